"""Positions: new tokens stand behind the cached ones, so every position the graph makes itself is offset.

A graph that takes `position_ids` gets its positions from the caller. Any other makes them from the length S:

    arange(S)                 ->  arange(S) + past_length
    arange(a, .., k, dtype)   ->  (a + k * (arange(S) + past_length)) in that dtype, rounded once and last
    table[a : a + S]          ->  index_select(table, arange(S) + past_length + a)   (cos_cached, wpe.weight, ..)

with `past_length` a new placeholder, a 0-dim int64 tensor, after the others. What becomes of the positions is no matter
as long as it is a function of each position alone, and that is derived (`passes/dependence`): whatever else depends on
the length is refused, with its operator and source line. Sums of integers along the sequence, which count tokens,
become a state (`passes/rewrite/running_sum.py`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from kvcompile.errors import DetectionError
from kvcompile.passes.dependence import Dependence, Level
from kvcompile.passes.graph import call, source_line, target_name, value
from kvcompile.passes.records import AttentionSite, NoMatch
from kvcompile.passes.rewrite.canonicalize import Canonical
from kvcompile.passes.rewrite.clean import eliminate_dead_code
from kvcompile.passes.rewrite.running_sum import replace_running_sums
from kvcompile.passes.table import graph_pass
from kvcompile.specs import RecurrentState

log = logging.getLogger(__name__)
aten = torch.ops.aten

NAME = "positions"
PAST_LENGTH = "past_length"

_ARANGE = (aten.arange.default, aten.arange.start, aten.arange.start_step)


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


@graph_pass("positions")
def offset_positions(canonical: Canonical) -> Positions:
    """Offset the positions of `canonical` in place; raises DetectionError naming what else depends on the length."""
    graph = canonical.graph_module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    keep = {node for site in canonical.sites for node in site.kept}
    # Parts of masks that depend on activations are built anew for a cache, from the positions there.
    in_masks = _only_in_masks(graph, canonical.sites)
    states = replace_running_sums(graph, in_masks)
    analysis = Dependence(canonical.graph_module)
    _require_local(graph, canonical.sites, analysis)
    made = [node for node in graph.nodes if node not in in_masks]
    aranges = [node for node in made if node.target in _ARANGE and _is_position(node, analysis)]
    slices = [node for node in made if _is_table_slice(node, analysis)]

    offsets = []
    moved: dict[Node, Node] = {}
    if aranges or slices:
        with graph.inserting_after(placeholders[-1]):
            past = graph.placeholder(PAST_LENGTH)
        fake = placeholders[0].meta["val"]
        with fake.fake_mode:
            past.meta["val"] = torch.empty((), dtype=torch.int64, device=fake.device)
        for node in aranges:
            offsets.append(f"arange ({source_line(node)})")
            moved[node] = _offset(node, past, placeholders[0])
        for node in slices:
            offsets.append(f"{node.args[0]}[:S] ({source_line(node)})")
            moved[node] = _select(node, past, placeholders[0])
    sites = tuple(site.moved(moved) for site in canonical.sites)
    eliminate_dead_code(canonical.graph_module, {moved.get(node, node) for node in keep})
    log.info("positions: %d offset", len(offsets))
    return Positions(canonical.graph_module, sites, bool(offsets), tuple(offsets), states)


def _require_local(graph: Graph, sites: tuple[AttentionSite, ...], analysis: Dependence) -> None:
    """Raises DetectionError unless all that the rewritten graph will compute belongs to one token each."""
    wanted = [node for site in sites for node in (site.q, site.k, site.v, *site.kept)]
    wanted += [node for site in sites for node in site.sources]
    output = next(node for node in graph.nodes if node.op == "output")
    assert isinstance(output.args[0], (list, tuple))
    results = [node for node in output.args[0] if isinstance(node, Node)]
    found = [problem for node in wanted if (problem := analysis.problem([node], rule=NAME))]
    found += [problem for node in results if (problem := analysis.problem([], [node], rule=NAME))]
    misses: list[NoMatch] = list(dict.fromkeys(found))
    if misses:
        lines = "\n".join(f"  - {miss}" for miss in misses)
        raise DetectionError(
            f"the sequence length is used in ways that a cache would break:\n{lines}", misses
        )


def _only_in_masks(graph: torch.fx.Graph, sites: tuple[AttentionSite, ...]) -> set[Node]:
    """Nodes that nothing needs but the parts of dynamic masks over both axes."""
    again = {site.out: site for site in sites if site.rerun}
    if not again:
        return set()
    needed: set[Node] = set()
    stack = [node for node in graph.nodes if node.op in ("output", "placeholder")]
    stack += [node for site in sites for node in site.kept]
    for site in again.values():
        stack += site.sources
        for mask in site.rerun:
            stack += [used for (_, used), side in mask.positions.items() if side == "query"]
    while stack:
        node = stack.pop()
        if node in needed:
            continue
        needed.add(node)
        apart: set[object] = set()
        if node in again:
            leaves = node.kwargs["leaves"]
            assert isinstance(leaves, (list, tuple))
            apart = {
                used for used, leaf in zip(leaves, again[node].leaves, strict=True) if leaf.kind == "pair"
            }
        stack += [used for used in node.all_input_nodes if used not in apart]
    return set(graph.nodes) - needed


def _is_position(node: Node, analysis: Dependence) -> bool:
    """arange(a, a + k S, k): an element for each token."""
    fact = analysis.fact(node)
    return fact.level == Level.POSITION and fact.count("token") == 1


def _is_table_slice(node: Node, analysis: Dependence) -> bool:
    """table[.., a : a + S, ..]: an element for each token, of what has none."""
    if target_name(node) not in ("slice", "narrow") or not isinstance(node.args[0], Node):
        return False
    return analysis.is_constant(node.args[0]) and analysis.fact(node).level == Level.POSITION


def _offset(node: Node, past: Node, input_ids: Node) -> Node:
    """start + step * (arange(S) + past), counted in integers and rounded last."""
    graph = node.graph
    first, step = _start_and_step(node)
    dtype = value(node).dtype
    with graph.inserting_after(node):
        shifted = call(graph, aten.add.Tensor, (node, past), node)
    if (dtype == torch.int64 or dtype == torch.int32) and step == 1:
        node.replace_all_uses_with(shifted, delete_user_cb=lambda user: user is not shifted)
        return shifted
    graph.erase_node(shifted)
    with graph.inserting_before(node):
        moved = _counted(graph, past, input_ids, node)
        if not (isinstance(first, int) and isinstance(step, int)):
            moved = call(graph, aten.to.dtype, (moved, torch.float64), node)
        for operator, number in ((aten.mul.Tensor, step), (aten.add.Tensor, first)):
            if number != (1 if operator is aten.mul.Tensor else 0):
                moved = call(graph, operator, (moved, number), node)
        if value(moved).dtype != dtype:
            moved = call(graph, aten.to.dtype, (moved, dtype), node)
    node.replace_all_uses_with(moved)
    graph.erase_node(node)
    return moved


def _start_and_step(node: Node) -> tuple[Any, Any]:
    if node.target is aten.arange.default:
        return 0, 1
    return node.args[0], node.args[2] if node.target is aten.arange.start_step and len(node.args) > 2 else 1


def _counted(graph: Graph, past: Node, input_ids: Node, like: Node) -> Node:
    """arange(S) + past, int64."""
    size = call(graph, aten.sym_size.int, (input_ids, 1), like)
    places = call(graph, aten.arange.default, (size,), like, {"device": value(past).device})
    return call(graph, aten.add.Tensor, (places, past), like)


def _select(node: Node, past: Node, input_ids: Node) -> Node:
    """table[a : a + S] -> index_select(table, arange(S) + past + a)."""
    table, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
    first = node.args[2] if len(node.args) > 2 and node.args[2] is not None else 0
    graph = node.graph
    with graph.inserting_before(node):
        positions = _counted(graph, past, input_ids, node)
        if first != 0:
            positions = call(graph, aten.add.Tensor, (positions, first), node)
        selected = call(graph, aten.index_select.default, (table, dim, positions), node)
    node.replace_all_uses_with(selected)
    graph.erase_node(node)
    return selected
