"""A call appends all of its tokens to a cache, or none: what becomes of the text when a call does not end.

It does not end where memory runs out, or where the user stops it (Ctrl-C while a streamer prints). What it has written
by then may stand in the place of what the text before needs:

| the cache | after a call that did not end |
|---|---|
| could step back from all that the call would have appended | as before the call |
| was empty | empty |
| any other | the text is lost: calls are refused until another is begun |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvcompile.errors import InputError
from kvcompile.layouts.stepping import StepsBack


class WholeCalls:
    """Whether a cache still holds its text; `lost` says why not, and is empty where it does."""

    def __init__(self) -> None:
        self.lost = ""

    def check(self) -> None:
        """Raises InputError where the text is lost, with the reason and what to do."""
        if self.lost:
            raise InputError(self.lost)

    def begin(self) -> None:
        """From here on a pass writes."""
        self.lost = self.lost or "a call to this cache has not ended; call reset()"

    def forget(self) -> None:
        """There is another text now, or none."""
        self.lost = ""

    @contextmanager
    def whole(self, columns: int, tokens: int, back: StepsBack, undo: Callable[[], None]) -> Iterator[None]:
        """A call that appends `tokens` to `columns`, in passes that each `begin`.

        undo: lets the cache hold the columns that it had
        """
        try:
            yield
        except BaseException as error:
            undo()
            reason = back.problem(columns + tokens) if self.lost and columns else None
            self.lost = "" if reason is None else _told(columns, tokens, error, reason)
            raise
        self.lost = ""


def _told(columns: int, tokens: int, error: BaseException, reason: str) -> str:
    return (
        f"the text in this cache is lost: a call that was to append {tokens} tokens to {columns} was ended by "
        f"{type(error).__name__} after some had been written, and they cannot be taken back: {reason}. Call reset() "
        "and pass the whole text again, or use generate(), which computes it anew"
    )
