"""Generated kernels on hardware against the reference in a wider type, within an error budget
(`tests/support/budget.py`).

In bf16 and fp16 that is the reference in fp32; in fp32 the oracle of `tests/support/dictionary.py`, in float64.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvcompile.kernels.reference import attention as reference
from kvcompile.kernels.spec import SiteSpec
from tests.gpu.sites import EXACT_CODES, SITES, vectors
from tests.support import dictionary
from tests.support.budget import within
from tests.support.runner import run

pytestmark = pytest.mark.gpu
CHUNKS = (190, 70, *[1] * 20, 9, *[1] * 11)  # 300 tokens: prompts, single tokens, and a short one between
PADS = (0, 37, 199)


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
    if dtype == torch.float32:
        true = in_float64(plain, qkv, pads)
    else:
        true = run(plain, [x.float() for x in qkv], chunks, pads, **extra).out
    real = torch.arange(tokens, device=device) >= pads[:, None]
    ours, torchs, truth = (out.transpose(1, 2)[real] for out in (made.out, same.out, true))
    within(ours, torchs, truth, dtype, name)


def in_float64(site: SiteSpec, qkv: list[Tensor], pads: Tensor) -> Tensor:
    """What the oracle gives, on the CPU: [B, Hq, T, Dv] on q's device, 0 for padding."""
    rows = []
    for row, pad in enumerate(pads.tolist()):
        out = dictionary.attend(site, *(x[row, :, pad:].cpu() for x in qkv))
        rows.append(torch.cat([out.new_zeros(out.shape[0], pad, out.shape[2]), out], 1))
    return torch.stack(rows).to(qkv[0].device)


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


@pytest.mark.parametrize("name", ["h2o", "h2o int8", "h2o, scores of a layer"])
def test_scores_of_a_prompt_and_of_steps(name: str, device: torch.device) -> None:
    """Whoever adds them, the program that joins a head or `score`; no token has gone, and each may be in any slot."""
    sized, chunks = SITES[name], (150, *[1] * 40)
    pads = torch.tensor((0, 37, 120), device=device)
    qkv = vectors(sized, 3, sum(chunks), torch.bfloat16, device)
    plain = sized.site(kernels="reference")
    made, same, true = (
        by_token(run(site, own, chunks, pads).buffers, sum(chunks) - pads)
        for site, own in ((sized.site(), qkv), (plain, qkv), (plain, [x.float() for x in qkv]))
    )
    within(made, same, true, torch.bfloat16, name)
    assert float(same.sum()) > 100


def by_token(buffers: list[Tensor], lengths: Tensor) -> Tensor:
    """Scores of the tokens of all sequences, in their order, [tokens, heads]; slots fill in the order of tokens."""
    rows = []
    for token, score, length in zip(*buffers[-2:], lengths.tolist(), strict=True):
        order = token[:, :length].argsort(-1)
        assert torch.equal(
            token[:, :length].gather(1, order)[0].cpu(), torch.arange(length, dtype=torch.int32)
        )
        rows.append(score[:, :length].gather(1, order).T)
    return torch.cat(rows)


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


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_sums_of_products_that_cancel(name: str, device: torch.device) -> None:
    """Queries of one sign: what codes that count from the lowest owe scores is many times the scores."""
    sized, tokens = SITES[name], 200
    q, k, v = vectors(sized, 2, tokens, torch.bfloat16, device)
    q = (q.float().abs() + 1).to(q.dtype)
    k = (k.float() - k.float().mean(-1, keepdim=True)).to(k.dtype)
    pads = torch.zeros(2, dtype=torch.int64, device=device)
    chunks = (150, *[1] * 50)
    plain = sized.site(kernels="reference")
    made = run(sized.site(), [q, k, v], chunks, pads)
    same = run(plain, [q, k, v], chunks, pads)
    true = run(plain, [x.float() for x in (q, k, v)], chunks, pads)
    within(made.out, same.out, true.out, torch.bfloat16, name)


def test_ragged_lengths_of_a_large_batch(device: torch.device, rows: int = 64) -> None:
    """Every row is what it is by itself, and what it should be."""
    from kvcompile.kernels.triton.host.attention import cached_attention
    from kvcompile.kernels.triton.tools.synthetic_cache import sample

    sized = SITES["int8, pages of 64"]
    lengths = [1 + 37 * row for row in range(rows)]
    one = sample(sized.site(share="middle"), sized.heads, sized.dims, lengths, torch.bfloat16, device)
    together = cached_attention(one.inputs(0))
    assert one.table is not None
    for row in range(0, rows, 7):
        alone = replace(
            one,
            lengths=(lengths[row],),
            q=one.q[row : row + 1],
            k=one.k[row : row + 1],
            v=one.v[row : row + 1],
            positions=one.positions[row : row + 1],
            table=one.table[row : row + 1],
        )
        plain = replace(one.site, kernels="reference")
        wide = replace(alone, **{name: getattr(alone, name).float() for name in "qkv"})
        torchs, truth = (reference.cached_attention(of.inputs(0, plain)) for of in (alone, wide))
        # Splits differ, so sums have another order.
        for out in (together[row : row + 1], cached_attention(alone.inputs(0))):
            within(out, torchs, truth, torch.bfloat16, f"{lengths[row]} tokens")
