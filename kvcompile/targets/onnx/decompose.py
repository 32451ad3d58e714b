"""Operators that the exporter has no translation of, rewritten node by node.

PyTorch's exporter makes of a traced program one in operators that it knows by tracing it again, twice, with the table
of PyTorch's decompositions: two thirds of the time in which a graph becomes ONNX. What it makes of the graphs that come
here is little: writes become values (`passes/capture/functionalize.py`), a few operators go by another name, and what
only looks at a shape becomes the reshape that it is. That is done here, in the graph as it stands:

| operator | becomes |
|---|---|
| `a & b`, `a \\| b`, `a ^ b` | the bitwise operator |
| to | a cast, or nothing where the dtype is the same |
| flatten, unflatten | reshape |
| expand_as | expand |
| chunk | split |
| mT | transpose |
| contiguous | nothing: a value has no layout |
| argsort | the second of what sort gives |

A graph that has anything else which the exporter does not know is left to PyTorch as a whole.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, TensorArgument
from torch.fx import Graph, Node
from torch.onnx._internal.exporter import _decomp, _fx_passes

from kvcompile.passes.capture.functionalize import functionalize, mutates
from kvcompile.passes.graph import call, expr, shape, value
from kvcompile.passes.graph_module import module_of

log = logging.getLogger(__name__)
aten = torch.ops.aten
_RESHAPE = aten.reshape.default  # a view where there is one, else a copy: all one in ONNX
_CHECKS = (
    aten.sym_constrain_range_for_size.default,
    aten._assert_async.default,
    aten._assert_async.msg,
    aten._assert_scalar.default,
    aten._assert_tensor_metadata.default,
)
_BITWISE = {
    aten.__and__.Tensor: aten.bitwise_and.Tensor,
    aten.__or__.Tensor: aten.bitwise_or.Tensor,
    aten.__xor__.Tensor: aten.bitwise_xor.Tensor,
    aten.__and__.Scalar: aten.bitwise_and.Scalar,
    aten.__or__.Scalar: aten.bitwise_or.Scalar,
    aten.__xor__.Scalar: aten.bitwise_xor.Scalar,
}


@contextmanager
def node_by_node() -> Iterator[None]:
    """Meanwhile PyTorch's exporter decomposes programs as told above, where that can be."""
    passes: Any = _fx_passes
    original = passes.decompose_with_registry

    def decompose(program: ExportedProgram, registry: Any) -> ExportedProgram:
        found = decomposed(program, set(_decomp.get_onnx_implemented_overloads(registry)))
        whole: ExportedProgram = original(program, registry) if found is None else found
        return whole

    passes.decompose_with_registry = decompose
    try:
        yield
    finally:
        passes.decompose_with_registry = original


def decomposed(program: ExportedProgram, known: Collection[Any]) -> ExportedProgram | None:
    """The program in operators among `known` alone, changed in place; None, and as it was: it has others."""
    graph = Graph()
    outputs: Any = graph.graph_copy(program.graph, {})
    if not all(isinstance(node, Node) for node in outputs):
        return None
    graph.output(outputs)
    module = module_of(program.graph_module, graph, "Decomposed")
    _drop_casts_of_nothing(graph)
    if mutates(module) and functionalize(module):
        return None
    sizes = _Sizes(graph)
    for node in list(graph.nodes):
        if node.target in _CHECKS:
            graph.erase_node(node)
        elif rule := _RULES.get(node.target):
            with graph.inserting_before(node):
                made = rule(node, sizes)
            if made is not None:
                node.replace_all_uses_with(made)
                graph.erase_node(node)
    graph.eliminate_dead_code()
    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and not _is_known(node, known):
            log.info("onnx: %s is left to torch, with all of its graph", node.target)
            return None
    graph.lint()
    made = next(node for node in graph.nodes if node.op == "output").args[0]
    program._graph_signature = _named(program.graph_signature, made)
    program._graph_module = module
    return program


def _drop_casts_of_nothing(graph: Graph) -> None:
    """A cast to the dtype that a tensor has is that tensor, written to or not."""
    for node in list(graph.nodes):
        if node.target is aten.to.dtype and len(node.args) == 2 and not node.kwargs:
            source = _first(node)
            if value(source).dtype == value(node).dtype:
                node.replace_all_uses_with(source)
                graph.erase_node(node)


def _is_known(node: Node, known: Collection[Any]) -> bool:
    target: Any = node.target
    if target in (operator.getitem, _RESHAPE):
        return True
    # PyTorch takes apart what may be a view and is made of other operators, known or not.
    apart = isinstance(target, torch._ops.OpOverload) and target._can_decompose()
    if apart and any(result.alias_info for result in target._schema.returns):
        return False
    return node.op == "call_function" and target in known


def _named(signature: ExportGraphSignature, outputs: Any) -> ExportGraphSignature:
    """The signature, with the names that outputs have now."""
    specs = [
        replace(spec, arg=TensorArgument(node.name))
        for spec, node in zip(signature.output_specs, outputs, strict=True)
    ]
    return ExportGraphSignature(signature.input_specs, specs)


class _Sizes:
    """The sizes of a graph's values: numbers, or nodes where they are not known, of inputs where these have them."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.found: dict[Any, Node] = {}

    def of(self, source: Node, start: int, end: int, user: Node) -> list[Any]:
        """Those of dimensions start .. end - 1 of `source`."""
        sizes: list[Any] = list(value(source).shape)
        return [
            size if isinstance(size, int) else self._node(source, start + place, size, user)
            for place, size in enumerate(sizes[start:end])
        ]

    def _node(self, source: Node, dim: int, size: torch.SymInt, user: Node) -> Node:
        symbol = expr(size)
        if symbol not in self.found:
            places = (
                (node, place)
                for node in self.inputs
                if isinstance(value(node), torch.Tensor)
                for place, other in enumerate(value(node).shape)
                if isinstance(other, torch.SymInt) and expr(other) == symbol
            )
            place = next(places, None)
            if place is None:
                return call(self.graph, aten.sym_size.int, (source, dim), user, val=size)
            with self.graph.inserting_after(self.inputs[-1]):
                self.found[symbol] = call(self.graph, aten.sym_size.int, place, user, val=size)
        return self.found[symbol]


Rule = Callable[[Node, _Sizes], Node | None]


def _bitwise(node: Node, _: _Sizes) -> Node:
    return call(node.graph, _BITWISE[node.target], node.args, node, val=value(node))  # type: ignore[index]


def _cast(node: Node, _: _Sizes) -> Node:
    source = _first(node)
    if value(source).dtype == value(node).dtype and value(source).device == value(node).device:
        return source
    kwargs = {"dtype": value(node).dtype}
    return call(node.graph, aten._to_copy.default, (source,), node, kwargs, val=value(node))


def _nothing(node: Node, _: _Sizes) -> Node:
    return _first(node)


def _flatten(node: Node, sizes: _Sizes) -> Node:
    source = _first(node)
    dims = len(shape(source))
    given: Any = [*node.args[1:], *(0, -1)[len(node.args) - 1 :]]
    start, end = (dim % max(dims, 1) for dim in given)
    return _reshaped(node, [*sizes.of(source, 0, start, node), -1, *sizes.of(source, end + 1, dims, node)])


def _unflatten(node: Node, sizes: _Sizes) -> Node:
    source = _first(node)
    dims = len(shape(source))
    dim: Any = node.args[1] % dims  # type: ignore[operator]
    inner = list(node.args[2])  # type: ignore[arg-type]
    return _reshaped(node, [*sizes.of(source, 0, dim, node), *inner, *sizes.of(source, dim + 1, dims, node)])


def _expand_as(node: Node, sizes: _Sizes) -> Node:
    like = node.args[1]
    assert isinstance(like, Node)
    wanted = sizes.of(like, 0, len(shape(like)), node)
    return call(node.graph, aten.expand.default, (_first(node), wanted), node, val=value(node))


def _chunk(node: Node, _: _Sizes) -> Node | None:
    source, count = _first(node), node.args[1]
    dim: Any = (node.args[2] if len(node.args) > 2 else 0) % len(shape(source))  # type: ignore[operator]
    size = shape(source)[dim]
    if not isinstance(size, int) or not isinstance(count, int) or size == 0:
        return None
    return call(node.graph, aten.split.Tensor, (source, -(-size // count), dim), node, val=value(node))


def _transposed(node: Node, _: _Sizes) -> Node:
    return call(node.graph, aten.transpose.int, (_first(node), -2, -1), node, val=value(node))


def _argsort(node: Node, _: _Sizes) -> Node:
    sort = aten.sort.stable if node.target is aten.argsort.stable else aten.sort.default
    both = call(node.graph, sort, node.args, node, dict(node.kwargs))
    return call(node.graph, operator.getitem, (both, 1), node, val=value(node))


def _first(node: Node) -> Node:
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def _reshaped(node: Node, sizes: list[Any]) -> Node:
    return call(node.graph, _RESHAPE, (_first(node), sizes), node, val=value(node))


_RULES: dict[Any, Rule] = {
    **dict.fromkeys(_BITWISE, _bitwise),
    **dict.fromkeys((aten.to.dtype, aten.to.dtype_layout, aten.to.device), _cast),
    aten.contiguous.default: _nothing,
    aten.flatten.using_ints: _flatten,
    aten.unflatten.int: _unflatten,
    aten.expand_as.default: _expand_as,
    aten.chunk.default: _chunk,
    aten.mT.default: _transposed,
    aten.argsort.default: _argsort,
    aten.argsort.stable: _argsort,
}
