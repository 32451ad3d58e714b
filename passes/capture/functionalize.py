"""Functionalize: in-place writes become values, so that what a node holds does not depend on when it is read.

    x = new_empty(..); x[..., :k].copy_(a); x[..., k:].copy_(b)    ->   x = cat([a, b], -1)
    y.div_(s)                                                      ->   y1 = div(y, s), for all later uses of y

One walk over the graph: a write to a view becomes a scatter into what it is a view of, and whoever reads the same
memory later reads the new value (views are taken again when they are needed). Whatever is not understood for sure
(inputs and weights that are written to, views in other shapes, operators without a functional form) is left to
`ExportedProgram.run_decompositions`, which knows everything and takes ten times as long.
"""

from __future__ import annotations

import logging
import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from kvcompile.passes.graph import call, expr, shape, value
from kvcompile.passes.table import graph_pass

log = logging.getLogger(__name__)
aten = torch.ops.aten

_CREATED = (
    aten.new_empty.default,
    aten.empty.memory_format,
    aten.empty_like.default,
)
_IDENTITY = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)
_FAR = 2**62  # the end of a slice that goes to the end


class _NotUnderstood(Exception):
    """A write that this pass leaves to another."""


def mutates(graph_module: GraphModule) -> bool:
    """Whether any operator of the graph writes to its arguments."""
    return any(_writes(node) for node in graph_module.graph.nodes)


@graph_pass("functionalize")
def functionalize(graph_module: GraphModule) -> str:
    """Replace all in-place operators of `graph_module`, in place.

    Returns an empty string, or what was not understood: the graph is then no longer of use.
    """
    try:
        _Walk(graph_module).run()
    except _NotUnderstood as reason:
        log.info("functionalize: %s", reason)
        return str(reason)
    for node in reversed(list(graph_module.graph.nodes)):
        if node.target in _VIEWS and not node.users:  # it only served to write to
            graph_module.graph.erase_node(node)
    for node in list(graph_module.graph.nodes):
        _join(node)
    graph_module.graph.lint()
    return ""


class _Walk:
    """Which nodes share memory, and the value that each has now."""

    def __init__(self, graph_module: GraphModule):
        self.graph = graph_module.graph
        self.root: dict[Node, Node] = {}  # the node that made the memory
        self.parent: dict[Node, Node] = {}  # what a view is a view of
        self.blocked: dict[Node, str] = {}  # roots with a view that cannot be followed
        self.version: dict[Node, int] = {}  # writes to a root so far
        self.current: dict[Node, tuple[Node, int]] = {}  # a node's value, and the version that it is of

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op in ("placeholder", "get_attr"):
                self.root[node] = node
                self.blocked[node] = f"{node.name}, an input or a weight, is written to"
                continue
            before = tuple(node.all_input_nodes)
            first = node.args[0] if node.args and isinstance(node.args[0], Node) else None
            with self.graph.inserting_before(node):
                node.args, node.kwargs = map_arg((node.args, node.kwargs), self.now)
                if _writes(node):
                    assert first is not None
                    self._write(node, first)
                    continue
            self._register(node, first, before)

    def now(self, node: Node) -> Node:
        """The node that holds what is in `node`'s memory at this place of the walk."""
        root = self.root.get(node)
        version = self.version.get(root, 0) if root is not None else 0
        if not version:
            return node
        found, seen = self.current.get(node, (node, 0))
        if seen == version:
            return found
        assert node in self.parent, "a root is brought up to date when it is written to"
        args = (self.now(self.parent[node]), *node.args[1:])
        found = call(self.graph, _callable(node), args, node, dict(node.kwargs))
        self.current[node] = (found, version)
        return found

    def _register(self, node: Node, first: Node | None, inputs: tuple[Node, ...]) -> None:
        shared = _shared(node, first, inputs)
        if not shared:
            self.root[node] = node
            return
        for source in shared:
            root = self.root[source]
            self.root[node] = root
            if (node.target in _VIEWS or _same(node)) and source is first:
                self.parent[node] = source
            else:
                self.blocked.setdefault(root, f"memory is read through {node.target}")
            self.current[node] = (node, self.version.get(root, 0))

    def _write(self, node: Node, first: Node) -> None:
        root = self.root[first]
        if root in self.blocked:
            raise _NotUnderstood(f"{node.target}: {self.blocked[root]}")
        result = self._functional(node)
        self._store(first, result)
        # What the operator returns is its first argument.
        self.root[node] = root
        for user in list(node.users):
            user.replace_input_with(node, first)
        self.graph.erase_node(node)
        del self.root[node]

    def _functional(self, node: Node) -> Node:
        """The value that an in-place operator leaves in its first argument."""
        target = node.target
        assert isinstance(target, torch._ops.OpOverload)
        own = node.args[0]
        assert isinstance(own, Node)
        if target is aten.copy_.default:
            source = node.args[1]
            if (
                isinstance(source, Node)
                and [expr(s) for s in shape(source)] == [expr(s) for s in shape(own)]
                and (value(source).dtype, value(source).device) == (value(own).dtype, value(own).device)
            ):
                return source
            return call(self.graph, aten.copy.default, (own, source), node)
        writes = [argument.name for argument in target._schema.arguments if argument.alias_info is not None]
        name = target._schema.name.removeprefix("aten::")
        packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
        pure = getattr(packet, target._overloadname, None) if packet is not None else None
        if pure is None or len(writes) != 1 or len(target._schema.returns) != 1 or pure._schema.is_mutable:
            raise _NotUnderstood(f"{target} has no functional form")
        result = call(self.graph, pure, node.args, node, dict(node.kwargs))
        if value(result).dtype != value(own).dtype:
            result = call(self.graph, aten.to.dtype, (result, value(own).dtype), node)
        if [expr(s) for s in shape(result)] != [expr(s) for s in shape(own)]:
            raise _NotUnderstood(f"{target} changes a shape")
        return result

    def _store(self, node: Node, new: Node) -> None:
        """Let `node`'s memory hold `new` from here on."""
        root = self.root[node]
        if node in self.parent:
            parent = self.parent[node]
            self._store(parent, _scatter(node, self.now(parent), new))
        else:
            self.version[root] = self.version.get(root, 0) + 1
        self.current[node] = (new, self.version[root])


def _scatter(view: Node, parent: Node, new: Node) -> Node:
    """`parent` with the part that `view` shows replaced by `new`."""
    graph, args = view.graph, view.args[1:]
    if _same(view):
        return new
    if view.target is aten.slice.Tensor:
        return call(graph, aten.slice_scatter.default, (parent, new, *args), view)
    if view.target is aten.select.int:
        return call(graph, aten.select_scatter.default, (parent, new, *args), view)
    if view.target is aten.unsqueeze.default:
        dim = args[0] if args[0] >= 0 else args[0] + len(shape(view))  # type: ignore[operator]
        return call(graph, aten.squeeze.dim, (new, dim), view)
    if view.target is aten.transpose.int:
        return call(graph, aten.transpose.int, (new, *args), view)
    assert view.target is aten.permute.default and isinstance(args[0], (list, tuple))
    order = [dim % len(args[0]) for dim in args[0]]  # type: ignore[operator]
    return call(graph, aten.permute.default, (new, [order.index(i) for i in range(len(order))]), view)


_VIEWS = (
    aten.slice.Tensor,
    aten.select.int,
    aten.unsqueeze.default,
    aten.transpose.int,
    aten.permute.default,
)


def _same(node: Node) -> bool:
    """Whether a node is its first argument, the very same memory."""
    return node.target in _IDENTITY or (node.target is aten.dropout.default and node.args[2] is False)


def _shared(node: Node, first: Node | None, inputs: tuple[Node, ...]) -> list[Node]:
    """The inputs whose memory a node's value may lie in."""
    if node.target is operator.getitem:
        assert first is not None
        producer = first
        return [first] if _annotated(producer) else []
    if isinstance(node.target, torch._ops.OpOverload):
        if node.target in (aten.to.dtype, aten.to.dtype_layout, aten.to.device) and first is not None:
            same = (value(first).dtype, value(first).device) == (value(node).dtype, value(node).device)
            return [first] if same else []
        if _annotated(node):
            return [first] if first is not None else list(inputs)
        return [first] if node.target is aten.dropout.default and first is not None else []
    # Numbers share nothing; anything unknown may share everything.
    return list(inputs) if isinstance(value(node), torch.Tensor) else []


def may_write_into(node: Node) -> set[Node]:
    """The nodes in whose memory an operator may write: its written arguments, and what these may be views of."""
    if not _writes(node):
        return set()
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    given = dict(zip((a.name for a in target._schema.arguments), node.args, strict=False)) | node.kwargs
    waiting: list[Node] = []
    for argument in target._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            map_arg(given.get(argument.name), waiting.append)
    found: set[Node] = set()
    while waiting:
        source = waiting.pop()
        if source in found:
            continue
        found.add(source)
        if source.op == "call_function":
            first = source.args[0] if source.args and isinstance(source.args[0], Node) else None
            waiting += [*_shared(source, first, tuple(source.all_input_nodes)), *may_write_into(source)]
    return found


def _annotated(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and any(r.alias_info for r in target._schema.returns)


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _callable(node: Node) -> Any:
    assert callable(node.target)
    return node.target


def _join(node: Node) -> None:
    """Scatters that fill new memory from end to end, along one dimension, as a cat."""
    if node.target is not aten.slice_scatter.default or any(u.target is node.target for u in node.users):
        return
    dim, size = _int(node, 2, 0), shape(node)
    length = size[dim]
    pieces: list[tuple[int, int, Any]] = []
    base: Any = node
    while isinstance(base, Node) and base.target is aten.slice_scatter.default:
        start, end, step = _int(base, 3, 0), _int(base, 4, _FAR), _int(base, 5, 1)
        if not all(isinstance(x, int) for x in (dim, length, start, end)) or step != 1:
            return
        if _int(base, 2, 0) != dim or (base is not node and len(base.users) != 1):
            return
        pieces.append((start, min(end, length), base.args[1]))
        base = base.args[0]
    if not isinstance(base, Node) or base.target not in _CREATED:
        return
    pieces.sort(key=lambda piece: piece[0])
    ends = [0, *(end for _, end, _ in pieces)]
    if [start for start, _, _ in pieces] != ends[:-1] or ends[-1] != length:
        return
    if any(
        expr(shape(piece)[i]) != expr(size[i]) for _, _, piece in pieces for i in range(len(size)) if i != dim
    ):
        return
    with node.graph.inserting_before(node):
        joined = call(node.graph, aten.cat.default, ([piece for _, _, piece in pieces], dim), node)
    node.replace_all_uses_with(joined)
    node.graph.erase_node(node)


def _int(node: Node, index: int, default: int) -> Any:
    """An argument of slice_scatter; a dimension counts from the front."""
    found: Any = node.args[index] if len(node.args) > index else None
    found = default if found is None else found
    return found + len(shape(node)) if index == 2 and found < 0 else found


def read_back(graph_module: GraphModule) -> int:
    """Replace slices of what was scattered to the very same place by what was put there; returns how many.

    A buffer of which only the part that was just written is read, is not read: a cache that a model fills and reads in
    the same forward.
    """
    count = 0
    for node in graph_module.graph.nodes:
        base = node.args[0] if node.args else None
        if not isinstance(base, Node):
            continue
        if node.target is aten.copy.default and _alike(base, node.args[1]):
            node.replace_all_uses_with(node.args[1])
            count += 1
        elif base.target is _SCATTERS.get(node.target) and _range(node, node.args[1:]) == _range(
            node, base.args[2:]
        ):
            node.replace_all_uses_with(base.args[1])
            count += 1
    return count


_SCATTERS: dict[Any, Any] = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
}


def _alike(one: Node, other: Any) -> bool:
    if not isinstance(other, Node):
        return False
    sizes = [[expr(s) for s in shape(node)] for node in (one, other)]
    kinds = [(value(node).dtype, value(node).device) for node in (one, other)]
    return sizes[0] == sizes[1] and kinds[0] == kinds[1]


def _range(node: Node, given: tuple[Any, ...]) -> list[Any]:
    """Dimension, start, end and step (or dimension and index) by their values."""
    defaults = (0, 0, _FAR, 1) if node.target is aten.slice.Tensor else (0, 0)
    found = []
    for argument, default in zip((*given, *[None] * 4), defaults, strict=False):
        number = value(argument) if isinstance(argument, Node) else argument
        number = default if number is None else number
        found.append(expr(number) if isinstance(number, torch.SymInt) else min(number, _FAR))
    return found
