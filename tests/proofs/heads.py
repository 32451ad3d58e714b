"""Heads that are said to be repeated, compared with the tensors: which KV head a query head reads, and what of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import Node

from kvcompile.passes.dependence import Dependence
from kvcompile.passes.probe.evaluate import evaluate
from kvcompile.passes.score_mod.reader import Reader
from tests.proofs.draw import Drawn
from tests.support.dependence_graphs import Builder, inputs

aten = torch.ops.aten


class Heads:
    """A graph of one operand of attention. source: [B, Hkv, S, D]; made: the same as [B, S, Hkv, D]"""

    def __init__(self, seed: int, d: Drawn):
        self.b, self.d = Builder(seed), d
        self.kv, self.group, self.dim = (d.random.choice(own) for own in ((1, 2, 3), (1, 2, 3), (1, 2, 4)))
        self.heads = self.kv * self.group
        table = torch.randn(40, self.kv * self.dim, generator=torch.Generator().manual_seed(seed))
        x = self.b.add(aten.embedding.default, (self.b.constant("heads", table), self.b.ids))
        self.made = self.b.add(aten.reshape.default, (x, [self.b.rows, self.b.tokens, self.kv, self.dim]))
        self.source = self.b.add(aten.transpose.int, (self.made, 1, 2))

    def call(self, name: str, *args: object) -> Node:
        packet = getattr(aten, name)
        preferred = ("default", "int", "dim_IntList", "self_int", "Tensor")
        overload = next(o for o in preferred if o in packet.overloads())
        return self.b.add(getattr(packet, overload), args)

    def repeated(self, right: bool) -> Node:
        """Each head `group` times, or in another order."""
        x, place = self.source, 2 if right else 1
        sizes = [self.b.rows, self.heads, self.b.tokens, self.dim]
        wide = [-1] * 5
        wide[place] = self.group
        order = [head // self.group if right else head % self.kv for head in range(self.heads)]
        table = self.b.constant("order", torch.tensor(order))
        expanded = lambda: self.call("expand", self.call("unsqueeze", x, place), wide)  # noqa: E731
        ways: dict[str, Callable[[], Node]] = {
            "expand": lambda: self.call("reshape", expanded(), sizes),
            "repeat": lambda: self.call("repeat", x, [1, self.group, 1, 1]),
            "repeat_interleave": lambda: self.call("repeat_interleave", x, self.group, 1),
            "index_select": lambda: self.call("index_select", x, 1, table),
            "index": lambda: self.b.add(aten.index.Tensor, (x, [None, table])),
        }
        self.way = self.d.one("expand", "repeat_interleave" if right else "repeat", *ways)
        return ways[self.way]()

    def moved(self, x: Node) -> Node:
        """Another tensor of the same shape: as it is, or elements of other places, or other elements."""
        b, d = self.b, self.d
        steps = b.add(aten.arange.default, (b.tokens,))
        kept: tuple[Callable[[], Node], ...] = (
            lambda: x,
            lambda: self.call("contiguous", x),
            lambda: self.call("transpose", self.call("transpose", x, 1, 2), 1, 2),
            lambda: b.add(aten.slice.Tensor, (x, 3, 0, self.dim)),
            lambda: self.call("flip", self.call("flip", x, [d.random.randrange(4)]), [1]),
            lambda: self.call("flip", x, [d.random.choice((0, 1, 2, 3))]),
            lambda: self.call("roll", x, [1], [d.random.randrange(4)]),
            lambda: b.add(aten.mul.Tensor, (x, 1.5)),
            lambda: b.add(aten.mul.Tensor, (x, b.add(aten.unsqueeze.default, (steps, -1)))),
            lambda: b.add(aten.index_select.default, (x, 2, b.add(aten.remainder.Scalar, (steps, 3)))),
            lambda: self.call("expand", b.add(aten.slice.Tensor, (x, 1, 0, 1)), [-1, self.heads, -1, -1]),
            lambda: self.call("reshape", x, [b.rows, b.tokens, self.heads, self.dim]),
            lambda: self.call(
                "transpose", self.call("reshape", x, [b.rows, b.tokens, self.heads, self.dim]), 1, 2
            ),
            lambda: b.add(
                aten.cat.default,
                (
                    [
                        b.add(aten.slice.Tensor, (x, 3, self.dim // 2)),
                        b.add(aten.slice.Tensor, (x, 3, 0, self.dim // 2)),
                    ],
                    3,
                ),
            ),
        )
        return d.random.choice(kept)()


def heads(seed: int) -> str | None:
    """An operand that is said to be heads, each for a group, is that; and the usual ways to repeat are found."""
    d = Drawn(seed)
    graph = Heads(seed, d)
    right = d.chance(0.6)
    operand = graph.repeated(right)
    as_it_is = d.chance(0.5)
    if not as_it_is:
        operand = graph.moved(operand)
    product, transposed, flat = operand, d.chance(0.3), d.chance(0.2)
    if flat:
        operand = product = graph.call("reshape", operand, [-1, graph.b.tokens, graph.dim])
    if transposed:
        operand = graph.b.add(aten.transpose.int, (operand, -1, -2))
    source, order = (graph.source, (0, 1, 2, 3)) if d.chance(0.6) else (graph.made, (0, 2, 1, 3))
    module = graph.b.finish()
    reader = Reader(Dependence(module))
    if reader.heads(product) != graph.heads:
        return None
    found = reader.repeats(operand, product, source, order, transposed)
    one, other = evaluate(module, [operand, source], inputs(seed))
    equal = _repeats(one.mT if transposed else one, other.permute(order), graph)
    if found and not equal:
        return f"{operand} is said to be {source}, each head for {graph.group}:\n{module.graph}"
    if as_it_is and equal and not found and graph.way in ("expand", "repeat_interleave"):
        return f"{operand} is {source}, each head for {graph.group}, and that is not found:\n{module.graph}"
    return None


def _repeats(operand: Tensor, source: Tensor, graph: Heads) -> bool:
    batch, _, tokens, dim = source.shape
    wanted = source[:, torch.arange(graph.heads) // graph.group]
    return operand.numel() == wanted.numel() and torch.equal(operand.reshape(batch, -1, tokens, dim), wanted)
