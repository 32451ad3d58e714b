"""Part of kernels: new vectors as they are used. RoPE at their places, and the Hadamard rotation of a storage.

    out[i] = x[i] cos[p, i] + across[i] sin[p, i],   across = -x[j] for the first of a pair, x[j] for the second

Pairs are those of `types.RotaryForm`; both of a pair are read from memory, so any range of channels can turn. All is
computed in float32 and rounded to the model's dtype, as `kernels/shared/rope.py` has it.
"""

from __future__ import annotations

import math

import torch

from kvcompile.kernels.triton.append.encode.tile import Tile
from kvcompile.kernels.triton.helpers import hadamard, stored
from kvcompile.kernels.triton.params import Param, ScalarParam, TensorParam
from kvcompile.specs import RotaryForm

_HINT = 16  # channels side by side that the compiler may load at once


def tables() -> tuple[Param, ...]:
    """cos and sin float32 [positions, rotary_dim]."""
    return (
        TensorParam("cos", torch.float32, 2),
        TensorParam("sin", torch.float32, 2),
        ScalarParam("table_rows"),
    )


def partners(form: RotaryForm, tile: Tile) -> list[str]:
    """Statements that define `partner` of each channel `c` [1, width], `sign` and, where not all turn, `turns`."""
    at = f"(c - {form.start})" if form.start else "c"
    half = form.rotary_dim // 2
    if form.style == "half":
        first, side = f"{at} < {half}", math.gcd(half, form.start or half, _HINT)
        lines = [
            f"first = {first}",
            f"partner = tl.where(first, c + {half}, c - {half})",
        ]
        if side > 1:
            lines.append(f"partner = tl.max_contiguous(tl.multiple_of(partner, [1, {side}]), [1, {side}])")
    else:
        lines = [f"first = {at} % 2 == 0", "partner = tl.where(first, c + 1, c - 1)"]
    lines.append("sign = tl.where(first, -1.0, 1.0)")
    if form.start or form.rotary_dim != tile.width:
        lines.append(f"turns = (c >= {form.start}) & (c < {form.start + form.rotary_dim})")
    return lines


def apply_rope(form: RotaryForm, tile: Tile, row: str, place: str, out: str = "x") -> list[str]:
    """Statements that make `out` of `x`, the vectors at pointers `row` [rows, 1], turned at `place`: [rows], or [1] of
    heads."""
    every = form.start == 0 and form.rotary_dim == tile.width
    channel = f"(c - {form.start})" if form.start else "c"
    guard = "real[:, None]" if every else "real[:, None] & turns"
    lines = [f"place = tl.minimum(tl.maximum({place}, 0), table_rows - 1)[:, None]"]
    for name in ("cos", "sin"):
        at = f"{name}_ptr + place * {name}_s0 + {channel}"
        lines.append(f"{name} = tl.load({at}, mask={guard}, other=0.0)")
    guard = f"{tile.among('real')}[:, None]" if every else f"{tile.among('real')}[:, None] & turns"
    lines.append(f"across = sign * tl.load({row} + partner, mask={guard}, other=0.0).to(tl.float32)")
    turned = "x * cos + across * sin"
    lines.append(f"{out} = {rounded(turned if every else f'tl.where(turns, {turned}, x)', tile)}")
    return lines


def apply_hadamard(tile: Tile, x: str = "x") -> str:
    return f"{x} = {hadamard(x, tile.rows, tile.width, tile.dim)}"


def rounded(x: str, tile: Tile) -> str:
    """float32 `x` as the tile's dtype gives it back, in float32."""
    own = stored(x, tile.dtype, tile.interpreted)
    return own if tile.dtype == "float32" else f"{own}.to(tl.float32)"
