"""Storages that keep their newest tokens in full (`layouts/storages/residual.py`): append and read.

Such a storage's parts are those of its settled tokens, in the order of tokens, and last a ring of the `residual`
newest vectors [B, Hkv, R, D]. A settled form may stand in its slot before it is read from there: every token of a
`Recent` is encoded at once, a group of a `PerChannel` each time that one of its tokens comes, until it is whole.

Many tokens attend to the ring as it was and to themselves, and go into it after: early queries still see in full
what late tokens push out. One token goes into the ring first. Storages without residual pass through.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvcompile.kernels import codec
from kvcompile.kernels.bits import pack, unpack
from kvcompile.kernels.symbolic import evaluate
from kvcompile.layouts import CacheLayout, InKeys, ModelDtype, PerChannel, Recent, Storage
from kvcompile.layouts import symbols as sy
from kvcompile.layouts.storages.part import scale_dtype


def in_full_from(storage: Storage, length: Tensor) -> Tensor:
    """The first position that a sequence of `length` (any shape) reads in full; `length` itself: none."""
    kept = codec.as_kept(storage)
    return evaluate(kept.settled, {sy.length: length}) if isinstance(kept, (Recent, PerChannel)) else length


def settled(
    storage: Storage, x: Tensor, parts: list[Tensor], positions: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """What tokens x [B, Hkv, S, D] at `positions` [B, S] write beside the ring: rows [B, N], parts [B, Hkv, N, ...].

    Rows of padding are negative, or hold what is written again before it is read. The ring of one token is that
    after it, that of many tokens the one before them.
    """
    kept = codec.as_kept(storage)
    match kept:
        case Recent(inner=inner):
            return positions, codec.encode(inner, _for_ring(storage, x), parts)
        case PerChannel():
            # The groups that the tokens touch, the last of them again where fewer than the most that S can touch.
            count = (x.shape[2] + kept.group - 2) // kept.group + 1
            start, end = positions[:, :1] // kept.group, positions[:, -1:] // kept.group
            groups = torch.minimum(start + torch.arange(count, device=x.device), end).clamp(min=0)
            tokens = groups[:, :, None] * kept.group + torch.arange(kept.group, device=x.device)
            if x.shape[2] == 1:
                index = torch.remainder(tokens, kept.residual).flatten(1)
                found = _take(parts[-1], index)
            else:
                found = _newest(storage, x, parts[-1], positions, tokens.flatten(1))
            grouped = found.unflatten(2, (-1, kept.group)).float()
            codes, scale, minimum = codec.quantized(grouped, 3, kept.bits, scale_dtype(kept.scale_dtype))
            return groups, [pack(codes, kept.bits), scale, minimum]
        case _:
            return positions, codec.encode(storage, x, parts)


def append(storage: Storage, x: Tensor, parts: list[Tensor], positions: Tensor, seq_lens: Tensor) -> None:
    """Write tokens x [B, Hkv, S, D] into the ring, if the storage has one: those that stay."""
    if not storage.residual:
        return
    ring, x = parts[-1], _for_ring(storage, x)
    if x.shape[2] == 1:
        batch = torch.arange(x.shape[0], device=x.device)[:, None, None]
        head = torch.arange(x.shape[1], device=x.device)[None, :, None]
        ring.index_put_((batch, head, torch.remainder(positions, storage.residual)[:, None]), x)
        return
    holds = _held(positions[:, -1] + 1, storage.residual)
    index = (holds - positions[:, :1]).clamp(0, x.shape[2] - 1)
    overwrite(ring, x, index, holds >= seq_lens[:, None])


def overwrite(buffer: Tensor, part: Tensor, index: Tensor, which: Tensor) -> None:
    """Row r of `buffer` [B, Hkv, rows, ...] becomes row index[:, r] of `part` where `which` [B, rows]."""
    shape = (*which.shape[:1], 1, which.shape[1], *[1] * (part.dim() - 3))
    if part.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):  # torch gathers no fp8
        taken = _take(part.view(torch.uint8), index).view(part.dtype)
    else:
        taken = _take(part, index)
    buffer.copy_(torch.where(which.view(shape), taken, buffer))


def up_to(storage: Storage, parts: list[Tensor], span: int) -> list[Tensor]:
    """The parts of the first `span` tokens, in whole groups; what has rows of its own as it is."""
    kept = codec.as_kept(storage)
    every = kept.group if isinstance(kept, PerChannel) else 1
    own = sum(not part.fixed for part in storage.parts(128, torch.float32))
    return [*(part[:, :, : (span + every - 1) // every] for part in parts[:own]), *parts[own:]]


def dot_keys(
    storage: Storage, q: Tensor, parts: list[Tensor], key_positions: Tensor, length: Tensor
) -> Tensor:
    """`codec.dot_keys` as sequences of `length` [B] read the keys at `key_positions` [B, T] (in order from 0)."""
    if not storage.residual:
        return codec.dot_keys(storage, q, parts)
    q = codec.turned(storage, q)
    older = _apply_settled(storage, parts, lambda inner, own: codec.dot_keys(inner, q, own), key_positions)
    newest = codec.dot_keys(ModelDtype(), q, parts[-1:])
    slot = torch.remainder(key_positions, storage.residual)
    newest = newest.gather(-1, slot[:, None, None].expand(older.shape))
    return torch.where(_in_full(storage, key_positions, length)[:, None, None], newest, older)


def weigh_values(
    storage: Storage, p: Tensor, parts: list[Tensor], key_positions: Tensor, length: Tensor
) -> Tensor:
    """`codec.weigh_values` as sequences of `length` [B] read the values at `key_positions` [B, T] (in order from 0)."""
    if not storage.residual:
        return codec.weigh_values(storage, p, parts)
    of_older = p.masked_fill(_in_full(storage, key_positions, length)[:, None, None], 0.0)
    older = _apply_settled(
        storage, parts, lambda inner, own: codec.weigh_values(inner, of_older, own), key_positions
    )
    held = _held(length, storage.residual)
    index = held.clamp(0, p.shape[-1] - 1)[:, None, None].expand(*p.shape[:-1], storage.residual)
    unread = (held < 0) | (held < in_full_from(storage, length)[:, None])
    of_newest = p.gather(-1, index).masked_fill(unread[:, None, None], 0.0)
    return codec.turned(storage, older + codec.weigh_values(ModelDtype(), of_newest, parts[-1:]))


def decode(
    storage: Storage, parts: list[Tensor], key_positions: Tensor, length: Tensor, dtype: torch.dtype
) -> Tensor:
    """Vectors [B, Hkv, T, D] at `key_positions` [B, T] (in order from 0) as sequences of `length` [B] read them."""
    older = decode_settled(storage, parts, key_positions.shape[1], dtype)
    if not storage.residual:
        return older
    newest = _take(parts[-1], torch.remainder(key_positions, storage.residual))
    newest = codec.turned(storage, newest).to(dtype)
    return torch.where(_in_full(storage, key_positions, length)[:, None, :, None], newest, older)


def decode_settled(storage: Storage, parts: list[Tensor], tokens: int, dtype: torch.dtype) -> Tensor:
    """The settled form of the first `tokens` tokens; where a token has none yet, anything: [B, Hkv, tokens, D]."""
    kept = codec.as_kept(storage)
    match kept:
        case Recent(inner=inner):
            x = codec.decode(inner, parts[:-1], torch.float32)
        case PerChannel():
            data, scale, minimum, _ = parts
            x = codec.dequantized(unpack(data, kept.bits), scale, minimum, 3).flatten(2, 3)[:, :, :tokens]
        case _:
            return codec.decode(storage, parts, dtype)
    return codec.turned(storage, x).to(dtype)


def seen_by_many(
    layout: CacheLayout,
    keys: list[Tensor],
    values: list[Tensor],
    new: tuple[Tensor, Tensor],
    key_positions: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values for queries at `positions` [B, S], whose own K and V are `new` and not yet in the rings.

    Early queries see a token in full that late ones see settled. So what stands between the two is there once for
    every form that it is seen in, and each query is allowed one of them.

    Returns:
        keys [B, Hkv, N, D] and values [B, Hkv, N, Dv] in `dtype`, their positions [B, N] (-1: none) and whether a
        query may see them [B, S, N]. The first of N are the settled ones, at `key_positions` [B, T].
    """
    k_new, v_new = new
    tokens, many = key_positions.shape[1], k_new.shape[2]
    last, length = positions[:, -1:], positions[:, :, None] + 1
    place = torch.arange(layout.residual + many, device=positions.device)
    recent = seq_lens[:, None] - layout.residual + place
    recent = torch.where((recent >= 0) & (recent <= last), recent, -1)
    at = recent.clamp(0, tokens - 1)

    def forms(storage: Storage, parts: list[Tensor], x: Tensor) -> list[Tensor]:
        older = decode_settled(storage, parts, tokens, dtype)
        if not storage.residual:
            return [older, _take(older, at)]
        newest = codec.turned(storage, _newest(storage, x, parts[-1], positions, recent)).to(dtype)
        return [older, _take(older, at), newest]

    k = forms(layout.keys, keys, k_new)
    owner = layout.keys if isinstance(layout.values, InKeys) else layout.values
    if isinstance(layout.values, InKeys):
        v = [x[..., : layout.values.channels] for x in k]
    else:
        v = forms(layout.values, values, v_new)
    k_from, v_from = in_full_from(layout.keys, length), in_full_from(owner, length)

    def allowed(position: Tensor, k_full: bool, v_full: bool) -> Tensor:
        position = position[:, None]
        k_now, v_now = position >= k_from, position >= v_from
        return (k_now if k_full else ~k_now) & (v_now if v_full else ~v_now)

    found = [(k[0], v[0], key_positions, allowed(key_positions, False, False))]
    for k_full, v_full in ((False, True), (True, False), (True, True)):
        exists = (layout.keys.residual or not k_full) and (owner.residual or not v_full)
        if k_full != v_full:
            earlier, later = (layout.keys, owner) if k_full else (owner, layout.keys)
            exists = exists and not _never_later(later, earlier)
        if exists:
            found.append((k[1 + k_full], v[1 + v_full], recent, allowed(recent, k_full, v_full)))
    ks, vs, places, masks = zip(*found, strict=True)
    return torch.cat(ks, 2), torch.cat(vs, 2), torch.cat(places, 1), torch.cat(masks, 2)


def _never_later(one: Storage, other: Storage) -> bool:
    """Whether every token that `other` gives in full is in full in `one` as well, at any length."""
    if one == other:
        return True
    a, b = codec.as_kept(one), codec.as_kept(other)
    if isinstance(a, PerChannel) and isinstance(b, PerChannel):
        return a.residual == b.residual
    return isinstance(a, Recent) and isinstance(b, (Recent, PerChannel)) and b.residual <= a.residual


def _newest(storage: Storage, x: Tensor, ring: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
    """Vectors at positions `wanted` [B, N], of the new tokens x [B, Hkv, S, D] or of the ring before them."""
    source = torch.cat([ring, _for_ring(storage, x)], dim=2)
    own = (wanted - positions[:, :1]).clamp(0, x.shape[2] - 1)
    seen = torch.remainder(wanted, storage.residual)
    # The first token of this call that is no padding.
    start = positions[:, :1].clamp(min=0)
    return _take(source, torch.where(wanted >= start, storage.residual + own, seen))


def _for_ring(storage: Storage, x: Tensor) -> Tensor:
    """New vectors as a ring holds them, and as they are settled from: in the model's dtype, and turned."""
    return codec.turned(storage, x).to(x.dtype)


def _held(length: Tensor, residual: int) -> Tensor:
    """The position of the token in each slot of a ring, [B, R], for sequences of `length` [B]; negative: none."""
    slot = torch.arange(residual, device=length.device)[None]
    last = length[:, None] - 1
    return last - torch.remainder(last - slot, residual)


def _in_full(storage: Storage, key_positions: Tensor, length: Tensor) -> Tensor:
    return key_positions >= in_full_from(storage, length)[:, None]


def _apply_settled(
    storage: Storage,
    parts: list[Tensor],
    function: Callable[[Storage, list[Tensor]], Tensor],
    key_positions: Tensor,
) -> Tensor:
    """`function` of the settled tokens, as a storage and parts that the codec knows."""
    kept = codec.as_kept(storage)
    if isinstance(kept, Recent):
        return function(kept.inner, parts[:-1])
    return function(ModelDtype(), [decode_settled(kept, parts, key_positions.shape[1], torch.float32)])


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Rows `index` [B, N] of x [B, Hkv, rows, ...]."""
    shape = (index.shape[0], 1, index.shape[1], *[1] * (x.dim() - 3))
    return torch.gather(x, 2, index.view(shape).expand(-1, x.shape[1], -1, *x.shape[3:]))
