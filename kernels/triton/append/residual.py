"""Part of append: the rows in full of storages that keep the newest or the first tokens so
(`kernels/reference/residual.py`).

row = pos for a sink, else sinks + pos mod residual
"""

from __future__ import annotations

from kvcompile.kernels.triton.append.encode.tile import Store, Tile
from kvcompile.kernels.triton.append.operands import Side, store
from kvcompile.kernels.triton.helpers import stored
from kvcompile.kernels.triton.params import TensorParam


def row_of(side: Side, pos: str) -> str:
    """The row of tokens at `pos` >= 0; some row for those that have none."""
    sinks, residual = side.storage.sinks, side.storage.residual
    if not residual:
        return f"tl.minimum({pos}, {sinks - 1})"
    ring = f"{pos} % {residual}"
    return f"tl.where({pos} < {sinks}, {pos}, {sinks} + {ring})" if sinks else ring


def stays(side: Side, one: bool) -> str | None:
    """Which real tokens at `pos` get a row, of new ones up to position `last`; None: none does.

    Of many tokens that share a row of the ring, the last: each row is written once, as no order can be relied on.
    """
    sinks, residual = side.storage.sinks, side.storage.residual
    among = [f"(pos < {sinks})"] if sinks else []
    if residual:
        if one:
            return "real"
        among.append(f"(pos > last - {residual})")
    return f"real & ({' | '.join(among)})" if among else None


def written(side: Side, part: TensorParam, tile: Tile, one: bool) -> list[str]:
    """Statements that write the vectors `x`, of the model's dtype, of those tokens at `pos` that stay in full."""
    kept = stays(side, one)
    if kept is None:
        return []
    value = Store("full", stored("x", tile.dtype, tile.interpreted), tile.dim)
    lines = [f"in_full = ({row_of(side, 'pos')}).to(tl.int64)", f"kept = {tile.among(kept)}"]
    return lines + store(part, value, "batch", "in_full", "kept", tile)
