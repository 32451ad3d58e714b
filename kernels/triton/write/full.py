"""Part of append: the rows in full of storages that keep the newest or the first tokens so (`kernels/recent.py`).

row = pos for a sink, else sinks + pos mod residual
"""

from __future__ import annotations

from kvcompile.kernels.triton.encode.tile import Store, Tile
from kvcompile.kernels.triton.helpers import stored
from kvcompile.kernels.triton.params import TensorParam
from kvcompile.kernels.triton.write.parts import Side, store


def row_of(side: Side, pos: str) -> str:
    """The row of tokens at `pos` >= 0; some row for those that have none."""
    sinks, residual = side.storage.sinks, side.storage.residual
    if not residual:
        return f"tl.minimum({pos}, {sinks - 1})"
    ring = f"{pos} % {residual}"
    return f"tl.where({pos} < {sinks}, {pos}, {sinks} + {ring})" if sinks else ring


def written(side: Side, part: TensorParam, tile: Tile, one: bool, only_sinks: bool) -> list[str]:
    """Statements that write the vectors `x`, of the model's dtype, of those tokens at `pos` that stay in full."""
    sinks, residual = side.storage.sinks, side.storage.residual
    if not (sinks if only_sinks else sinks + residual):
        return []
    stays = [f"(pos < {sinks})"] if sinks else []
    if residual and not only_sinks:
        # Of many, the last for each row of the ring.
        stays = [] if one else [*stays, f"(pos > last - {residual})"]
    value = Store("full", stored("x", tile.dtype, tile.interpreted), tile.dim)
    kept = f"real & ({' | '.join(stays)})" if stays else "real"
    lines = [f"in_full = ({row_of(side, 'pos')}).to(tl.int64)", f"kept = {kept}"]
    return lines + store(part, value, "batch", "in_full", "kept", tile.width)
