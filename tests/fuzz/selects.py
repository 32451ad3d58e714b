"""Keys chosen by activations, and keys and values that are more than a product of their own token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fuzz.expressions import Context
from tests.fuzz.parts import NONE, Rule

TOP = (4, 8, 30, 64, 100, 200, 400, 600)


def index_scores(c: Context) -> Tensor:
    """[B, S, S] of an indexer with two heads and one key per token, as DeepSeek-V3.2 has it."""
    q = c.linear("index_q", 16).unflatten(-1, (2, 8))
    k = c.linear("index_k", 8)
    weight = c.linear("index_w", 2)
    return (F.relu(torch.einsum("bihd,bjd->bihj", q, k)) * weight[..., None]).sum(2) + c.x[..., :1] @ c.x[
        ..., 1:2
    ].mT


def best(c: Context, shown: Tensor, k: int, how: str) -> Tensor:
    """Of the keys that are shown, the k best."""
    causal = c.of("i >= j")
    visible = causal[:, 0] if causal.dim() == 4 else causal
    scores = index_scores(c).masked_fill(~visible, -torch.inf)
    top = scores.topk(min(k, c.n), -1)
    if how == "scatter":
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, top.indices, True)
    elif how == "zeros":
        chosen = torch.zeros(*scores.shape).scatter(-1, top.indices, 1.0) > 0
    elif how == "full":
        chosen = torch.full(scores.shape, -1e9).scatter(-1, top.indices, 0.0) == 0
    else:
        chosen = scores >= top.values[..., -1:]
    return shown & chosen[:, None] & causal


def good(c: Context, shown: Tensor) -> Tensor:
    """A threshold on the indexer's score, and the token itself."""
    return shown & ((index_scores(c) > 0)[:, None] | c.of("d == 0"))


def gated(c: Context, shown: Tensor) -> Tensor:
    """Each key tells whether it is worth keeping."""
    return shown & (c.at_k(c.linear("keep", c.heads_count) > -0.3) | c.of("d == 0"))


def best_of_all(c: Context, shown: Tensor, k: int) -> Tensor:
    """The k tokens of the whole text that score best: the future decides."""
    scores = c.linear("worth", 1)[..., 0]
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(
        -1, scores.topk(min(k, c.n), -1).indices, True
    )
    return shown & (c.at_k(chosen) | c.of("d == 0"))


SELECTS: dict[str, Rule] = {
    NONE.name: Rule(lambda c, shown: shown, weight=10),
    "indexer": Rule(best, lambda rng: (rng.choice(TOP), rng.choice(("scatter", "zeros", "full"))), 3),
    "indexer, all as good": Rule(best, lambda rng: (rng.choice(TOP), "threshold"), 1, None),
    "indexer, threshold": Rule(good, weight=1, held=None),
    "gated keys": Rule(gated, weight=1, held=None),
    "best of the whole text": Rule(best_of_all, lambda rng: (rng.choice((64, 100, 200)),), 0.5, False),
}


# Keys and values: q, k, v [B, H, S, D] in, the same out.
Heads = tuple[Tensor, Tensor, Tensor]


def before(t: Tensor, steps: int = 1) -> Tensor:
    """Each token gets what belongs to an earlier one."""
    return F.pad(t, (0, 0, steps, 0))[:, :, :-steps]


def mixed_keys(c: Context, q: Tensor, k: Tensor, v: Tensor) -> Heads:
    gate = c.weight("mix", k.shape[1], 1, 1).sigmoid()
    return q, k * gate + before(k) * (1 - gate), v


def shifted_values(c: Context, q: Tensor, k: Tensor, v: Tensor, steps: int) -> Heads:
    return q, k, before(v, steps)


def residual_values(c: Context, q: Tensor, k: Tensor, v: Tensor) -> Heads:
    kept = c.kept.setdefault("v", v)
    return q, k, 0.5 * v + 0.5 * kept


def shared(c: Context, q: Tensor, k: Tensor, v: Tensor) -> Heads:
    """Keys and values of the first layer that has this."""
    kept_k, kept_v = c.kept.setdefault("k", k), c.kept.setdefault("shared v", v)
    return q, kept_k, kept_v


def as_values(c: Context, q: Tensor, k: Tensor, v: Tensor) -> Heads:
    return q, k, k


def averaged_keys(c: Context, q: Tensor, k: Tensor, v: Tensor) -> Heads:
    return q, k - k.mean(2, keepdim=True), v


def running_keys(c: Context, q: Tensor, k: Tensor, v: Tensor) -> Heads:
    return q, k, v.cumsum(2) / torch.arange(1, c.n + 1)[:, None]


def hidden_values(c: Context, q: Tensor, k: Tensor, v: Tensor) -> Heads:
    return q, k, v.masked_fill(c.hidden()[:, None, :, None], 0.0)


def flipped_keys(c: Context, q: Tensor, k: Tensor, v: Tensor) -> Heads:
    return q, k.flip(2), v


def persistent(c: Context, q: Tensor, k: Tensor, v: Tensor) -> Heads:
    """The keys' norms divide them; queries of special tokens ask for nothing."""
    return q * (~c.hidden())[:, None, :, None], F.normalize(k, dim=-1) * 3, v


KEYS: dict[str, Rule] = {
    NONE.name: Rule(lambda c, q, k, v: (q, k, v), weight=10),
    "values of the first layer": Rule(residual_values, weight=2),
    "shared with the first layer": Rule(shared, weight=2),
    "keys as values": Rule(as_values, weight=1),
    "values hidden by id": Rule(hidden_values, weight=1),
    "normed keys": Rule(persistent, weight=2),
    "keys mixed with the last": Rule(mixed_keys, weight=1, held=None),
    "values of an earlier token": Rule(shifted_values, lambda rng: (rng.choice((1, 2, 20, 64)),), 1, None),
    "keys less their mean": Rule(averaged_keys, weight=1, held=False),
    "running mean of values": Rule(running_keys, weight=1, held=None),
    "keys in reverse": Rule(flipped_keys, weight=0.5, held=False),
}
