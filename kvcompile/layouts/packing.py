"""Which caches a packed step can be over: one pass for the new tokens of many sequences.

A sequence is then found by its page table alone. What is kept in no page stands in rows next to each other where
sequences take a step together, and in a packed step they do not.

| layout | packed |
|---|---|
| every token, or sinks and a window, in pages | yes, in any storage whose numbers are all in pages, or calibrated |
| tokens in full beside, groups over tokens | no: those of the last group, and those in full, are in no page |
| tokens chosen by scores | no: what is noted of slots is in no page |
| summaries of pages | no: they are in no page |
| not in pages | no |
"""

from __future__ import annotations

from kvcompile.layouts.layout import CacheLayout
from kvcompile.layouts.placement import Paged


def unpacked(layout: CacheLayout) -> str | None:
    """Why new tokens of several sequences cannot go into this layer in one row, or None."""
    if not isinstance(layout.placement, Paged):
        return f"placement '{layout.placement}': each sequence has memory of its own; placement: paged has one for all"
    if layout.retention.by_score:
        return f"'{layout.retention}' notes scores of each sequence's slots, in no page"
    if layout.selection.selects:
        return f"'{layout.selection}' keeps summaries of a sequence's pages beside them, in no page"
    for storage in (layout.keys, layout.values):
        if storage.residual or storage.sinks:
            return f"'{storage}' keeps tokens in full beside, in no page"
    if layout.keys.channelwise or layout.values.channelwise:
        return "axis: channel settles tokens in groups, and those of the last group are in no page; use axis: token"
    return None
