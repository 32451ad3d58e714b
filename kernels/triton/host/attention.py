"""Appends and attends by generated kernels: launches of roles do what `kvcompile::cached_attention` promises.

A step is the same for every layout:  place -> write -> select -> attend -> note.

| new tokens | layout | launches |
|---|---|---|
| one | any | append, (group), decode, combine |
| many | slots are never reused | append, (group), prefill, (append of rows in full) |
| many | of these, codes of single tokens | append, decoded_rows, prefill twice (`decoded_once.py`) |
| many | a ring | append to an array of the new tokens, prefill over slots and array, append |

The role that writes new tokens also places them: it turns queries and keys. What a retention by scores launches besides
is in `retention/by_score.py`, what a selection of pages adds in `page_selection.py`. Shapes and meaning are those of
`reference.cached_attention`, the oracle of all of this: only the order of sums is another, and products are in the
types of `tile/dot_dtype.py`.

What is launched depends on shapes alone: on a GPU nothing asks the device how long a sequence is.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvcompile.expression import ScoreMod
from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.triton.host import decoded_once, over_rows
from kvcompile.kernels.triton.host.call import (
    Call,
    New,
    append,
    appended,
    decode,
    prefill,
    settle,
    staged,
    transformed,
    turned_back,
)
from kvcompile.kernels.triton.host.retention import retained
from kvcompile.kernels.triton.host.selections import SELECT
from kvcompile.kernels.triton.host.site_kernels import kernels_of
from kvcompile.kernels.triton.tile import expression
from kvcompile.layouts import InKeys


def cached_attention(x: AttendInputs) -> Tensor:
    """Append k, v to the buffers (in place) and attend; returns [B, Hq, S, Dv] in q's dtype.

    `seq_lens` says no more than positions do. A site whose scores have an expression that no kernel computes is refused
    when a plan is made (`supports.py`).
    """
    call = call_of(x)
    return _attend_one(call, x) if call.one else attend_many(call, x)


def _attend_one(call: Call, x: AttendInputs) -> Tensor:
    """One new token a sequence."""
    layout, retention = x.spec.layout, retained(x.spec.layout.retention)
    new = _written(call)
    pages = SELECT[layout.selection.kind](call, x.span) if layout.selection.selects else None
    standing = retention.standing(call)
    out, *found = decode(call, new, x.span, retention.tracked(call), *standing, pages)
    retention.note(call, found)
    return out


def attend_many(call: Call, x: AttendInputs) -> Tensor:
    """Many new tokens a sequence; `call` is that of `x`, or of its tokens in one row (`host/packed.py`)."""
    if decoded_once.is_for(call):
        return decoded_once.attend(call, x.span)
    layout, retention = x.spec.layout, retained(x.spec.layout.retention)
    first = layout.in_order
    new = _written(call) if first else staged(call)
    if layout.selection.selects:
        SELECT[layout.selection.kind](call, x.span)
    standing = retention.standing(call)
    if first:
        out, *found = over_rows.attend(call, new, x.span)
    else:
        out, *found = prefill(call, new, retention.many, *standing)
    if x.spec.share in ("none", "last"):
        if not first:
            settle(call, retention.keep(call, new, standing, found))
        elif call.kernels.in_full:
            append(replace(call, k=new.k, v=new.v), ["only_full", "in_basis"])
    return turned_back(call, out)


def _written(call: Call) -> New:
    """The new tokens, written to their slots by the first of the sites that share a cache; each turns its queries."""
    if call.site.share in ("none", "first"):
        return appended(call)
    if not call.one and call.kernels.in_full:
        return staged(call)._replace(parts=[])
    return New(transformed(call), call.k, call.v, [])


def call_of(x: AttendInputs) -> Call:
    """The call as kernels take its tensors."""
    site, q, k, v, bias = x.spec, x.q, x.k, x.v, x.bias
    if site.score.mod is not None and (problem := expression.refusal(site.score.mod)):
        raise TypeError(f"there are no kernels for this site, and its plan should have said so: {problem}")
    site = replace(site, kernels="triton")
    v_dim = site.layout.values.channels if isinstance(site.layout.values, InKeys) else v.shape[3]
    one_bias = bias is not None and bias.shape[0] == 1
    made = kernels_of(site, (q.shape[1], k.shape[1]), (q.shape[3], v_dim), q.dtype, q.device, one_bias)
    q, k, v = (_dense(vectors) for vectors in (q, k, v))
    rope = [table.float().contiguous() for table in x.rope]
    sinks = None if x.sinks is None else x.sinks.float()
    bias = None if bias is None else bias.float().contiguous()
    read = _read(site.score.mod, x.leaves or [])
    return Call(made, q, k, v, x.parts, x.positions, rope, sinks, bias, x.page_table, read, x.notes)


def _read(mod: ScoreMod | None, leaves: list[Tensor]) -> list[Tensor]:
    """The leaf tensors that kernels read, in the order of their numbers, dense; truth values as bytes."""
    if mod is None:
        return []
    dense = [leaves[number].contiguous() for number in sorted(expression.tensors(mod).found)]
    return [x.view(torch.uint8) if x.dtype is torch.bool else x for x in dense]


def _dense(x: Tensor) -> Tensor:
    """x with a dense last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()
