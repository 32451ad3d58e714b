"""KIVI as its authors have it, beside our cache: the same bits, groups and residual, token after token.

`Published` transcribes Algorithm 1 of Liu et al. 2024 (arXiv 2402.02750, "The KIVI Prefill & Decoding Algorithm"),
with the arithmetic of the authors' code (github.com/jy-yuan/KIVI, quant/new_pack.py: `quant_and_pack_kcache`,
`quant_and_pack_vcache`, `unpack_and_dequant_*`, without the packing): tensors that are concatenated and cut, and no
slots, rings or positions. Only decode steps are compared: the paper's prompt attends to keys and values in full.
(transformers' quantized cache wraps quanto and hqq, which are no dependencies of this project.)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import CacheLayout, per_channel, uint, with_residual
from tests.support.runner import run

HEADS, D, T = 2, 64, 90


def key_quant(k: Tensor, group: int, bits: int) -> Tensor:
    """new_pack.py: quant_and_pack_kcache and back: k [B, nh, T, D], in groups of tokens, per channel."""
    batch, heads, tokens, dim = k.shape
    data = k.view(batch, heads, tokens // group, group, dim)
    mn, mx = data.min(dim=-2, keepdim=True)[0], data.max(dim=-2, keepdim=True)[0]
    max_int = 2**bits - 1
    scale = (mx - mn) / max_int
    codes = ((data - mn) / scale).clamp(0, max_int).round().to(torch.int32)
    return (codes * scale + mn).view(k.shape)


def value_quant(v: Tensor, group: int, bits: int) -> Tensor:
    """new_pack.py: quant_and_pack_vcache and back: v [B, nh, T, D], in groups of channels, per token."""
    data = v.view(*v.shape[:-1], v.shape[-1] // group, group)
    mn, mx = data.min(dim=-1, keepdim=True)[0], data.max(dim=-1, keepdim=True)[0]
    max_int = 2**bits - 1
    scale = (mx - mn) / max_int
    codes = ((data - mn) / scale).clamp(0, max_int).round().to(torch.int32)
    return (codes * scale + mn).view(v.shape)


class Published:
    """Algorithm 1: X_Kg, X_Kr, X_Vg and X_Vr are the names of the paper; R the residual length."""

    def __init__(self, x_k: Tensor, x_v: Tensor, residual: int, group: int, v_group: int, bits: int):
        """Prefill: of l tokens, l - l mod R keys and l - R values are quantized."""
        self.residual, self.group, self.v_group, self.bits = residual, group, v_group, bits
        tokens = x_k.shape[2]
        cut = tokens - tokens % residual
        self.k_g, self.k_r = key_quant(x_k[:, :, :cut], group, bits), x_k[:, :, cut:]
        cut = max(0, tokens - residual)
        self.v_g, self.v_r = value_quant(x_v[:, :, :cut], v_group, bits), x_v[:, :, cut:]

    def decode(self, t_q: Tensor, t_k: Tensor, t_v: Tensor, scale: float) -> Tensor:
        """One token, [B, nh, 1, D] each."""
        self.k_r = torch.cat([self.k_r, t_k], dim=2)
        self.v_r = torch.cat([self.v_r, t_v], dim=2)
        if self.k_r.shape[2] == self.residual:
            self.k_g = torch.cat([self.k_g, key_quant(self.k_r, self.group, self.bits)], dim=2)
            self.k_r = self.k_r[:, :, :0]
        if self.v_r.shape[2] > self.residual:
            old = self.v_r[:, :, : -self.residual]
            self.v_g = torch.cat([self.v_g, value_quant(old, self.v_group, self.bits)], dim=2)
            self.v_r = self.v_r[:, :, -self.residual :]
        a = torch.cat([t_q @ self.k_g.transpose(2, 3), t_q @ self.k_r.transpose(2, 3)], dim=-1)
        a = (a * scale).softmax(-1)
        split = self.v_g.shape[2]
        return a[..., :split] @ self.v_g + a[..., split:] @ self.v_r


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(
    ("prompt", "residual", "group"), [(0, 32, 32), (33, 32, 32), (64, 64, 32), (50, 8, 4)]
)
def test_decode_steps_are_those_of_the_published_algorithm(
    bits: Any, prompt: int, residual: int, group: int
) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, T, D, generator=g) for _ in range(3))
    # The authors' scales are not rounded to another dtype: float32 ones here.
    keys = per_channel(bits, group, residual, "float32")
    values = with_residual(uint(bits, 32, "float32"), residual)
    spec = SiteSpec(CacheLayout(keys, values), D**-0.5)
    chunks = [prompt] * bool(prompt) + [1] * (T - prompt)
    ours = run(spec, [q, k, v], chunks, torch.tensor([0])).out
    theirs = Published(k[:, :, :prompt], v[:, :, :prompt], residual, group, 32, bits)
    for i in range(prompt, T):
        token = slice(i, i + 1)
        wanted = theirs.decode(q[:, :, token], k[:, :, token], v[:, :, token], D**-0.5)
        error = (ours[:, :, token] - wanted).abs().max()
        assert error <= 64 * torch.finfo(torch.float32).eps * v.abs().max(), f"token {i}"
