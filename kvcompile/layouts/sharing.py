"""Which caches several texts can share, and how a text gets its cache back after it had to give it up.

A page is shared up to n tokens where its bytes are a function of tokens [0, n) alone, nobody writes it again, and all
else that is needed to go on from n is in pages, too.

| layout | prefix | a fork | given up |
|---|---|---|---|
| every token, in pages | any | shares pages | computed again |
| sinks and a window, in pages | up to its slots: then they are written again | shares pages | computed again |
| tokens in full beside, groups over tokens | none: some are in no page | copies those | computed again |
| tokens chosen by scores | none: every later query changes them | copies | never |
| summaries of pages | none: they are in no page | copies | never |
| recurrent state, rows that a mask keeps | none: in no page | copies those | computed again |
| not in pages | none | copies | never lacks pages |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvcompile.layouts.layout import CacheLayout
from kvcompile.layouts.placement import Paged


@dataclass(frozen=True)
class Sharing:
    """What texts of one plan can share.

    until:      tokens of a prefix at most; None: any number; 0: none
    reason:     why not more
    recomputes: whether a text that lost its cache gets the same one by being computed again, in any pieces
    """

    until: int | None = None
    reason: str = ""
    recomputes: bool = True

    @property
    def shares(self) -> bool:
        return self.until != 0


def sharing(layouts: Iterable[CacheLayout], states: bool, masked: bool) -> Sharing:
    """What the layers of a cache allow together.

    states: whether there is recurrent state
    masked: whether some layer keeps what its mask reads of every token
    """
    each = list(layouts)
    found = Sharing()
    if states:
        found = Sharing(0, "the model carries a state from token to token, which is in no page")
    elif masked:
        found = Sharing(0, "a layer keeps what its mask reads of every token, in no page")
    for layout in each:
        own = of_layout(layout)
        if own.until is not None and (found.until is None or own.until < found.until):
            found = own
    recomputes = all(layout.chunk_invariant and not layout.retention.whole_prompts for layout in each)
    return Sharing(found.until, found.reason, recomputes)


def of_layout(layout: CacheLayout) -> Sharing:
    """What one layer allows."""
    if layout.retention.by_score:
        return Sharing(
            0, f"'{layout.retention}' chooses tokens by scores, which every later query changes", False
        )
    if not isinstance(layout.placement, Paged):
        return Sharing(
            0,
            f"placement '{layout.placement}': each text has memory of its own; placement: paged shares pages",
        )
    if layout.selection.selects:
        return Sharing(
            0, f"'{layout.selection}' keeps summaries of a text's pages beside them, in no page", False
        )
    for storage in (layout.keys, layout.values):
        if storage.residual or storage.sinks:
            return Sharing(0, f"'{storage}' keeps tokens in full beside, in no page")
    if layout.keys.channelwise or layout.values.channelwise:
        return Sharing(
            0, "axis: channel settles tokens in groups, and those of the last group are in no page"
        )
    if not layout.bounded:
        return Sharing()
    slots = layout.slots(None)
    return Sharing(slots, f"'{layout.retention}' writes its {slots} slots again")
