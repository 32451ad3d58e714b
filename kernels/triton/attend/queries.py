"""What stands before the loops over tiles: the queries, in the type of their products, and what belongs to them.

q[i]        piece i of a query's channels, [BLOCK_M, W]; q[i]_full for keys in full, q[i]_sinks for sinks (`places.py`)
row_scale   of queries that are divided by their largest channel: it, the factor of scores, and what codes of all pieces
            are owed (`TileLoader.power`); what those of a piece are owed besides, its queries have, 2^8 at most
q_lowest    what scores of signed codes that count from the lowest begin with (`TileLoader.from_lowest`)
q_sum[g]    the sum of a group's channels, times which the minimum of a key enters its score, or `q_minima`
            (`minima.py`)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import torch

from kvcompile.kernels.triton.attend import minima
from kvcompile.kernels.triton.attend.context import Attend
from kvcompile.kernels.triton.tile import cache_positions, dot_dtype, scores, stacking
from kvcompile.kernels.triton.tile.channel_blocks import ChannelBlock
from kvcompile.kernels.triton.tile.residual import InFull
from kvcompile.kernels.triton.tile.tile_loader import LEAST, TileLoader

# What a reduction does to two of its elements.
_JOINED = {"tl.max": "tl.maximum({}, {})", "tl.sum": "{} + {}"}


def constants(attend: Attend) -> list[str]:
    """Lines that define what no query and no tile changes."""
    lines = [line for part in attend.readers for line in part.constants()]
    return [*lines, *cache_positions.prologue(attend.spec, attend.many)]


def fixed_scale(attend: Attend, part: TileLoader) -> list[str]:
    """The line that loads the calibrated scale of a head's vectors, where there is one."""
    if not part.fixed_scale:
        return []
    return [f"{part.side}_scale = tl.load({part.side}_scale_ptr + batch * {attend.spec.num_kv_heads} + head)"]


def queries(attend: Attend) -> list[str]:
    """Lines that load the queries' pieces and what belongs to them."""
    spec, keys = attend.spec, attend.keys
    every = range(len(keys.pieces))
    unit = min(keys.power(index) for index in every)
    lines = [line for index in every for line in _loaded(attend, index)]
    kind = f"tl.{dot_dtype.of_model(spec)}"
    if attend.two_queries:
        lines += [f"q{index}_sinks = q{index}_sinks.to({kind})" for index in every]
    if attend.full("keys") and not attend.apart:
        # In a product with keys in full, a head is a row once.
        lines += [
            f"q{index}_full = {_rows(attend, f'q{index}', f'kc{index}', piece.block, 1)}.to({kind})"
            for index, piece in enumerate(keys.pieces)
        ]
    if attend.normalized:
        lines += [f"q{index} = q{index}.to(tl.float32)" for index in every]
        largest = over_channels(attend, "tl.max", {index: f"tl.abs(q{index})" for index in every})
        lines.append(f"norm = tl.maximum({largest}, 1e-30)")
        if attend.q_dtype == torch.float16:
            # By a power of two they lose no bits that they have.
            lines.append("norm = (norm.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)")
        lines += [f"q{index} = q{index} / norm[:, None]" for index in every]
        lines.append(f"row_scale = norm * {scores.factor(spec) * 2**unit!r}")
    if attend.stack > 1:
        count = attend.groups("keys")[0]
        for index, piece in enumerate(keys.pieces):
            lines.append(f"q{index} = {_rows(attend, f'q{index}', f'kc{index}', piece.block, count)}")
    for index, group in enumerate(keys.scales()):
        if group.minimum is not None and not attend.narrow(keys):
            wide = "" if attend.normalized else ".to(tl.float32)"
            total = over_channels(attend, "tl.sum", {i: f"q{i}{wide}" for i in group.pieces})
            # `row_scale` multiplies it as well, and a minimum is owed nothing.
            lines.append(f"q_sum{index} = {f'({total}) * {2.0**-unit!r}' if unit else total}")
    if keys.folded:
        # Scales per channel multiply queries in float32, tile by tile.
        lines += [] if attend.normalized else [f"q{index} = q{index}.to(tl.float32)" for index in every]
    elif attend.normalized or str(attend.q_dtype) != f"torch.{keys.dot}":
        # Codes of a piece may be owed more than those of another.
        owed = [keys.power(index) - unit for index in every]
        own = [f"(q{index} * {2.0**more})" if more else f"q{index}" for index, more in enumerate(owed)]
        lines += [f"q{index} = {own[index]}.to(tl.{keys.dot})" for index in every]
    if attend.narrow(keys) and keys.scales()[0].minimum is not None:
        lines += minima.of_queries(attend, {index: keys.power(index) - unit for index in every}, unit)
    if keys.from_lowest:
        total = over_channels(attend, "tl.sum", {i: f"q{i}.to(tl.float32)" for i in every})
        # 128 in the unit of the codes, of the queries as they are in products.
        lines.append(f"q_lowest = ({total}) * {-128 * 2.0**-LEAST!r}")
        lines.append(f"q_lowest = q_lowest[:, None] + tl.zeros([{attend.rows}, {spec.block_n}], tl.float32)")
    return [*lines, *scores.prologue(spec, attend.names)]


def over_channels(attend: Attend, reduced: str, blocks: Mapping[int, str]) -> str:
    """An expression: over all channels of some pieces, what `reduced` (of _JOINED) gives of each row.

    Pieces of one width are joined element by element first: warps that share a row wait for each other once for them,
    and not once for each piece. blocks: an expression of each piece
    """
    joined = _JOINED[reduced].format
    found: dict[int, str] = {}
    for index, block in blocks.items():
        width = attend.keys.pieces[index].block
        found[width] = joined(found[width], block) if width in found else block
    return reduce(joined, (f"{reduced}({block}, 1)" for block in found.values()))


def in_full(attend: Attend, rows: InFull) -> list[str]:
    """Lines that load queries once more, as pieces `q0_full`, ... for products with keys in full, a head a row once.

    Kept since the other queries were loaded, they would take registers of tiles that have no such keys.
    """
    kind, lines = f"tl.{dot_dtype.of_model(attend.spec)}", []
    for index, piece in enumerate(rows.pieces):
        name, channels = f"q{index}_full", rows.channels(index)
        at, guard = _address(attend, "q", channels, piece)
        lines.append(f"{name} = tl.load({at}, mask={guard}, other=0.0)")
        lines.append(f"{name} = {_rows(attend, name, channels, piece.block, 1)}.to({kind})")
    return lines


def _rows(attend: Attend, name: str, channels: str, width: int, count: int) -> str:
    """An expression: piece `name` as rows of the products, of which each set has one of `count` groups of channels."""
    if attend.stack == 1:
        return name
    own = stacking.own(channels, count, attend.groups("keys")[1], attend.stack)
    return f"tl.reshape(tl.where({own}, {name}[None, :, :], 0.0), [{attend.rows}, {width}])"


def _loaded(attend: Attend, index: int) -> list[str]:
    """Lines that load piece `index`, and once more where queries turn at other places toward sinks."""
    lines = []
    for suffix in ("", "_sinks") if attend.two_queries else ("",):
        at, guard = _address(attend, f"q{suffix}", f"kc{index}", attend.keys.pieces[index])
        lines.append(f"q{index}{suffix} = tl.load({at}, mask={guard}, other=0.0)")
    return lines


def _address(attend: Attend, prefix: str, channels: str, piece: ChannelBlock) -> tuple[str, str]:
    """Expressions: where a piece of the queries stands, and which of it are there."""
    # In 64 bits: the queries of a long prompt are more than 2^31 elements.
    of = "row_batch[:, None]" if attend.cascade else "batch"
    at = f"{prefix}_ptr + {of} * {prefix}_s0 + heads[:, None].to(tl.int64) * {prefix}_s1"
    at += f" + token[:, None].to(tl.int64) * {prefix}_s2" if attend.many else ""
    guard = "real[:, None]" + ("" if piece.whole else f" & ({channels} < {piece.stop})")
    return f"{at} + {channels}", guard
