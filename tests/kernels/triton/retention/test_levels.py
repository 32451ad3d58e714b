"""Logits that a step leaves for scores: in halves, less the level of their tile, whatever all have in common."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from kvcompile.kernels.triton.retention import score as score_role
from kvcompile.layouts import CacheLayout, Slots
from tests.kernels.triton.attend.test_attend import at_the_end, decoded
from tests.support.triton_attention import H2O, Case
from tests.support.triton_write import kernels_folder  # noqa: F401  (a fixture)


def test_what_all_logits_have_in_common_takes_no_bits() -> None:
    """Of 115 in all of them, a half alone would be off by 0.03; of many tokens and of few, in tiles of two programs."""
    layout = CacheLayout(placement=Slots(), retention=replace(H2O, heavy=30))
    _, same, call = at_the_end(Case(layout, (4, 2), dtype=torch.float16, chunks=(24, 15, 1)), (0, 35))
    q = call.q / 4
    q[..., 0] = 8.0
    call.buffers[0][..., 0] = 40.0
    call = replace(call, q=q, buffers=call.buffers[:-2])
    *_, logits, levels = decoded(call, 2, 16, "logits")
    assert logits.dtype == torch.float16 and levels.dtype == torch.float32
    found = logits.double() + levels.double().repeat_interleave(16, -1)[..., : logits.shape[-1]]
    rows = q[:, :, 0].double().unflatten(1, (2, 2))
    keys = call.buffers[0].double()
    exact = torch.einsum("bhgd,bhtd->bhgt", rows, keys) * call.site.sm_scale / math.log(2)
    there = (same.held[-1] >= 0)[:, :, None].expand_as(exact)
    assert exact[there].min() > 90
    spread = exact[there].max() - exact[there].min()
    budget = float(spread) * 2.0**-11  # half a unit in the last place, and products in float32
    off = float((found - exact)[there].abs().max())
    assert off < budget < 0.01, (off, budget)


def test_tiles_of_score_leave_room_for_other_programs() -> None:
    assert [score_role.block_n(slots) for slots in (1, 100, 1024, 100_000)] == [1, 128, 1024, 1024]
