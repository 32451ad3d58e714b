"""Append and attend by generated kernels: what `kvcompile::cached_attention` promises, as launches of roles.

| new tokens | layout | launches |
|---|---|---|
| one | any | append, (group), decode, combine |
| many | slots are never reused | append, (group), prefill, (append of rows in full) |
| many | a ring | append to an array of the new tokens, prefill over slots and array, append |

Retention by scores is in `attention_scored.py`, what a selection of pages adds in `attention_selected.py`. Shapes and
meaning are those of `reference.cached_attention`, the oracle of all of this: only the order of sums is another, and
products are in the types of `tile/dot_dtype.py`.

What is launched depends on shapes alone: on a GPU nothing asks the device how long a sequence is.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvcompile.expression import ScoreMod
from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.triton.host import attention_scored, attention_selected
from kvcompile.kernels.triton.host.call import (
    Call,
    append,
    appended,
    decode,
    groups,
    prefill,
    settle,
    staged,
    transformed,
    turned_back,
)
from kvcompile.kernels.triton.host.site_kernels import kernels_of
from kvcompile.kernels.triton.tile import expression
from kvcompile.layouts import InKeys


def cached_attention(x: AttendInputs) -> Tensor:
    """Append k, v to the buffers (in place) and attend; returns [B, Hq, S, Dv] in q's dtype.

    `seq_lens` says no more than positions do. A site whose scores have an expression that no kernel computes is refused
    when a plan is made (`supports.py`).
    """
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
    call = Call(made, q, k, v, x.buffers, x.positions, rope, sinks, bias, x.page_table, read)
    if site.layout.retention.by_score:
        return attention_scored.one(call) if q.shape[2] == 1 else attention_scored.many(call)
    pages = None
    if site.layout.selection.selects:
        call, pages = attention_selected.selected(call, x.span)
    return _one(call, x.span, pages) if q.shape[2] == 1 else _many(call)


def _one(call: Call, span: int, pages: Tensor | None) -> Tensor:
    """One new token a sequence: it is appended, and attends to all slots, or to those of `pages`."""
    made, q = call.kernels, call.q
    if call.site.share in ("none", "first"):
        options = ["one", *made.transforms(one=True), *(["full"] if made.in_full else [])]
        outs = append(call, options)
        q = outs[0] if outs else q
        groups(call, None, None, ("one",))
    else:
        q = transformed(call)
    return decode(call, q, span, pages=pages)[0]


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
            append(replace(call, k=k, v=v), ["only_full", "in_basis"])
        return turned_back(call, out)
    q, k, v, new = staged(call)
    out = prefill(call, q, k, v, new)[0]
    if last:
        settle(call)
    return turned_back(call, out)


def _read(mod: ScoreMod | None, leaves: list[Tensor]) -> list[Tensor]:
    """The leaf tensors that kernels read, in the order of their numbers, dense; truth values as bytes."""
    if mod is None:
        return []
    dense = [leaves[number].contiguous() for number in sorted(expression.tensors(mod).found)]
    return [x.view(torch.uint8) if x.dtype is torch.bool else x for x in dense]


def _dense(x: Tensor) -> Tensor:
    """x with a dense last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()
