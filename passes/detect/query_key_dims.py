"""Which dimensions of a mask's subgraph run over queries and which over keys.

Where queries and keys are the same sequence, both have the size S, and a traced graph does not say which is
which. Here every dimension of size S gets a class; each operator merges the classes of dimensions that it aligns
(union-find); the last two dimensions of the mask name two of the classes. An operator whose alignment is not
known raises `Unknown`, which names it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from kvcompile.passes.graph import expr, shape, target_name

Axis = tuple[Node, Node | None, int]

# Operators whose result has the dimensions of their (broadcast) operands.
_POINTWISE_NAMES = frozenset(
    [
        "_to_copy",
        "to",
        "clone",
        "contiguous",
        "detach",
        "alias",
        "type_as",
        "__and__",
        "__or__",
        "__xor__",
        "dropout",
        "softplus",
        "relu",
        "masked_fill",
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
        "where",
        "lift_fresh_copy",
    ]
)
_CREATE = frozenset(
    [
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "zeros",
        "ones",
        "full",
        "empty",
        "scalar_tensor",
        "arange",
    ]
)
REDUCE = frozenset(
    ["sum", "mean", "amax", "amin", "max", "min", "any", "all", "logsumexp", "prod", "argmax", "argmin"]
)
_ALONG = frozenset(
    [
        "topk",
        "sort",
        "softmax",
        "_softmax",
        "log_softmax",
        "cumsum",
        "gather",
        "scatter",
        "scatter_add",
        "index_add",
    ]
)


class Unknown(Exception):
    """An operator whose effect on dimensions is not known here; the text names it."""


class Axes:
    """Classes of the dimensions of size S over a region of a graph."""

    def __init__(self, seq: Any):
        """seq: the symbol S."""
        self.seq = seq
        # Positions serve both sides: each use of these nodes has axes of its own.
        self.apart: set[Node] = set()
        self._user: Node | None = None
        self._parent: dict[Axis, Axis] = {}

    def is_seq(self, node: Node, dim: int) -> bool:
        return bool(expr(shape(node)[dim]) == self.seq)

    def of(self, node: Node) -> list[int]:
        """The dimensions of `node` that have size S."""
        return [dim for dim in range(len(shape(node))) if self.is_seq(node, dim)]

    def find(self, node: Node, dim: int, user: Node | None = None) -> Axis:
        """The representative of a dimension's class (negative dimensions count from the end).

        user: which use of the node, where each has its own.
        """
        axis: Axis = (node, user if node in self.apart else None, dim % max(len(shape(node)), 1))
        while axis in self._parent:
            axis = self._parent[axis]
        return axis

    def merge(self, a: Node, dim_a: int, b: Node, dim_b: int) -> None:
        """Say that two dimensions are the same one; only those of size S matter."""
        if not (self.is_seq(a, dim_a) and self.is_seq(b, dim_b)):
            return
        first, second = (self.find(node, dim, self._user) for node, dim in ((a, dim_a), (b, dim_b)))
        if first != second:
            self._parent[first] = second

    def visit(self, node: Node) -> None:
        """Merge what `node` aligns; raises Unknown."""
        self._user = node
        name = target_name(node)
        inputs = [n for n in node.all_input_nodes if shape(n)]
        if name in _CREATE:
            return
        if node.target is operator.getitem or name in _ALONG:
            self._along(node, name, inputs)
        elif name in REDUCE:
            self._reduce(node, inputs[0])
        elif name in ("matmul", "bmm", "mm"):
            self._product(node, inputs)
        elif name in ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze"):
            self._reshape(node, inputs[0])
        elif name in ("permute", "transpose", "t", "mT"):
            self._permute(node, inputs[0], name)
        elif name in ("expand", "expand_as"):
            self._broadcast(node, inputs[:1])
        elif name in (
            "slice",
            "narrow",
            "split",
            "chunk",
            "split_with_sizes",
            "cat",
            "select",
            "repeat_interleave",
        ):
            self._same_but_one(node, inputs, name)
        elif is_pointwise(node):
            self._broadcast(node, inputs)
        else:
            raise Unknown(f"{node.target} in the mask")

    def _broadcast(self, node: Node, inputs: Iterable[Node]) -> None:
        for source in inputs:
            for back in range(1, len(shape(source)) + 1):
                self.merge(source, -back, node, -back)

    def _along(self, node: Node, name: str, inputs: list[Node]) -> None:
        """Operators that work along one dimension and keep the others; their indices do, too."""
        if node.target is operator.getitem:
            source = node.args[0]
            assert isinstance(source, Node)
            name = target_name(source)
            if shape(source) or name not in _ALONG:  # a tensor indexed by a number, a list of pieces
                raise Unknown(f"getitem of {name} in the mask")
            inputs = [n for n in source.all_input_nodes if shape(n)]
        if not shape(node):  # several results: each getitem is visited
            return
        first, *others = inputs
        rank = len(shape(node))
        if len(shape(first)) != rank:
            raise Unknown(f"{node.target} in the mask")
        along = self._dim(node, rank)
        if name == "gather":  # the result has the index's sizes
            first, others = others[-1], [first]
        if name in ("scatter", "scatter_add", "gather"):
            self._indices(node, first if name != "gather" else others[0], along)
        for dim in range(rank):
            self.merge(first, dim, node, dim)
            for other in others:
                if len(shape(other)) == rank and dim != along:
                    self.merge(other, dim, node, dim)

    def _indices(self, node: Node, indexed: Node, along: int) -> None:
        """Indices that a topk or sort chose point into the dimension it chose from."""
        if not self.is_seq(indexed, along):
            return
        source = node.args[2]
        while isinstance(source, Node) and is_pointwise(source):
            source = source.args[0]
        if isinstance(source, Node) and source.target is operator.getitem:
            source = source.args[0]
        if not isinstance(source, Node) or target_name(source) not in ("topk", "sort", "argsort"):
            raise Unknown(f"{node.target} by computed indices in the mask")
        chosen = source.args[0]
        assert isinstance(chosen, Node)
        position = 2 if target_name(source) == "topk" else 1
        dim = source.args[position] if len(source.args) > position else -1
        assert isinstance(dim, int)
        self.merge(chosen, dim, indexed, along)

    @staticmethod
    def _dim(node: Node, rank: int) -> int:
        source = node.args[0] if node.target is operator.getitem else node
        assert isinstance(source, Node)
        position = 2 if target_name(source) == "topk" else 1
        dim = source.args[position] if len(source.args) > position else source.kwargs.get("dim", -1)
        assert isinstance(dim, int)
        return dim % rank

    def _reduce(self, node: Node, source: Node) -> None:
        dims = node.args[1] if len(node.args) > 1 else None
        if dims is None or not shape(node):
            raise Unknown(f"{node.target} over everything in the mask")
        rank = len(shape(source))
        gone = {d % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims]) if isinstance(d, int)}
        kept = [d for d in range(rank) if d not in gone]
        keeps = len(shape(node)) == rank
        for place, dim in enumerate(kept):
            self.merge(source, dim, node, dim if keeps else place)

    def _product(self, node: Node, inputs: list[Node]) -> None:
        left, right = node.args[:2]
        assert isinstance(left, Node) and isinstance(right, Node)
        if min(len(shape(left)), len(shape(right))) < 2:
            raise Unknown(f"{node.target} of a vector in the mask")
        self.merge(left, -2, node, -2)
        self.merge(right, -1, node, -1)
        self.merge(left, -1, right, -2)
        for source in (left, right):
            for back in range(3, len(shape(source)) + 1):
                self.merge(source, -back, node, -back)

    def _reshape(self, node: Node, source: Node) -> None:
        """Dimensions of size S pass a reshape in their order, if none is split or joined with others."""
        before, after = self.of(source), self.of(node)
        if len(before) != len(after):
            raise Unknown(f"{node.target} that joins the sequence with another dimension in the mask")
        for a, b in zip(before, after, strict=True):
            self.merge(source, a, node, b)

    def _permute(self, node: Node, source: Node, name: str) -> None:
        rank = len(shape(source))
        order = list(range(rank))
        if name == "permute":
            assert isinstance(node.args[1], (list, tuple))
            order = [int(d) % rank for d in node.args[1] if isinstance(d, int)]
        else:
            a, b = (node.args[1], node.args[2]) if name == "transpose" else (-2, -1)
            assert isinstance(a, int) and isinstance(b, int)
            order[a % rank], order[b % rank] = order[b % rank], order[a % rank]
        for place, dim in enumerate(order):
            self.merge(source, dim, node, place)

    def _same_but_one(self, node: Node, inputs: list[Node], name: str) -> None:
        if not shape(node):
            return
        for source in inputs:
            if name == "select":
                gone = node.args[1]
                assert isinstance(gone, int)
                kept = [d for d in range(len(shape(source))) if d != gone % len(shape(source))]
                for place, dim in enumerate(kept):
                    self.merge(source, dim, node, place)
            else:
                for dim in range(len(shape(node))):
                    self.merge(source, dim, node, dim)


def is_pointwise(node: Node) -> bool:
    """Whether a node's result has the dimensions of its (broadcast) operands."""
    return target_name(node) in _POINTWISE_NAMES or torch.Tag.pointwise in getattr(node.target, "tags", ())
