"""Stage: of a canonical graph, one for each stage of a pipeline (GPipe, Huang et al. 2019, without micro-batches).

    first stage   inputs                     -> the value that crosses
    between       inputs, the value before   -> the value that crosses next
    last stage    inputs, the value before   -> the outputs of the whole graph

Where one can cut is found from the graph's dataflow (`crossing.py`); where one does, by bytes of weights and caches
(`balance.py`). Of a graph that is sharded, the graphs of all ranks are cut at the same node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch.fx import Graph, GraphModule, Node

from kvcompile.errors import PlanError
from kvcompile.kernels.ops import opaque
from kvcompile.kernels.ops.running_sum import running_sum
from kvcompile.passes.graph import told
from kvcompile.passes.graph_digest import graph_digest
from kvcompile.passes.graph_module import module_of
from kvcompile.passes.probe.evaluate import fetch_attr
from kvcompile.passes.records import AttentionSite
from kvcompile.passes.rewrite.clean import drop_dead
from kvcompile.passes.stages.balance import Segment, balanced
from kvcompile.passes.stages.crossing import Crossing, Dims, Place, behind, dims, kept
from kvcompile.passes.table import graph_pass
from kvcompile.plan import Plan
from kvcompile.util.console import format_bytes

STAGE_IN = "stage_in"  # the placeholder of the value that crosses


@dataclass(frozen=True)
class Value:
    """A tensor that goes between stages: sizes that are names or numbers, its dtype, and where it comes from."""

    dims: Dims
    dtype: torch.dtype
    where: str

    def shape(self, batch: int, tokens: int, kept: int) -> tuple[int, ...]:
        """Its sizes for so many sequences, tokens, and tokens whose logits are wanted."""
        names = {"batch": batch, "tokens": tokens, "kept": kept}
        return tuple(names[size] if isinstance(size, str) else size for size in self.dims)


@dataclass(frozen=True)
class Stage:
    """One stage of one rank's graph: canonical, with its own sites, and its part of the plan.

    takes: what it gets from the stage before; None: the first
    gives: what it passes on; None: the last, which gives the outputs of the whole graph
    nodes: the whole graph's that it computes, by name; again: those of them that other stages may compute as well
    """

    number: int
    graph_module: GraphModule
    sites: tuple[AttentionSite, ...]
    decisions: tuple[int, ...]
    states: tuple[int, ...]
    takes: Value | None
    gives: Value | None
    nodes: frozenset[str]
    again: frozenset[str]
    weight_bytes: int

    def of(self, plan: Plan) -> Plan:
        """A plan's part that this stage carries out."""
        return replace(
            plan,
            decisions=tuple(plan.decisions[i] for i in self.decisions),
            states=tuple(plan.states[i] for i in self.states),
        )


@dataclass(frozen=True)
class Staging:
    """A graph over stages; `ranks[r]` are the stages of tensor rank r (one, where the graph is not sharded).

    places: where it could be cut; outputs: of the last stage
    """

    ranks: tuple[tuple[Stage, ...], ...]
    plan: Plan
    places: int
    outputs: tuple[Value, ...]

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Those of the first rank."""
        return self.ranks[0]

    def told(self) -> tuple[str, ...]:
        """What each stage has, and what crosses; for people."""
        count = len(self.stages)
        lines = [f"over {count} stages, cut at {count - 1} of {self.places} places where one value crosses"]
        for stage in self.stages:
            layers = [self.plan.decisions[i].layer for i in stage.decisions]
            span = f"layers {layers[0]} to {layers[-1]}" if layers else "no attention"
            own = stage.of(self.plan)
            cache = format_bytes(own.bytes(1, self.plan.limits.max_tokens)) + " of cache a sequence"
            passed = "" if stage.gives is None else f"; passes on {stage.gives.where}"
            lines.append(
                f"stage {stage.number}: {span}, {format_bytes(stage.weight_bytes)} of weights, {cache}{passed}"
            )
        return tuple(lines)

    def digest(self, named: Collection[str], pieces: Sequence[Mapping[str, tuple[str, str]]] = ()) -> str:
        """A hash of all stages' graphs; named, pieces (of each rank): as `graph_digest` has them."""
        each = [
            graph_digest(stage.graph_module, named, pieces[rank] if pieces else {})
            for rank, stages in enumerate(self.ranks)
            for stage in stages
        ]
        return hashlib.sha256(" ".join(each).encode()).hexdigest()[:16]


@graph_pass("stages")
def staged(
    ranks: Sequence[tuple[GraphModule, tuple[AttentionSite, ...]]], plan: Plan, stages: int
) -> Staging:
    """The stages of each rank's graph (of one, where it is not sharded); the graphs are as they were.

    Raises:
        PlanError: the graph has too few places where one value alone crosses, with the reason.
    """
    sources = [decision.kv_source for decision in plan.decisions]
    crossings = [Crossing(module.graph, sites, sources) for module, sites in ranks]
    first = crossings[0]
    sizes, segments = _segments(ranks[0][0], first, plan)
    starts = balanced(segments, sizes, stages)
    if starts is None:
        raise PlanError(
            f"parallel: stages: {stages}: a graph is cut where one value alone crosses from a layer to the next, and "
            f"this one can be cut into {first.most()} stages at most: {first.reason()}. Use fewer stages, or tensor: "
            f"{stages}"
        )
    chosen = [start - 1 for start in starts]
    return Staging(
        tuple(
            _stages(module, crossing, [crossing.places[i] for i in chosen], plan)
            for (module, _), crossing in zip(ranks, crossings, strict=True)
        ),
        plan,
        len(first.places),
        tuple(_value(node, first.graph) for node in _outputs(first.nodes[-1])),
    )


def _outputs(node: Node) -> list[Node]:
    """The values of an output, in order: one may be there twice."""
    values = node.args[0]
    assert isinstance(values, (list, tuple)), "a canonical graph gives a flat tuple"
    return [value for value in values if isinstance(value, Node)]


def _segments(module: GraphModule, crossing: Crossing, plan: Plan) -> tuple[dict[str, int], list[Segment]]:
    """Bytes of each weight, and what lies between the places to cut."""
    sizes: dict[str, int] = {}
    segments = []
    cache = {
        site.out: replace(plan, decisions=(decision,), states=()).bytes(plan.limits.max_batch)
        for site, decision in zip(crossing.sites, plan.decisions, strict=True)
    }
    held = {state.module_path: state.nbytes * plan.limits.max_batch for state in plan.states}
    edges = [-1, *(place.after for place in crossing.places), len(crossing.nodes) - 1]
    for start, stop in pairwise(edges):
        own = [node for node in crossing.nodes[start + 1 : stop + 1] if _belongs(node, crossing)]
        weights = set()
        kept_bytes = 0
        for node in (*own, *behind(own, crossing)):
            if node.op == "get_attr":
                name = str(node.target)
                value = fetch_attr(module, name)
                sizes[name] = value.numel() * value.element_size()
                weights.add(name)
            elif node.target in (opaque.opaque, opaque.mixer):
                record = opaque.find(str(node.args[-1]))
                sizes[record.path] = sum(p.numel() * p.element_size() for p in record.module.parameters())
                weights.add(record.path)
                kept_bytes += held.get(record.path, 0)
            kept_bytes += cache.get(node, 0)
        work = sum(node in crossing.works for node in own)
        segments.append(Segment(frozenset(weights), kept_bytes, work))
    return sizes, segments


def _belongs(node: Node, crossing: Crossing) -> bool:
    """Whether a node is on one stage alone; the output, which may read anything, goes with the last."""
    return node in crossing.past or node.op == "output"


def _stages(
    module: GraphModule, crossing: Crossing, places: Sequence[Place], plan: Plan
) -> tuple[Stage, ...]:
    edges = [-1, *(place.after for place in places), len(crossing.nodes) - 1]
    values = [None, *(_value(place.value, crossing.graph) for place in places), None]
    found = []
    for number, (start, stop) in enumerate(pairwise(edges)):
        own = [node for node in crossing.nodes[start + 1 : stop + 1] if _belongs(node, crossing)]
        enters = places[number - 1].value if number else None
        leaves = places[number].value if number < len(places) else None
        found.append(
            _stage(
                module, crossing, own, (enters, leaves), (values[number], values[number + 1]), number, plan
            )
        )
    return tuple(found)


def _value(node: Node, graph: Graph) -> Value:
    found = dims(node, graph)
    if found is None:
        raise PlanError(
            f"parallel: stages: the sizes of {told(node)}, an output, do not follow from those of the tokens, and all "
            "ranks must know them; use tensor instead"
        )
    return Value(found, node.meta["val"].dtype, told(node))


def _stage(
    module: GraphModule,
    crossing: Crossing,
    own: Sequence[Node],
    ends: tuple[Node | None, Node | None],
    values: tuple[Value | None, Value | None],
    number: int,
    plan: Plan,
) -> Stage:
    enters, leaves = ends
    again = behind(own, crossing)
    wanted = {*own, *again}
    graph = Graph()
    made: dict[Node, Node] = {}
    for node in crossing.nodes:  # every stage is called with all inputs
        if node.op == "placeholder":
            made[node] = graph.node_copy(node)
    if enters is not None:
        made[enters] = graph.placeholder(STAGE_IN)
        made[enters].meta["val"] = enters.meta["val"]
    for node in crossing.nodes:
        if node.op == "output":
            if leaves is None:
                graph.node_copy(node, made.__getitem__)
            else:
                graph.output((made[leaves],))
        elif node in wanted and node not in made:
            made[node] = graph.node_copy(node, made.__getitem__)
    sites, decisions = [], []
    for place, site in enumerate(crossing.sites):
        if site.out in wanted:
            sites.append(site.without_roots().moved(made))
            decisions.append(place)
    drop_dead(graph, {node for site in sites for node in kept(site)})
    graph.lint()
    names = dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "get_attr")
    weights = {name: fetch_attr(module, name) for name in names}
    paths = set(map(_state_path, graph.nodes))
    return Stage(
        number,
        module_of(weights, graph, "Stage"),
        tuple(sites),
        tuple(decisions),
        tuple(i for i, state in enumerate(plan.states) if state.module_path in paths),
        *values,
        frozenset(node.name for node in wanted if node.op == "call_function"),
        frozenset(node.name for node in again if node.op == "call_function"),
        sum(value.numel() * value.element_size() for value in weights.values()),
    )


def _state_path(node: Node) -> str:
    """Under which name the plan has a node's recurrent state; empty: it has none."""
    if node.target in (opaque.opaque, opaque.mixer):
        return opaque.find(str(node.args[-1])).path
    return str(node.args[1]) if node.target is running_sum else ""


__all__ = ["STAGE_IN", "Stage", "Staging", "Value", "staged"]
