"""Crossing: where a canonical graph can be cut in two, so that one value goes from the first part to the second.

    past attention   a node that is computed from an attention site, or from a module that runs as Python
    before it        anything else: masks, positions, rotary tables, embeddings. It is a function of the inputs and of
                     weights, so that every stage that needs it computes it again

After a node at which one value past attention is all that later nodes read (a residual connection), the graph can be
cut: that value crosses. The weights behind what is computed again are counted for every stage that does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from kvcompile.kernels.ops.opaque import mixer, opaque
from kvcompile.passes.graph import expr, shape, told
from kvcompile.passes.records import AttentionSite
from kvcompile.util.listed import listed

Dims = tuple[int | str, ...]

_SIZES = {"input_ids": ("batch", "tokens"), "logits_to_keep": ("kept",)}
_TOLD = 4  # values that a reason names


@dataclass(frozen=True)
class Place:
    """A place to cut: behind node number `after` of the graph's, where `value` alone crosses."""

    after: int
    value: Node


@dataclass
class Crossing:
    """A graph as cuts see it. `sites`: its attention sites; a site reads `kept(site)` besides its arguments.

    sources: of each site the layer whose cache it reads: those of one cache stay together
    """

    graph: Graph
    sites: Sequence[AttentionSite]
    sources: Sequence[int]
    nodes: list[Node] = field(init=False)
    past: set[Node] = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = list(self.graph.nodes)
        work = self.works
        self.past = set()
        for node in self.nodes:
            if node in work or any(used in self.past for used in self.reads(node)):
                self.past.add(node)

    @cached_property
    def works(self) -> set[Node]:
        """Attention sites, and modules that run as Python: what a stage must have one of."""
        return {site.out for site in self.sites} | {
            node for node in self.nodes if node.target in (opaque, mixer)
        }

    @cached_property
    def _kept(self) -> Mapping[Node, tuple[Node, ...]]:
        return {site.out: kept(site) for site in self.sites}

    def reads(self, node: Node) -> list[Node]:
        """What a node is computed from; of a site also what its op may be given instead of its arguments."""
        return list(dict.fromkeys((*node.all_input_nodes, *self._kept.get(node, ()))))

    def _ends(self) -> dict[Node, int]:
        """Of each value past attention the number of the last node that reads it."""
        found = {}
        for number, node in enumerate(self.nodes):
            for used in self.reads(node):
                if used in self.past:
                    found[used] = number
        return found

    @cached_property
    def _open(self) -> list[tuple[Node, ...]]:
        """By number of node what crosses behind it."""
        ends = self._ends()
        found, crossing = [], dict[Node, None]()
        for number, node in enumerate(self.nodes):
            if node in ends:
                crossing[node] = None
            for used in self.reads(node):
                if ends.get(used) == number:
                    crossing.pop(used, None)
            found.append(tuple(crossing))
        return found

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """All places to cut, in order, one for each value: with work and all of each cache on either side."""
        number = {node: at for at, node in enumerate(self.nodes)}
        spans = [
            (min(group), max(group))
            for source in dict.fromkeys(self.sources)
            if (
                group := [
                    number[s.out] for s, of in zip(self.sites, self.sources, strict=True) if of == source
                ]
            )
        ]
        found: dict[Node, Place] = {}
        for at in chain(*self._gaps):
            crossing = self._open[at]
            if len(crossing) != 1:
                continue
            value = crossing[-1]
            apart = all(not first <= at < last for first, last in spans)
            if apart and self._of_tokens(value):
                found.setdefault(value, Place(at, value))
        return tuple(found.values())

    def _of_tokens(self, node: Node) -> bool:
        """Whether a value is [B, S, ..], in whatever order: then its sizes are known before it comes."""
        found = dims(node, self.graph)
        return found is not None and {"batch", "tokens"} <= set(found) and "kept" not in found

    @cached_property
    def _gaps(self) -> list[range]:
        """Numbers of the nodes from each block of work to the next."""
        number = {node: at for at, node in enumerate(self.nodes)}
        work = sorted(number[node] for node in self.works)
        return [range(one, other) for one, other in pairwise(work)]

    def most(self) -> int:
        """How many stages there can be."""
        return 1 + sum(any(place.after in gap for place in self.places) for gap in self._gaps)

    def reason(self) -> str:
        """Why there can be no more stages; for people."""
        closed = [gap for gap in self._gaps if not any(place.after in gap for place in self.places)]
        if not closed:
            return (
                f"it has {len(self.works)} attention blocks or modules with a state, and each stage needs one"
            )
        fewest = min((self._open[at] for gap in closed for at in gap), key=len)
        if len(fewest) == 1:
            return "where one value crosses, layers of both sides read one cache, or it is not one row for each token"
        named = listed(map(told, fewest), _TOLD)
        return (
            f"between {len(closed)} of its {len(self._gaps) + 1} blocks and the next, several values cross; where "
            f"fewest do, {len(fewest)}: {named}"
        )


def kept(site: AttentionSite) -> tuple[Node, ...]:
    """What the op of a site may be given: its operands before and after RoPE, and what its scores read."""
    rope = () if site.rope is None else (site.rope.q_input, site.rope.k_input)
    more = [node for node in (site.sinks, site.bias) if node is not None]
    return (site.q, site.k, site.v, *rope, *site.sources, *more, *(leaf.node for leaf in site.leaves))


def dims(node: Node, graph: Graph) -> Dims | None:
    """The sizes of a value: "batch", "tokens", "kept" (logits), or numbers; None where one is something else."""
    if not isinstance(node.meta.get("val"), Tensor):
        return None
    names: dict[Any, str] = {}
    for each in graph.nodes:
        if each.op == "placeholder" and each.name in _SIZES:
            names |= {expr(size): name for size, name in zip(shape(each), _SIZES[each.name], strict=True)}
    found: list[int | str] = []
    for size in map(expr, shape(node)):
        if size not in names and not size.is_Integer:
            return None
        found.append(names[size] if size in names else int(size))
    return tuple(found)


def behind(nodes: Iterable[Node], crossing: Crossing) -> set[Node]:
    """Nodes before attention that `nodes` are computed from, weights and inputs among them."""
    found: set[Node] = set()
    stack = [used for node in nodes for used in crossing.reads(node)]
    while stack:
        node = stack.pop()
        if node not in crossing.past and node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found
