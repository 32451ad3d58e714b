"""One graph for both sides of a length: `k if S >= k else S` goes two ways, and both are `min(k, S)`.

A model that asks whether the text is longer than some c is traced once for S < c and once for S >= c. Where the two
graphs are the same computation, but for integers that are S in the first and c in the second, each of them is
min(S, c): below c that is S, from c on it is c, so the joined graph is the first one for S < c and the second one for
S >= c. The other way round they are max(S, c). Nothing else is joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree

from kvcompile.passes.capture.guards import Threshold
from kvcompile.passes.graph import expr, shape, target_name, value
from kvcompile.passes.probe.evaluate import fetch_attr
from kvcompile.passes.rewrite.clean import eliminate_dead_code
from kvcompile.util.faking import faking


def worth_it(graph_module: GraphModule, threshold: Threshold) -> bool:
    """Whether the length decides how much is selected, which is what can be joined; another trace takes time."""
    size = expr(shape(_placeholder(graph_module))[1])
    for node in graph_module.graph.nodes:
        if target_name(node) in ("topk", "narrow", "slice") and node.op == "call_function":
            numbers = [_expr(arg) for arg in node.args[1:]]
            if threshold.length in numbers or (target_name(node) == "topk" and size in numbers):
                return True
    return False


def join(
    below: GraphModule, above: GraphModule, length: int, example: Sequence[Tensor]
) -> GraphModule | None:
    """The graph of both, made of `below`; None where they differ in more than a min or max of S and `length`.

    below, above: graphs for S < length and for S >= length, with the same inputs
    example: values of these
    """
    pairing = _Pairing(below, above, length)
    outputs = [next(n for n in g.graph.nodes if n.op == "output") for g in (below, above)]
    if not pairing.same((outputs[0].args, {}), (outputs[1].args, {}), outputs[0]):
        return None
    graph = below.graph
    ids = _placeholder(below)
    with graph.inserting_before(next(n for n in graph.nodes if n.op == "call_function")):
        size = graph.call_function(torch.ops.aten.sym_size.int, (ids, 1))
        made = {
            function: graph.call_function(function, (size, length))
            for function in dict.fromkeys(pairing.changes.values())
        }
    for (node, place), function in pairing.changes.items():
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        leaves[place] = made[function]
        node.args, node.kwargs = pytree.tree_unflatten(leaves, spec)
    eliminate_dead_code(below)
    return below if _propagate(below, example) else None


class _Pairing:
    """Which nodes of two graphs are the same, and the integers to join: by node and place among its arguments."""

    def __init__(self, below: GraphModule, above: GraphModule, length: int):
        self.modules, self.length = (below, above), length
        self.sizes = tuple(expr(shape(_placeholder(module))[1]) for module in self.modules)
        self.known: dict[tuple[Node, Node], bool] = {}
        self.changes: dict[tuple[Node, int], Any] = {}

    def same(self, one: Any, other: Any, user: Node) -> bool:
        """Whether two arguments of paired nodes compute the same, after what is noted in `changes`."""
        ones, spec = pytree.tree_flatten(one)
        others, other_spec = pytree.tree_flatten(other)
        if spec != other_spec:
            return False
        return all(
            self._leaf(a, b, user, place) for place, (a, b) in enumerate(zip(ones, others, strict=True))
        )

    def _leaf(self, one: Any, other: Any, user: Node, place: int) -> bool:
        if isinstance(one, Node) and isinstance(other, Node) and self._nodes(one, other):
            return True
        pair = (_expr(one), _expr(other))
        if pair[0] is None or pair[1] is None:
            return not isinstance(one, Node) and not isinstance(other, Node) and one == other
        if not isinstance(one, Node) and not isinstance(other, Node) and pair[0] == pair[1]:
            return True
        if pair == (self.sizes[0], self.length):
            self.changes[user, place] = torch.sym_min
        elif pair == (self.length, self.sizes[1]):
            self.changes[user, place] = torch.sym_max
        else:
            return False
        return True

    def _nodes(self, one: Node, other: Node) -> bool:
        if (one, other) not in self.known:
            before = dict(self.changes)
            self.known[one, other] = self._same_call(one, other)
            if not self.known[one, other]:
                self.changes = before
        return self.known[one, other]

    def _same_call(self, one: Node, other: Node) -> bool:
        if one.op != other.op or (one.op != "get_attr" and one.target != other.target):
            return False
        if one.op == "get_attr":
            a, b = (fetch_attr(m, str(n.target)) for m, n in zip(self.modules, (one, other), strict=True))
            return a is b or (
                isinstance(a, Tensor)
                and isinstance(b, Tensor)
                and (a.shape, a.dtype) == (b.shape, b.dtype)
                and torch.equal(a, b)
            )
        return self.same((one.args, one.kwargs), (other.args, other.kwargs), one)


def _expr(argument: Any) -> Any:
    """An integer as an expression; None for anything else."""
    found = value(argument)
    if isinstance(found, bool) or not isinstance(found, (int, torch.SymInt)):
        return None
    return expr(found)


def _placeholder(module: GraphModule) -> Node:
    found: Node = next(node for node in module.graph.nodes if node.op == "placeholder")
    return found


def _propagate(module: GraphModule, example: Sequence[Tensor]) -> bool:
    """New fake values for all nodes, with free sizes; False where a size would be bound."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, static_shapes=False)
    values: dict[Node, Any] = {}
    given = iter(example)
    ids: Any = None
    with torch.no_grad():
        for node in module.graph.nodes:
            if node.op == "placeholder":
                tensor = next(given)
                if ids is not None and tensor.dim() == 2:  # positions: as many as ids
                    with mode:
                        values[node] = torch.empty(ids.shape, dtype=tensor.dtype, device=tensor.device)
                else:
                    context: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC] * tensor.dim())
                    source = ConstantSource(str(node.target))
                    values[node] = mode.from_tensor(tensor, symbolic_context=context, source=source)
                ids = values[node] if ids is None else ids
            elif node.op == "get_attr":
                found = fetch_attr(module, str(node.target))
                values[node] = (
                    mode.from_tensor(found, static_shapes=True) if isinstance(found, Tensor) else found
                )
            elif node.op == "call_function":
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
                with faking(mode):
                    values[node] = node.target(*args, **kwargs)
            else:
                continue
            node.meta["val"] = values[node]
    free = [expr(size) for size in ids.shape]
    bounds = [env.var_to_range.get(size) for size in free]
    return all(size.is_Symbol for size in free) and all(
        bound is not None and int(bound.lower) <= 2 and not getattr(bound.upper, "is_Integer", False)
        for bound in bounds
    )
