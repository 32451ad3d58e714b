"""Reads and writes the slots of a layer, whatever decides which token stands in which.

Slots are rows of the layer's own arrays, or of pages (`paged.py`). The rows that a storage keeps in full stand beside
them (`residual.py`) and are written along with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.reference import linear_write, paged, residual
from kvcompile.kernels.reference.kv_sides import sides
from kvcompile.kernels.reference.selections import gathered
from kvcompile.kernels.shared.dialect import current


@dataclass(frozen=True)
class Stored:
    """What a call reads of the slots: K's parts and V's, [B, Hkv, T, ...] each, and the tokens that they are of.

    tokens: positions [B, T], or [B, Hs, T] where heads read tokens of their own; -1: none
    """

    keys: list[Tensor]
    values: list[Tensor]
    tokens: Tensor


def write(x: AttendInputs, slot: Tensor) -> None:
    """Encode new tokens and write each to its slot, before they attend.

    The newest tokens that are kept in full are not written here where many come; see `write_residual`.

    Args:
        slot: [B, S], negative for padding; or [B, Hs, 1], at least 0, where heads give one token slots of their own.
    """
    layout, positions = x.spec.layout, x.positions
    one = x.k.shape[2] == 1
    for storage, vectors, own in sides(layout, x.k, x.v, x.parts):
        residual.append(storage, vectors, own, positions, x.seq_lens, only_sinks=layout.in_order and not one)
    batch = torch.arange(x.k.shape[0], device=x.k.device)[:, None, None]
    head = torch.arange(x.k.shape[1], device=x.k.device)[None, :, None]
    for storage, vectors, own in sides(layout, x.k, x.v, x.parts):
        rows, encoded = residual.settled(storage, vectors, own, slot)
        # A ring or a calibrated scale is not among them.
        for buffer, part in zip(own, encoded, strict=False):
            if x.page_table is not None:
                paged.write(buffer, x.page_table, rows, part)
                continue
            # `rows is positions`: the address is the position, and tokens share no row.
            if current().linear and rows is positions and linear_write.fits(buffer):
                linear_write.write(buffer, part, positions)
                continue
            # Padding (negative positions) lands at the far end, in slots that no token of its sequence
            # reaches: the limit of tokens counts padding, too.
            row = rows if rows.dim() == 3 else torch.remainder(rows, buffer.shape[2])[:, None]
            buffer.index_put_((batch, head, row), part)


def write_residual(x: AttendInputs) -> None:
    """Write new tokens into the rows in full alone: after many tokens of slots in order have attended."""
    for storage, vectors, own in sides(x.spec.layout, x.k, x.v, x.parts):
        residual.append(storage, vectors, own, x.positions, x.seq_lens)


def count(x: AttendInputs) -> int:
    """How many slots of each sequence a call reads."""
    layout = x.spec.layout
    if layout.in_order:
        return x.span
    return x.buffers[0].shape[2] if x.page_table is None else layout.slots(None)


def reached(x: AttendInputs) -> Tensor | None:
    """The slots int64 [B, N] that a call reads where pages behind a window are given back: those of the sinks, and all
    from the first that its first token sees to its last. None: it reads the first `count` slots.

    N is a matter of how many tokens come, and hardly of how many there are. Tokens in full, and groups of tokens, are
    found from the beginning on, and graphs for elsewhere know no such slots: they read all.
    """
    layout, released = x.spec.layout, x.spec.layout.released
    if released is None or layout.in_full or layout.keys.channelwise or layout.values.channelwise:
        return None
    if not current().in_blocks:
        return None
    device, last = x.seq_lens.device, torch.sym_min(x.span, released.window - 1 + x.k.shape[2])
    first = (x.seq_lens - (released.window - 1)).clamp(min=released.sinks)[:, None]
    sinks = torch.arange(released.sinks, device=device).expand(first.shape[0], -1)
    return torch.cat([sinks, first + torch.arange(last, device=device)], dim=1)


def read_at(x: AttendInputs, slots: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """As `read`, of the slots [B, T] of a layer in pages; those beyond the last page are of any."""
    layout, parts, table = x.spec.layout, x.parts, x.page_table
    assert table is not None, "only pages are given back"
    keys, values = parts[: layout.num_key_parts], parts[layout.num_key_parts :]
    return paged.stored_at(layout.keys, keys, table, slots), paged.stored_at(
        layout.values, values, table, slots
    )


def read(x: AttendInputs, chosen: Tensor | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """K's parts and V's, [B, Hkv, T, ...] each.

    chosen: the slots [B, Hkv, T] that are read; None: all of `count`
    """
    layout, parts, table = x.spec.layout, x.parts, x.page_table
    keys, values = parts[: layout.num_key_parts], parts[layout.num_key_parts :]
    if chosen is not None:
        keys = gathered(layout.keys, keys, chosen, x.span, table)
        values = gathered(layout.values, values, chosen, x.span, table)
    elif table is not None:
        keys = paged.stored(layout.keys, keys, table, count(x))
        values = paged.stored(layout.values, values, table, count(x))
    elif layout.in_order:
        keys, values = (
            residual.up_to(layout.keys, keys, x.span),
            residual.up_to(layout.values, values, x.span),
        )
    return keys, values
