"""Where a text ends, and what of it can be shown: tokens to text, stop strings and ids, the largest number of tokens.

A token that ends a text (of `eos_ids` or `stop_token_ids`) is one of its tokens, and adds nothing to the text; so it is
with a stop string, which ends a text before itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvcompile.serve.detokenize import detokenizer
from kvcompile.serve.sampling import Sampling
from kvcompile.serve.stops import Stops


@dataclass(frozen=True)
class Piece:
    """What a token adds to the text that is shown, and why the text has ended; None: it goes on."""

    text: str
    finish: Literal["stop", "length"] | None = None


class Ends:
    """One text from its first token to its last.

    Args:
        eos_ids:   tokens that end a text, unless `ignore_eos` (with a structure, always)
        tokenizer: None: texts are empty, and stop strings never come
        prompt:    what the text follows
        room:      tokens that fit before a limit of the cache; None: any number
    """

    def __init__(
        self,
        sampling: Sampling,
        eos_ids: frozenset[int],
        tokenizer: Any | None,
        prompt: Sequence[int],
        room: int | None = None,
    ):
        ends = frozenset(sampling.stop_token_ids)
        goes_on = sampling.ignore_eos and sampling.structure is None  # nothing follows a grammar's end
        self._ends = ends if goes_on else ends | eos_ids
        self._left = sampling.max_tokens if room is None else min(sampling.max_tokens, room)
        self._detokenizer = detokenizer(tokenizer, prompt)
        self._stops = Stops(sampling.stop)
        self._ended = False

    def take(self, token: int) -> Piece:
        """What the text's next token adds to it; when it ends the text, nothing is left for `flush`."""
        if self._ended:
            raise RuntimeError("the text has ended: it takes no further token")
        self._left -= 1
        if token in self._ends:
            return Piece(self.flush(), "stop")
        text, stopped = self._stops.take(self._detokenizer.take(token))
        if stopped:
            self._ended = True
            return Piece(text, "stop")
        if self._left > 0:
            return Piece(text)
        rest, stopped = self._rest()
        return Piece(text + rest, "stop" if stopped else "length")

    def flush(self) -> str:
        """End the text where it is: what was held back, but for a stop string that it completes."""
        return "" if self._ended else self._rest()[0]

    def _rest(self) -> tuple[str, bool]:
        self._ended = True
        text, stopped = self._stops.take(self._detokenizer.flush())
        return (text if stopped else text + self._stops.flush()), stopped

    def forked(self) -> Ends:
        """Another text's, with the same past."""
        other = object.__new__(Ends)
        other.__dict__.update(self.__dict__)
        other._detokenizer, other._stops = self._detokenizer.forked(), self._stops.forked()
        return other
