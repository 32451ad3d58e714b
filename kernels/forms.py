"""Keys and values for many queries at once, of storages that keep the newest tokens in full.

A query at position i sees what a sequence of i + 1 tokens keeps: early queries see a token in full that late ones see
settled. So what stands between the two is there once for every form that it is seen in, and each query is allowed
one of them. The new tokens are not in the ring of the newest yet; in a layout that reuses slots, in no slot at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels import codec, recent
from kvcompile.layouts import CacheLayout, InKeys, PerChannel, Recent, Storage

# One side's vectors [B, Hkv, N, D]: all tokens settled, the last ones settled, and those in full (None: none is).
Forms = tuple[Tensor, Tensor, Tensor | None]
Seen = tuple[Tensor, Tensor, Tensor, Tensor]


def seen_by_many(
    layout: CacheLayout,
    keys: list[Tensor],
    values: list[Tensor],
    new: tuple[Tensor, Tensor],
    key_positions: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    dtype: torch.dtype,
) -> Seen:
    """For queries at `positions` [B, S], whose own K and V are `new`, in the basis of `layout`: settled and in the
    slots already, where tokens stand in order from 0, but not yet in the rings.

    Returns:
        keys [B, Hkv, N, D] and values [B, Hkv, N, Dv] in `dtype`, their positions [B, N] (-1: none) and whether a
        query may see them [B, S, N]. The first of N are the settled ones, at `key_positions` [B, T].
    """
    tokens, many = key_positions.shape[1], positions.shape[1]
    place = torch.arange(layout.residual + many, device=positions.device)
    last = seq_lens[:, None] - layout.residual + place
    last = torch.where((last >= 0) & (last <= positions[:, -1:]), last, -1)
    at = last.clamp(0, tokens - 1)

    def forms(storage: Storage, parts: list[Tensor], x: Tensor) -> Forms:
        older = recent.decode_old(storage, parts, key_positions, dtype)
        if not storage.residual:
            return older, recent.take(older, at), None
        newest = recent.in_full(storage, x, parts[-1], positions, last)
        return older, recent.take(older, at), codec.turned(storage, newest).to(dtype)

    k = forms(layout.keys, keys, new[0])
    v = None if isinstance(layout.values, InKeys) else forms(layout.values, values, new[1])
    return _joined(layout, k, v, key_positions, last, positions)


def seen_in_a_ring(
    stored: CacheLayout,
    layout: CacheLayout,
    keys: list[Tensor],
    values: list[Tensor],
    new: tuple[Tensor, Tensor],
    key_positions: Tensor,
    positions: Tensor,
    dtype: torch.dtype,
) -> Seen:
    """As `seen_by_many`, of slots in any order that hold nothing of the new tokens yet: every token in every form.

    stored: the layout of the buffers; `layout` is the same in the basis that is read. `new` is as the model gives it.
    """
    places = torch.cat([key_positions, positions], dim=1)

    def forms(storage: Storage, read: Storage, parts: list[Tensor], x: Tensor) -> Forms:
        old = recent.decode_old(read, parts, key_positions, dtype)
        older = torch.cat([old, recent.as_old(storage, read, x, parts, positions)], dim=2)
        if not storage.residual:
            return older, older, None
        # What a ring no longer holds is anything here, and no new query sees it in full.
        before = recent.take(parts[-1], recent.row_of(storage, key_positions))
        newest = torch.cat([before, recent.in_basis(storage, x)], dim=2)
        return older, older, codec.turned(read, newest).to(dtype)

    k = forms(stored.keys, layout.keys, keys, new[0])
    v = None if isinstance(layout.values, InKeys) else forms(stored.values, layout.values, values, new[1])
    return _joined(layout, k, v, places, places, positions)


def _joined(
    layout: CacheLayout, k: Forms, v: Forms | None, all_places: Tensor, last: Tensor, positions: Tensor
) -> Seen:
    """The pairs of forms in which any token is seen, one behind the other.

    all_places, last: positions of the tokens that are there settled, and of those that are also there in full
    """
    owner = layout.values
    if isinstance(owner, InKeys):
        channels, owner = owner.channels, layout.keys
        v = (k[0][..., :channels], k[1][..., :channels], None if k[2] is None else k[2][..., :channels])
    assert v is not None
    length = positions[:, :, None] + 1
    k_from, v_from = recent.in_full_from(layout.keys, length), recent.in_full_from(owner, length)

    def allowed(place: Tensor, k_full: bool, v_full: bool) -> Tensor:
        place = place[:, None]
        k_now, v_now = place >= k_from, place >= v_from
        return (k_now if k_full else ~k_now) & (v_now if v_full else ~v_now)

    found = [(k[0], v[0], all_places, allowed(all_places, False, False))]
    for k_full, v_full in ((False, True), (True, False), (True, True)):
        if k_full != v_full:
            earlier, later = (layout.keys, owner) if k_full else (owner, layout.keys)
            if _never_later(later, earlier):
                continue
        own_k, own_v = k[1 + k_full], v[1 + v_full]
        if own_k is not None and own_v is not None:
            found.append((own_k, own_v, last, allowed(last, k_full, v_full)))
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
