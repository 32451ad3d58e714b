"""Cuts a cached graph into regions at its attention sites, and finds the regions that repeat.

A decoder is a chain: every attention depends on the one before it. Region k holds what lies between attention
k-1 and attention k (that one included): the rest of a layer and the start of the next. All but the first and
the last are the same function of other weights, so each distinct one is compiled once and called many times.
Nothing here knows of modules or names; equal structure is equal text.

Calls of opaque modules are regions of their own: they run as Python, but for steps (`compile/python_step.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg


@dataclass(frozen=True)
class RegionCall:
    """One call of a region: values are named by the original graph's nodes (weights by their path)."""

    region: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Regions:
    """The cut graph: distinct regions, the calls in order, and where the values come from and go.

    eager: the regions that call opaque modules
    """

    modules: tuple[GraphModule, ...]
    calls: tuple[RegionCall, ...]
    placeholders: tuple[str, ...]
    weights: dict[str, Tensor]
    outputs: tuple[str, ...]
    eager: frozenset[int] = frozenset()

    @property
    def last_use(self) -> dict[str, int]:
        """Index of the last call that reads a value, so that it can be freed after it."""
        last: dict[str, int] = {}
        for index, call in enumerate(self.calls):
            for name in call.inputs:
                last[name] = index
        return {name: index for name, index in last.items() if name not in self.outputs}


def cut(
    module: GraphModule,
    is_site: Callable[[Node], bool],
    is_opaque: Callable[[Node], bool] = lambda node: False,
    alone: bool = False,
) -> Regions:
    """Cut `module` after every node for which `is_site` holds, and around every one for which `is_opaque` does.

    alone: sites are regions of their own, so that what lies between them writes nothing
    """
    nodes = [n for n in module.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    output = next(n for n in module.graph.nodes if n.op == "output")

    def is_apart(node: Node) -> bool:
        return is_opaque(node) or (alone and is_site(node))

    apart = {n for n in nodes if is_apart(n)}
    apart |= {n for n in nodes if n.target is operator.getitem and n.args[0] in apart}
    segment = _segments(nodes, is_site, apart)
    weights = {n: f"weight:{n.target}" for n in module.graph.nodes if n.op == "get_attr"}
    tensors = {name: _attribute(module, str(n.target)) for n, name in weights.items()}
    final = tuple(output.all_input_nodes)

    groups: dict[tuple[int, int], list[Node]] = {}
    order: dict[Node, int] = {}
    for node in nodes:
        # Within a segment, opaque calls come after the rest, each (with its results) by itself.
        call = node.args[0] if node in apart and not is_apart(node) else node
        assert isinstance(call, Node)
        place = order.setdefault(call, len(order)) if call in apart else -1
        groups.setdefault((segment[node], place), []).append(node)
    modules: list[GraphModule] = []
    known: dict[str, int] = {}
    calls: list[RegionCall] = []
    eager: set[int] = set()
    for key in sorted(groups):
        members = groups[key]
        inside = set(members)
        inputs = list(dict.fromkeys(i for n in members for i in n.all_input_nodes if i not in inside))
        outputs = [
            n for n in members if n in final or any(u not in inside and u.op != "output" for u in n.users)
        ]
        text = _text(members, inputs, outputs, {n: tensors[weights[n]] for n in inputs if n in weights})
        if text not in known:
            known[text] = len(modules)
            modules.append(_module(members, inputs, outputs, len(modules)))
        if any(map(is_opaque, members)):
            eager.add(known[text])
        names = tuple(weights.get(n, n.name) for n in inputs)
        calls.append(RegionCall(known[text], names, tuple(n.name for n in outputs)))
    return Regions(
        tuple(modules),
        tuple(calls),
        tuple(n.name for n in module.graph.nodes if n.op == "placeholder"),
        tensors,
        tuple(weights.get(n, n.name) for n in final),
        frozenset(eager),
    )


def _segments(nodes: list[Node], is_site: Callable[[Node], bool], apart: set[Node]) -> dict[Node, int]:
    """The region of each node: sites as early as their inputs allow, the rest as late as their users allow.

    Nodes of `apart` run after the rest of their segment, so what uses them goes to a later one.

    As late as possible keeps what belongs to one layer in it (a mask of its own, an unsqueezed cosine), so
    that repeated layers look the same.
    """
    early: dict[Node, int] = {}
    latest = 0  # sites stay in their order: they may share a cache
    for node in nodes:
        early[node] = max(
            (
                early[i] + ((is_site(i) and node not in apart) or (i in apart and node not in apart))
                for i in node.all_input_nodes
                if i in early
            ),
            default=0,
        )
        if is_site(node):
            early[node] = latest = max(early[node], latest)
    last = max(early.values(), default=0)
    segment: dict[Node, int] = {}
    for node in reversed(nodes):
        late = min((segment[u] for u in node.users if u in segment), default=last)
        # What only the output uses goes as late as its inputs: the end of the chain.
        segment[node] = early[node] if is_site(node) or node in apart else max(early[node], late)
    for node in nodes:
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, Node) and source in segment:
            segment[node] = segment[source]  # no list leaves a region
    return segment


def _attribute(module: GraphModule, path: str) -> Tensor:
    value = operator.attrgetter(path)(module)
    assert isinstance(value, Tensor), f"{path} is no tensor"
    return value.detach()


def text_of(graph: Graph) -> str:
    """The same of a whole graph, which has its weights among its placeholders."""
    members = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    output = next(n for n in graph.nodes if n.op == "output")
    return _text(members, inputs, list(output.args[0]), {})


def _text(members: list[Node], inputs: list[Node], outputs: list[Node], weights: dict[Node, Tensor]) -> str:
    """The structure as text: equal texts compute the same function of their inputs."""
    number = {n: f"%{i}" for i, n in enumerate([*inputs, *members])}
    lines = [
        f"{number[n]} = "
        + (f"{w.dtype}{tuple(w.shape)}{w.stride()}{w.device}" if (w := weights.get(n)) is not None else "in")
        for n in inputs
    ]
    for n in members:
        args = map_arg((n.args, n.kwargs), lambda i: _Name(number[i]))
        lines.append(f"{number[n]} = {n.op} {n.target} {args!r}")
    return "\n".join((*lines, f"return {[number[n] for n in outputs]}"))


class _Name(str):
    """A node's number, printed without quotes (so that no string argument looks like one)."""

    def __repr__(self) -> str:
        return str(self)


def _module(members: list[Node], inputs: list[Node], outputs: list[Node], number: int) -> GraphModule:
    graph = Graph()
    made: dict[Node, Node] = {n: graph.placeholder(f"in_{i}") for i, n in enumerate(inputs)}
    for n in members:
        made[n] = graph.node_copy(n, lambda i: made[i])
    graph.output(tuple(made[n] for n in outputs))
    graph.lint()
    return GraphModule(torch.nn.Module(), graph, f"Region{number}")
