"""Append and attend by generated kernels: what `kvcompile::cached_attention` promises, as launches of roles.

| new tokens | layout | launches |
|---|---|---|
| one | any | append, (group), decode, combine |
| many | slots are never reused | append, (group), prefill, (append of rows in full) |
| many | a ring | append to an array of the new tokens, prefill over slots and array, append |

Retention by scores is in `attention_scored.py`. Shapes and meaning are those of `reference.cached_attention`, the
oracle of all of this: only the order of sums is another, and products are in the types of `dots.py`.

What is launched depends on shapes alone: on a GPU nothing asks the device how long a sequence is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from kvcompile.kernels.hadamard import hadamard
from kvcompile.kernels.rope import rotate
from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton import append as append_role
from kvcompile.kernels.triton import ops_attend, ops_write, places
from kvcompile.kernels.triton.attend import row_tiles
from kvcompile.kernels.triton.combine import turns
from kvcompile.kernels.triton.config import Config, case_of, config
from kvcompile.kernels.triton.device import Fp8Form, device_of, fp8_of, interpreted
from kvcompile.kernels.triton.params import taken_as
from kvcompile.kernels.triton.spec import KernelSpec, Role
from kvcompile.layouts import InKeys, PerChannel, Rotated, Scored
from kvcompile.layouts.storage import as_kept


@dataclass(frozen=True)
class Kernels:
    """The specs of a site's kernels on one device, by role."""

    site: SiteSpec
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: torch.device
    one_bias: bool = False

    def config(self, role: Role) -> Config:
        dims = (self.num_qo_heads, self.num_kv_heads, self.head_dim, self.v_head_dim)
        case = case_of(role, self.site, *dims, self.dtype)
        return config(case, self.site, device_of(self.device))

    def spec(self, role: Role, options: Sequence[str] = ()) -> KernelSpec:
        """The spec of a role; options that the device decides are added."""
        own = self.config(role) if role in ("decode", "prefill", "columns") else Config()
        found = [*options, *(["interpreted"] if interpreted() else [])]
        if role in ("decode", "prefill", "columns") and self.one_bias:
            found.append("one_bias")
        return KernelSpec(
            role,
            self.site,
            self.num_qo_heads,
            self.num_kv_heads,
            self.head_dim,
            self.v_head_dim,
            str(self.dtype).removeprefix("torch."),
            own.block_m,
            own.block_n,
            fp8=self.fp8,
            options=tuple(sorted(found)),
        )

    def appends(self, options: Sequence[str]) -> str:
        """The spec of an append, as a text."""
        block = append_role.block_n(self.head_dim, self.v_head_dim, "one" in options)
        return replace(self.spec("append", options), block_n=block).to_json()

    @property
    def fp8(self) -> Fp8Form:
        return fp8_of(device_of(self.device).arch)

    def transforms(self, one: bool) -> tuple[str, ...]:
        """Options of append that say what happens to queries, `one` a sequence or many, before they meet keys."""
        site, found = self.site, []
        if site.rotates_on_append:
            found.append("rope")
        if site.layout.rotates_on_read and site.rotary:
            found.append("rope_q")
            if site.layout.retention.in_cache:
                found.append("capped" if one else "based")
        if found or isinstance(site.layout.keys, Rotated):
            found.append("q_out")
        return tuple(found)

    @property
    def in_full(self) -> bool:
        """Whether any vectors stand in full beside their slots."""
        return self.site.layout.in_full

    def outs(self) -> tuple[str, ...]:
        """Options of append for k and v as they are kept, where that is not as they come."""
        found = ["k_out"] if isinstance(self.site.layout.keys, Rotated) or self.site.rotates_on_append else []
        return (*found, *(["v_out"] if isinstance(self.site.layout.values, Rotated) else []))

    @property
    def grouped(self) -> tuple[str, ...]:
        """The sides whose tokens share scales."""
        found = (("keys", self.site.layout.keys), ("values", self.site.layout.values))
        return tuple(name for name, storage in found if isinstance(as_kept(storage), PerChannel))


@lru_cache(maxsize=1024)
def kernels_of(
    site: SiteSpec,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    one_bias: bool,
) -> Kernels:
    return Kernels(site, *heads, *dims, dtype, device, one_bias)


@dataclass(frozen=True)
class Call:
    """The tensors of one call, as `cached_attention` has them."""

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

    @property
    def site(self) -> SiteSpec:
        return self.kernels.site

    @property
    def rope_read(self) -> list[Tensor]:
        """Tables for keys that turn when they are read."""
        return [] if self.site.rotates_on_append else self.rope


def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    buffers: list[Tensor],
    positions: Tensor,
    seq_lens: Tensor,
    rope: list[Tensor],
    span: int,
    site: SiteSpec,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    dynamic: Tensor | None = None,
    page_table: Tensor | None = None,
) -> Tensor:
    """Append k, v to `buffers` (in place) and attend; returns [B, Hq, S, Dv] in q's dtype.

    Args: as `reference.cached_attention`. `seq_lens` says no more than positions do. `dynamic` is refused when a plan
        is made (`supports.py`).
    """
    if dynamic is not None:
        raise TypeError(
            "a mask that is computed from activations has no kernels: the plan should have refused it"
        )
    site = replace(site, kernels="triton")
    v_dim = site.layout.values.channels if isinstance(site.layout.values, InKeys) else v.shape[3]
    one_bias = bias is not None and bias.shape[0] == 1
    made = kernels_of(site, (q.shape[1], k.shape[1]), (q.shape[3], v_dim), q.dtype, q.device, one_bias)
    q, k, v = (_dense(x) for x in (q, k, v))
    rope = [table.float().contiguous() for table in rope]
    sinks = None if sinks is None else sinks.float()
    bias = None if bias is None else bias.float().contiguous()
    call = Call(made, q, k, v, buffers, positions, rope, sinks, bias, page_table)
    if isinstance(site.layout.retention, Scored):
        from kvcompile.kernels.triton import attention_scored  # it calls back here

        return attention_scored.one(call) if q.shape[2] == 1 else attention_scored.many(call)
    return _one(call, span) if q.shape[2] == 1 else _many(call)


def _one(call: Call, span: int) -> Tensor:
    """One new token a sequence: it is appended, and attends to all slots."""
    made, q = call.kernels, call.q
    if call.site.share in ("none", "first"):
        options = ["one", *made.transforms(one=True), *(["full"] if made.in_full else [])]
        outs = append(call, made.appends(options))
        q = outs[0] if outs else q
        groups(call, None, None, ("one",))
    else:
        q = transformed(call)
    return decode(call, q, span)[0]


def decode(
    call: Call,
    q: Tensor,
    slots: int,
    options: Sequence[str] = (),
    token: Tensor | None = None,
    place: Tensor | None = None,
) -> list[Tensor]:
    """The output of one query a sequence, [B, Hq, 1, Dv], and with option logits, the logits and their log-sum-exp.

    slots: of one sequence, at most
    """
    made = call.kernels
    own = made.config("decode")
    wide = ("q_fp32",) if q.dtype != made.dtype else ()
    spec = made.spec("decode", (*options, *wide))
    programs = q.shape[0] * made.num_kv_heads * row_tiles(spec)
    most = slots if not call.site.layout.bounded else call.site.layout.slots(None)
    splits = own.splits(device_of(q.device), programs, (most + own.block_n - 1) // own.block_n)
    partial, sums, *logits = ops_attend.decode(
        q,
        call.buffers,
        call.positions,
        call.bias,
        call.rope_read,
        call.page_table,
        token,
        place,
        splits,
        own.num_warps,
        own.num_stages,
        spec.to_json(),
    )
    joined = made.spec("combine", ("lse",) if logits else ())
    out = ops_attend.combine(partial, sums, call.sinks, joined.to_json())
    return [*out, *logits]


def _many(call: Call) -> Tensor:
    """Many new tokens a sequence."""
    made, layout = call.kernels, call.site.layout
    first, last = call.site.share in ("none", "first"), call.site.share in ("none", "last")
    if layout.in_order:
        q, k, v = (call.q, call.k, call.v)
        if first or made.in_full:
            options = [*made.transforms(one=False), *(made.outs() if made.in_full else [])]
            # Sites that share the cache do what comes before attention once, and each its own queries.
            q, k, v = appended(call, options, call.buffers if first else None)
        else:
            q = transformed(call)
        if first:
            groups(call, k, v, ())
        out = prefill(call, q, k, v, [])[0]
        if last and made.in_full:
            append(replace(call, k=k, v=v), made.appends(["only_full", "in_basis"]))
        return turned_back(call, out)
    q, k, v, new = staged(call)
    out = prefill(call, q, k, v, new)[0]
    if last:
        settle(call)
    return turned_back(call, out)


def settle(call: Call, slots: Tensor | None = None) -> None:
    """Of many new tokens those that stay to their slots, where a layout reuses slots.

    They are encoded once more from the vectors that came, and not from those that `staged` gives out: these are rounded
    to the model's dtype, and a rotated vector may round to another code from there.
    """
    made = call.kernels
    options = [*(["rope"] if call.site.rotates_on_append else []), *(["full"] if made.in_full else [])]
    append(call, made.appends(options), slots)


def appended(
    call: Call, options: Sequence[str], buffers: list[Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as they meet and are kept, after an append of them to `buffers`, or to an array that is dropped."""
    made = call.kernels
    if buffers is None:
        return staged(call)[:3]
    outs = iter(append(replace(call, buffers=buffers), made.appends(options)))
    named = ((call.q, "q_out"), (call.k, "k_out"), (call.v, "v_out"))
    q, k, v = (next(outs) if name in options else x for x, name in named)
    return q, k, v


def staged(call: Call) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The new tokens as an array of the same storage, dense: q, k, v, and its parts.

    q is as it meets keys; k and v are as they are kept, where any stand in full. Calibrated scales are the cache's own.
    """
    made, layout = call.kernels, call.site.layout
    batch, heads, tokens, _ = call.k.shape
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
            fresh = call.k.new_empty((batch, heads, tokens, *part.shape), dtype=dtype)
            buffers.append(fresh)
            new.append(fresh)
    wanted = ["staged", *made.transforms(one=False), *(made.outs() if made.in_full else [])]
    outs = iter(append(replace(call, buffers=buffers, page_table=None), made.appends(wanted)))
    named = ((call.q, "q_out"), (call.k, "k_out"), (call.v, "v_out"))
    q, k, v = (next(outs) if name in wanted else x for x, name in named)
    return q, k, v, new


def append(call: Call, spec: str, slots: Tensor | None = None) -> list[Tensor]:
    """Launch an append; see `ops_write.append`."""
    options = KernelSpec.from_json(spec).options
    in_keys = isinstance(call.site.layout.values, InKeys)
    turns_now = "rope" in options or "rope_q" in options
    outs: list[Tensor] = ops_write.append(
        call.q if "q_out" in options else None,
        call.k,
        None if in_keys else call.v,
        call.buffers,
        call.positions,
        call.rope if turns_now else [],
        slots,
        None if "only_full" in options else call.page_table,
        spec,
    )
    return outs


def groups(call: Call, k: Tensor | None, v: Tensor | None, options: Sequence[str]) -> None:
    """Encode the groups of tokens that the new ones make whole."""
    for side in call.kernels.grouped:
        spec = call.kernels.spec("group", (side, *options)).to_json()
        ops_write.group(k if side == "keys" else v, call.buffers, call.positions, call.page_table, spec)


def prefill(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    new: list[Tensor],
    options: Sequence[str] = (),
    token: Tensor | None = None,
    place: Tensor | None = None,
) -> list[Tensor]:
    """The output of many queries, in the basis of the values, and with option lse, their log-sum-exp."""
    made, site = call.kernels, call.site
    own = made.config("prefill")
    spec = made.spec("prefill", (*options, *(["new"] if new else [])))
    in_full = made.in_full
    q_sinks = None
    if call.rope_read and places.two_queries(spec, many=True):
        budget = int(site.layout.retention.budget())
        q_sinks = rotate(call.q, call.positions.clamp(max=budget - 1), *call.rope, form=site.rotary)
    outs: list[Tensor] = ops_attend.prefill(
        q,
        q_sinks,
        k if in_full else None,
        v if in_full else None,
        call.buffers,
        new,
        call.positions,
        call.sinks,
        call.bias,
        call.rope_read,
        call.page_table,
        token,
        place,
        own.num_warps,
        own.num_stages,
        spec.to_json(),
    )
    return outs


def transformed(call: Call) -> Tensor:
    """Queries as they meet the keys of another site's cache, which appends no queries of this one."""
    q, site = call.q, call.site
    if call.rope:
        q = rotate(q, query_places(call), *call.rope, form=site.rotary)
    return hadamard(q).to(q.dtype) if isinstance(site.layout.keys, Rotated) else q


def query_places(call: Call) -> Tensor:
    """The positions [B, S] at which queries turn."""
    retention = call.site.layout.retention
    if not retention.in_cache:
        return call.positions
    budget = int(retention.budget())
    if call.positions.shape[1] == 1:
        return call.positions.clamp(max=budget - 1)
    return call.positions - (call.positions[:, :1].clamp(min=0) - budget).clamp(min=0)


def turned_back(call: Call, out: Tensor) -> Tensor:
    """The result of prefill in the model's basis."""
    if not turns(call.kernels.spec("combine")):
        return out
    return hadamard(out)[..., : call.kernels.v_head_dim].to(out.dtype)


def _dense(x: Tensor) -> Tensor:
    """x with a dense last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()
