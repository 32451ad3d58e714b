"""Holds the tensors of one `cached_attention` on generated kernels, and makes the launches of its roles.

`attention.py` puts them in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.kernels.shared.hadamard import hadamard
from kvcompile.kernels.shared.rope import rotate
from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton import packed
from kvcompile.kernels.triton.append.slots import evicts
from kvcompile.kernels.triton.attend import cascade, work_list
from kvcompile.kernels.triton.attend.combine import turns, weighed
from kvcompile.kernels.triton.device import device_of
from kvcompile.kernels.triton.host import ops_attend, ops_prefill, ops_write
from kvcompile.kernels.triton.host.ops_arguments import slots_of
from kvcompile.kernels.triton.host.site_kernels import Kernels
from kvcompile.kernels.triton.params import taken_as
from kvcompile.kernels.triton.retention import score
from kvcompile.kernels.triton.spec import ROWS
from kvcompile.kernels.triton.tile import cache_positions
from kvcompile.layouts import Paged, TopPages


@dataclass(frozen=True)
class Call:
    """The tensors of one call, as `cached_attention` has them.

    buffers: K's parts, then V's; none of attention over new tokens alone
    leaves:  those that the site's expression reads, in the order of their numbers, as kernels take them
    notes:   what is noted of slots or pages
    starts:  int64 [B + 1], of a packed call (`host/packed.py`): all new tokens stand in one row, [1, .., S, ..]
    longest: new tokens of one of its sequences, at most
    """

    kernels: Kernels
    q: Tensor
    k: Tensor
    v: Tensor
    buffers: list[Tensor]
    positions: Tensor
    rope: list[Tensor]
    sinks: Tensor | None
    bias: Tensor | None
    page_table: Tensor | None
    leaves: list[Tensor] = field(default_factory=list)
    notes: list[Tensor] = field(default_factory=list)
    starts: Tensor | None = None
    longest: int = 0

    @property
    def site(self) -> SiteSpec:
        return self.kernels.site

    @property
    def one(self) -> bool:
        """Whether there is one new token a sequence."""
        return self.q.shape[2] == 1 and self.starts is None

    @property
    def dialect(self) -> tuple[str, ...]:
        """The options of kernels over many tokens that say how these stand."""
        return () if self.starts is None else (packed.OPTION,)

    @property
    def whole(self) -> tuple[str, ...]:
        """The option of kernels that attend that says that a sequence's slots are a multiple of 16, where it is known.

        Of a size that a graph leaves open it is not.
        """
        layout = self.site.layout
        if not self.buffers or not layout.in_order or isinstance(layout.placement, Paged):
            return ()
        slots = slots_of(self.kernels.spec("decode"), self.buffers)
        return ("slots16",) if statically_known_true(slots % 16 == 0) else ()

    @property
    def rope_read(self) -> list[Tensor]:
        """Tables for keys that turn when they are read."""
        return [] if self.site.rotates_on_append else self.rope


class New(NamedTuple):
    """The new tokens as attention reads them.

    arrivals: int32 [B, Hq], zeros, of a step whose programs count themselves (`attend/work_list.py`)
    prefixes: int32 [B, 4], of a step whose sequences may have pages in common (`attend/cascade.py`)
    q is as it meets keys; k and v are as they are kept, where any stand in full. parts: what the storage makes of them,
    where they are in no slot yet, dense
    """

    q: Tensor
    k: Tensor
    v: Tensor
    parts: list[Tensor]
    arrivals: Tensor | None = None
    prefixes: Tensor | None = None


def most_read(site: SiteSpec, slots: Any, block_n: int) -> Any:
    """Slots in the tiles that a step reads of one sequence, at most; an integer, or a symbol of one as `slots` is.

    slots: of one sequence, at most; block_n: of a tile
    """
    layout = site.layout
    if layout.bounded:
        return layout.slots(None)
    windows = [window for window in (layout.retention.window, site.mask.window) if window is not None]
    if not layout.in_order or not windows:
        return slots
    # Tiles behind the window are skipped (`tile/block_bounds.py`); of the first and the last one slot may be read.
    return torch.sym_min(slots, layout.retention.sinks + min(windows) + 2 * block_n)


def joins(call: Call) -> bool:
    """Whether decode joins the parts of a head by itself."""
    made = call.kernels
    return call.one and work_list.joins(made.spec("decode"), weighed(made.spec("combine"))) and _listed(call)


def shares(call: Call) -> bool:
    """Whether decode reads once what sequences have in common."""
    return call.one and _listed(call) and cascade.shares(call.kernels.spec("decode"))


def _listed(call: Call) -> bool:
    return work_list.sharing(call.positions.shape[0]).listed


def decode(
    call: Call,
    new: New,
    slots: int,
    options: Sequence[str] = (),
    token: Tensor | None = None,
    place: Tensor | None = None,
    pages: Tensor | None = None,
) -> list[Tensor]:
    """The output of one query a sequence, [B, Hq, 1, Dv], and with option logits, the log-sum-exp, logits and levels.

    Of these three, none where the launch that joins the parts has added what they give to scores.

    new: the query, and what programs count themselves by, where they do
    slots: of one sequence, at most
    pages: those that are read, int32 [B, Hkv, K]; None: all slots are read
    """
    made, q = call.kernels, new.q
    own = made.config("decode")
    wide = ("q_fp32",) if q.dtype != made.dtype else ()
    few = ("chosen",) if pages is not None else ()
    shared = work_list.sharing(q.shape[0])
    alone = (work_list.JOINED,) if joins(call) else ()
    arrivals = new.arrivals
    if alone and arrivals is None:  # of a site whose tokens another has written
        arrivals = q.new_zeros(q.shape[:2], dtype=torch.int32)
    common = (cascade.CASCADE,) if new.prefixes is not None else ()
    added = (score.SCORED,) if alone and "logits" in options and score.adds(made.spec("decode")) else ()
    spec = made.spec("decode", (*options, *wide, *few, *call.whole, *shared.options, *alone, *added, *common))
    heads = q.shape[0] * work_list.heads(spec)
    most = most_read(call.site, slots, own.block_n)
    selection = call.site.layout.selection
    if pages is not None and isinstance(selection, TopPages):
        most = selection.tokens
    tiles, device = (most + own.block_n - 1) // own.block_n, device_of(q.device)
    programs = own.shares(device, heads * tiles) if shared.listed else own.splits(device, heads, tiles)
    found = ops_attend.decode(
        q,
        call.buffers,
        call.positions,
        call.bias,
        call.leaves,
        call.rope_read,
        call.page_table,
        token,
        place,
        pages,
        call.sinks if alone else None,
        arrivals,
        call.notes[1] if added else None,
        programs,
        own.num_warps,
        own.num_stages,
        spec.to_json(),
        new.prefixes,
    )
    if alone:
        return list(found)
    partial, sums, *found = found
    spans, logits = (found[0], found[1:]) if shared.listed else (None, found)
    joined = made.spec("combine", (*(["lse"] if logits else []), *shared.options, *common))
    if shared.listed:
        joined = replace(joined, block_m=spec.block_m)
    if common:
        joined = replace(joined, block_n=spec.block_n)
    last = made.config("combine")
    out = ops_attend.combine(
        partial,
        sums,
        spans,
        None if spans is None else call.positions,
        call.sinks,
        last.num_warps,
        last.num_stages,
        joined.to_json(),
        new.prefixes,
    )
    return [*out, *logits]


def settle(call: Call, slots: Tensor | None = None) -> None:
    """Of many new tokens those that stay to their slots, where a layout reuses slots.

    They are encoded once more from the vectors that came, and not from those that `staged` gives out: these are rounded
    to the model's dtype, and a rotated vector may round to another code from there.
    """
    made = call.kernels
    options = [*(["rope"] if call.site.rotates_on_append else []), *(["full"] if made.in_full else [])]
    append(call, options, slots)


def appended(call: Call) -> New:
    """The new tokens, after an append of them to their slots."""
    made = call.kernels
    options = list(made.transforms(one=call.one))
    if made.in_full:
        options += ["full"] if call.one else made.outs()
    if call.one:
        options.append("one")
    if joins(call):
        options.append("arrivals")
    if shares(call):
        options.append("prefixes")
    new = as_kept(call, options, append(call, options))
    groups(call, None if call.one else new.k, None if call.one else new.v, ("one",) if call.one else ())
    return new


def staged(call: Call) -> New:
    """The new tokens, and an array of them in the storage of the cache, whose calibrated scales it has.

    It has room for a multiple of 16 tokens.
    """
    made, layout = call.kernels, call.site.layout
    batch, heads, tokens, _ = call.k.shape
    slots = (tokens + 15) // 16 * 16
    if call.starts is not None:
        slots = packed.room(tokens, call.starts.shape[0] - 1)
    buffers, new = [], []
    keys = layout.num_key_parts
    for storage, dim, own in (
        (layout.keys, made.head_dim, call.buffers[:keys]),
        (layout.values, made.v_head_dim, call.buffers[keys:]),
    ):
        for part, kept in zip(storage.parts(dim, made.dtype), own, strict=False):
            if part.fixed:
                buffers.append(kept)
                continue
            dtype = taken_as(part.dtype, made.fp8)
            fresh = call.k.new_empty((batch, heads, slots, *part.shape), dtype=dtype)
            buffers.append(fresh)
            new.append(fresh)
    wanted = ["staged", *made.transforms(one=False), *(made.outs() if made.in_full else [])]
    outs = append(replace(call, buffers=buffers, page_table=None), wanted)
    return as_kept(call, wanted, outs)._replace(parts=new)


def as_kept(call: Call, options: Sequence[str], outs: Sequence[Tensor]) -> New:
    """The new tokens of an append with `options` that has given `outs`."""
    found = iter(outs)
    named = ((call.q, "q_out"), (call.k, "k_out"), (call.v, "v_out"))
    q, k, v = (next(found) if name in options else x for x, name in named)
    arrivals, prefixes = (next(found) if name in options else None for name in ("arrivals", "prefixes"))
    return New(q, k, v, [], arrivals, prefixes)


def append(call: Call, options: Sequence[str], slots: Tensor | None = None) -> list[Tensor]:
    """Launch an append with `options` (`append/append.py`); slots and result as `ops_write.append` has them."""
    in_keys = call.site.layout.in_keys
    turns_now = "rope" in options or "rope_q" in options
    spec = call.kernels.appends((*options, *call.dialect), call.positions.shape[0])
    outs: list[Tensor] = ops_write.append(
        call.q if "q_out" in options else None,
        call.k,
        None if in_keys else call.v,
        [*call.buffers, *(call.notes if evicts(spec) else [])],
        call.positions,
        call.rope if turns_now else [],
        slots,
        None if "only_full" in options else call.page_table,
        spec.to_json(),
        call.starts,
        call.longest,
    )
    return outs


def groups(call: Call, k: Tensor | None, v: Tensor | None, options: Sequence[str]) -> None:
    """Encode the groups of tokens that the new ones make whole."""
    for side in call.kernels.grouped:
        spec = call.kernels.spec("group", (side, *options)).to_json()
        ops_write.group(k if side == "keys" else v, call.buffers, call.positions, call.page_table, spec)


def prefill(
    call: Call,
    new: New,
    options: Sequence[str] = (),
    token: Tensor | None = None,
    place: Tensor | None = None,
    older: Sequence[Tensor | None] = (None, None),
) -> list[Tensor]:
    """The output of many queries, in the basis of the values, and with option lse, their log-sum-exp.

    older: with option continued, what option older gave (`decoded_once.py`)
    """
    made, site = call.kernels, call.site
    own = made.config("prefill", options)
    whole = () if ROWS in options else call.whole  # rows have no scales
    spec = made.spec("prefill", (*options, *(["new"] if new.parts else []), *call.dialect, *whole))
    in_full = made.in_full
    q_sinks = None
    if call.rope_read and cache_positions.two_queries(spec, many=True):
        budget = int(site.layout.retention.budget())
        q_sinks = rotate(call.q, call.positions.clamp(max=budget - 1), *call.rope, form=site.rotary)
    outs: list[Tensor] = ops_prefill.prefill(
        new.q,
        q_sinks,
        new.k if in_full else None,
        new.v if in_full else None,
        call.buffers,
        new.parts,
        call.positions,
        call.sinks,
        call.bias,
        call.leaves,
        call.rope_read,
        call.page_table,
        token,
        place,
        own.num_warps,
        own.num_stages,
        spec.to_json(),
        call.starts,
        call.longest,
        *older,
    )
    return outs


def transformed(call: Call) -> Tensor:
    """Queries as they meet the keys of another site's cache, which appends no queries of this one."""
    q, site = call.q, call.site
    if call.rope:
        q = rotate(q, query_places(call), *call.rope, form=site.rotary)
    return hadamard(q).to(q.dtype) if site.layout.keys.hadamard else q


def query_places(call: Call) -> Tensor:
    """The positions [B, S] at which queries turn."""
    retention = call.site.layout.retention
    if not retention.in_cache:
        return call.positions
    budget = int(retention.budget())
    if call.one:
        return call.positions.clamp(max=budget - 1)
    assert call.starts is None, "many tokens of a ring turn where they are staged"
    return call.positions - (call.positions[:, :1].clamp(min=0) - budget).clamp(min=0)


def turned_back(call: Call, out: Tensor) -> Tensor:
    """The result of prefill in the model's basis."""
    if not turns(call.kernels.spec("combine")):
        return out
    return hadamard(out)[..., : call.kernels.v_head_dim].to(out.dtype)
