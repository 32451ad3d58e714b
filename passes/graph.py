"""What every pass shares: how a node says what it is and where it comes from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import PurePath
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from kvcompile.util.faking import faking
from kvcompile.util.own_code import TORCH

_BARE = ("aten::", "kvcompile::")  # the libraries whose operators go by their bare names
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
# Frames of libraries and of transformers' plumbing; the model's own line is the innermost of the others.
_PLUMBING = (
    "<eval_with_key",
    "/passes/graph_module.py",  # which calls the code of branches
    TORCH,
    "/transformers/integrations/",
    "/transformers/utils/",
    "/transformers/masking_utils.py",
    "/transformers/modeling_",
    "/transformers/activations.py",
    "/transformers/pytorch_utils.py",
)


def source_line(node: Node) -> str:
    """`file.py:123`: the innermost line of the model's own code that made `node`, or an empty string."""
    trace = node.meta.get("stack_trace") or ""
    frames = [(m["file"], m["line"]) for m in _FRAME.finditer(trace)]
    own = [frame for frame in frames if not any(part in frame[0] for part in _PLUMBING)]
    if not (own or frames):
        return ""
    file, line = (own or frames)[-1]
    return f"{PurePath(file).name}:{line}"


def module_path(node: Node) -> str:
    """The dotted path of the innermost module whose forward made `node`, or an empty string."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    return paths[-1] if paths else ""


def value(node: object) -> Any:
    """The fake tensor or symbolic integer that export recorded for `node`."""
    return node.meta.get("val") if isinstance(node, Node) else node


def shape(node: Node) -> tuple[Any, ...]:
    """The symbolic shape of a tensor-valued node; an empty tuple for anything else."""
    val = value(node)
    return tuple(val.shape) if isinstance(val, torch.Tensor) else ()


def expr(dim: object) -> sympy.Expr:
    """A dimension as a sympy expression, so that comparing two of them adds no guard."""
    return dim.node.expr if isinstance(dim, torch.SymInt) else sympy.sympify(dim)


def is_size(dim: object, size: sympy.Expr) -> bool:
    """Whether a dimension is `size`, without a guard; most are numbers, which need no algebra."""
    if isinstance(dim, torch.SymInt):
        return bool(dim.node.expr == size)
    return bool(size.is_Integer) and int(size) == dim


def size_at(dim: object, sizes: Mapping[sympy.Expr, int]) -> int:
    """A dimension as it is for these values of symbols.

    Raises:
        TypeError: it has other symbols, too.
    """
    return dim if type(dim) is int else _at(expr(dim), tuple(sizes.items()))


@lru_cache(1 << 14)
def _at(size: sympy.Expr, sizes: tuple[tuple[sympy.Expr, int], ...]) -> int:
    return int(size.subs(sizes))


def target_name(node: Node) -> str:
    """`aten.add.Tensor` -> `add`, an operator of another library -> `library::add`, anything else -> its own name.

    What is known of PyTorch's `add` is not known of what another library calls so.
    """
    if isinstance(node.target, torch._ops.OpOverload):
        name = node.target._schema.name
        return name.split("::")[-1] if name.startswith(_BARE) else name
    return getattr(node.target, "__name__", str(node.target))


def told(node: Node) -> str:
    """Where a call is, for people."""
    where = ", ".join(part for part in (module_path(node), source_line(node)) if part)
    return f"{target_name(node)} ({where})" if where else f"{target_name(node)} {node.name}"


def ancestors(nodes: Sequence[Node], stop: frozenset[Node] | set[Node] = frozenset()) -> set[Node]:
    """`nodes` and everything they are computed from; the walk does not look behind `stop`."""
    seen: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node not in stop:
            stack.extend(node.all_input_nodes)
    return seen


def descendants(nodes: Sequence[Node]) -> set[Node]:
    """`nodes` and everything computed from them."""
    seen: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.users)
    return seen


def call(
    graph: Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    like: Node,
    kwargs: dict[str, Any] | None = None,
    val: Any = None,
) -> Node:
    """Insert a call at the graph's insertion point, with its fake value, and with the origin of `like`.

    val: the fake value, where it is known
    """
    node = graph.call_function(target, args, kwargs or {})
    for key in ("stack_trace", "nn_module_stack"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    if val is not None:
        node.meta["val"] = val
        return node
    fake_args, fake_kwargs = torch.fx.map_arg((args, kwargs or {}), value)
    modes = [v.fake_mode for v in _leaves((fake_args, fake_kwargs, value(like))) if hasattr(v, "fake_mode")]
    if modes:
        with faking(modes[0]):
            node.meta["val"] = target(*fake_args, **fake_kwargs)
    return node


def _leaves(tree: Any) -> Iterator[Any]:
    return iter(torch.utils._pytree.tree_leaves(tree))
