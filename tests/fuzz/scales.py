"""Scales of scores, and what scores go through: softcaps and other functions of a score."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import torch
from torch import Tensor

from tests.fuzz.expressions import Context
from tests.fuzz.masks import filled
from tests.fuzz.parts import NONE, Rule


def on_scores(*texts: str) -> Callable[[Random], tuple[str, str]]:
    return lambda rng: (filled(rng, rng.choice(texts)), "scores")


def on_either(*texts: str) -> Callable[[Random], tuple[str, str]]:
    return lambda rng: (filled(rng, rng.choice(texts)), rng.choice(("scores", "query")))


def factor(c: Context, text: str, where: str) -> tuple[Tensor, str]:
    """The factor, and whether queries or scores are multiplied by it; 1 / sqrt(dim) comes with it."""
    value = c.of(text)
    value = value.to(c.model.dtype) if isinstance(value, Tensor) else value
    return value * c.model.spec.dim**-0.5, where


SCALES: dict[str, Rule] = {
    NONE.name: Rule(lambda c: None, weight=12),
    "written": Rule(factor, weight=0, held=None),  # by hand, in a test
    "number": Rule(factor, on_either("1.3", "0.5", "2.0", "-1.0", "c.buf(0.7)", "c.one(1.1)"), 4),
    "per head": Rule(
        factor,
        on_either("c.heads(0.5, 1.0, 2.0, 1.5)", "c.weight('heads', c.heads_count, 1, 1)", "1.0 / (h + 1)"),
        2,
    ),
    "learned": Rule(
        factor, on_either("c.weight('scale', 1).exp()", "c.weight('scale', c.heads_count, 1, 1).exp()"), 2
    ),
    "log-n": Rule(
        factor,
        on_either(
            "torch.log(i + 1.0).clamp(min=1.0)",
            "(torch.log(i + 1.0) / math.log(64)).clamp(min=1.0)",
            "torch.log(i + 1.0).clamp(min=math.log(256)) / math.log(256)",
            "torch.log1p(i // W) * 0.3 + 1.0",
            "torch.where(i >= W, 1.5, 1.0)",
            "(1 + 0.1 * torch.log1p(torch.floor(i / W)))",
        ),
        4,
    ),
    "by distance": Rule(
        factor,
        on_scores(
            "torch.where(d > W, 0.5, 1.0)", "1.0 / (1 + d.clamp(min=0) // W)", "torch.exp(-d.abs() / 300)"
        ),
        2,
    ),
    "by key's place": Rule(
        factor, on_scores("torch.where(j < W, 1.0, 1.6)", "1 + 0.5 * torch.sin(j * 0.02)"), 1
    ),
    "by query": Rule(
        factor,
        on_either(
            "1 + c.at_q(c.linear('temp', c.heads_count).sigmoid())",
            "c.at_q(c.linear('temp', 1)[..., 0].exp())",
        ),
        2,
        None,
    ),
    "by key": Rule(factor, on_scores("1 + c.at_k(c.linear('temp', c.heads_count).sigmoid())"), 1, None),
    "by id": Rule(
        factor, on_either("torch.where(c.at_q(c.hidden()), 2.0, 1.0)", "1 + c.at_q(ids % 7) * 0.1"), 1, None
    ),
    "by length": Rule(
        factor,
        on_either("torch.full((), math.log(2.0)) * n / 100", "(n + 0.0) ** 0.1", "1 + (n > 300) * 0.5"),
        1,
        None,
    ),
}


def softcap(c: Context, s: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(s / cap)


def half_softcap(c: Context, s: Tensor, cap: float) -> Tensor:
    half = c.heads_count // 2
    return torch.cat([softcap(c, s[:, :half], cap), s[:, half:]], 1)


def late_softcap(c: Context, s: Tensor, start: int) -> Tensor:
    return torch.where(c.of(f"i >= {start}"), softcap(c, s, 1.5), s)


def standardised(c: Context, s: Tensor) -> Tensor:
    """Each query's scores over all keys, the future's too."""
    return (s - s.mean(-1, keepdim=True)) / s.std(-1, keepdim=True)


def row_max(c: Context, s: Tensor) -> Tensor:
    return s - s.amax((0, 1, 2, 3), keepdim=True) * torch.sigmoid(s)


def weak_hidden(c: Context, s: Tensor, hidden: float) -> Tensor:
    return s.masked_fill((s < 0) & c.of("i != j"), hidden)


RESPONSES: dict[str, Rule] = {
    NONE.name: Rule(lambda c, s: s, weight=12),
    "softcap": Rule(softcap, lambda rng: (rng.choice((0.5, 2.0, 5.0, 30.0)),), 3),
    "softcap on half of the heads": Rule(half_softcap, lambda rng: (2.0,), 1),
    "softcap from a position on": Rule(late_softcap, lambda rng: (rng.choice((64, 100, 200, 300)),), 1),
    "clamped": Rule(lambda c, s, most: s.clamp(-most, most), lambda rng: (rng.choice((0.5, 1.0, 3.0)),), 1),
    "leaky": Rule(lambda c, s: torch.nn.functional.leaky_relu(s, 0.2), weight=1),
    "squared": Rule(lambda c, s: s * s * math.sqrt(0.5), weight=0.5),
    "absolute": Rule(lambda c, s: s.abs(), weight=0.5),
    "kernel": Rule(lambda c, s: torch.log(torch.exp(s) + 1.0), weight=0.5),
    "standardised": Rule(standardised, weight=0.5, held=False),
    "less the most of all": Rule(row_max, weight=0.5, held=False),
    "the weak are hidden": Rule(weak_hidden, lambda rng: (rng.choice((-1e9, -math.inf)),), 0.3, None),
}
