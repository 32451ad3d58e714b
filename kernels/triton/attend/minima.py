"""Minima of groups of channels as products: of a step whose query heads are a row once for each group.

A minimum of a key enters its score times the sum of a query's channels in the group, one of a value its sum times a
probability. Both are sums over groups, or over slots, and tensor cores take what threads would take number by number:

    s += q_minima @ k_minima^T       [rows, COLUMNS] @ [COLUMNS, BLOCK_N]    float32, as tf32
    minima += p @ v_minima           [rows, BLOCK_N] @ [BLOCK_N, COLUMNS]    float16

tf32 has 11 bits of a number: minima that are stored in float16 are none other there, and a sum of channels is two of
its columns, what tf32 has of it and what is left. The sums are those of the queries as codes meet them, rounded to
float16: what a rounding adds to a query meets code * scale + minimum, which is smaller than code * scale.

Of what values come to, a row has its group's column, behind the loops.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcompile.kernels.triton.attend.context import Attend
from kvcompile.kernels.triton.tile import stacking

_LEAST = 16  # what a product sums up at least, in Triton 3.6
_FEWEST = 8  # columns that it has at least
_TF32 = -(2**13)  # a mask: the bits of float32 that tf32 has


def of_queries(attend: Attend, owed: Mapping[int, int], unit: int) -> list[str]:
    """Lines that define `q_minima`, of queries as they are in products.

    owed: of each piece, the power of two by which its queries are larger than they are; unit: what scores are owed
    """
    keys, group = attend.keys, attend.keys.scales()[0]
    count, columns = group.groups, max(_LEAST, 2 * group.groups)
    lines, width = [f"column = tl.arange(0, {columns})[None, :]"], attend.groups("keys")[1]
    for place, (i, power) in enumerate(owed.items()):
        channel = f"tl.trans({keys.letter}c{i}) // {width}"
        ones = f"tl.where(({channel} == column % {count}) & (column < {2 * count}), {2.0**-power}, 0.0)"
        onto = ", q_minima" if place else ""
        lines.append(f"q_minima = tl.dot(q{i}, {ones}.to(tl.{keys.dot}){onto})")
    return [
        *lines,
        *([f"q_minima = q_minima * {2.0**-unit!r}"] if unit else []),
        f"q_high = (q_minima.to(tl.int32, bitcast=True) & {_TF32}).to(tl.float32, bitcast=True)",
        f"q_minima = tl.where(column < {count}, q_high, q_minima - q_high)",
    ]


def of_scores(attend: Attend, name: str, count: int) -> list[str]:
    """Lines that add to scores `s` what minima `name` of keys, of `count` groups, are of them."""
    wide = _repeated(attend, f"{name}.to(tl.float32)", count, max(_LEAST, 2 * count))
    return [f's = tl.dot(q_minima, tl.trans({wide}), s, input_precision="tf32")']


def zeros(attend: Attend, count: int) -> str:
    """An expression: what sums of minima of values begin with."""
    return f"tl.zeros([{attend.rows}, {max(_FEWEST, count)}], tl.float32)"


def of_values(attend: Attend, place: int, name: str, count: int, weights: str) -> str:
    """The line that adds minima `name` of values, of `count` groups, times `weights` to sums `minima[place]`."""
    wide = _repeated(attend, name, count, max(_FEWEST, count))
    return f"minima{place} = tl.dot({weights}, {wide}, minima{place})"


def summed(attend: Attend, place: int, count: int) -> list[str]:
    """Lines behind the loops that make `minima[place]` a number of each row: that of its group."""
    columns = max(_FEWEST, count)
    sets = f"[{attend.stack}, {attend.spec.block_m}, {columns}]"
    return [
        f"column = tl.arange(0, {columns})[None, :]",
        f"own_column = {stacking.own('column', count, 1, attend.stack)} & (column < {count})[None, :, :]",
        f"own_column = tl.reshape(tl.broadcast_to(own_column, {sets}), [{attend.rows}, {columns}])",
        f"minima{place} = tl.sum(tl.where(own_column, minima{place}, 0.0), 1)",
    ]


def _repeated(attend: Attend, name: str, count: int, columns: int) -> str:
    """An expression: numbers [BLOCK_N, count] side by side until they are `columns`."""
    if columns == count:
        return name
    size = attend.spec.block_n
    whole = f"tl.broadcast_to({name}[:, None, :], [{size}, {columns // count}, {count}])"
    return f"tl.reshape({whole}, [{size}, {columns}])"
