"""Tables that are read at queries and keys, compared with what is said to be in them, all of it, to the last bit."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from kvcompile.expression import Expr, H, K, Q, integer
from kvcompile.passes.score_mod.make import add, make
from kvcompile.passes.score_mod.prove import Prover
from kvcompile.passes.score_mod.tables import Tables
from tests.proofs.draw import INT64, Drawn, simplified
from tests.proofs.values import HEADS, NEAR, Text, same

_LONG = 24  # rows of a table, at most


def _held(value: Tensor) -> tuple[Tables, Node]:
    """The tables of a graph that holds one."""
    root = nn.Module()
    root.register_buffer("table", value)
    graph = Graph()
    node = graph.get_attr("table")
    node.meta["val"] = value
    graph.output(node)
    dependence = SimpleNamespace(graph_module=GraphModule(root, graph))
    translator: Any = SimpleNamespace(dependence=dependence, prover=Prover(HEADS))
    return Tables(translator), node


def _shown(d: Drawn, height: int, width: int) -> Tensor:
    """A pattern, and often one that is wrong somewhere."""
    i, j = torch.arange(height)[:, None], torch.arange(width)
    size = d.random.choice((1, 2, 3, 5, 8, height, width))
    patterns = (
        *(j <= i, j < i, j <= i + 1, (j <= i) & (i - j < size), (j <= i) & (i // size == j // size)),
        *(
            (i - j).abs() < size,
            (j <= i) & (j % 3 == 0),
            (j <= i) & ((i - j) % 2 == 0),
            j >= i,
            i // size == j // size,
        ),
        (j <= i) & ((i - j < size) | (j < 2)),
    )
    found = d.random.choice(patterns).clone()
    if d.chance(0.4):
        at = (d.random.randrange(height), d.random.randrange(width))
        at = d.random.choice((at, (height - 1, 0), (0, width - 1), (height - 1, width - 1), (0, 0)))
        found[at] = ~found[at]
    return found


def _table(d: Drawn, height: int, width: int) -> Tensor:
    shown = _shown(d, height, width)
    i, j = torch.arange(height)[:, None], torch.arange(width)
    hidden = d.random.choice(
        (-math.inf, torch.finfo(torch.float32).min, -1e9, -1e4, -1200.0, -5.0, 1.0, math.nan)
    )
    match d.random.randrange(8):
        case 0 | 1:
            return shown if d.chance(0.7) else ~shown
        case 2 | 3:
            return torch.where(shown, d.random.choice((0.0, 1.0, -3.0)), hidden)
        case 4:
            return torch.where(shown, 0.5 * (j - i), hidden)
        case 5:  # masks that were added to each other
            return torch.where(shown, 0.0, hidden) + torch.where(_shown(d, height, width), 0.0, hidden)
        case 6:  # distances, which are no mask however large they are
            return (j - i) * d.random.choice((1.0, 100.0, 400.0, 2000.0))
        case _:
            return shown.long() if d.chance(0.5) else i - j


def tables(seed: int) -> str | None:
    """An element of a table is what the table holds there, wherever it may be read."""
    d = Drawn(seed)
    height, width = (d.random.randrange(2, _LONG) for _ in range(2))
    width = height if d.chance(0.6) else width
    first, second = (d.random.choice((0, 0, 0, 1, 3)) for _ in range(2))
    places = [add(Q, integer(first)), add(K, integer(second))]
    table = _table(d, height, width)
    if d.chance(0.25):
        places.reverse()
    match d.random.randrange(4):
        case 0:
            table, places = (
                torch.stack([_table(d, height, width).to(table.dtype), table]),
                [integer(-1), *places],
            )
        case 1:
            table, places = torch.stack([table] * HEADS), [H, *places]
            if d.chance(0.5):
                table[1] = _table(d, height, width).to(table.dtype)
        case 2 if d.chance(0.3):
            table, places = table[:, 0], [d.random.choice(places)]
    held, node = _held(table)
    found = held.element(node, tuple(places))
    text = Text.of(NEAR, 0, {node.name: table})
    indices = [text.value(place) for place in places]
    inside = torch.ones(HEADS, len(NEAR), len(NEAR), dtype=torch.bool)
    for index, size in zip(indices, table.shape, strict=True):
        inside &= index < size
    right = table[tuple(index.clamp(max=size - 1) for index, size in zip(indices, table.shape, strict=True))]
    wrong = inside & ~same(text.value(found), right)
    if found.dtype is not table.dtype:
        return f"{found} is {found.dtype}, not {table.dtype}"
    if wrong.any():
        h, i, j = wrong.nonzero()[0].tolist()
        return f"{found} is no element of\n{table}\nat head {h}, query {i}, key {j}: {text.value(found)[h, i, j]}"
    return None


def limits(seed: int) -> str | None:
    """Texts as long as is said read tables at places that these have."""
    d = Drawn(seed, wild=False)
    size = d.random.randrange(1, 40)
    place = _place(d, size)
    if not place.names & {"q", "k"}:
        return None
    held, node = _held(torch.arange(size).double())
    held.reads[place, size] = node
    found = held.limit()
    values = Text.of(NEAR).value(place)
    outside = (values >= size) | (values < -size)
    pairs = torch.maximum(torch.arange(len(NEAR))[:, None], torch.arange(len(NEAR)))
    ends = int(pairs.expand_as(outside)[outside].min()) if outside.any() else None
    if ends is None or ends == 0:  # no text at all: the model has no values
        return None
    if found is None or found[0] > ends:
        return f"{place} leaves a table of {size} in a text of {ends + 1} tokens, and {found} was said"
    if found[0] < ends:
        return f"{place} stays in a table of {size} in texts of {ends} tokens, and {found[0]} was said"
    return None


def _place(d: Drawn, size: int) -> Expr:
    """A place along a table: of positions, alone or apart, clamped or not."""
    far = d.random.choice(
        (Q, K, Expr("sub", INT64, (Q, K)), Expr("add", INT64, (Q, K)), Expr("sub", INT64, (K, Q)))
    )
    more = integer(d.random.choice((0, 0, 1, 2, -1, size - 1)))
    found = Expr("add", INT64, (far, more))
    match d.random.randrange(6):
        case 0:
            found = Expr("floordiv", INT64, (found, integer(d.random.choice((2, 3)))))
        case 1:
            found = Expr("mod", INT64, (found, integer(d.random.choice((size, size + 1, 7)))))
        case 2:
            found = Expr("min", INT64, (found, integer(size - d.random.choice((0, 1, 2)))))
        case 3:
            found = Expr("max", INT64, (found, integer(-size - d.random.choice((0, 1, -1)))))
        case 4:
            found = Expr("mul", INT64, (found, integer(d.random.choice((2, 3)))))
    return simplified(found)


__all__ = ["limits", "make", "tables"]
