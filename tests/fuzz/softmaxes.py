"""From scores [B, H, S, S], masked, to probabilities; and weights that come after the softmax."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch
from torch import Tensor

from tests.fuzz.expressions import Context
from tests.fuzz.masks import filled
from tests.fuzz.parts import NONE, Rule


def in_float32(c: Context, s: Tensor) -> Tensor:
    return torch.softmax(s, -1, dtype=torch.float32).to(s.dtype)


def by_hand(c: Context, s: Tensor) -> Tensor:
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def without_maximum(c: Context, s: Tensor) -> Tensor:
    e = s.exp()
    return e / e.sum(-1, keepdim=True)


def by_log(c: Context, s: Tensor) -> Tensor:
    return torch.log_softmax(s, -1).exp()


def by_logsumexp(c: Context, s: Tensor) -> Tensor:
    return torch.exp(s - torch.logsumexp(s, -1, keepdim=True))


def off_by_one(c: Context, s: Tensor) -> Tensor:
    """exp(s) / (1 + sum exp(s))"""
    most = s.amax(-1, keepdim=True).clamp(min=0)
    e = torch.exp(s - most)
    return e / (torch.exp(-most) + e.sum(-1, keepdim=True))


def off_by_one_column(c: Context, s: Tensor) -> Tensor:
    return torch.cat([s, torch.zeros_like(s[..., :1])], -1).softmax(-1)[..., :-1]


def sinks(c: Context, s: Tensor) -> Tensor:
    column = c.weight("sinks", c.heads_count).reshape(1, -1, 1, 1).expand(s.shape[0], -1, s.shape[2], -1)
    return torch.cat([s, column], -1).softmax(-1)[..., :-1]


def sinks_first(c: Context, s: Tensor) -> Tensor:
    column = c.weight("sinks", 1).reshape(1, 1, 1, 1).expand(s.shape[0], s.shape[1], s.shape[2], -1)
    return torch.cat([column, s], -1).softmax(-1)[..., 1:]


def sinks_of(c: Context, s: Tensor, text: str) -> Tensor:
    """One more logit of each query, by what it is or where it stands."""
    column = c.of(text).expand(s.shape[0], s.shape[1], s.shape[2], -1)
    return torch.cat([s, column.to(s.dtype)], -1).softmax(-1)[..., :-1]


def sigmoid(c: Context, s: Tensor) -> Tensor:
    return torch.sigmoid(s)


def relu_squared(c: Context, s: Tensor) -> Tensor:
    return torch.relu(s.clamp(min=-100)).square()


def over_queries(c: Context, s: Tensor) -> Tensor:
    return s.masked_fill(s < -100, -100.0).softmax(-2)


def best_scores(c: Context, s: Tensor, k: int) -> Tensor:
    """Only the k best scores of each query count."""
    least = s.topk(min(k, s.shape[-1]), -1).values[..., -1:]
    return s.masked_fill(s < least, -torch.inf).softmax(-1)


def over_chunks(c: Context, s: Tensor) -> Tensor:
    """Softmax over each half of the keys: what is a half depends on the length."""
    half = s.shape[-1] // 2
    return torch.cat([s[..., :half].clamp(min=-50).softmax(-1), s[..., half:].clamp(min=-50).softmax(-1)], -1)


SOFTMAXES: dict[str, Rule] = {
    "softmax": Rule(lambda c, s: s.softmax(-1), weight=14),
    "in float32": Rule(in_float32, weight=3),
    "by hand": Rule(by_hand, weight=2),
    "by hand, without the maximum": Rule(without_maximum, weight=2),
    "by log_softmax": Rule(by_log, weight=1),
    "by logsumexp": Rule(by_logsumexp, weight=1),
    "off by one": Rule(off_by_one, weight=1),
    "off by one, a column": Rule(off_by_one_column, weight=1),
    "sinks": Rule(sinks, weight=3),
    "one sink, first": Rule(sinks_first, weight=1),
    "sinks of queries": Rule(
        sinks_of,
        lambda rng: (rng.choice(("c.at_q(c.linear('sinks', c.heads_count))", "0.01 * (i - 100.0) + 0 * h")),),
        1,
        None,
    ),
    "sigmoid": Rule(sigmoid, weight=1, held=None),
    "relu squared": Rule(relu_squared, weight=1, held=None),
    "over the queries": Rule(over_queries, weight=1, held=False),
    "best scores": Rule(best_scores, lambda rng: (rng.choice((8, 32, 64, 100, 200)),), 1, None),
    "over halves": Rule(over_chunks, weight=0.5, held=False),
}


# Weights after the softmax: p, the context, and what rules need; returns what V is multiplied by.


def times(c: Context, p: Tensor, text: str) -> Tensor:
    return p * c.of(text)


def times_again_one(c: Context, p: Tensor, text: str) -> Tensor:
    p = p * c.of(text)
    return p / (p.sum(-1, keepdim=True) + 1e-6)


def of(*texts: str) -> Callable[[Random], tuple[str]]:
    return lambda rng: (filled(rng, rng.choice(texts)),)


SPANS = (
    "((c.weight('span', c.heads_count, 1, 1).abs() * 100 + 32 - d) / 32).clamp(0, 1)",
    "((W + 32 - d) / 32.0).clamp(0.0, 1.0)",
    "(1 - d / 400.0).clamp(min=0.0)",
    "(d < W).to(c.model.dtype)",
    "0.99 ** d.clamp(min=0)",
    "torch.exp(-d.clamp(min=0) * c.slopes() * 0.1)",
    "torch.where(d > W, 0.5, 1.0)",
    "torch.where(j < K, 1.0, 0.7)",
    "torch.where(i < W, 1.0, 1.5)",
)

WEIGHTS: dict[str, Rule] = {
    NONE.name: Rule(lambda c, p: p, weight=12),
    "written": Rule(times, weight=0, held=None),  # by hand, in a test
    "written, again 1": Rule(times_again_one, weight=0, held=None),
    "adaptive span": Rule(times, of(*SPANS), 4),
    "adaptive span, again 1": Rule(times_again_one, of(*SPANS), 3),
    "heads": Rule(times, of("c.weight('gate', c.heads_count, 1, 1)", "c.heads(1.0, 0.5, 0.0, 2.0)"), 2),
    "gates of the query": Rule(times, of("c.at_q(c.linear('gate', c.heads_count).sigmoid())"), 2),
    "gates of the key": Rule(times, of("c.at_k(c.linear('gate', c.heads_count).sigmoid())"), 1),
    "by id": Rule(
        times,
        of("torch.where(c.at_k(c.hidden()), 0.0, 1.0)", "torch.where(c.at_q(c.hidden()), 0.3, 1.0)"),
        1,
        None,
    ),
    "dropout": Rule(lambda c, p: torch.nn.functional.dropout(p, 0.3, training=c.model.training), weight=1),
    "talking heads": Rule(
        lambda c, p: torch.einsum("bhij,hg->bgij", p, c.weight("talk", c.heads_count, c.heads_count)),
        weight=1,
        held=None,
    ),
    "squared": Rule(lambda c, p: p * p, weight=1, held=None),
    "a floor": Rule(lambda c, p: p.clamp(min=0.01), weight=1, held=None),
    "a threshold": Rule(lambda c, p: torch.where(p > 0.02, p, 0.0), weight=0.5, held=None),
    "less the mean": Rule(lambda c, p: p - p.mean(-1, keepdim=True) * 0.5, weight=0.5, held=False),
    "by length": Rule(times, of("(1.0 - d / n)", "torch.full((), 1.0) * n / 100"), 1, None),
    "summed over queries": Rule(lambda c, p: p * (1 - p.cumsum(2) / 50).clamp(min=0), weight=0.5, held=None),
}
