"""The regions of a rewritten graph as JSON, and back: nodes in their order, each with its operator by name.

| argument | JSON |
|---|---|
| another node | {"node": its number} |
| list | {"list": [..]}; a tuple is a list, as in `values.py` |
| slice | {"slice": [start, stop, step]} |
| torch.layout, torch.memory_format | {"layout": "strided"}, {"memory_format": "contiguous_format"} |
| what `values.py` has | as there |

Operators are `torch.ops` by name, and a few functions of Python that compute with sizes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Target

from kvcompile.runtime.saved_module.values import of_json, to_json

_OPERATORS = (
    "getitem add sub mul floordiv truediv mod pow neg abs eq ne lt le gt ge and_ or_ xor not_ lshift rshift"
)
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in _OPERATORS.split()},
    **{
        f"math.{name}": getattr(math, name)
        for name in ("ceil", "floor", "trunc", "sqrt", "log", "log2", "exp")
    },
    **{
        f"torch.{name}": getattr(torch, name)
        for name in ("sym_max", "sym_min", "sym_int", "sym_float", "sym_not", "sym_ite", "sym_sqrt")
        if hasattr(torch, name)
    },
    **{f"builtins.{function.__name__}": function for function in (max, min, abs, round, int, float)},
}
_NAMES = {function: name for name, function in _FUNCTIONS.items()}


class Unwritable(Exception):
    """A graph has what no file can hold; the text says what."""


def graph_to_json(module: GraphModule) -> list[Any]:
    """The nodes of a region; raises Unwritable."""
    numbers: dict[Node, int] = {}
    nodes: list[Any] = []
    for node in module.graph.nodes:
        numbers[node] = len(nodes)
        if node.op not in ("placeholder", "call_function", "output"):
            raise Unwritable(f"a {node.op} of {node.target}")
        args, kwargs = _to_json(node.args, numbers), {k: _to_json(v, numbers) for k, v in node.kwargs.items()}
        target = _name(node.target) if node.op == "call_function" else str(node.target)
        nodes.append([node.op, node.name, target, args, kwargs])
    return nodes


def graph_of_json(nodes: Any, name: str) -> GraphModule:
    """The inverse of `graph_to_json`; raises ValueError, TypeError, KeyError or AttributeError where it is none."""
    graph = Graph()
    made: list[Node] = []
    for op, own, target, args, kwargs in nodes:
        found: Target = target
        if op == "call_function":
            found = _function(target)
        elif op not in ("placeholder", "output"):
            raise ValueError(f"a node {op!r}")
        given = {key: _of_json(value, made) for key, value in kwargs.items()}
        made.append(graph.create_node(op, found, _of_json(args, made), given, own))
    graph.lint()
    return GraphModule(nn.Module(), graph, name)


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if target in _NAMES:
        return _NAMES[target]
    raise Unwritable(f"a call of {getattr(target, '__name__', target)}")


def _function(name: str) -> Callable[..., Any]:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    space, op, overload = name.split(".")
    found = getattr(getattr(getattr(torch.ops, space), op), overload)
    if not isinstance(found, torch._ops.OpOverload):
        raise ValueError(f"{name} is no operator")
    return found


def _to_json(value: Any, numbers: dict[Node, int]) -> Any:
    if isinstance(value, Node):
        return {"node": numbers[value]}
    if isinstance(value, tuple):
        return [_to_json(item, numbers) for item in value]
    if isinstance(value, list):
        return {"list": [_to_json(item, numbers) for item in value]}
    if isinstance(value, slice):
        return {"slice": [_to_json(item, numbers) for item in (value.start, value.stop, value.step)]}
    if isinstance(value, (torch.layout, torch.memory_format)):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    try:
        return to_json(value)
    except TypeError as error:
        raise Unwritable(str(error)) from error


def _of_json(data: Any, made: list[Node]) -> Any:
    if isinstance(data, list):
        return tuple(_of_json(item, made) for item in data)
    match data:
        case {"node": int(number), **rest} if not rest:
            return made[number]
        case {"list": list(items), **rest} if not rest:
            return [_of_json(item, made) for item in items]
        case {"slice": list(items), **rest} if not rest:
            return slice(*(_of_json(item, made) for item in items))
        case {"layout": str(name), **rest} | {"memory_format": str(name), **rest} if not rest:
            return _enumerated(name)
    return of_json(data)


def _enumerated(name: str) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, (torch.layout, torch.memory_format)):
        raise ValueError(f"torch.{name} is neither layout nor memory format")
    return found
