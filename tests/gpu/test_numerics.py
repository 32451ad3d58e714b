"""Generated kernels on hardware, in bf16 and fp16, against the reference in fp32, within an error budget.

The budget is measured: PyTorch's own error in the same dtype, twice, and half a unit in the last place of the output.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.gpu.sites import EXACT_CODES, SITES, vectors
from tests.runner import run

pytestmark = pytest.mark.gpu
CHUNKS = (190, 70, *[1] * 20, 9, *[1] * 11)  # 300 tokens: prompts, single tokens, and a short one between
PADS = (0, 37, 199)


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def within_budget(
    name: str, dtype: torch.dtype, device: torch.device, chunks: tuple[int, ...] = CHUNKS
) -> None:
    sized, tokens = SITES[name], sum(chunks)
    pads = torch.tensor(PADS, device=device).clamp(max=tokens * 2 // 3)
    qkv = vectors(sized, len(PADS), tokens, dtype, device)
    extra = sized.extra(device)
    plain = sized.site(kernels="reference")
    made = run(sized.site(), qkv, chunks, pads, **extra)
    same = run(plain, qkv, chunks, pads, **extra)
    true = run(plain, [x.float() for x in qkv], chunks, pads, **extra)
    real = torch.arange(tokens, device=device) >= pads[:, None]
    ours, torchs, truth = (r.out.transpose(1, 2)[real].double() for r in (made, same, true))
    assert torch.isfinite(ours).all()
    eps = torch.finfo(dtype).eps
    budget = 2 * rms(torchs - truth) + eps / 2 * rms(truth)
    assert rms(ours - truth) <= budget, (
        f"{rms(ours - truth) / rms(truth):.2e}, {budget / rms(truth):.2e} allowed"
    )
    worst = 2 * float((torchs - truth).abs().max()) + 4 * eps * float(truth.abs().max())
    assert float((ours - truth).abs().max()) <= worst


@pytest.mark.parametrize("name", SITES)
def test_bfloat16(name: str, device: torch.device) -> None:
    within_budget(name, torch.bfloat16, device)


@pytest.mark.parametrize("name", ["model", "int8", "fp8", "int4", "kivi", "model, ring", "h2o"])
def test_float16(name: str, device: torch.device) -> None:
    within_budget(name, torch.float16, device)


@pytest.mark.parametrize("name", ["model", "int8", "int4"])
def test_float32(name: str, device: torch.device) -> None:
    """Products in float32 are those of float32, not of tf32."""
    within_budget(name, torch.float32, device)


@pytest.mark.parametrize("name", EXACT_CODES)
def test_what_is_written_is_what_the_reference_writes(name: str, device: torch.device) -> None:
    """Bit for bit: an op of its own would round scales or codes in another way."""
    sized = SITES[name]
    qkv = vectors(sized, 3, 100, torch.bfloat16, device)
    pads = torch.zeros(3, dtype=torch.int64, device=device)
    chunks = (80, *[1] * 20)
    made = run(sized.site(), qkv, chunks, pads)
    expected = run(sized.site(kernels="reference"), qkv, chunks, pads)
    for own, wanted in zip(made.buffers, expected.buffers, strict=True):
        if own.dtype.itemsize == 1:
            own, wanted = own.view(torch.uint8), wanted.view(torch.uint8)
        assert torch.equal(own, wanted)


def test_ragged_lengths_of_a_large_batch(device: torch.device) -> None:
    """Every row is what it is by itself."""
    from kvcompile.kernels.triton.attention import cached_attention
    from kvcompile.kernels.triton.sample import sample

    sized = SITES["int8, pages of 64"]
    lengths = [1 + 37 * row for row in range(64)]
    one = sample(sized.site(share="middle"), sized.heads, sized.dims, lengths, torch.bfloat16, device)
    together = cached_attention(*one.arguments(0))
    assert one.table is not None
    for row in range(0, 64, 7):
        alone = replace(
            one,
            lengths=(lengths[row],),
            q=one.q[row : row + 1],
            k=one.k[row : row + 1],
            v=one.v[row : row + 1],
            positions=one.positions[row : row + 1],
            table=one.table[row : row + 1],
        )
        expected = cached_attention(*alone.arguments(0, replace(one.site, kernels="reference")))
        # Splits differ, so sums have another order.
        torch.testing.assert_close(together[row : row + 1], expected, rtol=2**-7, atol=2**-9)
