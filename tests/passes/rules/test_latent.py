"""Latent attention (MLA): rows of the latent are cached where that is proven equal, K and V where it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kvcompile
from kvcompile.layouts import InKeys, int8
from kvcompile.passes.capture.capture import capture
from kvcompile.passes.detect.detect import detect
from kvcompile.passes.records import NoMatch
from kvcompile.specs import RotaryForm

HEADS, NOPE, ROPE, VALUES, RANK, WIDTH = 4, 8, 4, 6, 10, 24


class Latent(nn.Module):
    """Attention over a latent row per token, as DeepSeek-V2 has it; `kind` changes one thing."""

    frequencies: Tensor

    def __init__(self, kind: str = "", layers: int = 2):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.kv_heads = 2 if kind == "grouped" else HEADS
        self.embed, self.head = nn.Embedding(61, WIDTH), nn.Linear(WIDTH, 61)
        bias = kind == "bias"

        def made(*sizes: tuple[int, int]) -> nn.ModuleList:
            return nn.ModuleList(nn.Linear(*size, bias=bias) for size in sizes * layers)

        self.q = made((WIDTH, HEADS * (NOPE + ROPE)))
        self.down = made((WIDTH, RANK + ROPE * (HEADS if kind == "rope per head" else 1)))
        self.other = made((WIDTH, RANK))
        self.up = made((RANK, self.kv_heads * (NOPE + VALUES)))
        self.up_k, self.up_v = made((RANK, self.kv_heads * NOPE)), made((RANK, self.kv_heads * VALUES))
        self.out = made((HEADS * VALUES, WIDTH))
        self.norm = nn.RMSNorm(NOPE)
        self.register_buffer("frequencies", 0.5 / 50 ** (torch.arange(ROPE // 2) / (ROPE // 2)))

    def turn(self, x: Tensor) -> Tensor:
        """x [B, H, S, ROPE]; neighbours rotate."""
        angles = torch.arange(x.shape[2])[:, None] * self.frequencies
        a, b = x[..., ::2], x[..., 1::2]
        turned = [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()]
        return torch.stack(turned, -1).flatten(-2)

    def forward(self, input_ids: Tensor) -> Tensor:
        batch, size = input_ids.shape
        x = self.embed(input_ids)
        for index in range(len(self.q)):
            q = self.q[index](x).view(batch, size, HEADS, -1).transpose(1, 2)
            q = torch.cat([q[..., :NOPE], self.turn(q[..., NOPE:])], -1)
            c, p = self.down[index](x).split([RANK, self.down[index].out_features - RANK], -1)
            c = F.layer_norm(c, (RANK,))
            p = self.turn(p.view(batch, size, -1, ROPE).transpose(1, 2))
            k, v = self.expanded(index, x, c)
            if self.kind == "norm between":
                k = self.norm(k)
            parts = [k, p.expand(-1, self.kv_heads, -1, -1)]
            k = torch.cat(parts[::-1] if self.kind == "rope first" else parts, -1)
            q = q.roll(ROPE, -1) if self.kind == "rope first" else q
            y = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=0.3, enable_gqa=self.kv_heads != HEADS
            )
            x = x + self.out[index](y.transpose(1, 2).reshape(batch, size, -1))
        return self.head(x)

    def expanded(self, index: int, x: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """K without its rotary channels, and V, [B, H, S, ..]."""
        batch, size = x.shape[:2]
        if self.kind in ("two layers", "two latents"):
            other = self.other[index](x) if self.kind == "two latents" else c
            k, v = self.up_k[index](c), self.up_v[index](other)
            k, v = (t.view(batch, size, self.kv_heads, -1).transpose(1, 2) for t in (k, v))
        elif self.kind == "keys before values":  # all heads' keys, then all heads' values
            k, v = self.up[index](c).split([self.kv_heads * NOPE, self.kv_heads * VALUES], -1)
            k, v = (t.view(batch, size, self.kv_heads, -1).transpose(1, 2) for t in (k, v))
        else:
            heads = self.up[index](c).view(batch, size, self.kv_heads, -1).transpose(1, 2)
            k, v = heads.split([NOPE, VALUES], -1)
        return k, v.tanh() if self.kind == "values not linear" else v


ABSORBED = ("", "bias", "grouped", "two layers", "keys before values", "rope first")
EXPANDED = {
    "norm between": "keys and values are not linear in the same row",
    "two latents": "keys and values are not linear in the same row",
    "rope per head": "some channels of the keys are neither from that row nor shared by the heads",
    "values not linear": None,
}
RECIPES: dict[str, dict[str, Any]] = {
    "baseline": {"max_tokens": 64},
    "window": {"cache": {"retention": {"kind": "window", "size": 30}}},
    "in_cache": {
        "cache": {"retention": {"kind": "sink_window", "sinks": 2, "window": 30, "positions": "in_cache"}}
    },
}


def optimized(model: nn.Module, recipe: dict[str, Any], **more: Any) -> Any:
    return kvcompile.optimize(model, "baseline", compile={"mode": "none"}, max_batch=2, **recipe, **more)


def check(fast: Any, model: nn.Module) -> None:
    """A prompt, single tokens and a chunk, against the model on all tokens."""
    ids = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(2))
    fast.reset()
    found = torch.cat([fast(part) for part in ids.split([11, 1, 1, 7, 4], 1)], 1)
    torch.testing.assert_close(found, model(ids), rtol=1e-4, atol=1e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ABSORBED)
def test_absorbed(kind: str) -> None:
    """One row of rank + rope channels per token and layer, and the model's own results."""
    model = Latent(kind, layers=1).eval()
    fast = optimized(model, RECIPES["baseline"])
    assert fast.plan.bytes_per_token == (RANK + ROPE) * 4
    check(fast, model)
    assert fast.cache.nbytes == 2 * 64 * (RANK + ROPE) * 4
    for decision in fast.plan.decisions:
        assert decision.latent and decision.layout.values == InKeys(RANK)
        assert (decision.num_kv_heads, decision.head_dim, decision.v_head_dim) == (1, RANK + ROPE, RANK)
        assert "one latent row of 14 channels stands for" in decision.because[1]


@pytest.mark.parametrize("recipe", ["window", "in_cache"])
def test_absorbed_in_rings(recipe: str) -> None:
    """Rings that wrap against the oracle (thorough), and the model itself while nothing is forgotten."""
    model = Latent(layers=1).eval()
    fast = optimized(model, RECIPES[recipe], verify="thorough")
    assert fast.plan.decisions[0].rope == RotaryForm("interleaved", RANK, ROPE)
    check(fast, model)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_absorbed_and_quantized(dtype: str) -> None:
    """Rows are stored as the keys are; the values are read from them."""
    model = Latent(layers=1).eval()
    for retention in (
        {"kind": "full"},
        {"kind": "sink_window", "sinks": 2, "window": 9, "positions": "in_cache"},
    ):
        cache = {"keys": {"dtype": dtype}, "values": {"dtype": "model"}, "retention": retention}
        fast = optimized(model, {"cache": cache, "max_tokens": 64}, verify="thorough")
        size = RANK + ROPE + 2 if dtype == "int8" else (RANK + ROPE) // 2 + 4
        assert fast.plan.bytes_per_token == size
        ids = torch.randint(0, 61, (2, 10))
        found, wanted = torch.cat([fast(ids[:, :7]), fast(ids[:, 7:])], 1), model(ids)
        assert (found - wanted).norm() < (0.02 if dtype == "int8" else 0.2) * wanted.norm()


def test_half_precision() -> None:
    model = Latent().eval().to(torch.bfloat16)
    fast = optimized(model, RECIPES["baseline"], verify="thorough")
    assert fast.plan.decisions[0].latent and fast.plan.lossless


def test_off_keeps_k_and_v() -> None:
    model = Latent(layers=1).eval()
    fast = optimized(model, {"cache": {"latent": "off"}, "max_tokens": 64})
    decision = fast.plan.decisions[0]
    assert not decision.latent and fast.plan.bytes_per_token == HEADS * (NOPE + ROPE + VALUES) * 4
    assert "K and V expanded from their latent: the recipe says so" in decision.because
    check(fast, model)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", EXPANDED)
def test_what_is_not_linear_in_one_row(kind: str) -> None:
    """It keeps K and V, and says why where something was near."""
    model = Latent(kind, layers=1).eval()
    detection = detect(capture(model))
    assert detection.sites[0].latent is None
    reasons = [
        miss.reason for miss in detection.misses if isinstance(miss, NoMatch) and miss.rule == "latent"
    ]
    wanted = EXPANDED[kind]
    assert (not reasons) if wanted is None else (wanted in reasons[0])
    check(optimized(model, RECIPES["baseline"]), model)


def test_attention_without_a_small_row_is_no_latent() -> None:
    """Any K and V are linear in the hidden state; keeping that instead would save little."""
    from tests.support.models import NanoGPT, make

    detection = detect(capture(make(NanoGPT)))
    assert all(site.latent is None for site in detection.sites)
    assert not [miss for miss in detection.misses if miss.rule == "latent"]


def test_int8_of_a_transformers_model() -> None:
    """DeepSeek-V3, whose neighbours are brought apart before they rotate."""
    from tests.coverage.configs import tiny_model

    model = tiny_model("deepseek_v3")
    fast = kvcompile.optimize(model, "int8", max_tokens=64, max_batch=2, compile={"mode": "none"})
    assert [d.layout.keys for d in fast.plan.decisions] == [int8()] * 2
    assert fast.plan.bytes_per_token == 2 * (16 + 8 + 2)
    assert [d.rope for d in fast.plan.decisions] == [RotaryForm("half", 16, 8)] * 2
    ids = torch.randint(3, 61, (2, 16))
    found = torch.cat([fast(ids[:, :9]).logits, fast(ids[:, 9:]).logits], 1)
    wanted = model(ids).logits
    assert (found - wanted).norm() < 0.05 * wanted.norm()
