"""Tables that counts of tokens index: for how many tokens they have rows.

    table[pad + cumsum(ids != pad)]

A table of positions 0, 1, 2, .. ends where there are as many tokens as rows. Where positions are counted from the
tokens, as RoBERTa does it, the text that meets the end first is one in which every token counts: 1 stands for what is
summed, and since a model may also look at the ids themselves, texts of some one id are tried.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Node

from kvcompile.passes.graph import target_name
from kvcompile.passes.probe.probe import NotEvaluated, Prober
from kvcompile.passes.rewrite.running_sum import is_running_sum

_LOOKED_UP = ("embedding", "index", "index_select", "gather")
_IDS = (0, 1, 2)  # one of them may be padding


def counted_end(needed: Collection[Node], prober: Prober, longest: int) -> int | None:
    """How many tokens the tables among `needed` have rows for, where counts index them; None: `longest` and more."""
    by_sum = {node: _sums(node) for node in needed if target_name(node) in _LOOKED_UP}
    tables = [node for node, sums in by_sum.items() if sums]
    sums = frozenset().union(*by_sum.values())
    ends = [_end(tables, sums, prober, number, longest) for number in _IDS] if tables else []
    return min((end for end in ends if end is not None), default=None)


def _sums(table: Node) -> frozenset[Node]:
    """The running sums that the integers are computed from which index a table; not those behind a choice."""
    found, seen, stack = set(), {table}, list(table.all_input_nodes)
    while stack:
        node = stack.pop()
        value = node.meta.get("val")
        if (
            node in seen
            or not isinstance(value, torch.Tensor)
            or value.is_floating_point()
            or value.is_complex()
        ):
            continue
        seen.add(node)
        if is_running_sum(node):
            found.add(node)
        else:
            stack.extend(node.all_input_nodes)
    return frozenset(found)


def _end(tables: list[Node], sums: Collection[Node], prober: Prober, number: int, longest: int) -> int | None:
    """How many tokens of this id there are rows for; None: `longest` and more, or none at all."""

    def fits(length: int) -> bool:
        ids = prober.placeholders["input_ids"]
        overrides = {ids: torch.full((1, length), number, device=prober.device)}
        for node in sums:
            source = node.args[0]
            assert isinstance(source, Node)
            dtype = source.meta["val"].dtype
            overrides[source] = torch.ones(
                prober.concrete(source, 1, length), dtype=dtype, device=prober.device
            )
        try:
            prober.run(tables, 1, length, overrides)
        except NotEvaluated:
            return False
        return True

    if not fits(1) or fits(longest):
        return None
    good, bad = 1, longest
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


__all__ = ["counted_end"]
