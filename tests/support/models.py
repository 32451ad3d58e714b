"""Small hand-written decoders and tiny random transformers models, shared by all tests.

Each is a plain `nn.Module` over input_ids [B, S] int64 that returns logits [B, S, vocab] of its dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class TinyConfig:
    """Sizes that keep every axis different, so that a mixed-up axis shows."""

    vocab_size: int = 61
    hidden_size: int = 48
    num_layers: int = 2
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 8
    intermediate_size: int = 56
    max_seq_len: int = 128
    rope_theta: float = 10000.0


def attend(q: Tensor, k: Tensor, v: Tensor, eager: bool) -> Tensor:
    """Causal attention over [B, H, S, D], by SDPA or spelled out."""
    if not eager:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    size = q.shape[-2]
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
    hidden = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    return F.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1) @ v


class NanoBlock(nn.Module):
    def __init__(self, config: TinyConfig, eager: bool):
        super().__init__()
        width = config.num_heads * config.head_dim
        self.heads, self.eager = config.num_heads, eager
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, size, width = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, size, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        y = attend(q, k, v, self.eager).transpose(1, 2).contiguous().view(batch, size, width)
        x = x + self.c_proj(y)
        return x + self.proj(F.gelu(self.fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    """GPT-2 as nanoGPT writes it: learned positions, fused qkv, LayerNorm, tied head."""

    def __init__(self, config: TinyConfig | None = None, eager: bool = False):
        super().__init__()
        self.sizes = config = config or TinyConfig()
        width = config.num_heads * config.head_dim
        self.wte = nn.Embedding(config.vocab_size, width)
        self.wpe = nn.Embedding(config.max_seq_len, width)
        self.h = nn.ModuleList(NanoBlock(config, eager) for _ in range(config.num_layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        size = input_ids.shape[1]
        assert size <= self.sizes.max_seq_len, "sequence longer than the position table"
        x = self.wte(input_ids) + self.wpe(torch.arange(size, device=input_ids.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class LlamaBlock(nn.Module):
    def __init__(self, config: TinyConfig, eager: bool):
        super().__init__()
        self.config, self.eager = config, eager
        width, dim = config.hidden_size, config.head_dim
        self.attn_norm, self.mlp_norm = RMSNorm(width), RMSNorm(width)
        self.q_proj = nn.Linear(width, config.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * dim, width, bias=False)
        self.gate = nn.Linear(width, config.intermediate_size, bias=False)
        self.up = nn.Linear(width, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, size, _ = x.shape
        y = self.attn_norm(x)
        q = self.q_proj(y).view(batch, size, self.config.num_heads, -1).transpose(1, 2)
        k = self.k_proj(y).view(batch, size, self.config.num_kv_heads, -1).transpose(1, 2)
        v = self.v_proj(y).view(batch, size, self.config.num_kv_heads, -1).transpose(1, 2)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        group = self.config.num_heads // self.config.num_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        y = attend(q, k, v, self.eager).transpose(1, 2).reshape(batch, size, -1)
        x = x + self.o_proj(y)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class TinyLlama(nn.Module):
    """Llama as one writes it by hand: RoPE, GQA, RMSNorm, SwiGLU; positions 0..S-1 inside."""

    inv_freq: Tensor

    def __init__(self, config: TinyConfig | None = None, eager: bool = False):
        super().__init__()
        self.sizes = config = config or TinyConfig()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaBlock(config, eager) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        exponent = torch.arange(0, config.head_dim, 2) / config.head_dim
        self.register_buffer("inv_freq", config.rope_theta**-exponent, persistent=False)

    def run(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """positions: [B or 1, S] int64."""
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)[:, None]  # [B or 1, 1, S, D]
        x = self.embed(input_ids)
        cos, sin = angles.cos().type_as(x), angles.sin().type_as(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.run(input_ids, torch.arange(input_ids.shape[1], device=input_ids.device)[None])


class TinyLlamaPositions(TinyLlama):
    """The same with the optional position_ids [B, S] argument that transformers models have."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            return super().forward(input_ids)
        return self.run(input_ids, position_ids)


def make(model: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """A seeded instance in eval mode."""
    torch.manual_seed(0)
    return model(*args, **kwargs).eval()


_HF: dict[str, tuple[str, dict[str, Any]]] = {
    # kind: (config class, what differs from the tiny sizes)
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 9}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 9, "query_pre_attn_scalar": 8}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 8,
            "sliding_window": 9,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt2": ("GPT2Config", {"n_embd": 48, "n_head": 6, "n_positions": 512}),
    "phi": ("PhiConfig", {"num_key_value_heads": 6, "partial_rotary_factor": 0.5}),
    "gpt_neox": ("GPTNeoXConfig", {"rotary_pct": 0.5}),
    "bloom": ("BloomConfig", {"n_head": 6}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
    ),
    "deepseek_v3": ("DeepseekV3Config", {}),
    "gemma4": ("Gemma4TextConfig", {}),
    "bert": ("BertConfig", {}),
    "mamba": ("MambaConfig", {"state_size": 4, "use_mambapy": False}),
}


def tiny_hf(kind: str = "llama", attn: str = "sdpa", layers: int = 2, **changes: Any) -> nn.Module:
    """A random tiny transformers model of that kind, in eval mode; `changes` go to its config."""
    import transformers

    name, special = _HF[kind]
    sizes = {
        "vocab_size": 61,
        "hidden_size": 48,
        "intermediate_size": 56,
        "num_hidden_layers": layers,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = getattr(transformers, name)(**{**sizes, **special, **changes})
    torch.manual_seed(0)
    auto = transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
    return auto.from_config(config, attn_implementation=attn).eval()
