"""Other implementations of decode attention on the same keys and values, where they are installed.

Each takes a dense bf16 cache and gives a call; what is not there, or does not take a case, gives its reason instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Call = Callable[[], object]


@dataclass(frozen=True)
class Dense:
    """q [B, Hq, 1, D]; k, v [B, Hkv, T, D]; lengths int32 [B], all T."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor
    sm_scale: float


def sdpa(x: Dense) -> Call:
    """torch's scaled_dot_product_attention with grouped heads."""
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(x.q, x.k, x.v, scale=x.sm_scale, enable_gqa=x.q.shape[1] != x.k.shape[1])


def flex(x: Dense) -> Call:
    """FlexAttention, compiled (flash decoding)."""
    from torch.nn.attention.flex_attention import flex_attention

    run = torch.compile(flex_attention, dynamic=False) if x.q.is_cuda else flex_attention
    return lambda: run(x.q, x.k, x.v, scale=x.sm_scale, enable_gqa=x.q.shape[1] != x.k.shape[1])


def flash_attn(x: Dense) -> Call:
    """flash_attn_with_kvcache of the package flash_attn."""
    from flash_attn import flash_attn_with_kvcache

    q, k, v = (t.transpose(1, 2).contiguous() for t in (x.q, x.k, x.v))
    return lambda: flash_attn_with_kvcache(
        q, k, v, cache_seqlens=x.lengths, softmax_scale=x.sm_scale, causal=True
    )


def flash_attn_3(x: Dense) -> Call:
    """The same of FlashAttention-3 (package flash_attn_interface), for Hopper."""
    from flash_attn_interface import flash_attn_with_kvcache

    q, k, v = (t.transpose(1, 2).contiguous() for t in (x.q, x.k, x.v))
    return lambda: flash_attn_with_kvcache(
        q, k, v, cache_seqlens=x.lengths, softmax_scale=x.sm_scale, causal=True
    )


def flashinfer(x: Dense) -> Call:
    """BatchDecodeWithPagedKVCacheWrapper, pages of 64, tensor cores."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    page, (batch, heads, tokens, dim) = 64, x.k.shape
    each = -(-tokens // page)
    pad = each * page - tokens
    k, v = (
        torch.nn.functional.pad(t, (0, 0, 0, pad)).view(batch, heads, each, page, dim) for t in (x.k, x.v)
    )
    pool = (
        torch.stack([k, v], 3)
        .permute(0, 2, 3, 1, 4, 5)
        .reshape(batch * each, 2, heads, page, dim)
        .contiguous()
    )
    numbers = {"dtype": torch.int32, "device": x.q.device}
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device=x.q.device),
        "HND",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=torch.empty(batch + 1, **numbers),
        paged_kv_indices_buffer=torch.empty(batch * each, **numbers),
        paged_kv_last_page_len_buffer=torch.empty(batch, **numbers),
    )
    wrapper.plan(
        torch.arange(batch + 1, **numbers) * each,
        torch.arange(batch * each, **numbers),
        torch.full((batch,), page - pad, **numbers),
        x.q.shape[1],
        heads,
        dim,
        page,
        q_data_type=x.q.dtype,
        kv_data_type=x.k.dtype,
        sm_scale=x.sm_scale,
    )
    q = x.q.squeeze(2).contiguous()
    return lambda: wrapper.run(q, pool)


def vllm(x: Dense) -> Call:
    """vLLM's own build of FlashAttention."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    page, (batch, heads, tokens, dim) = 64, x.k.shape
    each = -(-tokens // page)
    pad = each * page - tokens
    k, v = (
        torch.nn.functional.pad(t, (0, 0, 0, pad))
        .view(batch, heads, each, page, dim)
        .permute(0, 2, 3, 1, 4)
        .reshape(batch * each, page, heads, dim)
        .contiguous()
        for t in (x.k, x.v)
    )
    table = torch.arange(batch * each, dtype=torch.int32, device=x.q.device).view(batch, each)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=x.q.device)
    q = x.q.squeeze(2).contiguous()
    return lambda: flash_attn_varlen_func(
        q,
        k,
        v,
        max_seqlen_q=1,
        cu_seqlens_q=starts,
        max_seqlen_k=tokens,
        seqused_k=x.lengths,
        block_table=table,
        softmax_scale=x.sm_scale,
        causal=True,
    )


PEERS: dict[str, Callable[[Dense], Call]] = {
    "torch SDPA": sdpa,
    "FlexAttention": flex,
    "flash_attn": flash_attn,
    "FlashAttention-3": flash_attn_3,
    "flashinfer": flashinfer,
    "vLLM": vllm,
}


def attempt(make: Callable[[Dense], Call], x: Dense, expected: Tensor) -> Call | str:
    """The peer's call, or why it is not measured. expected: [B, Hq, 1, D], what it must give."""
    try:
        call = make(x)
        result = call()
    except ImportError as error:
        return f"not installed ({error})"
    except Exception as error:
        return f"does not take this: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    result = result[0] if isinstance(result, tuple) else result
    assert isinstance(result, Tensor)
    error = (result.reshape(expected.shape).float() - expected.float()).norm() / expected.float().norm()
    if not error < 0.02:  # bf16 sums in any order differ by less than half of that
        return f"gives another result (relative error {error:.3f})"
    return call
