"""Which layouts can step back: forget the newest tokens again, as if they had never come.

| kept | steps back |
|---|---|
| every token, each by itself | always |
| rings (a window, with or without sinks) | until a slot has been taken back |
| the newest tokens in full beside rounded ones (KIVI, `residual`) | until one is rounded: it is not in full any more |
| tokens chosen by scores | never: scores are sums over all queries so far |
| pages with summaries of their keys | never: a summary does not know whose extremes it has |
| recurrent state | never |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvcompile.layouts.layout import CacheLayout
from kvcompile.layouts.storage import InKeys, Storage


@dataclass(frozen=True)
class StepsBack:
    """From how many tokens a cache can step back.

    until:  None: from any number; else no more than these
    reason: why not from more
    """

    until: int | None = None
    reason: str = ""

    @property
    def always(self) -> bool:
        return self.until is None

    def problem(self, tokens: int) -> str | None:
        """Why a cache of `tokens` cannot step back, or None."""
        return None if self.until is None or tokens <= self.until else self.reason


def steps_back(layouts: Iterable[CacheLayout], states: bool) -> StepsBack:
    """What the layers of a cache allow together; states: whether there is recurrent state."""
    if states:
        return StepsBack(0, "the model carries a state from token to token, which cannot be taken back")
    return _least(map(_of, layouts))


def _least(each: Iterable[StepsBack]) -> StepsBack:
    """What all of them allow."""
    found = StepsBack()
    for own in each:
        if own.until is not None and (found.until is None or own.until < found.until):
            found = own
    return found


def _of(layout: CacheLayout) -> StepsBack:
    if layout.retention.by_score:
        return StepsBack(
            0, f"'{layout.retention}' has given up tokens by scores that no token can be taken out of"
        )
    if layout.selection.selects:
        return StepsBack(0, f"'{layout.selection}' has summaries of pages that no token can be taken out of")
    sides = [_of_storage(storage) for storage in (layout.keys, layout.values)]
    if layout.bounded:
        given_up = f"'{layout.retention}' has given up tokens that would be seen again"
        sides.append(StepsBack(layout.slots(None), given_up))
    return _least(sides)


def _of_storage(storage: Storage | InKeys) -> StepsBack:
    if not (storage.residual or storage.channelwise):
        return StepsBack()
    # Channels settle when `residual` tokens are there, single tokens when one more comes.
    in_full = storage.residual - 1 if storage.channelwise else storage.residual
    return StepsBack(
        max(in_full, 0), f"'{storage}' has rounded tokens that would be among the newest in full again"
    )
