"""Positions: new tokens stand behind the cached ones, so every position the graph makes itself is offset.

A graph that takes `position_ids` gets its positions from the caller. Any other makes them from the length S:

    arange(S)           ->  arange(S) + past_length
    table[:S]           ->  index_select(table, arange(S) + past_length)   (cos_cached, wpe.weight, ..)

with `past_length` a new placeholder, a 0-dim int64 tensor, after the others. Positions may go through
arithmetic, trigonometry, casts, views, and indexing *into tables*. Every other live use of S refuses, with
its source line: an index into the tokens themselves, a comparison, a cumulative product over the sequence, S as
a number. Sums of integers along the sequence, which count tokens, become a state (`passes/running_sum.py`).
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from kvcompile.errors import DetectionError
from kvcompile.passes.base import PassReport, call, expr, module_path, shape, source_line, target_name, value
from kvcompile.passes.canonicalize import Canonical
from kvcompile.passes.clean import eliminate_dead_code
from kvcompile.passes.running_sum import replace_running_sums
from kvcompile.types import AttentionSite, NoMatch, RecurrentState

log = logging.getLogger(__name__)
aten = torch.ops.aten

NAME = "positions"
PAST_LENGTH = "past_length"

_ARANGE = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_COMPARE = (
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "where",
    "masked_fill",
    "tril",
    "triu",
    "scatter",
    "gather",
    "logical_not",
    "__and__",
    "__or__",
    "bitwise_and",
    "bitwise_or",
    "logical_and",
    "logical_or",
)
_CUMULATIVE = ("cumsum", "cumprod", "logcumsumexp", "diff", "flip", "roll", "sort", "argsort", "nonzero")
# Operators that take S as a size of their result: their values do not depend on what S is.
_SHAPED = (
    "view",
    "reshape",
    "_unsafe_view",
    "expand",
    "zeros",
    "ones",
    "full",
    "empty",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty",
    "arange",
    "slice",
    "unflatten",
    "split_with_sizes",
    "as_strided",
    "repeat",
    "narrow",
    "repeat_interleave",
    "sym_size",
    "split",
    "empty_strided",
    "empty_permuted",
    "new_empty_strided",
)


@dataclass(frozen=True)
class Positions:
    """The canonical graph with its positions offset.

    past_length: whether a placeholder `past_length` (0-dim int64) was appended; False where the caller's
                 position_ids are the only positions
    offsets:     what was offset, one line each
    states:      sums along the sequence that a cache has to carry
    """

    graph_module: GraphModule
    sites: tuple[AttentionSite, ...]
    past_length: bool
    offsets: tuple[str, ...]
    states: tuple[RecurrentState, ...]
    report: PassReport


def offset_positions(canonical: Canonical) -> Positions:
    """Offset the positions of `canonical` in place; raises DetectionError naming every other use of S."""
    start = time.perf_counter()
    graph = canonical.graph_module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    batch, seq = (expr(size) for size in shape(placeholders[0]))
    keep = {node for site in canonical.sites for node in site.kept}
    # Parts of masks that depend on activations are built anew for a cache, from the positions there.
    in_masks = _only_in_masks(graph, canonical.sites)
    states = replace_running_sums(graph, in_masks)
    tables = _tables(graph)
    aranges = [node for node in graph.nodes if _is_arange(node, seq) and node not in in_masks]
    slices = [node for node in graph.nodes if _is_table_slice(node, seq, tables) and node not in in_masks]
    misses = [
        miss for node, miss in _refusals(graph, aranges, seq, batch, tables, slices) if node not in in_masks
    ]
    if misses:
        lines = "\n".join(f"  - {miss}" for miss in misses)
        raise DetectionError(
            f"the sequence length is used in ways that a cache would break:\n{lines}", misses
        )

    offsets = []
    moved: dict[Node, Node] = {}
    if aranges or slices:
        with graph.inserting_after(placeholders[-1]):
            past = graph.placeholder(PAST_LENGTH)
        fake = placeholders[0].meta["val"]
        with fake.fake_mode:
            past.meta["val"] = torch.empty((), dtype=torch.int64, device=fake.device)
        for node in aranges:
            with graph.inserting_after(node):
                shifted = call(graph, aten.add.Tensor, (node, past), node)
            node.replace_all_uses_with(shifted, delete_user_cb=lambda user, own=shifted: user is not own)
            moved[node] = shifted
            offsets.append(f"arange ({source_line(node)})")
        for node in slices:
            offsets.append(f"{node.args[0]}[:S] ({source_line(node)})")
            moved[node] = _select(node, past, placeholders[0])
    sites = tuple(site.moved(moved) for site in canonical.sites)
    eliminate_dead_code(canonical.graph_module, {moved.get(node, node) for node in keep})
    report = PassReport(NAME, len(offsets), (), time.perf_counter() - start)
    log.info("%s", report)
    return Positions(canonical.graph_module, sites, bool(offsets), tuple(offsets), states, report)


def _only_in_masks(graph: torch.fx.Graph, sites: tuple[AttentionSite, ...]) -> set[Node]:
    """Nodes that nothing needs but the parts of dynamic masks over both axes."""
    dynamic = {site.out: site.dynamic for site in sites if site.dynamic}
    if not dynamic:
        return set()
    needed: set[Node] = set()
    stack = [node for node in graph.nodes if node.op in ("output", "placeholder")]
    stack += [node for site in sites for node in site.kept]
    for mask in dynamic.values():
        stack += [*mask.sources, *(used for (_, used), side in mask.positions.items() if side == "query")]
    while stack:
        node = stack.pop()
        if node in needed:
            continue
        needed.add(node)
        apart = dynamic.get(node)
        stack += [used for used in node.all_input_nodes if apart is None or used is not apart.node]
    return set(graph.nodes) - needed


def _tables(graph: torch.fx.Graph) -> set[Node]:
    """Nodes computed from weights and buffers alone: the same whatever the input."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr" or (
            node.op == "call_function"
            and node.all_input_nodes
            and all(n in found for n in node.all_input_nodes)
        ):
            found.add(node)
    return found


def _is_arange(node: Node, seq: Any) -> bool:
    if node.target not in _ARANGE:
        return False
    return bool(expr(shape(node)[0]) == seq)


def _is_table_slice(node: Node, seq: Any, tables: set[Node]) -> bool:
    """table[.., a : a + S, ..]"""
    if target_name(node) not in ("slice", "narrow") or node.args[0] not in tables:
        return False
    dim = node.args[1] if len(node.args) > 1 else 0
    assert isinstance(dim, int)
    return bool(expr(shape(node)[dim]) == seq)


def _select(node: Node, past: Node, input_ids: Node) -> Node:
    """table[a : a + S] -> index_select(table, arange(S) + past + a)."""
    table, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
    first = node.args[2] if len(node.args) > 2 and node.args[2] is not None else 0
    graph = node.graph
    with graph.inserting_before(node):
        size = call(graph, aten.sym_size.int, (input_ids, 1), node)
        positions = call(graph, aten.arange.default, (size,), node, {"device": value(past).device})
        positions = call(graph, aten.add.Tensor, (positions, past), node)
        if first != 0:
            positions = call(graph, aten.add.Tensor, (positions, first), node)
        selected = call(graph, aten.index_select.default, (table, dim, positions), node)
    node.replace_all_uses_with(selected)
    graph.erase_node(node)
    return selected


def _refusals(
    graph: torch.fx.Graph, aranges: list[Node], seq: Any, batch: Any, tables: set[Node], slices: list[Node]
) -> list[tuple[Node, NoMatch]]:
    found = []
    for node in aranges:
        if node.target is aten.arange.start_step and len(node.args) > 2 and node.args[2] != 1:
            found.append(_at(f"positions run in steps of {node.args[2]}", node))
        found.extend(_position_misuse(node, tables))
    for node in graph.nodes:
        if node.op != "call_function" or node in aranges or node in slices:
            continue
        name = target_name(node)
        sizes = [expr(size) for size in shape(node)]
        if node.target in _ARANGE and seq in sizes[0].free_symbols and batch not in sizes[0].free_symbols:
            found.append(_at(f"an arange over {sizes[0]} is still used", node))
        elif name in _CUMULATIVE and _runs_over(node, seq, batch):
            found.append(_at(f"{name} over the sequence mixes tokens outside attention", node))
        elif name not in _SHAPED and _takes_length(node, seq, batch):
            found.append(_at(f"the sequence length enters {name} as a number", node))
        elif name in ("slice", "narrow") and node not in slices and not _whole_slice(node, seq):
            found.append(_at("a slice along the sequence", node)) if _cuts_sequence(node, seq) else None
    return found


def _position_misuse(arange: Node, tables: set[Node]) -> list[tuple[Node, NoMatch]]:
    """Uses of position numbers that an offset would break."""
    found, seen, stack = [], {arange}, [arange]
    from_inputs = _from_inputs(arange.graph)
    while stack:
        node = stack.pop()
        for user in node.users:
            if user in seen:
                continue
            seen.add(user)
            name = target_name(user)
            if name in _COMPARE or name in _CUMULATIVE:
                found.append(_at(f"positions enter {name}, which a cache would change", user))
            elif name in ("index", "index_select", "embedding"):
                if user.args[0] in from_inputs:
                    found.append(_at(f"positions index the tokens' own values in {name}", user))
                elif user.args[0] is node:
                    stack.append(user)
            elif not any(other in from_inputs for other in user.all_input_nodes if shape(other)):
                stack.append(user)  # still a function of positions alone; once mixed with data it is applied
    return found


def _from_inputs(graph: torch.fx.Graph) -> set[Node]:
    """Tensor nodes that depend on the values of placeholders."""
    found: set[Node] = set()
    for node in graph.nodes:
        tensors = [n for n in node.all_input_nodes if n in found]
        if node.op == "placeholder" or (
            tensors
            and (shape(node) or isinstance(value(node), (list, tuple)))
            and target_name(node)
            not in ("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")
        ):
            found.add(node)
    return found


def _runs_over(node: Node, seq: Any, batch: Any) -> bool:
    dims = node.args[1] if len(node.args) > 1 else 0
    sizes = shape(node.args[0]) if isinstance(node.args[0], Node) else ()
    chosen = dims if isinstance(dims, (list, tuple)) else [dims]
    symbols = [
        expr(sizes[d]).free_symbols for d in chosen if isinstance(d, int) and -len(sizes) <= d < len(sizes)
    ]
    # B * S together is a list of tokens (a router sorting them by expert), not the sequence.
    return any(seq in free and batch not in free for free in symbols)


def _takes_length(node: Node, seq: Any, batch: Any) -> bool:
    """Whether a symbolic integer made of S (not of B * S, a token count) is an argument of an operator."""
    if not shape(node):
        return False
    symbols = [expr(value(n)) for n in node.all_input_nodes if isinstance(value(n), torch.SymInt)]
    return any(seq in symbol.free_symbols and batch not in symbol.free_symbols for symbol in symbols)


def _whole_slice(node: Node, seq: Any) -> bool:
    source = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else 0
    assert isinstance(source, Node) and isinstance(dim, int)
    return bool(expr(shape(source)[dim]) == expr(shape(node)[dim]))


def _cuts_sequence(node: Node, seq: Any) -> bool:
    source, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
    assert isinstance(source, Node) and isinstance(dim, int)
    return expr(shape(source)[dim]) == seq and seq in expr(shape(node)[dim]).free_symbols


def _at(reason: str, node: Node) -> tuple[Node, NoMatch]:
    return node, _miss(reason, node)


def _miss(reason: str, node: Node) -> NoMatch:
    return NoMatch(NAME, reason, node.name, source_line(node), module_path(node))
