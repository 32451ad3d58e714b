"""Appends and reads tokens that a storage keeps unquantized, the newest or the first (`layouts/storage/storage.py`).

Such a storage's parts are those of its settled tokens, and last the rows in full [B, Hkv, sinks + residual, D]: those
of the first tokens, and a ring of the newest. A settled form may stand in its slot before it is read from there:
a token with a scale of its own is encoded at once, a group of tokens each time that one of them comes, until it is
whole.

One token goes into the rows in full first. Many tokens attend to the ring as it was and to themselves
(`kernels/reference/residual_views.py`), and go into it after: early queries still see in full what late tokens push
out. Storages that keep nothing in full pass through.

Tokens may stand in any order: positions of keys are [B, T], or [B, Hkv, T] where heads keep other tokens, and -1
where there is none. Only groups of tokens (a scale per channel) need them in order from 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvcompile.kernels.reference import codec, codes
from kvcompile.kernels.reference.symbolic import evaluate
from kvcompile.kernels.shared.dialect import current
from kvcompile.layouts import InKeys, Storage
from kvcompile.layouts import symbols as sy
from kvcompile.layouts.storage import is_fp8


def in_full_from(storage: Storage, length: Tensor) -> Tensor:
    """The first position that a sequence of `length` (any shape) reads in full as a new one; `length` itself: none."""
    return evaluate(storage.quantized_tokens, {sy.length: length}) if storage.unquantized else length


def settled(
    storage: Storage, x: Tensor, parts: list[Tensor], positions: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """What tokens x [B, Hkv, S, D] at `positions` [B, S] write beside the rows in full: rows [B, N], parts
    [B, Hkv, N, ...].

    Rows of padding are negative, or hold what is written again before it is read. The ring of one token is that
    after it, that of many tokens the one before them.
    """
    if not storage.channelwise:
        if storage.unquantized:
            return positions, codec.encode(storage.of_slots, in_basis(storage, x), parts)
        return positions, codec.encode(storage, x, parts)
    # The groups that the tokens touch, the last of them again where fewer than the most that S can touch.
    group = storage.group
    count = (x.shape[2] + group - 2) // group + 1
    start, end = positions[:, :1] // group, positions[:, -1:] // group
    groups = torch.minimum(start + torch.arange(count, device=x.device), end).clamp(min=0)
    tokens = groups[:, :, None] * group + torch.arange(group, device=x.device)
    if x.shape[2] == 1:
        found = take(parts[-1], row_of(storage, tokens.flatten(1)))
    else:
        found = in_full(storage, x, parts[-1], positions, tokens.flatten(1))
    grouped = found.unflatten(2, (-1, group)).float()
    q, numbers = codec.quantized(storage, grouped, 3)
    return groups, [codes.packed(storage.element, q), *numbers]


def append(
    storage: Storage,
    x: Tensor,
    parts: list[Tensor],
    positions: Tensor,
    seq_lens: Tensor,
    only_sinks: bool = False,
) -> None:
    """Write tokens x [B, Hkv, S, D] into the rows in full, if the storage has such: those that stay.

    only_sinks: not into the ring of the newest.
    """
    if not (storage.sinks if only_sinks else storage.sinks + storage.residual):
        return
    rows, x = parts[-1], in_basis(storage, x)
    if x.shape[2] == 1 and storage.residual:
        batch = torch.arange(x.shape[0], device=x.device)[:, None, None]
        head = torch.arange(x.shape[1], device=x.device)[None, :, None]
        rows.index_put_((batch, head, row_of(storage, positions)[:, None]), x)
        return
    holds = _held(storage, positions[:, -1] + 1)
    is_new = holds >= seq_lens[:, None]
    if only_sinks and storage.residual:
        is_new = is_new & (torch.arange(holds.shape[1], device=x.device) < storage.sinks)
    overwrite(rows, x, (holds - positions[:, :1]).clamp(0, x.shape[2] - 1), is_new)


def overwrite(buffer: Tensor, part: Tensor, index: Tensor, which: Tensor) -> None:
    """Row r of `buffer` [B, Hkv, rows, ...] becomes row index[:, r] of `part` where `which` [B, rows]."""
    shape = (*which.shape[:1], 1, which.shape[1], *[1] * (part.dim() - 3))
    buffer.copy_(torch.where(which.view(shape), take(part, index), buffer))


def up_to(storage: Storage | InKeys, parts: list[Tensor], span: int) -> list[Tensor]:
    """The parts of the first `span` tokens at least, in whole groups; what has rows of its own as it is."""
    own = sum(not part.fixed for part in storage.parts(128, torch.float32))
    return [*(part[:, :, : rows_of(storage, span, part.shape[2])] for part in parts[:own]), *parts[own:]]


def rows_of(storage: Storage | InKeys, span: int, rows: int) -> int:
    """How many of a part's `rows` hold the first `span` tokens, where a row may be a group of tokens.

    Of groups some more are read: a number of them that can be one, or pass the last, would be taken for one, or for
    less than all, in every call by those who trace with a span of few tokens. This one goes from 2 to `rows` as span
    goes from none to all, and is at least span / group:  rows - floor((rows - 2) e)  >=  rows - floor(rows e),
    where e is the part of all tokens that is beyond the span.
    """
    if isinstance(storage, InKeys) or not storage.channelwise:
        return span
    if rows <= 2:
        return rows
    return 2 + (span * (rows - 2) + rows * storage.group - 1) // (rows * storage.group)


def dot_keys(
    storage: Storage, q: Tensor, parts: list[Tensor], key_positions: Tensor, length: Tensor
) -> Tensor:
    """`codec.dot_keys` as sequences of `length` [B] read the keys at `key_positions`."""
    if not (storage.residual or storage.sinks):
        return codec.dot_keys(storage, q, parts)
    q = codec.turned(storage, q)
    older = _apply_settled(storage, parts, lambda inner, own: codec.dot_keys(inner, q, own), key_positions)
    newest = codec.dot_keys(codec.MODEL, q, parts[-1:])
    row = _heads(row_of(storage, key_positions))[:, :, None]
    newest = newest.gather(-1, row.expand(older.shape))
    return torch.where(_heads(_in_full(storage, key_positions, length))[:, :, None], newest, older)


def weigh_values(
    storage: Storage,
    p: Tensor,
    parts: list[Tensor],
    key_positions: Tensor,
    length: Tensor,
    ordered: bool = False,
) -> Tensor:
    """`codec.weigh_values` as sequences of `length` [B] read the values at `key_positions`; ordered: those from 0 on,
    one after another."""
    if not (storage.residual or storage.sinks):
        return codec.weigh_values(storage, p, parts)
    full = _in_full(storage, key_positions, length)
    of_older = p.masked_fill(_heads(full)[:, :, None], 0.0)
    older = _apply_settled(
        storage, parts, lambda inner, own: codec.weigh_values(inner, of_older, own), key_positions
    )
    if ordered:
        held = _held(storage, length)
        place = held.clamp(0, p.shape[-1] - 1)
        unread = (held < 0) | (held < in_full_from(storage, length)[:, None])
        if storage.sinks:
            unread = unread & ((held < 0) | (held >= storage.sinks))
    else:
        place = _places(storage, key_positions, full)
        unread, place = place < 0, place.clamp(min=0)
    index = _heads(place)[:, :, None].expand(*p.shape[:-1], place.shape[-1])
    of_newest = p.gather(-1, index).masked_fill(_heads(unread)[:, :, None], 0.0)
    return codec.turned(storage, older + codec.weigh_values(codec.MODEL, of_newest, parts[-1:]))


def decode(
    storage: Storage, parts: list[Tensor], key_positions: Tensor, length: Tensor, dtype: torch.dtype
) -> Tensor:
    """Vectors [B, Hkv, T, D] at `key_positions` as sequences of `length` [B] read them."""
    older = decode_settled(storage, parts, key_positions.shape[-1], dtype)
    if not (storage.residual or storage.sinks):
        return older
    newest = codec.turned(storage, take(parts[-1], row_of(storage, key_positions))).to(dtype)
    return torch.where(_heads(_in_full(storage, key_positions, length))[..., None], newest, older)


def decode_old(storage: Storage, parts: list[Tensor], key_positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Vectors [B, Hkv, T, D] at `key_positions` as they are read once they are none of the newest."""
    older = decode_settled(storage, parts, key_positions.shape[-1], dtype)
    if not storage.sinks:
        return older
    first = codec.turned(storage, take(parts[-1], row_of(storage, key_positions))).to(dtype)
    return torch.where(_heads(_is_sink(storage, key_positions))[..., None], first, older)


def as_old(storage: Storage, read: Storage, x: Tensor, parts: list[Tensor], positions: Tensor) -> Tensor:
    """New tokens x [B, Hkv, S, D] at `positions` [B, S] as `decode_old` will give them, in the basis of `read`."""
    if not storage.unquantized:
        return codec.as_stored(storage, read, x, parts)
    own, kept = in_basis(storage, x).float(), storage.of_slots
    older = codec.as_stored(kept, kept, own, parts)
    if storage.sinks:
        older = torch.where(_is_sink(storage, positions)[:, None, :, None], own, older)
    return codec.turned(read, older).to(x.dtype)


def decode_settled(storage: Storage, parts: list[Tensor], tokens: int, dtype: torch.dtype) -> Tensor:
    """The settled form of the first `tokens` slots; where there is none yet, anything: [B, Hkv, tokens, D]."""
    if not storage.unquantized:
        return codec.decode(storage, parts, dtype)
    if storage.channelwise:
        data, *numbers, _ = parts
        found = codes.numbers(storage.element, data)
        x = codec.dequantized(storage, found, numbers, 3).flatten(2, 3)[:, :, :tokens]
    else:
        x = codec.decode(storage.of_slots, parts[:-1], torch.float32)
    return codec.turned(storage, x).to(dtype)


def in_full(storage: Storage, x: Tensor, rows: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
    """Vectors at positions `wanted` [B, N], of the new tokens x [B, Hkv, S, D] or of the rows in full before them."""
    source = torch.cat([rows, in_basis(storage, x)], dim=2)
    own = (wanted - positions[:, :1]).clamp(0, x.shape[2] - 1)
    # The first token of this call that is no padding.
    start = positions[:, :1].clamp(min=0)
    return take(source, torch.where(wanted >= start, rows.shape[2] + own, row_of(storage, wanted)))


def in_basis(storage: Storage, x: Tensor) -> Tensor:
    """New vectors as the rows in full hold them, and as they are settled from: in the model's dtype, and turned."""
    return codec.turned(storage, x).to(x.dtype)


def row_of(storage: Storage, positions: Tensor) -> Tensor:
    """The row in full of the tokens at `positions` (any shape); some row for those that have none."""
    if not storage.residual:
        return positions.clamp(0, storage.sinks - 1)
    ring = storage.sinks + torch.remainder(positions, storage.residual)
    if not storage.sinks:
        return ring
    return torch.where(positions < storage.sinks, positions.clamp(min=0), ring)


def _held(storage: Storage, length: Tensor) -> Tensor:
    """The position of the token in each row in full, [B, rows], for sequences of `length` [B]; negative: none."""
    sinks, residual = storage.sinks, storage.residual
    row = torch.arange(sinks + residual, device=length.device)[None]
    last = length[:, None] - 1
    if not residual:
        return torch.where(row <= last, row, -1)
    ring = last - torch.remainder(last - (row - sinks), residual)
    if not sinks:
        return ring
    return torch.where(row < sinks, torch.where(row <= last, row, -1), torch.where(ring < sinks, -1, ring))


def _places(storage: Storage, key_positions: Tensor, full: Tensor) -> Tensor:
    """Where among the keys the token of each row in full stands, [B, rows] or [B, Hkv, rows]; -1: it is not there."""
    rows = storage.sinks + storage.residual
    # All that are in no row go to one more, which is dropped.
    row = torch.where(full & (key_positions >= 0), row_of(storage, key_positions), rows)
    place = torch.arange(row.shape[-1], device=row.device).expand_as(row)
    if current().counts:  # such a target scatters no more numbers than there are places
        own = row[..., None, :] == torch.arange(rows, device=row.device)[:, None]
        return torch.where(own, place[..., None, :], -1).amax(-1)
    none = torch.full((*row.shape[:-1], rows + 1), -1, dtype=place.dtype, device=row.device)
    return none.scatter(-1, row, place)[..., :rows]


def _is_sink(storage: Storage, positions: Tensor) -> Tensor:
    return (positions >= 0) & (positions < storage.sinks)


def _in_full(storage: Storage, key_positions: Tensor, length: Tensor) -> Tensor:
    """Which of the keys sequences of `length` [B] read in full, in the shape of `key_positions`."""
    first = in_full_from(storage, length).view(-1, *[1] * (key_positions.dim() - 1))
    newest = key_positions >= first
    return newest | _is_sink(storage, key_positions) if storage.sinks else newest


def _apply_settled(
    storage: Storage,
    parts: list[Tensor],
    function: Callable[[Storage, list[Tensor]], Tensor],
    key_positions: Tensor,
) -> Tensor:
    """`function` of the settled tokens, as a storage and parts that the codec knows."""
    if not storage.channelwise:
        return function(storage.of_slots, parts[:-1])
    kept = storage.without_hadamard
    return function(codec.MODEL, [decode_settled(kept, parts, key_positions.shape[-1], torch.float32)])


def _heads(x: Tensor) -> Tensor:
    """[B, N], the same for all heads, or [B, Hkv, N] -> [B, 1 or Hkv, N]."""
    return x[:, None] if x.dim() == 2 else x


def take(x: Tensor, index: Tensor) -> Tensor:
    """Rows `index` [B, N] or [B, Hkv, N] of x [B, Hkv, rows, ...]."""
    if is_fp8(x.dtype):  # torch gathers no fp8
        return take(x.view(torch.uint8), index).view(x.dtype)
    index = _heads(index)
    shape = (*index.shape, *[1] * (x.dim() - 3))
    return torch.gather(x, 2, index.view(shape).expand(-1, x.shape[1], -1, *x.shape[3:]))
