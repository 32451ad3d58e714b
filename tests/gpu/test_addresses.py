"""Caches of more than 2^31 elements: offsets are 64-bit, in what is read and in what is written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.host.attention import cached_attention
from kvcompile.layouts import CacheLayout, Paged
from kvcompile.specs import MaskSpec
from tests.support.budget import within

pytestmark = pytest.mark.gpu
HEADS, DIM, WINDOW = 8, 128, 512
BEYOND = 2**31 + 2**24  # elements of a buffer


def check(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    """One query [1, Hq, 1, D] over the keys that it sees [1, Hkv, W, D], against PyTorch in float64."""
    attend = torch.nn.functional.scaled_dot_product_attention
    own, wide = (
        attend(*(x.to(dtype) for x in (q, k, v)), scale=DIM**-0.5, enable_gqa=True)
        for dtype in (out.dtype, torch.float64)
    )
    within(out, own, wide, out.dtype)


def room(device: torch.device, size: int) -> None:
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < size:
        pytest.skip(f"needs {size >> 30} GiB of free memory")


def test_dense_slots(device: torch.device, elements: int = BEYOND) -> None:
    """The last sequence's last slots stand beyond 2^31 elements."""
    room(device, 5 * elements)
    slots = elements // (2 * HEADS * DIM)
    buffers = [torch.zeros(2, HEADS, slots, DIM, dtype=torch.bfloat16, device=device) for _ in range(2)]
    for buffer in buffers:
        buffer[:, :, slots - WINDOW :].normal_()
    q = torch.randn(2, 2 * HEADS, 1, DIM, device=device).bfloat16()
    k, v = torch.randn(2, 2, HEADS, 1, DIM, device=device).bfloat16()
    site = SiteSpec(CacheLayout(), DIM**-0.5, MaskSpec("sliding", WINDOW), kernels="triton")
    positions = torch.full((2, 1), slots - 1, device=device)
    out = cached_attention(AttendInputs(q, k, v, buffers, positions, positions[:, 0], [], slots, site))
    assert torch.equal(buffers[0][:, :, -1:], k) and torch.equal(buffers[1][:, :, -1:], v)
    assert not buffers[0][:, :, : slots - WINDOW].any()
    for row in range(2):
        own = [buffer[row : row + 1, :, slots - WINDOW :] for buffer in buffers]
        check(out[row : row + 1], q[row : row + 1], *own)


def test_pages(device: torch.device, elements: int = BEYOND, size: int = 64) -> None:
    """A sequence's pages are the last ones of a pool."""
    room(device, 5 * elements)
    pages, used = elements // (HEADS * size * DIM), WINDOW // size
    pools = [torch.zeros(pages, HEADS, size, DIM, dtype=torch.bfloat16, device=device) for _ in range(2)]
    for pool in pools:
        pool[-used:].normal_()
    table = torch.arange(pages - used, pages, dtype=torch.int32, device=device)[None]
    q = torch.randn(1, 2 * HEADS, 1, DIM, device=device).bfloat16()
    k, v = torch.randn(2, 1, HEADS, 1, DIM, device=device).bfloat16()
    site = SiteSpec(CacheLayout(placement=Paged(size)), DIM**-0.5, kernels="triton")
    positions = torch.full((1, 1), WINDOW - 1, device=device)
    out = cached_attention(
        AttendInputs(q, k, v, pools, positions, positions[:, 0], [], WINDOW, site, page_table=table)
    )
    own = [pool[-used:].transpose(0, 1).reshape(1, HEADS, WINDOW, DIM) for pool in pools]
    assert torch.equal(own[0][:, :, -1:], k) and torch.equal(own[1][:, :, -1:], v)
    assert not pools[0][:-used].any()
    check(out, q, *own)
