"""Autocast spelled out: an operator that ran under `torch.autocast` becomes casts of its arguments, and itself.

What autocast does to an operator is not looked up in a list but seen: the operator runs once on fake tensors under the
same autocast, and the casts that torch makes of its arguments, before anything else, are those of the graph. An
operator that autocast knows only by its parts (einsum on a CPU) is replaced by these parts. The result's dtype and
shape must be what was recorded when the model was traced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from kvcompile.errors import ModelError
from kvcompile.passes.graph import call, expr, source_line, value
from kvcompile.util.faking import faking

aten = torch.ops.aten
_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


@dataclass(frozen=True)
class Cast:
    """An enabled `torch.autocast(device, dtype)`."""

    device: str
    dtype: torch.dtype


class _Seen(TorchDispatchMode):
    """The operators that run, with the dtypes of what they get, and the casts at the very start."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[tuple[Any, ...]] = []
        self.casts: dict[int, torch.dtype] = {}  # by id of the tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # questions about the device
            return result
        if func is aten._to_copy.default and all(op[0] is func for op in self.ops):
            self.casts[id(args[0])] = result.dtype
        given = tuple(x.dtype for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        self.ops.append((func, *given))
        return result


def cast_call(graph: Graph, inner: Node, known: Mapping[Node, Any], cast: Cast) -> tuple[Node, list[Node]]:
    """`inner`, a node of a body that ran under `cast`, at the graph's insertion point; and all nodes that this took.

    Raises:
        ModelError: the casts cannot be seen.
    """
    target: Any = inner.target
    args, kwargs = torch.fx.map_arg((inner.args, inner.kwargs), known.__getitem__)
    fake_args, fake_kwargs = torch.fx.map_arg((args, kwargs), value)
    fakes = [leaf for leaf in pytree.tree_leaves((fake_args, fake_kwargs)) if isinstance(leaf, Tensor)]
    if not fakes:
        made = graph.node_copy(inner, known.__getitem__)
        return made, [made]
    mode: Any = getattr(fakes[0], "fake_mode", None)
    assert mode is not None, "the values of a traced graph are fake tensors"

    def run(*given: Any) -> Any:
        a, k = pytree.tree_unflatten(list(given), spec)
        return target(*a, **k)

    leaves, spec = pytree.tree_flatten((fake_args, fake_kwargs))
    plain, seen = _Seen(), _Seen()
    with faking(mode):
        with plain:
            run(*leaves)
        with torch.autocast(cast.device, cast.dtype, cache_enabled=False), seen:
            run(*leaves)
    if seen.ops == plain.ops:
        made = graph.node_copy(inner, known.__getitem__)
        return made, [made]
    if _registered(target, fakes[0].device.type):
        added: list[Node] = []

        def casted(node: Node) -> Node:
            dtype = seen.casts.get(id(value(node)))
            if dtype is None or value(node).dtype == dtype:
                return node
            added.append(call(graph, aten.to.dtype, (node, dtype), inner))
            return added[-1]

        args, kwargs = torch.fx.map_arg((args, kwargs), casted)
        made = call(graph, target, args, inner, kwargs)
        added.append(made)
    else:
        made, added = _parts(graph, inner, run, leaves, pytree.tree_leaves((args, kwargs)), cast, mode)
    _confirm(inner, made)
    return made, added


def _registered(target: Any, device: str) -> bool:
    """Whether autocast has a rule for this very operator."""
    schema = target._schema
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    key = _KEYS.get(device, f"Autocast{device.upper()}")
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def _parts(
    graph: Graph, inner: Node, run: Any, leaves: list[Any], given: list[Any], cast: Cast, mode: Any
) -> tuple[Node, list[Node]]:
    """The operators that `inner` consists of, with their casts."""
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (Tensor, torch.SymInt))]

    def of_places(*values: Any) -> Any:
        every = list(leaves)
        for place, found in zip(places, values, strict=True):
            every[place] = found
        return run(*every)

    with faking(mode), torch.autocast(cast.device, cast.dtype, cache_enabled=False):
        parts = make_fx(of_places)(*(leaves[place] for place in places))
    known: dict[Node, Any] = {}
    sources = iter(given[place] for place in places)
    added: list[Node] = []
    for node in parts.graph.nodes:
        if node.op == "placeholder":
            known[node] = next(sources)
        elif node.op == "output":
            result = known[node.args[0]] if isinstance(node.args[0], Node) else None
            if not isinstance(result, Node):
                raise ModelError(f"{inner.target} under autocast ({source_line(inner)}) has several results")
            return result, added
        elif node.op == "call_function":
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), known.__getitem__)
            if node.target is aten._to_copy.default and list(kwargs) == ["dtype"]:
                known[node] = call(graph, aten.to.dtype, (args[0], kwargs["dtype"]), inner)
            else:
                known[node] = call(graph, node.target, args, inner, kwargs)
            added.append(known[node])
        else:
            raise ModelError(f"{inner.target} under autocast ({source_line(inner)}) makes a constant")
    raise AssertionError("a graph without output")


def _confirm(inner: Node, made: Node) -> None:
    def kind(node: Node) -> list[Any]:
        leaves = [leaf for leaf in pytree.tree_leaves(value(node)) if isinstance(leaf, Tensor)]
        return [(leaf.dtype, [expr(size) for size in leaf.shape]) for leaf in leaves]

    if kind(inner) != kind(made):
        raise ModelError(
            f"what torch.autocast does to {inner.target} ({source_line(inner)}) is not known: it gave {kind(inner)},"
            f" with its casts spelled out {kind(made)}; cast explicitly in the model"
        )
