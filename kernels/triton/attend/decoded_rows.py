"""Role decoded_rows: what is read of the slots of tokens before a prompt's, to rows (`host/decoded_once.py`).

    row[slot] = code[slot] * scale[slot] + minimum[slot]      slots 0 .. first - 1, in the model's dtype

With option all, slots of the prompt's tokens as well. Of tokens that stand in full, rows are anything: their settled
form may not be written yet, and nobody reads it. What stands in pages has rows in the order of its tokens.

These are the numbers of the reference, bit for bit, in the basis that the storage keeps: what was turned stays so.
Every code is made a number once, whatever number of queries reads it.

Options: all, packed (`packed.py`), interpreted. spec.block_n: slots of a tile.
Launch: grid(spec, rows, batch). The parts of the cache, dense; page_table int32 [B, pages], where they are in pages;
positions int64 [B, S], of which the first says how many tokens are held; decoded_k [B, Hkv, rows, D] and decoded_v
[B, Hkv, rows, Dv], written; `decoded`: rows that there are, 0: nothing is written; with option all `tokens`: those of
the prompt.
"""

from __future__ import annotations

import torch

from kvcompile.kernels.triton import helpers, packed
from kvcompile.kernels.triton.params import KernelSource, Param, ScalarParam, TensorParam
from kvcompile.kernels.triton.render import rendered
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.kernels.triton.tile import dequantize
from kvcompile.kernels.triton.tile.addressing import SlotArray
from kvcompile.kernels.triton.tile.channel_blocks import between, edges
from kvcompile.kernels.triton.tile.reader import reader
from kvcompile.kernels.triton.tile.tile_loader import TileLoader
from kvcompile.layouts import InKeys, Paged

ALL = "all"
OPTIONS = {ALL, packed.OPTION, "interpreted"}
WARPS = 4
_ELEMENTS = 8192  # of a tile of keys, or of values


def generate(spec: KernelSpec) -> KernelSource:
    """The kernel of a spec of role decoded_rows.

    Raises:
        ValueError: the layout is one whose slots are read as they stand, or an option is unknown.
    """
    layout = spec.layout
    if unknown := set(spec.options) - OPTIONS:
        raise ValueError(f"{spec.role} knows no options {sorted(unknown)}")
    if isinstance(layout.values, InKeys) or not layout.in_order:
        raise ValueError(
            f"{spec.role} is for slots that hold keys and values, in their order, not for {layout}"
        )
    placement, one_row = layout.placement, packed.OPTION in spec.options
    page = placement.page_size if isinstance(placement, Paged) else 0
    source = SlotArray("", "slots", spec.num_kv_heads, spec.block_n, page)
    sides = [(part, f"decoded_{part.letter}") for part in (_reader(spec, "keys"), _reader(spec, "values"))]
    params: list[Param] = list(source.params)
    for part, _ in sides:
        params += part.params(source)
    params += [TensorParam("positions", torch.int64, 2), ScalarParam("decoded")]
    if one_row:
        params.append(packed.STARTS)
    elif ALL in spec.options:
        params.append(ScalarParam("tokens"))
    params += [TensorParam(out, spec.torch_dtype) for _, out in sides]
    text = rendered(
        "decoded_rows.py.jinja",
        params=params,
        spec=spec,
        packed=packed.prologue(params, "tokens <= 0") if one_row else [],
        lines=[
            *source.located([part.group for part, _ in sides], True),
            *(line for part, out in sides for line in _written(spec, part, source, out)),
        ],
    )
    return KernelSource("decoded_rows", tuple(params), helpers.module(text))


def grid(spec: KernelSpec, rows: int, batch: int) -> tuple[int, int, int]:
    return (rows + spec.block_n - 1) // spec.block_n, spec.num_kv_heads, batch


def block_n(head_dim: int, v_head_dim: int) -> int:
    """Slots of a tile."""
    width = 1 << (max(head_dim, v_head_dim) - 1).bit_length()
    return max(1, min(64, _ELEMENTS // width))


def _reader(spec: KernelSpec, side: str) -> TileLoader:
    """All elements as numbers; groups of channels need no pieces, as every element has its scale."""
    storage = spec.layout.keys if side == "keys" else spec.layout.values
    dim = spec.head_dim if side == "keys" else spec.v_head_dim
    assert not isinstance(storage, InKeys)
    pieces = between(dim, edges(storage.of_slots, dim, stacked=True))
    return reader(spec, side, pieces, elementwise=True)


def _written(spec: KernelSpec, part: TileLoader, source: SlotArray, out: str) -> list[str]:
    """Lines that read a tile of one side and write its rows."""
    lines = part.constants()
    if part.fixed_scale:
        at = f"{part.side}_scale_ptr + batch * {spec.num_kv_heads} + head"
        lines.append(f"{part.side}_scale = tl.load({at})")
    lines += dequantize.loaded(part, source, True)
    for index, piece in enumerate(part.pieces):
        name = f"{part.letter}{index}"
        real = "" if piece.whole else f" & ({part.channels(index)} < {piece.stop})"
        value = helpers.stored(name, spec.dtype, "interpreted" in spec.options)
        at = f"{out}_ptr + (row + n)[:, None] * {part.dim} + {part.channels(index)}"
        lines.append(f"tl.store({at}, {value}, mask=inside[:, None]{real})")
    return lines
