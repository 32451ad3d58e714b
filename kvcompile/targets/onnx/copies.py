"""Regions that were translated once (`targets/region_calls.py`): their nodes are copied for every other call.

A region stands between the nodes `Begin` and `End`; of what lies between them, what depends on what goes in is the
region's own, and the rest (a range of positions) is the same for all calls. Weights go in, too: what an exporter makes
of weights while it translates, a transposed matrix, is made of each call's own afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes.common import CommonSubexpressionEliminationPass
from onnxscript import evaluator

from kvcompile.passes.capture.traced_once import AGAIN, BEGIN, END, NotOnce, makes

_DOMAIN = "kvcompile"
_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
_LARGER = 2  # times as large as its inputs a constant may be that is made of them


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Of the marks, for `torch.onnx.export(custom_translation_table=...)`."""

    def begin(given: Any, number: int) -> Any:
        return _mark("Begin", given, len(given), number)

    def end(made: Any, number: int) -> Any:
        return _mark("End", made, len(made), number)

    def again(given: Any, number: int, call: int) -> Any:
        return _mark("Again", given, makes(number), number)

    return {BEGIN: begin, END: end, AGAIN: again}


def _mark(kind: str, given: Sequence[Any], count: int, number: int) -> Sequence[ir.Value]:
    recorder: Any = evaluator.default()  # of nodes that are made while the exporter translates
    attributes = [ir.AttrInt64("number", number)]
    node = ir.Node(_DOMAIN, kind, inputs=list(given), attributes=attributes, num_outputs=count, version=1)
    recorder.nodes.append(node)
    return node.outputs


def expand(model: ir.Model) -> int:
    """Put copies of the nodes of regions in the places where they are called again, in place; returns how many.

    Raises:
        NotOnce: the nodes of a region are not to be told from others.
    """
    graph = model.graph
    marks = [node for node in graph if node.domain == _DOMAIN]
    begins, ends = (
        {_number(node): node for node in marks if node.op_type == kind} for kind in ("Begin", "End")
    )
    calls = [node for node in marks if node.op_type == "Again"]
    if begins.keys() != ends.keys() or not {_number(node) for node in calls} <= begins.keys():
        raise NotOnce("marks were lost while the graph was translated")
    bodies = {number: _body(graph, begins[number], end) for number, end in ends.items()}
    names = {value.name for node in graph for value in node.outputs} | {value.name for value in graph.inputs}
    names |= set(graph.initializers)
    for call in calls:
        number = _number(call)
        known = dict(zip(begins[number].outputs, call.inputs, strict=True))
        for node in bodies[number]:
            copy = _copy(node, known, names)
            graph.insert_before(call, copy)
            known |= dict(zip(node.outputs, copy.outputs, strict=True))
        _replace(graph, call, [known.get(value, value) for value in ends[number].inputs if value is not None])
    for node in [*ends.values(), *begins.values()]:
        _replace(graph, node, node.inputs)
    model.opset_imports.pop(_DOMAIN, None)
    graph.opset_imports.pop(_DOMAIN, None)
    _fold(graph)
    CommonSubexpressionEliminationPass()(model)  # what regions make of the same numbers: masks, positions
    return len(calls)


def _number(node: ir.Node) -> int:
    return node.attributes["number"].as_int()


def _body(graph: ir.Graph, begin: ir.Node, end: ir.Node) -> list[ir.Node]:
    """The nodes of a region, in order."""
    needed, waiting = set(), [end]
    while waiting:
        node = waiting.pop()
        for value in node.inputs:
            source = value.producer() if value is not None else None
            if source is not None and source not in needed and source is not begin:
                needed.add(source)
                waiting.append(source)
    depends: set[ir.Value] = set(begin.outputs)
    found = []
    for node in graph:
        if node in needed and any(value in depends for value in node.inputs):
            if node.domain == _DOMAIN:
                raise NotOnce("a region is called within another")
            if any(attribute.type in _GRAPHS for attribute in node.attributes.values()):
                raise NotOnce(f"{node.op_type} has a graph of its own")
            depends |= set(node.outputs)
            found.append(node)
    return found


def _copy(node: ir.Node, known: Mapping[ir.Value, Any], names: set[str | None]) -> ir.Node:
    copy = ir.Node(
        node.domain,
        node.op_type,
        inputs=[value if value is None else known.get(value, value) for value in node.inputs],
        attributes=list(node.attributes.values()),
        overload=node.overload,
        num_outputs=len(node.outputs),
        version=node.version,
        name=None,
    )
    for value, own in zip(copy.outputs, node.outputs, strict=True):
        value.type, value.shape, value.name = own.type, own.shape, _new(own.name, names)
    return copy


def _new(name: str | None, names: set[str | None]) -> str:
    base, number = name or "val", 1
    while (found := f"{base}_{number}") in names:
        number += 1
    names.add(found)
    return found


def _replace(graph: ir.Graph, node: ir.Node, values: Sequence[ir.Value | None]) -> None:
    """What a node gives becomes `values`."""
    for old, new in zip(node.outputs, values, strict=True):
        assert new is not None
        for place, output in enumerate(graph.outputs):
            if output is old:
                graph.outputs[place] = new
        old.replace_all_uses_with(new)
    graph.remove(node, safe=True)


def _fold(graph: ir.Graph) -> None:
    """Compute what is made of weights alone."""
    for node in list(graph):
        inputs = [value for value in node.inputs if value is not None]
        if not inputs or node.domain or any(a.type in _GRAPHS for a in node.attributes.values()):
            continue
        given = {str(value.name): value.const_value for value in inputs if value.name in graph.initializers}
        weights = {name: tensor for name, tensor in given.items() if tensor is not None}
        if len(weights) < len(set(inputs)) or any(value.is_graph_output() for value in node.outputs):
            continue
        made = _computed(node, {name: tensor.numpy() for name, tensor in weights.items()})
        if sum(part.nbytes for part in made) > _LARGER * sum(tensor.nbytes for tensor in weights.values()):
            continue
        for value, part in zip(node.outputs, made, strict=True):
            new = ir.Value(name=f"{value.name}_folded", const_value=ir.tensor(part))
            new.type, new.shape = value.type, ir.Shape(part.shape)
            graph.register_initializer(new)
            value.replace_all_uses_with(new)
        graph.remove(node, safe=True)
        for value in set(inputs):
            if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
                graph.initializers.pop(str(value.name), None)


def _computed(node: ir.Node, given: Mapping[str, Any]) -> list[Any]:
    """What a node gives of arrays, by their names; by the reference implementation of ONNX."""
    if node.op_type == "Transpose":  # nearly all there is, and large
        order = node.attributes["perm"].as_ints() if "perm" in node.attributes else None
        return [np.ascontiguousarray(np.transpose(next(iter(given.values())), order))]
    return list(ReferenceEvaluator(ir.to_proto(node)).run(None, dict(given)))
