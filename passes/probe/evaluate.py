"""Run a part of a captured graph on concrete inputs: the instrument behind every probe.

Only the ancestors of the wanted nodes run, so evaluating a mask or a cos/sin table touches no weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node, map_arg

from kvcompile.passes.graph import ancestors


def fetch_attr(graph_module: GraphModule, target: str) -> Any:
    """The parameter, buffer or constant that a `get_attr` node names."""
    found: Any = graph_module
    for part in target.split("."):
        found = getattr(found, part)
    return found


def evaluate(
    graph_module: GraphModule,
    outputs: Sequence[Node],
    inputs: Mapping[str, Tensor],
    overrides: Mapping[Node, Any] | None = None,
    constant: Callable[[int], int] | None = None,
) -> list[Any]:
    """Values of `outputs` for concrete placeholder values, running just their ancestors.

    inputs:    placeholder name -> tensor; placeholders that are not needed may be left out
    overrides: values to take for some nodes instead of computing them (what lies behind them does not run)
    constant:  maps every integer literal among the arguments (used to shrink window constants in probes)

    Raises KeyError when a needed placeholder is missing; errors of the operators come through as they are.
    """
    overrides = overrides or {}
    needed = ancestors(list(outputs), set(overrides))
    order = [node for node in graph_module.graph.nodes if node in needed]
    uses: Counter[Node] = Counter(outputs)
    for node in order:
        if node not in overrides:
            uses.update(node.all_input_nodes)

    values: dict[Node, Any] = {}
    with torch.no_grad():
        for node in order:
            if node in overrides:
                values[node] = _beside(node, overrides[node])
                continue
            if node.op == "placeholder":
                values[node] = inputs[str(node.target)]
            elif node.op == "get_attr":
                values[node] = fetch_attr(graph_module, str(node.target))
            elif node.op == "call_function":
                assert callable(node.target)
                args, kwargs = node.args, node.kwargs
                if constant is not None:
                    args, kwargs = _map_ints(args, constant), _map_ints(kwargs, constant)
                args, kwargs = map_arg((args, kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
            else:
                raise NotImplementedError(f"evaluate: node {node} is a {node.op}")
            for used in node.all_input_nodes:
                uses[used] -= 1
                if not uses[used]:
                    del values[used]  # long probes hold one or two masks at a time, not all of them
    return [values[node] for node in outputs]


def _beside(node: Node, given: Any) -> Any:
    """What is given for a node, or for each of its results, on the device that the graph has it on."""
    val = node.meta.get("val")
    if isinstance(val, Tensor) and isinstance(given, Tensor):
        return given.to(val.device)
    if isinstance(val, (list, tuple)) and isinstance(given, (list, tuple)) and len(val) == len(given):
        return type(given)(
            own.to(of.device) if isinstance(own, Tensor) and isinstance(of, Tensor) else own
            for own, of in zip(given, val, strict=True)
        )
    return given


def depends_on(node: Node, names: Sequence[str]) -> bool:
    """Whether `node` uses the *values* of any named placeholder (not merely its shape)."""
    seen: set[Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current in seen or current.target in _SHAPE_ONLY:
            continue
        seen.add(current)
        if current.op == "placeholder" and current.target in names:
            return True
        stack.extend(current.all_input_nodes)
    return False


_aten = torch.ops.aten
# Operators that read the shape of their tensor argument and nothing else.
_SHAPE_ONLY: frozenset[Any] = frozenset(
    overload
    for packet in (
        _aten.sym_size,
        _aten.sym_numel,
        _aten.zeros_like,
        _aten.ones_like,
        _aten.full_like,
        _aten.empty_like,
        _aten.new_zeros,
        _aten.new_ones,
        _aten.new_full,
        _aten.new_empty,
    )
    for overload in (getattr(packet, name) for name in packet.overloads())
)


def shape_only(node: Node) -> bool:
    """Whether a node reads the shape of its tensor argument and nothing else."""
    return node.target in _SHAPE_ONLY


def _map_ints(tree: Any, constant: Callable[[int], int]) -> Any:
    if isinstance(tree, bool) or tree is None:
        return tree
    if isinstance(tree, int):
        return constant(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map_ints(item, constant) for item in tree)
    if isinstance(tree, Mapping):
        return {key: _map_ints(item, constant) for key, item in tree.items()}
    return tree
