"""Decoders as people write them by hand: one skeleton, and every form of attention as a function.

A form gets q [B, S, H, D], k [B, S, Hkv, D], v [B, S, Hkv, Dv] and the layer (for its parameters), and returns
[B, S, H * Dv]. `FORMS` are handled exactly; `BROKEN` are forms with one mistake, and what becomes of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEADS, DIM, WIDTH, VOCAB, LONGEST = 4, 8, 32, 61, 96
Attend = Callable[[Tensor, Tensor, Tensor, "Layer"], Tensor]


@dataclass(frozen=True)
class Form:
    """attend, and what the skeleton around it has. dtype: of the weights."""

    attend: Attend
    kv_heads: int = HEADS
    v_dim: int = DIM
    qk_norm: bool = False
    fused: bool = False
    parallel: bool = False
    dtype: torch.dtype = torch.float32


class Layer(nn.Module):
    """Attention and MLP; the parameters that some forms need are here for all."""

    mask: Tensor
    slopes: Tensor

    def __init__(self, form: Form):
        super().__init__()
        self.form = form
        sizes = [HEADS * DIM, form.kv_heads * DIM, form.kv_heads * form.v_dim]
        self.q, self.k, self.v = (nn.Linear(WIDTH, size) for size in sizes)
        self.qkv = nn.Linear(WIDTH, sum(sizes)) if form.fused else None
        self.o = nn.Linear(HEADS * form.v_dim, WIDTH)
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q_norm, self.k_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.bias = nn.Embedding(16, HEADS)
        self.gate = nn.Linear(WIDTH, HEADS)
        self.register_buffer("mask", torch.ones(LONGEST, LONGEST, dtype=torch.bool).tril())
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, HEADS + 1))

    def attention(self, x: Tensor) -> Tensor:
        batch, size, _ = x.shape
        if self.qkv is not None:
            q, k, v = self.qkv(x).split([self.q.out_features, self.k.out_features, self.v.out_features], -1)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (
            t.view(batch, size, heads, -1)
            for t, heads in ((q, HEADS), (k, self.form.kv_heads), (v, self.form.kv_heads))
        )
        if self.form.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.o(self.form.attend(q, k, v, self))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_1(x)
        if self.form.parallel:
            return x + self.attention(y) + self.mlp(y)
        x = x + self.attention(y)
        return x + self.mlp(self.norm_2(x))


class Decoder(nn.Module):
    """Two layers, learned positions, tied head."""

    def __init__(self, form: Form):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList(Layer(form) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.to(form.dtype).eval()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.place(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


# Pieces that forms share.


def heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.transpose(1, 2) for t in tensors)


def merged(y: Tensor) -> Tensor:
    """[B, H, S, Dv] -> [B, S, H * Dv]"""
    return y.transpose(1, 2).flatten(2)


def causal(size: int, shift: int = 0) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril(shift)


def distance(size: int) -> Tensor:
    place = torch.arange(size)
    return place[:, None] - place[None, :]


def by_scores(score: Callable[[Tensor, Layer], Tensor]) -> Attend:
    """Eager attention whose softmax input is `score(q k^T, layer)`."""

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
        q, k, v = heads_first(q, k, v)
        return merged(torch.softmax(score(q @ k.transpose(-1, -2), layer), -1) @ v)

    return attend


def by_mask(mask: Callable[[int], Tensor], **kwargs: float) -> Attend:
    """SDPA with a mask made from the length."""

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
        q, k, v = heads_first(q, k, v)
        return merged(F.scaled_dot_product_attention(q, k, v, attn_mask=mask(q.shape[2]), **kwargs))

    return attend


def hidden(scores: Tensor, mask: Tensor, value: float = -math.inf) -> Tensor:
    return scores.masked_fill(~mask, value)


SCALE = DIM**-0.5

# SDPA


def sdpa_causal(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    return merged(F.scaled_dot_product_attention(*heads_first(q, k, v), is_causal=True))


def sdpa_gqa(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    return merged(F.scaled_dot_product_attention(*heads_first(q, k, v), is_causal=True, enable_gqa=True))


def sdpa_scaled_query(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    return merged(F.scaled_dot_product_attention(*heads_first(q * 0.3, k, v), is_causal=True, scale=1.0))


def sdpa_twice(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    """What the first gives is what the second attends to, as it is."""
    first = F.scaled_dot_product_attention(*heads_first(q, k, v), is_causal=True)
    return merged(F.scaled_dot_product_attention(q.transpose(1, 2), first, first, is_causal=True))


# Products


def flat_bmm(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    batch, size = q.shape[:2]
    q, k, v = (t.transpose(1, 2).reshape(batch * HEADS, size, -1) for t in (q, k, v))
    p = torch.softmax(hidden(torch.bmm(q * SCALE, k.transpose(1, 2)), causal(size)), -1)
    return merged(torch.bmm(p, v).view(batch, HEADS, size, -1))


def flat_baddbmm(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    batch, size = q.shape[:2]
    q, k, v = (t.transpose(1, 2).reshape(batch * HEADS, size, -1) for t in (q, k, v))
    mask = torch.zeros(size, size).masked_fill(~causal(size), torch.finfo(torch.float32).min)
    scores = torch.baddbmm(mask.expand(batch * HEADS, -1, -1), q, k.transpose(1, 2), beta=1.0, alpha=SCALE)
    return merged(torch.bmm(scores.softmax(-1), v).view(batch, HEADS, size, -1))


def einsum_bhqk(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * SCALE
    p = hidden(scores, causal(q.shape[1])).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", p, v).flatten(2)


def einsum_bqhk(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    """Scores [B, S, H, S]: the heads stand between queries and keys."""
    scores = torch.einsum("bqhd,bkhd->bqhk", q, k) * SCALE
    p = hidden(scores, causal(q.shape[1])[:, None]).softmax(-1)
    return torch.einsum("bqhk,bkhd->bqhd", p, v).flatten(2)


# Groups


def grouped(repeat: Callable[[Tensor], Tensor]) -> Attend:
    """GQA with K and V [B, Hkv, S, D] repeated by `repeat`."""

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
        q, k, v = heads_first(q, k, v)
        scores = q @ repeat(k).transpose(-1, -2) * SCALE
        return merged(hidden(scores, causal(q.shape[2])).softmax(-1) @ repeat(v))

    return attend


def expanded(t: Tensor) -> Tensor:
    batch, heads, size, dim = t.shape
    return t[:, :, None].expand(batch, heads, HEADS // heads, size, dim).reshape(batch, HEADS, size, dim)


def turned_after(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    """Keys are repeated before something else is done to them, values are not: behind what is read of them, there are
    keys of all heads and values of fewer."""
    q, k, v = heads_first(q, k, v)
    k, v = expanded(k), expanded(v)
    k = torch.cat([-k[..., DIM // 2 :], k[..., : DIM // 2]], -1)
    return merged(hidden(q @ k.transpose(-1, -2) * SCALE, causal(q.shape[2])).softmax(-1) @ v)


def five_dimensions(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    """The queries of a group as a dimension of their own; K and V broadcast over it."""
    q, k, v = heads_first(q, k, v)
    q = q.unflatten(1, (k.shape[1], -1))
    scores = q @ k[:, :, None].transpose(-1, -2) * SCALE
    y = hidden(scores, causal(q.shape[3])).softmax(-1) @ v[:, :, None]
    return merged(y.flatten(1, 2))


# Softmax by hand, and what happens to scores


def by_hand(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    q, k, v = heads_first(q, k, v)
    scores = hidden(q @ k.transpose(-1, -2) * SCALE, causal(q.shape[2]))
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    return merged((e / e.sum(-1, keepdim=True)) @ v)


def with_sinks(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    q, k, v = heads_first(q, k, v)
    scores = hidden(q @ k.transpose(-1, -2) * SCALE, causal(q.shape[2]))
    column = layer.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    p = torch.cat([scores, column], -1).softmax(-1)
    return merged(p[..., :-1] @ v)


def dropped_out(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    q, k, v = heads_first(q, k, v)
    p = hidden(q @ k.transpose(-1, -2) * SCALE, causal(q.shape[2])).softmax(-1)
    return merged(F.dropout(p, 0.5, training=layer.training) @ v)


def in_float32(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    q, k, v = heads_first(q, k, v)
    scores = q @ k.transpose(-1, -2) * SCALE
    least = torch.finfo(scores.dtype).min
    scores = scores + torch.zeros_like(scores).masked_fill(~causal(q.shape[2]), least)
    return merged(scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v)


def buckets(size: int) -> Tensor:
    """T5-like: exact distances below 8, coarser ones beyond."""
    far = distance(size).clamp(min=0)
    coarse = 8 + (far.float().clamp(min=1).log2() * 2 - 6).floor().long()
    return torch.where(far < 8, far, coarse.clamp(8, 15))


def softcapped(s: Tensor, cap: float = 5.0) -> Tensor:
    return cap * torch.tanh(s * SCALE / cap)


def tabled(s: Tensor, layer: Layer) -> Tensor:
    size = s.shape[-1]
    return (s * SCALE).masked_fill(layer.mask[None, None, :size, :size] == 0, -math.inf)


def flex(mask: bool) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        size = q.shape[1]
        q, k, v = heads_first(q, k, v)
        slopes = layer.slopes
        with torch.no_grad():
            if mask:
                block = create_block_mask(
                    lambda b, h, i, j: (i >= j) & (i - j < 6), None, None, size, size, device="cpu"
                )
                return merged(flex_attention(q, k, v, block_mask=block))
            return merged(
                flex_attention(
                    q, k, v, lambda s, b, h, i, j: torch.where(i >= j, s + slopes[h] * (j - i), -math.inf)
                )
            )

    return attend


FORMS: dict[str, Form] = {
    "sdpa, is_causal": Form(sdpa_causal),
    "sdpa, boolean mask": Form(by_mask(causal)),
    "sdpa, mask that adds": Form(by_mask(lambda n: torch.zeros(n, n).masked_fill(~causal(n), -1e9))),
    "sdpa, enable_gqa": Form(sdpa_gqa, kv_heads=2),
    "sdpa, scale": Form(by_mask(causal, scale=0.2)),
    "sdpa, scaled queries": Form(sdpa_scaled_query),
    "sdpa, sliding": Form(by_mask(lambda n: causal(n) & (distance(n) < 6))),
    "sdpa, chunked": Form(
        by_mask(lambda n: causal(n) & (torch.arange(n)[:, None] // 6 == torch.arange(n) // 6))
    ),
    "sdpa, ALiBi": Form(
        by_mask(
            lambda n: (-distance(n) * (2.0 ** -torch.arange(1, 5))[:, None, None]).masked_fill(
                ~causal(n), -math.inf
            )
        )
    ),
    "matmul": Form(by_scores(lambda s, layer: hidden(s * SCALE, causal(s.shape[-1])))),
    "matmul, scale inside the mask": Form(
        by_scores(lambda s, layer: hidden(s, causal(s.shape[-1]), -1e9) * SCALE)
    ),
    "matmul, division": Form(
        by_scores(lambda s, layer: hidden(s / math.sqrt(DIM), causal(s.shape[-1]), -1e4))
    ),
    "matmul, where": Form(
        by_scores(lambda s, layer: torch.where(causal(s.shape[-1]), s * SCALE, torch.finfo(s.dtype).min))
    ),
    "matmul, table of the mask": Form(by_scores(tabled)),
    "bmm over batch and heads": Form(flat_bmm),
    "baddbmm": Form(flat_baddbmm),
    "einsum, bhqk": Form(einsum_bhqk),
    "einsum, bqhk": Form(einsum_bqhk),
    "groups by expand": Form(grouped(expanded), kv_heads=2),
    "groups by repeat_interleave": Form(
        grouped(lambda t: t.repeat_interleave(HEADS // t.shape[1], 1)), kv_heads=2
    ),
    "groups by index": Form(
        grouped(lambda t: t[:, torch.arange(HEADS) // (HEADS // t.shape[1])]), kv_heads=2
    ),
    "groups as a dimension": Form(five_dimensions, kv_heads=2),
    "one KV head": Form(grouped(expanded), kv_heads=1),
    "softmax by hand": Form(by_hand),
    "softmax in float32": Form(in_float32),
    "softmax in float32, bfloat16 weights": Form(in_float32, dtype=torch.bfloat16),
    "dropout": Form(dropped_out),
    "softcap": Form(by_scores(lambda s, layer: hidden(softcapped(s), causal(s.shape[-1])))),
    "sink logits": Form(with_sinks),
    "ALiBi by distance": Form(
        by_scores(
            lambda s, layer: hidden(
                s * SCALE - layer.slopes[:, None, None] * distance(s.shape[-1]), causal(s.shape[-1])
            )
        )
    ),
    "ALiBi by key": Form(
        by_scores(
            lambda s, layer: hidden(
                s * SCALE + layer.slopes[:, None, None] * torch.arange(s.shape[-1]), causal(s.shape[-1])
            )
        )
    ),
    "learned relative bias": Form(
        by_scores(
            lambda s, layer: hidden(
                s * SCALE + layer.bias(buckets(s.shape[-1])).permute(2, 0, 1), causal(s.shape[-1])
            )
        )
    ),
    "QK-norm": Form(sdpa_causal, qk_norm=True),
    "wider values": Form(grouped(lambda t: t), v_dim=12),
    "fused qkv": Form(sdpa_gqa, kv_heads=2, fused=True),
    "parallel MLP": Form(sdpa_causal, parallel=True),
    "flex_attention, mask_mod": Form(flex(mask=True)),
    "flex_attention, score_mod": Form(flex(mask=False)),
    "groups, keys turned after": Form(turned_after, kv_heads=2),
}


@dataclass(frozen=True)
class Broken:
    """A form with one mistake. refused: what the error says (a regular expression), or None: it is handled exactly."""

    form: Form
    refused: str | None


def only_first_layer(attend: Attend, otherwise: Attend) -> Attend:
    """Another attention in the second layer (told apart by a parameter that only the test sets)."""

    def chosen(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
        return (attend if getattr(layer, "first", True) else otherwise)(q, k, v, layer)

    return chosen


def sdpa_open(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    return merged(F.scaled_dot_product_attention(*heads_first(q, k, v)))


def not_softmax(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    q, k, v = heads_first(q, k, v)
    p = torch.sigmoid(hidden(q @ k.transpose(-1, -2) * SCALE, causal(q.shape[2])))
    return merged(p @ v)


def over_queries(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    """The softmax normalises over the queries, not over the keys."""
    q, k, v = heads_first(q, k, v)
    return merged(hidden(q @ k.transpose(-1, -2) * SCALE, causal(q.shape[2])).softmax(-2).nan_to_num() @ v)


def squared(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    q, k, v = heads_first(q, k, v)
    p = hidden(q @ k.transpose(-1, -2) * SCALE, causal(q.shape[2])).softmax(-1)
    return merged((p * p) @ v)


def gated_scores(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    """A temperature that each key brings along: no number, so no scale."""
    q, k, v = heads_first(q, k, v)
    scores = q @ k.transpose(-1, -2) * torch.sigmoid(k.sum(-1))[:, :, None]
    return merged(hidden(scores, causal(q.shape[2])).softmax(-1) @ v)


def sinks_kept(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    """The sink's probability goes to a value of zeros: the same as dropping it, spelled with a longer V."""
    q, k, v = heads_first(q, k, v)
    scores = hidden(q @ k.transpose(-1, -2) * SCALE, causal(q.shape[2]))
    column = layer.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    p = torch.cat([scores, column], -1).softmax(-1)
    return merged(p @ torch.cat([v, torch.zeros_like(v[:, :, :1])], 2))


def half_softcapped(s: Tensor, layer: Layer) -> Tensor:
    """A softcap on the first two heads only."""
    s = s * SCALE
    return hidden(torch.cat([softcapped(s[:, :2] / SCALE), s[:, 2:]], 1), causal(s.shape[-1]))


def token_slopes(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    """ALiBi whose slope depends on the query's content."""
    q, k, v = heads_first(q, k, v)
    scores = q @ k.transpose(-1, -2) * SCALE - q.sum(-1, keepdim=True).sigmoid() * distance(q.shape[2])
    return merged(hidden(scores, causal(q.shape[2])).softmax(-1) @ v)


BROKEN: dict[str, Broken] = {
    "bidirectional": Broken(Form(sdpa_open), "bidirectional"),
    "one layer bidirectional": Broken(Form(only_first_layer(sdpa_causal, sdpa_open)), "bidirectional"),
    "sees one token too many": Broken(
        Form(by_mask(lambda n: causal(n, 1))), "shows the future: query 0 sees key 1"
    ),
    "does not see itself": Broken(
        Form(by_mask(lambda n: causal(n, -1) | (torch.arange(n)[:, None] + torch.arange(n) == 0))),
        None,
    ),
    "a window one longer from 40 on": Broken(
        Form(by_mask(lambda n: causal(n) & (distance(n) < 6 + (torch.arange(n)[:, None] >= 40)))), None
    ),
    "scale applied twice": Broken(
        Form(by_scores(lambda s, layer: hidden(s * SCALE * SCALE, causal(s.shape[-1])))), None
    ),
    "a negative scale": Broken(
        Form(by_scores(lambda s, layer: hidden(-s * SCALE, causal(s.shape[-1])))), None
    ),
    "no softmax": Broken(Form(not_softmax), "no softmax attention|tokens mix outside attention"),
    "softmax over the queries": Broken(Form(over_queries), "softmax"),
    "squared probabilities": Broken(Form(squared), "not the softmax of the scores"),
    "scores gated by keys": Broken(Form(gated_scores), None),
    "sink with a value": Broken(Form(sinks_kept), "."),
    "softcap on two heads": Broken(Form(by_scores(half_softcapped)), None),
    "slope that depends on tokens": Broken(Form(token_slopes), None),
    "relative bias into the future": Broken(
        Form(
            by_scores(lambda s, layer: s * SCALE - layer.slopes[:, None, None] * distance(s.shape[-1]).abs())
        ),
        "bidirectional",
    ),
}
