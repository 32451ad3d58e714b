"""Makes the launches that retention by scores needs besides (`layouts/retention/scored.py`).

| new tokens | launches |
|---|---|
| one | append, which finds the slot, decode with logits, (combine with the log-sum-exp), score |
| many | append to an array of the new tokens, prefill over slots and array, columns, append of those that stay |

Which tokens stay after many have come is one sort per head, by PyTorch: of the slots those that stay keep theirs, and
new ones take what the others give up. The notes of a call are the token of each slot, and its score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvcompile.kernels.shared.retention import held_in, ranks
from kvcompile.kernels.triton.attend.context import Attend
from kvcompile.kernels.triton.host import ops_prefill, ops_write
from kvcompile.kernels.triton.host.call import Call, New
from kvcompile.kernels.triton.host.retention.hooks import Hooks, Standing
from kvcompile.kernels.triton.retention import score as score_role
from kvcompile.kernels.triton.retention.select import staying
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.layouts import Scored


class ByScore(Hooks):
    """The tokens with the highest scores stay, which attention has given them."""

    many = ("lse",)

    def tracked(self, call: Call) -> tuple[str, ...]:
        return ("logits",) if _retention(call).score != "vote" else ()

    def standing(self, call: Call) -> Standing:
        made = call.kernels
        if call.one:
            own = made.spec("decode", self.tracked(call))
            return noted(own, call.notes[0], lambda: call.positions[:, -1] + 1)
        return noted(made.spec("prefill", ("new",)), call.notes[0], lambda: _before(call)[:, 0])

    def note(self, call: Call, found: Sequence[Tensor]) -> None:
        if found:
            lse, logits, levels = found
            slots = score_role.block_n(_retention(call).tokens)
            spec = replace(
                call.kernels.spec("score"), block_n=slots, block_m=call.kernels.spec("decode").block_n
            )
            ops_write.score(call.notes[1], logits, levels, lse, call.positions, spec.to_json())

    def keep(self, call: Call, new: New, standing: Standing, found: Sequence[Tensor]) -> Tensor:
        made, (token, score), (lse,) = call.kernels, call.notes, found
        own = made.config("columns")
        gained = ops_prefill.columns(
            new.q,
            new.k if made.in_full else None,
            lse,
            call.buffers,
            new.parts,
            call.positions,
            call.bias,
            call.leaves,
            call.rope_read,
            call.page_table,
            *standing,
            own.num_warps,
            own.num_stages,
            made.spec("columns").to_json(),
            made.spec("columns", ("new",)).to_json(),
        )
        slots, scores, held = staying(token, score, gained, call.positions, _before(call), _retention(call))
        token.copy_(held)
        score.copy_(scores)
        return slots


def noted(spec: KernelSpec, token: Tensor, length: Callable[[], Tensor]) -> Standing:
    """Token and place of each slot, int32 [B, Hs, N], where the kernel of `spec` (decode, prefill) asks for them.

    length: makes the tokens of the sequences that the slots hold, [B]; outside a compiled graph it is a launch
    """
    attend = Attend(spec)
    place = ranks(held_in(token, length())).to(torch.int32) if attend.needs_place else None
    return (token if attend.needs_token else None), place


def _before(call: Call) -> Tensor:
    """How many tokens each sequence had before the call, [B, 1]."""
    return call.positions[:, :1].clamp(min=0)


def _retention(call: Call) -> Scored:
    retention = call.site.layout.retention
    assert isinstance(retention, Scored)
    return retention
