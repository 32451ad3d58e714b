"""What sites may do to their scores as an expression (`ScoreMod`), and the same in plain Python for the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcompile.expression import SCORE, Expr, H, K, LeafKind, Q, ScoreMod, const, integer, program

Plain = Callable[
    [float, int, int, int], "float | None"
]  # a score, query, key, head -> the score, None: not seen
FLOAT, INT, BOOL = torch.float32, torch.int64, torch.bool
LONGEST = 48  # positions of tables


@dataclass(frozen=True, eq=False)
class Carried:
    """What a site carries, the tensors that it reads, and what that is in plain Python."""

    mod: ScoreMod
    plain: Plain
    leaves: tuple[Tensor, ...] = ()

    def __repr__(self) -> str:
        return str(self.mod)


@dataclass(frozen=True)
class Leaf:
    """A tensor by its name, as an expression has it."""

    name: str
    kind: LeafKind = "table"


def op(name: str, *args: Expr, dtype: torch.dtype | None = None) -> Expr:
    """An operator in the dtype of its last operand, or of a claim."""
    claims = name in ("eq", "ge", "gt", "not") or (name in ("and", "or", "xor") and args[0].is_bool)
    return Expr(name, dtype or (BOOL if claims else args[-1].dtype), args)


def cast(x: Expr, dtype: torch.dtype) -> Expr:
    return Expr("cast", dtype, (x,))


def number(value: float, dtype: torch.dtype = FLOAT) -> Expr:
    return const(value, dtype)


def pair(name: str, dtype: torch.dtype) -> Expr:
    """What a model computed for a query's and a key's token."""
    return Expr("leaf", dtype, (), Leaf(name, "pair"))


def table(name: str, dtype: torch.dtype, *places: Expr) -> Expr:
    return Expr("leaf", dtype, places, Leaf(name))


def carried(
    plain: Plain,
    score: Expr | None = None,
    mask: Expr | None = None,
    by_distance: bool = False,
    empty_rows: bool = False,
    **leaves: Tensor,
) -> Carried:
    """leaves: the tensors by the names that `table` has."""
    names = list(leaves)
    instructions, numbers = program({"score": score, "mask": mask}, lambda leaf: names.index(leaf.name))
    kinds: tuple[LeafKind, ...] = ("table",) * len(names)
    mod = ScoreMod(
        instructions,
        kinds,
        numbers["score"],
        numbers["mask"],
        by_distance=by_distance,
        empty_rows=empty_rows,
    )
    return Carried(mod, plain, tuple(leaves.values()))


def drawn(*shape: int) -> Tensor:
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


D = op("sub", Q, K)


def dilated() -> Carried:
    """Every third key back, and the one before."""
    seen = op("or", op("eq", op("mod", D, integer(3)), integer(0)), op("eq", D, integer(1)))
    return carried(
        lambda s, q, k, h: s if (q - k) % 3 == 0 or q - k == 1 else None, mask=seen, by_distance=True
    )


def blocks() -> Carried:
    """A query's own block of eight, and the first key of every other."""
    own = op("eq", op("floordiv", Q, integer(8)), op("floordiv", K, integer(8)))
    first = op("eq", op("mod", K, integer(8)), integer(0))
    return carried(
        lambda s, q, k, h: s if q // 8 == k // 8 or k % 8 == 0 else None, mask=op("or", own, first)
    )


def behind() -> Carried:
    """Blocks of distances that count down from 0: all of what is divided is negative."""
    block = op("floordiv", op("sub", K, Q), integer(5))
    rest = op("mod", op("sub", K, Q), integer(7))
    cut = op("truncdiv", op("sub", op("sub", K, Q), integer(1)), integer(4))
    seen = op("or", op("ge", block, integer(-2)), op("eq", rest, integer(2)))
    added = op("mul", cast(op("add", block, cut), FLOAT), number(0.3))

    def plain(s: float, q: int, k: int, h: int) -> float | None:
        own = (k - q) // 5
        seen = own >= -2 or (k - q) % 7 == 2
        return s + 0.3 * (own + math.trunc((k - q - 1) / 4)) if seen else None

    return carried(plain, op("add", SCORE, added), seen, by_distance=True)


def windows(heads: int) -> Carried:
    """A window for each head, from a table."""
    sizes = 2 + 3 * torch.arange(heads)
    seen = op("gt", table("sizes", INT, H), D)
    return carried(
        lambda s, q, k, h: s if q - k < int(sizes[h]) else None, mask=seen, by_distance=True, sizes=sizes
    )


def buckets(heads: int, dtype: torch.dtype = FLOAT) -> Carried:
    """T5: the distance itself up to 4, then its logarithm up to 20, in a table of 8 buckets."""
    values = drawn(8, heads).to(dtype)
    far = op("div", op("log", op("div", cast(D, FLOAT), number(4.0))), number(math.log(20 / 4)))
    far = op("add", integer(4), cast(op("mul", far, number(4.0)), INT))
    near = op("gt", integer(4), D)
    bucket = op("where", near, D, op("min", far, integer(7)))
    added = cast(table("values", dtype, bucket, H), FLOAT)

    def plain(s: float, q: int, k: int, h: int) -> float:
        d = q - k
        own = d if d < 4 else min(4 + int(math.log(d / 4) / math.log(5) * 4), 7)
        return s + float(values[own, h])

    return carried(plain, op("add", SCORE, added), by_distance=True, values=values)


def hinge() -> Carried:
    """Nothing up to a distance, then a slope."""
    over = op("sub", cast(D, FLOAT), number(12.0))
    added = op("where", op("gt", D, integer(12)), op("mul", number(-0.4), over), number(0.0))
    return carried(
        lambda s, q, k, h: s + (-0.4 * (q - k - 12) if q - k > 12 else 0.0),
        op("add", SCORE, added),
        by_distance=True,
    )


def stacked() -> Carried:
    """One [2, L, L] of biases, the second of which is this site's, and a bool [L, L] of what is seen."""
    values = drawn(2, LONGEST, LONGEST)
    shown = drawn(LONGEST, LONGEST) < 0.5
    shown.fill_diagonal_(True)
    return carried(
        lambda s, q, k, h: s + float(values[1, q, k]) if shown[q, k] else None,
        op("add", SCORE, table("values", FLOAT, integer(1), Q, K)),
        table("shown", BOOL, Q, K),
        values=values,
        shown=shown,
    )


def from_the_end() -> Carried:
    """Tables that are read from their end: places that are negative."""
    values = drawn(LONGEST)
    return carried(
        lambda s, q, k, h: s + float(values[k - q - 1]),
        op("add", SCORE, table("values", FLOAT, op("sub", op("sub", K, Q), integer(1)))),
        by_distance=True,
        values=values,
    )


def holes() -> Carried:
    """Every third query sees no key at all, and some see only the far past."""
    far = op("ge", D, integer(4))
    none = op("eq", op("mod", Q, integer(3)), integer(1))
    odd = op("eq", op("and", Q, integer(3)), integer(2))
    seen = op("and", op("not", none), op("or", far, op("not", odd)))

    def plain(s: float, q: int, k: int, h: int) -> float | None:
        return s if q % 3 != 1 and (q - k >= 4 or q % 4 != 2) else None

    return carried(plain, mask=seen, empty_rows=True)


def capped() -> Carried:
    """A cap for odd keys, a factor by head, and a gate that is a sigmoid of the distance."""
    odd = op("eq", op("bitnot", op("sub", op("mul", K, integer(-1)), integer(1))), K)
    odd = op("and", odd, op("eq", op("and", K, integer(1)), integer(1)))
    soft = op("mul", number(2.0), op("tanh", op("mul", SCORE, number(0.5))))
    factor = op("rsqrt", op("add", cast(H, FLOAT), number(1.5)))
    gate = op("sigmoid", op("sub", number(1.0), op("sqrt", cast(D, FLOAT))))
    made = op("add", op("mul", op("where", odd, soft, SCORE), factor), gate)

    def plain(s: float, q: int, k: int, h: int) -> float:
        s = 2.0 * math.tanh(s * 0.5) if k % 2 else s
        return s / math.sqrt(h + 1.5) + 1 / (1 + math.exp(math.sqrt(q - k) - 1.0))

    return carried(plain, made)


def wide() -> Carried:
    """Integers that 32 bits do not hold: a hash of both positions picks keys."""
    mixed = op("add", op("mul", Q, integer(2654435761)), op("mul", K, integer(40503)))
    seen = op("or", op("ge", integer(600), op("mod", mixed, integer(1009))), op("eq", Q, K))
    return carried(
        lambda s, q, k, h: s if (q * 2654435761 + k * 40503) % 1009 <= 600 or q == k else None, mask=seen
    )


def by_distance(heads: int) -> list[Callable[[], Carried]]:
    """Those that go by the distance of query and key alone."""
    tables = [lambda: windows(heads), lambda: buckets(heads), lambda: buckets(heads, torch.bfloat16)]
    return [dilated, behind, hinge, from_the_end, *tables]


def anywhere(heads: int) -> list[Callable[[], Carried]]:
    """All."""
    return [*by_distance(heads), blocks, stacked, holes, capped, wide]
