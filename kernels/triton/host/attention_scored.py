"""Append and attend by generated kernels where scores say which tokens stay (`layouts/retention/scored.py`).

| new tokens | launches |
|---|---|
| one | evict, append to that slot, decode with logits, combine with the log-sum-exp, score |
| many | append to an array of the new tokens, prefill over slots and array, columns, append of those that stay |

Which tokens stay after many have come is one sort per head, by PyTorch: of the slots those that stay keep theirs, and
new ones take what the others give up.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvcompile.kernels.shared.retention import held_in, ranks
from kvcompile.kernels.triton.attend.context import Attend
from kvcompile.kernels.triton.host import ops_attend, ops_write
from kvcompile.kernels.triton.host.call import Call, append, decode, prefill, settle, staged, turned_back
from kvcompile.kernels.triton.retention import evict as evict_role
from kvcompile.kernels.triton.retention.select import staying
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.layouts import Scored


def _state(call: Call) -> tuple[Call, Scored, Tensor, Tensor]:
    """The call without the two buffers that say which token a slot holds, and its score; and those."""
    retention = call.site.layout.retention
    assert isinstance(retention, Scored)
    return replace(call, buffers=call.buffers[:-2]), retention, call.buffers[-2], call.buffers[-1]


def one(call: Call) -> Tensor:
    """One new token a sequence: it takes a slot, attends to all, and leaves its probabilities there."""
    call, retention, token, score = _state(call)
    made = call.kernels
    spec = made.spec("evict")
    spec = replace(spec, block_n=evict_role.block_n(retention.tokens))
    slots = ops_write.evict(token, score, call.positions, spec.to_json())
    options = ["one", *made.transforms(one=True), *(["full"] if made.in_full else [])]
    outs = append(call, options, slots)
    q = outs[0] if outs else call.q
    tracked = ("logits",) if retention.score != "vote" else ()
    tokens, place = noted(made.spec("decode", tracked), token, call.positions[:, -1] + 1)
    out, *rest = decode(call, q, retention.tokens, tracked, tokens, place)
    if rest:
        lse, logits = rest
        own = made.spec("score")
        own = replace(own, block_n=evict_role.block_n(retention.tokens))
        ops_write.score(score, logits, lse, call.positions, own.to_json())
    return out


def many(call: Call) -> Tensor:
    """Many new tokens a sequence: they attend to the slots and to themselves, and then some of all stay."""
    call, retention, token, score = _state(call)
    made = call.kernels
    q, k, v, new = staged(call)
    before = call.positions[:, :1].clamp(min=0)
    tokens, place = noted(made.spec("prefill", ("new",)), token, before[:, 0])
    out, lse = prefill(call, q, k, v, new, ("lse",), tokens, place)
    own = made.config("columns")
    gained = ops_attend.columns(
        q,
        k if made.in_full else None,
        lse,
        call.buffers,
        new,
        call.positions,
        call.bias,
        call.leaves,
        call.rope_read,
        call.page_table,
        tokens,
        place,
        own.num_warps,
        own.num_stages,
        made.spec("columns").to_json(),
        made.spec("columns", ("new",)).to_json(),
    )
    slots, scores, held = staying(token, score, gained, call.positions, before, retention)
    settle(call, slots)
    token.copy_(held)
    score.copy_(scores)
    return turned_back(call, out)


def noted(spec: KernelSpec, token: Tensor, length: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Token and place of each slot, int32 [B, Hs, N], where the kernel of `spec` (decode, prefill) asks for them.

    length: tokens of the sequences that the slots hold, [B]
    """
    attend = Attend(spec)
    place = ranks(held_in(token, length)).to(torch.int32) if attend.needs_place else None
    return (token if attend.needs_token else None), place
