"""Joins keys and values for many queries at once, of storages that keep the newest tokens unquantized.

A query at position i sees what a sequence of i + 1 tokens keeps: early queries see a token in full that late ones see
settled. So what stands between the two is there once for every form that it is seen in, and each query is allowed
one of them. The new tokens are not in the ring of the newest yet; in a layout that reuses slots, in no slot at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.reference import codec, residual
from kvcompile.kernels.reference.slots import Stored
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


def seen(x: AttendInputs, read: CacheLayout, stored: Stored) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What many queries attend to: what the slots hold, and their own K and V.

    Args:
        read: the layout in the basis that is read (`kv_sides.as_read`).
        stored: tokens are [B, T].

    Returns:
        keys [B, Hkv, N, D] and values [B, Hkv, N, Dv] in q's dtype, their positions [B, N] (-1: none) and whether a
        query may see them [B, S, N]; None: every query may, as far as positions go.
    """
    layout, dtype = x.spec.layout, x.q.dtype
    if not layout.in_order:
        return _in_a_ring(x, read, stored)
    if layout.residual:
        return _in_order(x, read, stored)
    keys = residual.decode_old(read.keys, stored.keys, stored.tokens, dtype)
    if isinstance(read.values, InKeys):
        return keys, keys[..., : read.values.channels], stored.tokens, None
    return keys, residual.decode_old(read.values, stored.values, stored.tokens, dtype), stored.tokens, None


def _in_order(x: AttendInputs, read: CacheLayout, stored: Stored) -> Seen:
    """As `seen`, where tokens stand in order from 0: the new ones are in the slots already, but not yet in the rings.

    The first of N are the settled ones.
    """
    layout, positions, tokens, dtype = x.spec.layout, x.positions, stored.tokens, x.q.dtype
    pairs = ((layout.keys, read.keys, x.k), (layout.values, read.values, x.v))
    # In the basis that is read.
    new_k, new_v = (codec.turned(kept, new).to(new.dtype) if kept != own else new for kept, own, new in pairs)
    place = torch.arange(read.residual + positions.shape[1], device=positions.device)
    last = x.seq_lens[:, None] - read.residual + place
    last = torch.where((last >= 0) & (last <= positions[:, -1:]), last, -1)
    at = last.clamp(0, tokens.shape[1] - 1)

    def forms(storage: Storage, parts: list[Tensor], new: Tensor) -> Forms:
        older = residual.decode_old(storage, parts, tokens, dtype)
        if not storage.residual:
            return older, residual.take(older, at), None
        newest = residual.in_full(storage, new, parts[-1], positions, last)
        return older, residual.take(older, at), codec.turned(storage, newest).to(dtype)

    k = forms(read.keys, stored.keys, new_k)
    v = None if isinstance(read.values, InKeys) else forms(read.values, stored.values, new_v)
    return _joined(read, k, v, tokens, last, positions)


def _in_a_ring(
    x: AttendInputs, read: CacheLayout, stored: Stored
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As `seen`, of slots in any order that hold nothing of the new tokens yet: every token in every form."""
    found = of_slots(x, read, stored)
    places = torch.cat([stored.tokens, x.positions], dim=1)
    if len(found.forms) == 1:
        return found.keys, found.values, places, None
    length = x.positions[:, :, None] + 1
    allowed = [may_see(read, form, places[:, None], length) for form in found.forms]
    return found.keys, found.values, places.repeat(1, len(found.forms)), torch.cat(allowed, 2)


def of_slots(x: AttendInputs, read: CacheLayout, stored: Stored) -> InForms:
    """The tokens in slots, [B, T] or [B, Hkv or 1, T], and the new ones, in each form that matters.

    Slots are in any order and hold nothing of the new tokens yet. read: as for `seen`.
    """
    layout, dtype = x.spec.layout, x.q.dtype

    def forms(storage: Storage, own: Storage, parts: list[Tensor], new: Tensor) -> Forms:
        old = residual.decode_old(own, parts, stored.tokens, dtype)
        older = torch.cat([old, residual.as_old(storage, own, new, parts, x.positions)], dim=2)
        if not storage.residual:
            return older, older, None
        # What a ring no longer holds is anything here, and no new query sees it in full.
        before = residual.take(parts[-1], residual.row_of(storage, stored.tokens))
        newest = torch.cat([before, residual.in_basis(storage, new)], dim=2)
        return older, older, codec.turned(own, newest).to(dtype)

    k = forms(layout.keys, read.keys, stored.keys, x.k)
    v = None
    if not (isinstance(layout.values, InKeys) or isinstance(read.values, InKeys)):
        v = forms(layout.values, read.values, stored.values, x.v)
    v = _values_of(read, k, v)
    found = [(k[0], v[0], (False, False))]
    for k_full, v_full in _later_forms(read):
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
