"""Keys and values for many queries at once, of storages that keep the newest tokens in full.

A query at position i sees what a sequence of i + 1 tokens keeps: early queries see a token in full that late ones see
settled. So what stands between the two is there once for every form that it is seen in, and each query is allowed
one of them. The new tokens are not in the ring of the newest yet; in a layout that reuses slots, in no slot at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcompile.kernels.reference import codec, residual
from kvcompile.layouts import CacheLayout, InKeys, Storage

# Whether keys, and whether values, are in full.
Pair = tuple[bool, bool]
PAIRS: tuple[Pair, ...] = ((False, False), (False, True), (True, False), (True, True))


@dataclass(frozen=True)
class InForms:
    """All tokens in each of `forms`, one behind the other: keys [B, Hkv, F * T, D], values [B, Hkv, F * T, Dv].

    A query may see a token in exactly one form.
    """

    keys: Tensor
    values: Tensor
    forms: tuple[Pair, ...]


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
        older = residual.decode_old(storage, parts, key_positions, dtype)
        if not storage.residual:
            return older, residual.take(older, at), None
        newest = residual.in_full(storage, x, parts[-1], positions, last)
        return older, residual.take(older, at), codec.turned(storage, newest).to(dtype)

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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As `seen_by_many`, of slots in any order that hold nothing of the new tokens yet: every token in every form.

    stored: the layout of the buffers; `layout` is the same in the basis that is read. `new` is as the model gives it.
    Where all tokens are seen in one form, every query may see it: None instead of the last tensor.
    """
    found = of_slots(stored, layout, keys, values, new, key_positions, positions, dtype)
    places = torch.cat([key_positions, positions], dim=1)
    if len(found.forms) == 1:
        return found.keys, found.values, places, None
    length = positions[:, :, None] + 1
    allowed = [may_see(layout, form, places[:, None], length) for form in found.forms]
    return found.keys, found.values, places.repeat(1, len(found.forms)), torch.cat(allowed, 2)


def of_slots(
    stored: CacheLayout,
    layout: CacheLayout,
    keys: list[Tensor],
    values: list[Tensor],
    new: tuple[Tensor, Tensor],
    key_positions: Tensor,
    positions: Tensor,
    dtype: torch.dtype,
) -> InForms:
    """The tokens in slots, at `key_positions` [B, T] or [B, Hkv or 1, T], and the new ones, in each form that matters.

    Slots are in any order and hold nothing of the new tokens yet. stored, layout: as for `seen_in_a_ring`.
    """

    def forms(storage: Storage, read: Storage, parts: list[Tensor], x: Tensor) -> Forms:
        old = residual.decode_old(read, parts, key_positions, dtype)
        older = torch.cat([old, residual.as_old(storage, read, x, parts, positions)], dim=2)
        if not storage.residual:
            return older, older, None
        # What a ring no longer holds is anything here, and no new query sees it in full.
        before = residual.take(parts[-1], residual.row_of(storage, key_positions))
        newest = torch.cat([before, residual.in_basis(storage, x)], dim=2)
        return older, older, codec.turned(read, newest).to(dtype)

    k = forms(stored.keys, layout.keys, keys, new[0])
    v = None
    if not (isinstance(stored.values, InKeys) or isinstance(layout.values, InKeys)):
        v = forms(stored.values, layout.values, values, new[1])
    v = _values_of(layout, k, v)
    found = [(k[0], v[0], (False, False))]
    for k_full, v_full in _later_forms(layout):
        own_k, own_v = k[1 + k_full], v[1 + v_full]
        if own_k is not None and own_v is not None:
            found.append((own_k, own_v, (k_full, v_full)))
    ks, vs, pairs = zip(*found, strict=True)
    if len(pairs) == 1:  # as they are: a join of one would copy them
        return InForms(ks[0], vs[0], pairs)
    return InForms(torch.cat(ks, 2), torch.cat(vs, 2), pairs)


def may_see(layout: CacheLayout, form: Pair, place: Tensor, length: Tensor) -> Tensor:
    """Whether sequences of `length` read the tokens at `place` in this form; both broadcast against each other."""
    owner = _owner(layout)
    k_full, v_full = form
    k_now = place >= residual.in_full_from(layout.keys, length)
    v_now = place >= residual.in_full_from(owner, length)
    return (k_now if k_full else ~k_now) & (v_now if v_full else ~v_now)


def _joined(
    layout: CacheLayout, k: Forms, v: Forms | None, all_places: Tensor, last: Tensor, positions: Tensor
) -> Seen:
    """The pairs of forms in which any token is seen, one behind the other.

    all_places, last: positions of the tokens that are there settled, and of those that are also there in full
    """
    v = _values_of(layout, k, v)
    length = positions[:, :, None] + 1
    found = [(k[0], v[0], all_places, may_see(layout, (False, False), all_places[:, None], length))]
    for form in _later_forms(layout):
        own_k, own_v = k[1 + form[0]], v[1 + form[1]]
        if own_k is not None and own_v is not None:
            found.append((own_k, own_v, last, may_see(layout, form, last[:, None], length)))
    ks, vs, places, masks = zip(*found, strict=True)
    return torch.cat(ks, 2), torch.cat(vs, 2), torch.cat(places, 1), torch.cat(masks, 2)


def _values_of(layout: CacheLayout, k: Forms, v: Forms | None) -> Forms:
    """V's forms, or where the keys hold the values, the first channels of K's."""
    if not isinstance(layout.values, InKeys):
        assert v is not None
        return v
    channels = layout.values.channels
    return k[0][..., :channels], k[1][..., :channels], None if k[2] is None else k[2][..., :channels]


def _later_forms(layout: CacheLayout) -> list[Pair]:
    """The forms besides all settled in which any token may be seen."""
    owner = _owner(layout)
    pairs = [(True, True)]
    if not _never_later(owner, layout.keys):
        pairs.append((True, False))
    if not _never_later(layout.keys, owner):
        pairs.append((False, True))
    return pairs


def _never_later(one: Storage, other: Storage) -> bool:
    """Whether every token that `other` gives in full is in full in `one` as well, at any length."""
    if one == other:
        return True
    if not (one.unquantized and other.unquantized):
        return False
    if one.channelwise:
        return other.channelwise and one.residual == other.residual
    return other.residual <= one.residual


def _owner(layout: CacheLayout) -> Storage:
    """The storage of the values: the keys' where they hold them."""
    return layout.keys if isinstance(layout.values, InKeys) else layout.values
