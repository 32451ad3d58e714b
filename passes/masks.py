"""Masks: what kind a pattern of visible keys is, at one length and over all of them.

A pattern [S, S] (bool, query by key) is compared with causal (j <= i), sliding(W) (i - W < j <= i) and chunked(C)
(j <= i and i // C == j // C) at several lengths: 29, 67, the length of every table in the mask's subgraph, and
beyond every integer constant in it, so no window or chunk escapes. Where that length is too large to evaluate,
the large constants are *shrunk* (all by the same amount, twice), and the window found must follow them exactly.
Whatever else hides some of the past is explicit: kept as a table, up to a length.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.fx import Node

from kvcompile.passes.evaluate import fetch_attr
from kvcompile.passes.probe import NotEvaluated, Prober, Refused
from kvcompile.types import MaskSpec

LENGTHS = (29, 67)
BUDGET = 2**25  # elements of one probed mask; 4096 + margin squared fits, 32768 squared does not
MARGIN = 33

Constant = Callable[[int], int]
Pattern = Callable[[int, Constant | None], Tensor]  # (length, constants) -> bool [S, S]


def pattern_kind(pattern: Tensor) -> MaskSpec:
    """The kind at this length: causal where no window or chunk shows yet; raises Refused for what no cache serves."""
    size = pattern.shape[-1]
    if pattern.shape[-2] != size:
        raise Refused(f"the mask has {pattern.shape[-2]} queries for {size} keys")
    position = torch.arange(size, device=pattern.device)
    past = position[:, None] >= position[None, :]
    check_causal(pattern[None])
    width = int(pattern[-1].sum())
    if torch.equal(pattern, past & (position[:, None] - position[None, :] < width)):
        return MaskSpec("causal") if width == size else MaskSpec("sliding", width)
    chunk = int(pattern[:, 0].sum())
    if torch.equal(pattern, past & (position[:, None] // chunk == position[None, :] // chunk)):
        return MaskSpec("chunked", chunk)
    return MaskSpec("explicit")


def check_causal(patterns: Tensor) -> None:
    """Raises Refused unless every query of [H, S, S] sees its own key and none of the future."""
    size = patterns.shape[-1]
    past = torch.ones(size, size, dtype=torch.bool, device=patterns.device).tril()
    for pattern in patterns:
        future = pattern & ~past
        if future.any():
            if pattern.all():
                raise Refused("the mask is bidirectional: query 3 sees key 7")
            raise Refused(_shows_the_future(pattern, future))
        own = pattern.diagonal()
        if not own.all():
            query = int((~own).nonzero()[0, 0])
            raise Refused(f"the mask hides the present: query {query} does not see its own key")


def _shows_the_future(pattern: Tensor, future: Tensor) -> str:
    query, key = (int(i) for i in future.nonzero()[0])
    text = f"the mask shows the future: query {query} sees key {key}"
    first = pattern[0]
    prefix = int(first.sum())
    past = ~torch.ones_like(pattern).triu(1)
    if torch.equal(pattern, past | first) and bool(first[:prefix].all()):
        text += f" (prefix({prefix}): a chunk of a prompt cannot show keys that come with the next)"
    return text


def classify(prober: Prober, pattern: Pattern, region: set[Node], heads: int, seen: Tensor) -> MaskSpec:
    """The mask over all lengths.

    pattern: evaluates it; `seen`: its value at LENGTHS[0]; region: the nodes that it is computed from
    heads:   how many of them one evaluation computes, for the budget

    "explicit" means that the pattern is none of the kinds or changes between lengths; raises Refused for a mask
    that no table can hold either.
    """
    constants, tables = _constants(prober, region)
    wanted = {LENGTHS[1]: LENGTHS[1], **{n: n for n in tables if n > LENGTHS[0]}}
    wanted |= {constant + MARGIN: constant for constant in constants}
    affordable = sorted(n for n in wanted if heads * min(n, prober.max_seq_len) ** 2 <= BUDGET)
    kinds = {LENGTHS[0]: pattern_kind(seen)}
    for length in affordable:
        for size in (length, wanted[length]):
            size = min(size, prober.max_seq_len)
            try:
                kinds[size] = kinds[size] if size in kinds else pattern_kind(pattern(size, None))
                break
            except NotEvaluated:
                if size == wanted[length]:
                    raise
                prober.max_seq_len = wanted[
                    length
                ]  # a table that no test of the graph's guards, yet ends here
    found = {kind for kind in kinds.values() if kind.kind != "causal"}
    if MaskSpec("explicit") in found or len(found) > 1:
        return MaskSpec("explicit")
    large = sorted(c for c in constants if heads * (c + MARGIN) ** 2 > BUDGET and c < prober.max_seq_len)
    if large:
        found |= _shrunk(pattern, large)
    if any(n not in affordable and n <= prober.max_seq_len for n in tables if n > LENGTHS[0]):
        raise Refused(f"the mask is a table of {max(tables)} positions, too large to check")
    if len(found) > 1:
        raise Refused(f"the mask changes with the length: {', '.join(sorted(map(str, found)))}")
    if not found:
        return MaskSpec("causal")
    mask = found.pop()
    assert mask.window is not None
    if any(kind.kind == "causal" and length > mask.window for length, kind in kinds.items()):
        return MaskSpec("explicit")
    return mask


def _shrunk(pattern: Pattern, large: list[int]) -> set[MaskSpec]:
    """Classify with the large constants replaced by small ones: the window must follow them."""
    if large[-1] - large[0] > 16:
        raise Refused(f"the mask has several large constants {large}, more than a probe can tell apart")
    results = set()
    for small in (11, 19):
        shift = large[0] - small
        shrink = {**{n: n - shift for n in large}, **{-n: shift - n for n in large}}
        found = pattern_kind(pattern(LENGTHS[1], partial(_replace, shrink)))
        if found.kind == "explicit":
            raise Refused(f"the mask depends on {large[0]} in a way that is neither a window nor a chunk")
        results.add(MaskSpec(found.kind, None if found.window is None else found.window + shift))
    if len(results) > 1:
        raise Refused("the mask depends on a large constant in a way that is not a window")
    return {mask for mask in results if mask.kind != "causal"}


def _replace(replacements: dict[int, int], number: int) -> int:
    return replacements.get(number, number)


def _constants(prober: Prober, region: set[Node]) -> tuple[set[int], set[int]]:
    """Integer constants above the probe length, and lengths of tables, in a mask subgraph."""
    constants: set[int] = set()
    tables: set[int] = set()
    for node in region:
        if node.op == "get_attr":
            tensor = fetch_attr(prober.graph_module, str(node.target))
            if isinstance(tensor, Tensor) and tensor.dim():
                sizes = [int(size) for size in tensor.shape if size > 1]
                # What has other sizes, too, is a weight that something selects from, not a table of positions.
                tables.update(sizes if len(set(sizes)) == 1 else [])
            elif isinstance(tensor, Tensor) and not tensor.is_floating_point():
                constants.add(abs(int(tensor)))
        for leaf in torch.utils._pytree.tree_leaves((node.args, dict(node.kwargs))):
            if isinstance(leaf, (int, float)) and not isinstance(leaf, bool) and float(leaf).is_integer():
                constants.add(abs(int(leaf)))
    return {c for c in constants if LENGTHS[0] <= c < 2**30}, tables
