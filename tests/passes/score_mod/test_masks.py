"""Masks and scales are proved: each kind is recognised, what is none is carried, all else refused with its reason."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvcompile.errors import DetectionError, ModelError
from kvcompile.passes.capture.capture import capture
from kvcompile.passes.detect.detect import detect
from kvcompile.passes.records import AttentionSite
from kvcompile.passes.rewrite.canonicalize import canonicalize

Attend = Callable[["One", Tensor, Tensor, Tensor], Tensor]
HEADS, DIM, LIMIT = 4, 8, 64


class One(nn.Module):
    """One attention layer around a function of q, k, v [B, H, S, D]."""

    table: Tensor
    window_table: Tensor
    slopes: Tensor

    def __init__(self, attend: Attend, num_kv_heads: int = HEADS):
        super().__init__()
        torch.manual_seed(0)
        self.attend, self.kv = attend, num_kv_heads
        self.embed = nn.Embedding(61, 32)
        self.q, self.k = nn.Linear(32, HEADS * DIM), nn.Linear(32, num_kv_heads * DIM)
        self.v, self.o = nn.Linear(32, num_kv_heads * DIM), nn.Linear(HEADS * DIM, 61)
        position = torch.arange(LIMIT)
        past = position[:, None] >= position
        self.register_buffer("table", past)
        self.register_buffer("window_table", past & (position[:, None] - position < 40))
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125, 0.0625]).view(4, 1, 1))

    def forward(self, input_ids: Tensor) -> Tensor:
        batch, size = input_ids.shape
        x = self.embed(input_ids)
        q = self.q(x).view(batch, size, HEADS, DIM).transpose(1, 2)
        k = self.k(x).view(batch, size, self.kv, DIM).transpose(1, 2)
        v = self.v(x).view(batch, size, self.kv, DIM).transpose(1, 2)
        return self.o(self.attend(self, q, k, v).transpose(1, 2).reshape(batch, size, -1))


def spelled(change: Callable[[One, Tensor, Tensor], Tensor], scale: float = DIM**-0.5) -> Attend:
    """Eager attention whose scores go through `change(module, scores, distance)`; distance = i - j."""

    def attend(module: One, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        position = torch.arange(q.shape[2])
        scores = change(module, q @ k.transpose(-1, -2) * scale, position[:, None] - position)
        return scores.softmax(-1) @ v

    return attend


def shows(condition: Callable[[Tensor], Tensor], hidden: float = -math.inf) -> Attend:
    return spelled(lambda _, scores, distance: scores.masked_fill(~condition(distance), hidden))


def sdpa(condition: Callable[[Tensor, Tensor], Tensor] | None = None, **arguments: float) -> Attend:
    """SDPA with a boolean mask of (i, j)."""

    def attend(module: One, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        position = torch.arange(q.shape[2])
        mask = None if condition is None else condition(position[:, None], position)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **arguments)  # type: ignore[arg-type]

    return attend


def site_of(model: nn.Module) -> AttentionSite:
    """The model's only site, after checking that the canonical graph computes what the model does."""
    model = model.eval()
    captured = capture(model)
    detection = detect(captured)
    canonical = canonicalize(captured, detection)
    ids = torch.randint(0, 61, (2, 23))
    with torch.no_grad():
        torch.testing.assert_close(canonical.graph_module(ids)[0], model(ids))
    (site,) = detection.sites
    return site


def band(window: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda i, j: (j <= i) & (i - j < window)


def chunk(size: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda i, j: (j <= i) & (i // size == j // size)


def baddbmm(module: One, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    batch, heads, size, dim = q.shape
    q, k, v = (t.reshape(batch * heads, size, dim) for t in (q, k, v))
    scores = torch.baddbmm(torch.zeros(1, 1, 1), q, k.transpose(1, 2), beta=1.0, alpha=dim**-0.5)
    scores = scores.view(batch, heads, size, size).masked_fill(~module.table[:size, :size], -1e9)
    probs = F.dropout(scores.softmax(-1), 0.1, module.training).view(batch * heads, size, size)
    return torch.bmm(probs, v).view(batch, heads, size, dim)


def einsum_last(module: One, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, S, H, D] order, an additive triangle, softmax in float32."""
    size = q.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * DIM**-0.5
    scores = scores + torch.full((size, size), -math.inf).triu(1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1, dtype=torch.float32), v).transpose(1, 2)


def grouped(module: One, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Five dimensions: queries of a group beside each other, keys broadcast."""
    batch, heads, size, dim = q.shape
    q = q.view(batch, module.kv, heads // module.kv, size, dim)
    scores = torch.einsum("bkgqd,bksd->bkgqs", q, k) * DIM**-0.5
    scores = scores.masked_fill(~module.table[:size, :size], -1e9)
    return torch.einsum("bkgqs,bksd->bkgqd", scores.softmax(-1), v).reshape(batch, heads, size, dim)


def in_place(module: One, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    scores /= DIM**0.5
    scores.masked_fill_(~module.table[: q.shape[2], : q.shape[2]], -1e4)
    return scores.softmax(-1) @ v


def max_subtracted(_: One, scores: Tensor, distance: Tensor) -> Tensor:
    scores = scores.masked_fill(distance < 0, -1e9)
    return scores - scores.amax(-1, keepdim=True)


def multiplied(_: One, scores: Tensor, distance: Tensor) -> Tensor:
    shown = (distance >= 0).float()
    return scores * shown - 1e10 * (1 - shown)


HITS: dict[str, tuple[nn.Module, str, float]] = {
    "is_causal": (One(sdpa(is_causal=True)), "causal", DIM**-0.5),
    "scale": (One(sdpa(is_causal=True, scale=0.7)), "causal", 0.7),
    "gqa": (One(sdpa(is_causal=True, enable_gqa=True), 2), "causal", DIM**-0.5),
    "mqa": (One(sdpa(is_causal=True, enable_gqa=True), 1), "causal", DIM**-0.5),
    "window 9": (One(sdpa(band(9))), "sliding(9)", DIM**-0.5),
    "window 29": (One(sdpa(band(29))), "sliding(29)", DIM**-0.5),
    "window 1500": (One(sdpa(band(1500))), "sliding(1500)", DIM**-0.5),
    "window 32768, shrunk": (One(sdpa(band(32768))), "sliding(32768)", DIM**-0.5),
    "eager window 32768": (One(shows(lambda d: (d >= 0) & (d <= 32767))), "sliding(32768)", DIM**-0.5),
    "window 40 in a table": (
        One(spelled(lambda m, t, d: t.masked_fill(~m.window_table[: t.shape[-1], : t.shape[-1]], -1e9))),
        "sliding(40)",
        DIM**-0.5,
    ),
    "finfo.min": (One(shows(lambda d: d >= 0, torch.finfo(torch.float32).min)), "causal", DIM**-0.5),
    "-1e4": (One(shows(lambda d: d >= 0, -1e4)), "causal", DIM**-0.5),
    "odd scale": (One(spelled(lambda _, t, d: t.masked_fill(d < 0, -1e9), 0.3)), "causal", 0.3),
    "max subtracted": (One(spelled(max_subtracted)), "causal", DIM**-0.5),
    "multiplied": (One(spelled(multiplied)), "causal", DIM**-0.5),
    "baddbmm": (One(baddbmm), "causal", DIM**-0.5),
    "einsum": (One(einsum_last), "causal", DIM**-0.5),
    "grouped einsum": (One(grouped, 2), "causal", DIM**-0.5),
    "in place": (One(in_place), "causal", DIM**-0.5),
    "chunked 8": (One(sdpa(chunk(8))), "chunked(8)", DIM**-0.5),
    "chunked 29": (One(sdpa(chunk(29))), "chunked(29)", DIM**-0.5),
    "chunked 50": (One(sdpa(chunk(50))), "chunked(50)", DIM**-0.5),
    "chunked 9000, shrunk": (One(sdpa(chunk(9000))), "chunked(9000)", DIM**-0.5),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("case", HITS)
def test_recognised(case: str) -> None:
    model, mask, scale = HITS[case]
    site = site_of(model)
    assert (str(site.mask), site.num_kv_heads) == (mask, model.kv)
    assert site.sm_scale == pytest.approx(scale, rel=1e-6)


CARRIED: dict[str, tuple[Attend, str]] = {
    "a hole far away": (sdpa(lambda i, j: (j <= i) & (i - j != 9000)), "mask"),
    "squared": (spelled(lambda _, t, d: (t * t).masked_fill(d < 0, -1e9)), "score"),
    "data": (
        lambda m, q, k, v: spelled(lambda _, t, d: (t + v.sum(-1)[:, :, None]).masked_fill(d < 0, -1e9))(
            m, q, k, v
        ),
        "score",
    ),
    "data mask": (
        lambda m, q, k, v: spelled(
            lambda _, t, d: t.masked_fill((d < 0) | ((v[:, :1, None, :, 0] > 0) & (d > 0)), -1e9)
        )(m, q, k, v),
        "mask",
    ),
    "sink of a query": (
        lambda m, q, k, v: (
            torch.cat(
                [(q @ k.mT).masked_fill(~m.table[: q.shape[2], : q.shape[2]], -1e9), q[..., :1]], -1
            ).softmax(-1)[..., :-1]
            @ v
        ),
        "score",
    ),
}


@pytest.mark.parametrize("case", CARRIED)
def test_carried(case: str) -> None:
    attend, what = CARRIED[case]
    site = site_of(One(attend))
    assert site.score.mod is not None and getattr(site.score.mod, what) is not None
    assert site.mask.kind == "causal"


MISSES: dict[str, tuple[Attend, str]] = {
    "no mask": (sdpa(), "the mask is bidirectional: query 3 sees key 7"),
    "bidirectional": (shows(lambda d: d == d), "the mask is bidirectional: query 3 sees key 7"),
    "one later": (shows(lambda d: d >= -1), "the mask shows the future: query 0 sees key 1"),
    "one earlier": (shows(lambda d: d > 0), "the mask hides the present: query 0 does not see its own key"),
    "future in sdpa": (sdpa(lambda i, j: j <= i + 1), "the mask shows the future: query 0 sees key 1"),
    "prefix": (sdpa(lambda i, j: (j <= i) | (j < 4)), "the mask shows the future: query 0 sees key 1"),
    "data mask": (
        lambda m, q, k, v: spelled(lambda _, t, d: t.masked_fill((d < 0) | (v[:, :1, None, :, 0] > 0), -1e9))(
            m, q, k, v
        ),
        "a query need not see its own key, and one that sees no key at all would see every key",
    ),
    "pooled": (
        lambda m, q, k, v: q + (k.sum(-1, keepdim=True).softmax(2) * v).sum(2, keepdim=True),
        "the softmax runs over dimension 2, expected the last",
    ),
}


@pytest.mark.parametrize("case", MISSES)
def test_refused_with_its_reason(case: str) -> None:
    attend, reason = MISSES[case]
    with pytest.raises(DetectionError) as caught:
        detect(capture(One(attend).eval()))
    assert reason in str(caught.value)
    (miss,) = caught.value.misses
    assert miss.source.startswith("test_masks.py:")


def test_dropout_in_eval_mode_is_refused() -> None:
    with pytest.raises(ModelError, match="draws random numbers"):
        capture(One(sdpa(is_causal=True, dropout_p=0.1)).eval())
