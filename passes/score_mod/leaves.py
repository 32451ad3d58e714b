"""What a leaf of a translated expression stands for, and why a translation may end."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from kvcompile.expression import LeafKind
from kvcompile.passes.graph import source_line


class Untranslatable(Exception):
    """Where a translation ends; the text names the operator and its line, `node` is it."""

    def __init__(self, reason: str, node: Node):
        line = source_line(node)
        super().__init__(f"{reason} ({line})" if line else reason)
        self.reason, self.node = reason, node


@dataclass(frozen=True)
class LeafRef:
    """The tensor behind a leaf: a node of the graph.

    dims: for what belongs to tokens or pairs, its dimensions of the batch (-1: none), the query, the key (-1: none)
    """

    kind: LeafKind
    node: Node
    dims: tuple[int, int, int] = (-1, -1, -1)

    @property
    def name(self) -> str:
        return str(self.node.name)
