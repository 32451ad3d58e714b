"""What texts of one plan can share, and how a text gets its cache back after it had to give it up.

What a text has at n tokens may be found by another one that begins with the same n, where it is a function of tokens
[0, n) alone. It is found in two ways:

    pages       stay where they are, and both texts have them, as long as nobody writes to them again
    snapshots   what of a text is in no such page is copied where a chunk of its prompt ends, and copied back

A layout that keeps the same cache in whatever pieces a text comes shares whatever it has computed. One whose cache
depends on the pieces shares what was computed in whole chunks: chunks always end at the same tokens, so two texts that
begin alike have the same there. What a prompt in one piece leaves depends on where it ends: nothing of it is shared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvcompile.layouts.layout import CacheLayout
from kvcompile.layouts.placement import Paged, Ring, Slots
from kvcompile.layouts.retention import Scored, SinkWindow
from kvcompile.layouts.selection import TopPages
from kvcompile.layouts.storage import per_channel, uint, with_residual


@dataclass(frozen=True)
class Sharing:
    """What texts of one plan can share.

    reason:     why they share nothing; "": they do
    beside:     what of a text is in no page that others find, so that a prefix needs a snapshot
    until:      tokens up to which a prefix needs no snapshot; None: however many, 0: it always does
    chunks:     whether only what was computed in whole chunks is shared
    recomputes: whether a text that lost its cache gets the same one by being computed again, in any pieces
    windows: whether a prefix needs but some pages of layers that give back those behind a window
    """

    reason: str = ""
    beside: tuple[str, ...] = ()
    until: int | None = None
    chunks: bool = False
    recomputes: bool = True
    windows: bool = False

    @property
    def shares(self) -> bool:
        return not self.reason

    @property
    def given_up(self) -> str:
        """How a text gets its cache back."""
        if self.recomputes:
            return "is computed again"
        return "keeps what it has until it ends: computed again, it would not be the same"

    def __str__(self) -> str:
        """What a prefix is: "any number of pages", "ends of chunks, with a snapshot of recurrent state"."""
        if self.reason:
            return f"nothing: {self.reason}"
        if not self.beside:
            some = ", of released windows those of the sinks and of the last tokens" if self.windows else ""
            return f"full pages{some}"
        snapshot = f"ends of chunks, with a snapshot of {' and '.join(self.beside)}"
        if self.until:
            return f"full pages up to {self.until:,} tokens; beyond, {snapshot}"
        return snapshot


def sharing(layouts: Iterable[CacheLayout], states: bool = False, masked: bool = False) -> Sharing:
    """What the layers of a cache allow together.

    states: whether there is recurrent state
    masked: whether some layer keeps what its mask reads of every token
    """
    found = [of_layout(layout) for layout in layouts]
    if states:
        found.append(Sharing(beside=("recurrent states",), until=0))
    if masked:
        found.append(Sharing(beside=("what a mask reads",), until=0))
    until = [own.until for own in found if own.until is not None]
    return Sharing(
        next((own.reason for own in found if own.reason), ""),
        tuple(dict.fromkeys(part for own in found for part in own.beside)),
        min(until, default=None),
        any(own.chunks for own in found),
        all(own.recomputes for own in found),
        any(own.windows for own in found),
    )


def of_layout(layout: CacheLayout) -> Sharing:
    """What one layer allows."""
    retention = layout.retention
    reason = f"'{retention}' takes a prompt in one piece, and what it keeps depends on where that ends"
    beside: list[str] = []
    fits = 0  # tokens that are all in pages
    if retention.by_score:
        beside.append("slots and scores")
    elif not isinstance(layout.placement, Paged):
        beside.append("the ring" if layout.bounded else "contiguous slots")
    elif layout.bounded:
        fits = layout.slots(None)
        beside.append("the ring")
    if layout.selection.selects:
        beside.append("summaries of pages")
    if layout.in_full:
        beside.append("tokens in full")
    elif layout.keys.channelwise or layout.values.channelwise:
        beside.append("the last group")
    return Sharing(
        reason if retention.whole_prompts else "",
        tuple(beside),
        fits if beside == ["the ring"] else 0 if beside else None,
        not layout.chunk_invariant,
        layout.chunk_invariant and not retention.whole_prompts,
        layout.released is not None,
    )


def table() -> str:
    """What each kind of layout allows: docs/serving.md has it."""
    kivi, full = per_channel(4, 32, 128), with_residual(uint(4), 128)
    paged, window = Paged(64), SinkWindow(4, 1020)
    scored, pages = Scored(4, 508, 512), TopPages(16, 64)
    kinds: dict[str, Sharing] = {
        "every token, in pages": of_layout(CacheLayout(placement=paged)),
        "every token, not in pages": of_layout(CacheLayout()),
        "tokens in full beside (KIVI, sinks), in pages": of_layout(CacheLayout(kivi, full, paged)),
        "sinks and a window, in pages": of_layout(CacheLayout(placement=paged, retention=window)),
        "sinks and a window, in pages that are released": of_layout(
            CacheLayout(placement=replace(paged, released=True), retention=window)
        ),
        "sinks and a window, in a ring": of_layout(CacheLayout(placement=Ring(), retention=window)),
        "some pages read (Quest)": of_layout(CacheLayout(placement=paged, selection=pages)),
        "chosen by scores, `prefill: bounded`": of_layout(
            CacheLayout(placement=Slots(), retention=replace(scored, prefill="bounded"))
        ),
        "chosen by scores, `prefill: full`": of_layout(CacheLayout(placement=Slots(), retention=scored)),
        "any of them, and recurrent states": sharing([CacheLayout(placement=paged)], states=True),
        "any of them, and rows that a mask keeps": sharing([CacheLayout(placement=paged)], masked=True),
    }
    lines = ["| layout | texts share | a text that has no room |", "|---|---|---|"]
    for name, own in kinds.items():
        lines.append(f"| {name} | {str(own).replace(chr(39), chr(96))} | {own.given_up} |")
    return "\n".join(lines)
