"""How mask, bias and product are written: PyTorch's own attention or every eager way."""

from __future__ import annotations

import math
from random import Random

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fuzz.expressions import Context
from tests.fuzz.parts import Rule
from tests.fuzz.spec import Layer

HIDDEN = (-math.inf, "min", -1e9, -1e4)


def least(dtype: torch.dtype, value: float | str) -> float:
    """What a hidden score becomes."""
    smallest = torch.finfo(dtype).min
    return smallest if value == "min" or smallest > float(value) > -math.inf else float(value)


def grouped(k: Tensor, heads: int, how: str) -> Tensor:
    """[B, Hkv, S, D] -> [B, H, S, D]"""
    batch, own, size, dim = k.shape
    if own == heads:
        return k
    if how == "repeat":
        return k.repeat_interleave(heads // own, 1)
    return k[:, :, None].expand(batch, own, heads // own, size, dim).reshape(batch, heads, size, dim)


def pairs(c: Context, shown: Tensor) -> Tensor:
    """The mask with both of its dimensions."""
    return shown.expand(torch.broadcast_shapes(shown.shape, (c.n, c.n)))


def sdpa_causal(c: Context, layer: Layer, q: Tensor, k: Tensor, v: Tensor, parts: Parts) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=parts[2], enable_gqa=k.shape[1] != q.shape[1]
    )


def sdpa_bool(c: Context, layer: Layer, q: Tensor, k: Tensor, v: Tensor, parts: Parts) -> Tensor:
    shown, _, scale = parts
    gqa = k.shape[1] != q.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=pairs(c, shown), scale=scale, enable_gqa=gqa)


def sdpa_float(
    c: Context, layer: Layer, q: Tensor, k: Tensor, v: Tensor, parts: Parts, value: float | str
) -> Tensor:
    shown, bias, scale = parts
    bias = torch.zeros((), dtype=q.dtype) if bias is None else bias
    mask = torch.where(pairs(c, shown), bias, least(q.dtype, value)).to(q.dtype)
    k, v = grouped(k, q.shape[1], "expand"), grouped(v, q.shape[1], "repeat")
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def fill(c: Context, s: Tensor, shown: Tensor, how: str, value: float | str) -> Tensor:
    number = least(s.dtype, value)
    finite = number if math.isfinite(number) else least(s.dtype, -1e9)
    if how == "masked_fill":
        return s.masked_fill(~shown, number)
    if how == "masked_fill, 0":
        return s.masked_fill(shown.int() == 0, number)
    if how == "masked_fill_":
        return s.masked_fill_(torch.logical_not(shown), number)
    if how == "where":
        return torch.where(shown, s, number)
    if how == "where, a tensor":
        return torch.where(shown, s, torch.full([], number, dtype=s.dtype))
    if how == "add":
        return s + torch.zeros_like(shown, dtype=s.dtype).masked_fill(~shown, number)
    if how == "one minus":
        return s + (1.0 - shown.to(s.dtype)) * max(finite, least(s.dtype, -1e9))
    if how == "times and less":
        m = shown.to(s.dtype)
        return s * m + least(s.dtype, -1e9) * (1 - m)
    if how == "log":
        return s + shown.to(s.dtype).log()
    if how == "times":  # hidden scores become 0: they are seen
        return s * shown.to(s.dtype)
    raise ValueError(how)


def eager(
    c: Context,
    layer: Layer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parts: Parts,
    how: str,
    value: float | str,
    product: str,
    order: str,
) -> Tensor:
    from tests.fuzz.scales import RESPONSES
    from tests.fuzz.softmaxes import SOFTMAXES, WEIGHTS

    shown, bias, scale = parts
    k, v = grouped(k, q.shape[1], product), grouped(v, q.shape[1], product)
    if product == "einsum":
        s = torch.einsum("bhid,bhjd->bhij", q, k)
    elif product == "baddbmm":
        start = torch.zeros((), dtype=q.dtype).expand(q.shape[0] * q.shape[1], c.n, c.n)
        s = torch.baddbmm(start, q.flatten(0, 1), k.flatten(0, 1).mT, beta=0.0, alpha=1.0).unflatten(
            0, q.shape[:2]
        )
    else:
        s = q @ k.transpose(-1, -2)
    if order == "mask first":  # the mask stands before the scale
        s = fill(c, s, shown, how, value) * (q.shape[-1] ** -0.5 if scale is None else scale)
        s = RESPONSES[layer.response.name].make(c, s, *layer.response.args)
        s = s if bias is None else s + bias
    else:
        s = s * (q.shape[-1] ** -0.5 if scale is None else scale)
        s = RESPONSES[layer.response.name].make(c, s, *layer.response.args)
        s = s if bias is None else s + bias
        s = fill(c, s, shown, how, value)
    p = SOFTMAXES[layer.softmax.name].make(c, s, *layer.softmax.args)
    p = WEIGHTS[layer.weights.name].make(c, p, *layer.weights.args).to(v.dtype)
    return torch.einsum("bhij,bhjd->bhid", p, v) if product == "einsum" else p @ v


def two_softmaxes(c: Context, layer: Layer, q: Tensor, k: Tensor, v: Tensor, parts: Parts) -> Tensor:
    """Differential attention: the second half of the channels has a softmax of its own, which is taken off."""
    shown, bias, scale = parts
    k, v = grouped(k, q.shape[1], "repeat"), grouped(v, q.shape[1], "repeat")
    maps = []
    for one, other in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True):
        s = one @ other.mT * (one.shape[-1] ** -0.5 if scale is None else scale)
        s = s if bias is None else s + bias
        maps.append(s.masked_fill(~shown, -math.inf).softmax(-1))
    return (maps[0] - 0.4 * maps[1]) @ v


def memory(c: Context, layer: Layer, q: Tensor, k: Tensor, v: Tensor, parts: Parts) -> Tensor:
    """Learned keys and values that every query sees."""
    shown, bias, scale = parts
    size = (1, k.shape[1], 3, k.shape[-1])
    k, v = (
        torch.cat([c.weight(name, *size).expand(t.shape[0], -1, -1, -1), t], 2)
        for name, t in (("memory_k", k), ("memory_v", v))
    )
    k, v = grouped(k, q.shape[1], "repeat"), grouped(v, q.shape[1], "repeat")
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if bias is None else torch.cat([s[..., :3], s[..., 3:] + bias], -1)
    return s.masked_fill(F.pad(~pairs(c, shown), (3, 0), value=False), -math.inf).softmax(-1) @ v


Parts = tuple[Tensor, "Tensor | None", "float | Tensor | None"]
FILLS = (
    "masked_fill",
    "masked_fill, 0",
    "masked_fill_",
    "where",
    "where, a tensor",
    "add",
    "one minus",
    "times and less",
    "log",
)


def drawn_eager(rng: Random) -> tuple[str, float | str, str, str]:
    how = rng.choices(FILLS, (6, 2, 1, 3, 2, 3, 2, 1, 1))[0]
    product = rng.choices(("matmul", "repeat", "einsum", "baddbmm"), (5, 2, 2, 1))[0]
    return how, rng.choices(HIDDEN, (4, 4, 2, 1))[0], product, "mask last"


def drawn_early(rng: Random) -> tuple[str, float | str, str, str]:
    how, _, product, _ = drawn_eager(rng)
    return how, rng.choice((-math.inf, -1e9, "min")), product, "mask first"


SPELLINGS: dict[str, Rule] = {
    "sdpa bool": Rule(sdpa_bool, weight=4),
    "sdpa float": Rule(sdpa_float, lambda rng: (rng.choice(HIDDEN),), 3),
    "eager": Rule(eager, drawn_eager, 5),
    "eager, mask first": Rule(eager, drawn_early, 1),
    "two softmaxes": Rule(two_softmaxes, weight=1, held=None),
    "memory": Rule(memory, weight=1, held=None),
    "eager, hidden a little": Rule(
        eager,
        lambda rng: ("masked_fill", rng.choice((-8.0, -12.0, -20.0, -50.0)), "matmul", "mask last"),
        0.3,
        None,
    ),
    "eager, mask by product": Rule(eager, lambda rng: ("times", 0.0, "matmul", "mask last"), 0.3, False),
    "sdpa is_causal": Rule(sdpa_causal, weight=0),  # only where there is nothing but a causal mask
}
