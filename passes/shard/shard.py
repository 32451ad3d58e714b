"""Shard: of a canonical graph, one for each rank of a tensor parallel group (Megatron-LM, Shoeybi et al. 2019, 3).

    attention sites   by heads: queries, keys and values from linear layers cut by columns
    after attention   by rows, and the ranks' results are added (all_reduce)
    MLPs, experts     first layers by columns, the last by rows; experts each by columns
    head              by vocabulary, and the logits of all ranks are gathered
    anything else     whole on every rank

Which layers these are is found from the graph's dataflow (`wishes.py`); that each value is what it is said to be, is
proved operator by operator (`build.py`, `forms/`), whatever was wished. Nothing knows a model by its class or names.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from kvcompile.kernels.ops import attention as attention_op
from kvcompile.passes.graph import shape, told
from kvcompile.passes.graph_digest import graph_digest
from kvcompile.passes.graph_module import module_of
from kvcompile.passes.records import AttentionSite
from kvcompile.passes.rewrite.clean import drop_dead
from kvcompile.passes.shard.build import Builder, Piece, tensor_of
from kvcompile.passes.shard.cuts import Cut, Placement, covering, is_whole, whole
from kvcompile.passes.shard.form import sizes
from kvcompile.passes.shard.forms import form_of
from kvcompile.passes.shard.prepare import prepare
from kvcompile.passes.shard.sites import Division, divide, of_bias
from kvcompile.passes.shard.wishes import Edge, Wishes
from kvcompile.passes.table import graph_pass
from kvcompile.plan import Plan

log = logging.getLogger(__name__)
assert attention_op.LIBRARY
_TOLD = 12  # layers that are whole, and are told one by one


@dataclass(frozen=True)
class WholeLinear:
    """A linear layer that every rank computes all of, and why."""

    where: str
    because: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.where} stays whole: {self.because}"


@dataclass(frozen=True)
class Shard:
    """One rank's graph: canonical, with the rank's heads at its sites.

    pieces: the weights that it reads, by name in the graph
    """

    rank: int
    graph_module: GraphModule
    sites: tuple[AttentionSite, ...]
    pieces: Mapping[str, Piece]


@dataclass(frozen=True)
class Sharding:
    """A graph over ranks.

    divisions: how each site is divided
    whole:     linear layers that are not cut; sums, gathers: collectives of one pass
    weight_bytes: of each rank, and of the whole graph
    """

    ranks: int
    shards: tuple[Shard, ...]
    divisions: tuple[Division, ...]
    whole: tuple[WholeLinear, ...]
    by_rows: int
    by_columns: int
    sums: int
    gathers: int
    weight_bytes: tuple[int, ...]
    whole_bytes: int

    def told(self) -> tuple[str, ...]:
        """What each rank has, what they exchange, and what is whole on all of them and why; for people."""
        part = max(self.weight_bytes) / max(self.whole_bytes, 1)
        head = (
            f"over {self.ranks} ranks: {self.by_columns} linear layers by columns, {self.by_rows} by rows, "
            f"{len(self.whole)} whole; a pass adds {self.sums} times over the ranks and gathers {self.gathers} times; "
            f"a rank has {part:.0%} of the bytes of the weights"
        )
        repeats = [f"{number}" for number, division in enumerate(self.divisions) if division.repeats]
        shared = f"layers {', '.join(repeats)}: a rank keeps KV heads, or latent rows, that other ranks keep as well"
        undivided = [
            f"layer {number}: its attention is whole on all ranks: {division.because}"
            for number, division in enumerate(self.divisions)
            if not division.divided
        ]
        left = [str(each) for each in self.whole[:_TOLD]]
        more = [f"and {len(self.whole) - _TOLD} more layers"] if len(self.whole) > _TOLD else []
        return (head, *([shared] if repeats else []), *undivided, *left, *more)

    def pieces(self, rank: int) -> dict[str, tuple[str, str]]:
        """Of each weight of a rank the name of the whole one, and which part it is, as `graph_digest` takes them."""
        own = self.shards[rank].pieces
        return {name: (piece.path, str(piece.placement)) for name, piece in own.items()}

    def digest(self, named: Collection[str]) -> str:
        """A hash of all ranks' graphs: what each computes of what, and which part of which weight it has.

        named: weights and buffers of the model
        """
        each = [graph_digest(own.graph_module, named, self.pieces(own.rank)) for own in self.shards]
        return hashlib.sha256(" ".join(each).encode()).hexdigest()[:16]


@graph_pass("shard")
def shard(canonical: GraphModule, sites: tuple[AttentionSite, ...], plan: Plan, ranks: int) -> Sharding:
    """The graphs of all ranks; the canonical graph is as it was. Weights are views of its own where they can be.

    Raises:
        PlanError: heads that do not divide over so many ranks, or a layout that needs all heads of a layer.
    """
    divisions = divide(sites, plan, ranks)
    graph = Graph()
    mapping: dict[Node, Node] = {}
    graph.output(graph.graph_copy(canonical.graph, mapping))
    moved = prepare(graph)
    mapping = {old: moved.get(new, new) for old, new in mapping.items()}
    own = tuple(site.moved(mapping).without_roots() for site in sites)
    drop_dead(graph, {node for site in own for node in _kept(site)})
    builder = Builder(canonical, ranks, {}, Wishes({}, frozenset(), {}, {}))
    wishes = _wishes(graph, own, divisions, ranks)
    builder.forms, builder.wishes = wishes.forms, wishes
    moved_sites = _build(graph, builder, own, divisions)
    return _sharding(canonical, builder, wishes, moved_sites, divisions)


def _kept(site: AttentionSite) -> tuple[Node, ...]:
    assert site.latent is None, "a graph is sharded after its latent forms have been chosen"
    rope = () if site.rope is None else (site.rope.q_input, site.rope.k_input)
    return (site.q, site.k, site.v, *rope, *site.sources)


def _wishes(
    graph: Graph,
    sites: Sequence[AttentionSite],
    divisions: Sequence[Division],
    ranks: int,
) -> Wishes:
    nodes = list(graph.nodes)
    constants: set[Node] = set()
    for node in nodes:
        computed = node.op == "call_function" and bool(node.all_input_nodes) and form_of(node) is not None
        alone = computed and all(used in constants for used in node.all_input_nodes)
        if (node.op == "get_attr" or alone) and isinstance(node.meta.get("val"), Tensor):
            constants.add(node)
    forms = {node: form for node in nodes if (form := form_of(node)) is not None}
    order = {node: place for place, node in enumerate(nodes)}
    fixed: dict[Node, Placement] = {}
    edges: dict[Edge, Placement] = {}
    kept: dict[Node, int] = {}
    for site, division in zip(sites, divisions, strict=True):
        if not division.divided:
            for node in _kept(site):
                kept[node] = kept.get(node, 0) + 1
            continue
        fixed[site.out] = division.of_heads(len(shape(site.out)), division.queries)
        for node, cut in _operands(site, division):
            edges[(site.out, node)] = _heads(node, cut)
    wishes = Wishes(forms, frozenset(constants), order, fixed, kept)
    wishes.sites({edge: placement for edge, placement in edges.items() if not is_whole(placement)})
    output = nodes[-1]
    results = output.args[0]
    for result in results if isinstance(results, (list, tuple)) else ():
        _head(wishes, output, result, ranks)
    wishes.row_linears(ranks)
    return wishes


def _heads(node: Node, cut: Cut | None) -> Placement:
    return tuple(cut if dim == 1 else None for dim in range(len(shape(node))))


def _operands(site: AttentionSite, division: Division) -> list[tuple[Node, Cut | None]]:
    """Values [B, heads, S, D] that a site reads, and how their heads are cut."""
    found = [(site.q, division.queries), (site.k, division.keys), (site.v, division.keys)]
    if site.rope is not None:
        found += [(site.rope.q_input, division.queries), (site.rope.k_input, division.keys)]
    return found


def _head(wishes: Wishes, output: Node, result: Any, ranks: int) -> None:
    """Logits by vocabulary, where their last dimension is the columns of a linear layer."""
    if not isinstance(result, Node) or not isinstance(result.meta.get("val"), Tensor):
        return
    size = sizes(result)[-1] if sizes(result) else None
    if size is None or size < ranks:
        return
    placement = (*([None] * (len(sizes(result)) - 1)), covering(size, ranks))
    wishes.columns((output, result), placement)


def _build(
    graph: Graph, builder: Builder, sites: Sequence[AttentionSite], divisions: Sequence[Division]
) -> list[tuple[AttentionSite, ...]]:
    """Build all nodes; returns the sites of each rank."""
    found = {site.out: (site, division) for site, division in zip(sites, divisions, strict=True)}
    for node in graph.nodes:
        if node.op == "output":
            own = [_ranks_of(builder, *found[site.out]) for site in sites]
            builder.copy(node)
            return [tuple(each[rank] for each in own) for rank in range(builder.ranks)]
        if node.op != "call_function":
            if node not in builder.wishes.constants:
                builder.copy(node)
            continue
        if node not in found:
            builder.call(node)
            continue
        site, division = found[node]
        placed = _placed(site, division)
        for used in _nodes(site):  # before the site, whose op may read any of them
            if used is not node and used in builder.natural:
                builder.get(used, placed.get(used) or whole(len(shape(used))))
        if division.divided:
            builder.attend(node, placed, _heads(node, division.queries))
        else:
            builder.call(node)
    raise AssertionError("a graph has an output")


def _nodes(site: AttentionSite) -> list[Node]:
    """What the op of a site may be given."""
    more = [node for node in (site.sinks, site.bias) if node is not None]
    return [*_kept(site), *more, *(leaf.node for leaf in site.leaves)]


def _placed(site: AttentionSite, division: Division) -> dict[Node, Placement]:
    """How what a divided site reads is cut; nothing for one that is whole."""
    if not division.divided:
        return {}
    placed = {each: _heads(each, cut) for each, cut in _operands(site, division)}
    placed |= {each: of_bias(each, division) for each in (site.sinks, site.bias) if each is not None}
    return placed


def _sharding(
    canonical: GraphModule,
    builder: Builder,
    wishes: Wishes,
    sites: Sequence[tuple[AttentionSite, ...]],
    divisions: tuple[Division, ...],
) -> Sharding:
    built, ranks = builder.built, builder.ranks
    shards = []
    for rank, (graph, own) in enumerate(zip(built.graphs, sites, strict=True)):
        drop_dead(graph, {node for site in own for node in _kept(site)})
        graph.lint()
        names = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
        pieces = {name: piece for name, piece in built.pieces.items() if name in names}
        held = {name: tensor_of(canonical, piece, rank) for name, piece in pieces.items()}
        held |= {name: tensors[rank] for name, tensors in built.made.items() if name in names}
        shards.append(Shard(rank, module_of(held, graph, "Shard"), own, pieces))
    uncut = [
        node
        for node in wishes.forms
        if wishes.is_linear(node) and node not in built.rows and node not in built.columns
    ]
    log.info("shard: %d ranks, %d layers by columns, %d by rows", ranks, len(built.columns), len(built.rows))
    return Sharding(
        ranks,
        tuple(shards),
        divisions,
        tuple(_uncut(node, wishes) for node in uncut),
        len(built.rows),
        len(built.columns),
        sum(kind == "sum" for kind, _ in built.moved),
        sum(kind == "gather" for kind, _ in built.moved),
        tuple(map(_bytes, shards)),
        _whole_bytes(canonical),
    )


def _uncut(node: Node, wishes: Wishes) -> WholeLinear:
    found = wishes.weight(node)
    assert found is not None
    val = found[2].meta["val"]
    return WholeLinear(told(node), wishes.why(node), int(val.numel()) * val.element_size())


def _bytes(own: Shard) -> int:
    """Bytes of the weights that a rank reads; a part of a weight that is there whole, is no more."""
    found = 0
    there = {piece.path for piece in own.pieces.values() if is_whole(piece.placement)}
    for name, piece in own.pieces.items():
        if is_whole(piece.placement) or piece.path not in there:
            value = _attribute(own.graph_module, name)
            found += value.numel() * value.element_size()
    return found


def _whole_bytes(module: GraphModule) -> int:
    names = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    return sum(value.numel() * value.element_size() for value in (_attribute(module, name) for name in names))


def _attribute(module: GraphModule, name: str) -> Tensor:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    assert isinstance(found, Tensor)
    return found


def _ranks_of(builder: Builder, site: AttentionSite, division: Division) -> tuple[AttentionSite, ...]:
    """A site as each rank has it: its nodes and its heads."""
    placed = _placed(site, division) | {site.out: builder.natural[site.out]}
    found = []
    for rank in range(builder.ranks):
        local = site.moved(_Local(builder, placed, rank))
        if division.queries is not None:
            keys = site.num_kv_heads if division.keys is None else division.keys.count(rank)
            local = replace(local, num_qo_heads=division.queries.count(rank), num_kv_heads=keys)
        found.append(local)
    return tuple(found)


class _Local(dict[Node, Node]):
    """Nodes of one rank by those of the whole graph, each brought where it is asked for."""

    def __init__(self, builder: Builder, placed: Mapping[Node, Placement], rank: int):
        super().__init__()
        self.builder, self.placed, self.rank = builder, placed, rank

    def get(self, node: Node, default: Any = None) -> Any:
        if (
            node not in self.placed
            and node not in self.builder.natural
            and node not in self.builder.wishes.constants
        ):
            return default
        placement = self.placed.get(node)
        if placement is None:
            return self.builder.whole(node)[self.rank]
        return self.builder.get(node, placement)[self.rank]


def localized(plan: Plan, sharding: Sharding, rank: int) -> Plan:
    """The plan as one rank carries it out: with its heads, and its heads' calibrated scales."""
    decisions = []
    for decision, division, site in zip(
        plan.decisions, sharding.divisions, sharding.shards[rank].sites, strict=True
    ):
        scales = decision.scales
        if division.keys is not None:
            keys = division.keys
            scales = tuple(
                (name, tuple(values[i] for i in keys.indices(rank)) if len(values) == keys.size else values)
                for name, values in scales
            )
        decisions.append(
            replace(
                decision,
                num_qo_heads=site.num_qo_heads,
                num_kv_heads=site.num_kv_heads,
                scales=scales,
            )
        )
    return replace(plan, decisions=tuple(decisions))


__all__ = ["Shard", "Sharding", "WholeLinear", "localized", "shard"]
