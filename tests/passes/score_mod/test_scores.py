"""Every form of attention scores is read from the graph, rewritten, and equal to the model; near misses are refused.

Each case is a decoder of two layers around one way to spell attention. Its logits are compared here, over a
prompt, chunks and single tokens: with a cache that keeps all (against the model), and with a ring (against the
same model with one more band over its mask).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kvcompile
from kvcompile import api
from kvcompile.errors import DetectionError, PlanError, VerificationError
from kvcompile.kernels.reference import attend_many, attend_one
from kvcompile.passes.graph import expr, value
from kvcompile.pipeline import Front, plan_for, understand
from kvcompile.recipe import Recipe
from kvcompile.util.faking import faking
from kvcompile.verify import verify
from tests.support.marks import cases

HEADS, KV, DIM, LIMIT = 4, 2, 8, 80
CHUNKS = (11, 1, 1, 9, 1, 13, 1, 1)
BAND = 9

Attend = Callable[["Layer", Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """Attention by `attend(layer, q, k, v, distance, hidden)`, all heads repeated; distance [S, S] is i - j."""

    def __init__(self, attend: Attend):
        super().__init__()
        self.attend = attend
        self.q, self.k = nn.Linear(32, HEADS * DIM), nn.Linear(32, KV * DIM)
        self.v, self.o = nn.Linear(32, KV * DIM), nn.Linear(HEADS * DIM, 32)
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.slopes = nn.Parameter(2.0 ** -torch.arange(1, HEADS + 1).view(HEADS, 1, 1))
        self.buckets = nn.Embedding(12, HEADS)
        self.far = nn.Parameter(torch.randn(HEADS, LIMIT, LIMIT))

    def forward(self, x: Tensor, hidden: Tensor, distance: Tensor) -> Tensor:
        batch, size, _ = x.shape
        q, k, v = (f(x).view(batch, size, -1, DIM).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(HEADS // KV, 1) for t in (k, v))
        y = self.attend(self, 3 * q, k, v, distance, hidden)
        return x + self.o(y.transpose(1, 2).reshape(batch, size, -1))


class Decoder(nn.Module):
    """Two such layers; `mask(distance, i, j)` says what is shown, and `band` hides what is further away."""

    def __init__(self, attend: Attend, mask: Callable[..., Tensor] | None = None, band: int = LIMIT):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(61, 32), nn.Linear(32, 61)
        self.layers = nn.ModuleList(Layer(attend) for _ in range(2))
        self.mask, self.band = mask or (lambda d, i, j: d >= 0), band

    def forward(self, input_ids: Tensor) -> Tensor:
        size = input_ids.shape[1]
        assert size <= LIMIT, "longer than the tables"
        position = torch.arange(size)
        distance = position[:, None] - position
        shown = self.mask(distance, position[:, None], position)
        if self.band < LIMIT:
            shown = shown & (distance < self.band)
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, ~shown, distance)
        return self.head(x)


class Endless(Decoder):
    """The same without an end."""

    def forward(self, input_ids: Tensor) -> Tensor:
        position = torch.arange(input_ids.shape[1])
        distance = position[:, None] - position
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, distance < 0, distance)
        return self.head(x)


def raw(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) * DIM**-0.5


def scored(change: Callable[..., Tensor], fill: float = -math.inf) -> Attend:
    """Eager attention whose scaled scores go through change(layer, scores, distance) before the mask."""

    def attend(m: Layer, q: Tensor, k: Tensor, v: Tensor, distance: Tensor, hidden: Tensor) -> Tensor:
        return change(m, raw(q, k), distance).masked_fill(hidden, fill).softmax(-1) @ v

    return attend


def weighed(change: Callable[[Layer, Tensor], Tensor]) -> Attend:
    """Eager attention whose probabilities are change(layer, masked scores)."""

    def attend(m: Layer, q: Tensor, k: Tensor, v: Tensor, distance: Tensor, hidden: Tensor) -> Tensor:
        return change(m, raw(q, k).masked_fill(hidden, -1e9)) @ v

    return attend


def sink(m: Layer, scores: Tensor) -> Tensor:
    column = m.sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    both = torch.cat([scores, column], -1)
    both = both - both.max(-1, keepdim=True).values
    return both.softmax(-1, dtype=torch.float32)[..., :-1]


def sink_first(m: Layer, scores: Tensor) -> Tensor:
    column = m.sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([column, scores], -1).softmax(-1)[..., 1:]


def sink_by_gate(m: Layer, q: Tensor, k: Tensor, v: Tensor, distance: Tensor, hidden: Tensor) -> Tensor:
    scores = raw(q, k).masked_fill(hidden, -1e9)
    gate = torch.sigmoid(scores.logsumexp(-1) - m.sinks[None, :, None])
    return scores.softmax(-1) @ v * gate[..., None]


def off_by_one(m: Layer, scores: Tensor) -> Tensor:
    top = scores.amax(-1, keepdim=True)
    e = torch.exp(scores - top)
    return e / (torch.exp(-top) + e.sum(-1, keepdim=True))


def by_hand(m: Layer, scores: Tensor) -> Tensor:
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def alibi_in_sdpa(m: Layer, q: Tensor, k: Tensor, v: Tensor, distance: Tensor, hidden: Tensor) -> Tensor:
    bias = (-m.slopes * distance).masked_fill(hidden, torch.finfo(q.dtype).min)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None], scale=0.2)


def alibi_in_baddbmm(m: Layer, q: Tensor, k: Tensor, v: Tensor, distance: Tensor, hidden: Tensor) -> Tensor:
    batch, heads, size, dim = q.shape
    alibi = (m.slopes * torch.arange(size)).repeat(batch, 1, 1)
    q, k, v = (t.reshape(-1, size, dim) for t in (q, k, v))
    scores = torch.baddbmm(alibi, q, k.transpose(1, 2), beta=0.5, alpha=DIM**-0.5)
    scores = scores.view(batch, heads, size, size) + torch.zeros(()).masked_fill(hidden, -1e9)
    p = F.dropout(scores.softmax(-1), 0.1, m.training).view(-1, size, size)
    return torch.bmm(p, v).view(batch, heads, size, dim)


def rounded_alibi(m: Layer, q: Tensor, k: Tensor, v: Tensor, distance: Tensor, hidden: Tensor) -> Tensor:
    alibi = ((0.3 * m.slopes).bfloat16() * torch.arange(q.shape[2])).float()
    bias = (alibi / math.sqrt(DIM))[None].masked_fill(hidden, torch.finfo(q.dtype).min)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def buckets(m: Layer, scores: Tensor, distance: Tensor) -> Tensor:
    """T5's: exact up to 5, then by logarithms."""
    far = 5 + (torch.log(distance.clamp(min=1) / 5) / math.log(40 / 5) * 6).long().clamp(min=0)
    bucket = torch.where(distance < 5, distance.clamp(min=0), far).clamp(max=11)
    return scores + m.buckets(bucket).permute(2, 0, 1)


def any_table(m: Layer, scores: Tensor, distance: Tensor) -> Tensor:
    size = scores.shape[-1]
    return scores + m.far[:, :size, :size]


def sequence_first(m: Layer, q: Tensor, k: Tensor, v: Tensor, distance: Tensor, hidden: Tensor) -> Tensor:
    """Scores [B, Sq, H, Sk]; the scale split between q and k."""
    q, k, v = (t.transpose(1, 2) for t in (q * DIM**-0.25, k * DIM**-0.25, v))
    scores = torch.einsum("bihd,bjhd->bihj", q, k).float()
    scores = torch.where(hidden[:, None], torch.tensor(-1e4), scores)
    return torch.einsum("bihj,bjhd->bihd", scores.softmax(-1).to(v.dtype), v).transpose(1, 2)


def all_of_them(m: Layer, q: Tensor, k: Tensor, v: Tensor, distance: Tensor, hidden: Tensor) -> Tensor:
    scores = 5 * torch.tanh(raw(q, k) / 5) - m.slopes * distance
    return sink(m, scores.masked_fill(hidden, -1e9)) @ v


# name: (attend, what a score spec says)
FORMS: dict[str, tuple[Attend, str]] = {
    "softcap": (scored(lambda m, t, d: 5.0 * torch.tanh(t / 5.0)), "softcap 5"),
    "sink": (weighed(sink), "sink logits"),
    "sink first": (weighed(sink_first), "sink logits"),
    "sink by gate": (sink_by_gate, "sink logits"),
    "off by one": (weighed(off_by_one), "sink logits"),
    "exp over sum": (weighed(by_hand), ""),
    "exp of difference": (weighed(lambda m, t: torch.exp(t - t.logsumexp(-1, keepdim=True))), ""),
    "log_softmax": (weighed(lambda m, t: F.log_softmax(t, -1).exp()), ""),
    "alibi": (scored(lambda m, t, d: t - m.slopes * d, -1e9), "ALiBi"),
    "alibi by key": (scored(lambda m, t, d: t + m.slopes * torch.arange(t.shape[-1]), -1e4), "ALiBi"),
    "alibi in sdpa": (alibi_in_sdpa, "ALiBi"),
    "alibi in baddbmm": (alibi_in_baddbmm, "ALiBi"),
    "rounded alibi": (rounded_alibi, "carried: score"),
    "bent alibi": (
        scored(lambda m, t, d: t - m.slopes * d * torch.sigmoid(20 * (75.5 - d))),
        "carried: score",
    ),
    "buckets": (scored(buckets), "carried: score"),
    "shared bias": (scored(lambda m, t, d: t + m.buckets(d.clamp(0, 11))[..., 0]), "carried: score"),
    "any table": (scored(any_table), "carried: score"),
    "sequence first": (sequence_first, ""),
    "all of them": (all_of_them, "softcap 5, ALiBi, sink logits"),
    "softcap on one head": (
        scored(
            lambda m, t, d: torch.where(torch.arange(HEADS).view(-1, 1, 1) < 1, 5.0 * torch.tanh(t / 5.0), t)
        ),
        "carried: score",
    ),
    "scale by head": (scored(lambda m, t, d: t * (1 + m.slopes)), "carried: score"),
    "scale by position": (
        scored(lambda m, t, d: t * torch.arange(1, t.shape[-1] + 1)[:, None]),
        "carried: score",
    ),
    "clamped": (scored(lambda m, t, d: t.clamp(-2, 2)), "carried: score"),
    "sink by position": (
        weighed(lambda m, t: sink(m, t - 0.01 * torch.arange(t.shape[-1])[:, None])),
        "sink logits, carried: score",
    ),
    "alibi of tokens": (
        lambda m, q, k, v, d, h: (
            (raw(q, k) - q.mean(-1, keepdim=True) * d).masked_fill(h, -1e9).softmax(-1) @ v
        ),
        "carried: score",
    ),
    "twice the sum": (
        weighed(lambda m, t: torch.exp(t) / (2 * torch.exp(t).sum(-1, keepdim=True))),
        "carried: weight 0.5",
    ),
    "softcap that falls": (scored(lambda m, t, d: -(5.0 * torch.tanh(t / 5.0))), "carried: score"),
}
BY_TOKENS = ("alibi of tokens",)  # what a ring has forgotten is needed for them
MASKS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "chunked": (lambda d, i, j: (d >= 0) & (i // 8 == j // 8), "chunked(8)"),
    "sliding": (lambda d, i, j: (d >= 0) & (d < 8), "sliding(8)"),
    "dilated": (lambda d, i, j: (d >= 0) & (d % 3 != 1), "causal, carried: mask"),
    "blocks": (
        lambda d, i, j: (d >= 0) & ((i // 8 == j // 8) | (j % 8 == 0)),
        "causal, carried: mask",
    ),
    "bounded": (lambda d, i, j: (d >= 0) & ((d < 30) | (i < 50)), "sliding(50), carried: mask"),
    "by head": (
        lambda d, i, j: (d >= 0) & (d < torch.tensor([4, 80, 9, 80]).view(4, 1, 1)),
        "causal, carried: mask",
    ),
}


def logits_of(model: nn.Module, front: Front, **cache: Any) -> Tensor:
    """The rewritten model's logits over all chunks; `cache` goes over a cache that keeps all."""
    # What is returned is compared here, not by the product's own verification.
    recipe = Recipe.load({"cache": cache}, max_tokens=LIMIT, compile={"mode": "none"}, verify="off")
    fast = api.build(model, front, recipe)
    return torch.cat([fast(part) for part in tokens().split(CHUNKS, 1)], 1)


def tokens() -> Tensor:
    return torch.randint(0, 61, (2, sum(CHUNKS)), generator=torch.Generator().manual_seed(3))


def attention_of(front: Front) -> str:
    plan = plan_for(front, Recipe.load({}, max_tokens=LIMIT))
    (found,) = {decision.attention for decision in plan.decisions}
    return found


def assert_equal(found: Tensor, model: nn.Module) -> None:
    with torch.no_grad():
        wanted = model(tokens())
    assert float((found - wanted).abs().max()) <= 2e-5 * float(wanted.abs().max())


@pytest.mark.few(2)
@pytest.mark.parametrize("form", FORMS)
def test_forms_are_found_and_equal(form: str) -> None:
    attend, score = FORMS[form]
    model = Decoder(attend).eval()
    front = understand(model)
    assert attention_of(front).startswith(", ".join(part for part in ("causal", score) if part))
    assert ("carried" in attention_of(front)) == ("carried" in score)
    assert_equal(logits_of(model, front), model)
    if form in BY_TOKENS:
        return
    ring = logits_of(model, front, retention={"kind": "window", "size": BAND})
    assert_equal(ring, Decoder(attend, band=BAND).eval())


@pytest.mark.few(2)
@pytest.mark.parametrize("mask", MASKS)
def test_masks_are_found_and_equal(mask: str) -> None:
    shown, found = MASKS[mask]
    attend = FORMS["sequence first"][0] if mask == "chunked" else scored(lambda m, t, d: t)
    model = Decoder(attend, shown).eval()
    front = understand(model)
    assert attention_of(front).startswith(found)
    assert_equal(logits_of(model, front), model)
    if "carried" not in found:
        assert_equal(logits_of(model, front, retention={"kind": "window"}), model)  # a ring of 8 slots


def raises(text: str, attend: Attend, mask: Callable[..., Tensor] | None = None) -> None:
    with pytest.raises(DetectionError) as caught:
        understand(Decoder(attend, mask).eval())
    assert text in str(caught.value)
    assert all(miss.source.startswith("test_scores.py:") for miss in caught.value.misses)


def sink_of_all_tokens(m: Layer, q: Tensor, k: Tensor, v: Tensor, distance: Tensor, hidden: Tensor) -> Tensor:
    sink = k[..., :1].mean(2, keepdim=True).expand_as(q[..., :1])
    scores = torch.cat([raw(q, k).masked_fill(hidden, -1e9), sink], -1)
    return scores.softmax(-1)[..., :-1] @ v


def sink_with_a_value(m: Layer, q: Tensor, k: Tensor, v: Tensor, distance: Tensor, hidden: Tensor) -> Tensor:
    scores = raw(q, k).masked_fill(hidden, -1e9)
    scores = torch.cat([scores, m.sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1) @ torch.cat([v, v.mean(2, keepdim=True)], 2)


def weights_of_values(m: Layer, q: Tensor, k: Tensor, v: Tensor, distance: Tensor, hidden: Tensor) -> Tensor:
    return (raw(q, k).masked_fill(hidden, -1e9).softmax(-1) ** 2) @ v


MISSES: dict[str, tuple[Attend, str]] = {
    "sink of all tokens": (sink_of_all_tokens, "aten.mean.dim over the tokens"),
    "sink with a value": (sink_with_a_value, "queries, keys or values do not run over the sequence"),
    "alibi of all tokens": (
        lambda m, q, k, v, d, h: (
            (raw(q, k) - q.mean((0, 2, 3))[:, None, None] * d).masked_fill(h, -1e9).softmax(-1) @ v
        ),
        "computed from the tokens as a whole",
    ),
    "squared probabilities": (
        weights_of_values,
        "what weighs the values is not the softmax of the scores (mul, masked_fill, softmax, pow)",
    ),
    "bias by length": (
        scored(lambda m, t, d: t + d * (1.0 / t.shape[-1])),
        "the length of the sequence as a number",
    ),
    "scores of eight bits": (
        scored(lambda m, t, d: t.to(torch.float8_e4m3fn).float()),
        "a score is rounded to float8_e4m3fn",
    ),
}


@pytest.mark.parametrize("case", MISSES)
def test_near_misses_are_refused(case: str) -> None:
    attend, reason = MISSES[case]
    raises(reason, attend)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (
            lambda d, i, j: (d >= 0) | (j < 4),
            "query 0 sees key 1 (prefix(4): a chunk of a prompt cannot show keys",
        ),
        (lambda d, i, j: d == d, "the mask is bidirectional: query 3 sees key 7"),
        (lambda d, i, j: d >= -(i == 70).long(), "the mask shows the future: query 70 sees key 71"),
        (lambda d, i, j: d > 0, "the mask hides the present: query 0 does not see its own key"),
        (
            lambda d, i, j: (d >= 0) & ((d < 5) | (j < i.shape[0] - 20)),
            "the mask depend on the length of the sequence",
        ),
    ],
)
def test_masks_that_no_cache_serves_are_refused(mask: Callable[..., Tensor], reason: str) -> None:
    raises(reason, scored(lambda m, t, d: t + m.slopes * 0), mask)


def test_a_scale_twice_is_another_scale() -> None:
    model = Decoder(scored(lambda m, t, d: t * 0.5 * DIM**-0.5)).eval()
    assert [site.sm_scale for site in understand(model).sites] == pytest.approx([0.5 / DIM] * 2, rel=1e-6)


def test_softcap_and_slopes_are_exact() -> None:
    site = understand(Decoder(all_of_them).eval()).sites[0]
    assert site.score.softcap == 5.0 and site.sm_scale == DIM**-0.5
    model = understand(Decoder(FORMS["alibi by key"][0]).eval())
    bias = model.sites[0].bias
    assert bias is not None
    assert getattr(model.canonical, str(bias.target)).tolist() == [0.5, 0.25, 0.125, 0.0625]


def test_sinks_are_the_models_own_weights() -> None:
    front = understand(Decoder(weighed(sink)).eval())
    assert [str(site.sinks.target) for site in front.sites if site.sinks] == [
        "layers.0.sinks",
        "layers.1.sinks",
    ]


def test_a_bias_reaches_as_far_as_its_table() -> None:
    front = understand(Decoder(FORMS["any table"][0]).eval())
    with pytest.raises(PlanError, match=rf"{LIMIT} positions"):
        plan_for(front, Recipe.load({}, max_tokens=LIMIT + 1))


def test_a_bias_by_distance_has_no_end() -> None:
    front = understand(Endless(FORMS["buckets"][0]).eval())
    assert plan_for(front, Recipe.load({}, max_tokens=100_000)).limits.max_tokens == 100_000
    for retention in (
        {"kind": "window", "size": 16},
        {"kind": "sink_window", "sinks": 2, "window": 14, "positions": "in_cache"},
    ):
        plan = plan_for(front, Recipe.load({"cache": {"retention": retention}}))
        assert plan.bounded and plan.decisions[0].score.mod is not None


def t5_buckets(m: Layer, scores: Tensor, distance: Tensor) -> Tensor:
    """As T5 writes them: what the logarithm makes of short distances is never looked up."""
    d = distance.clamp(min=0)
    far = 4 + (torch.log(d.float().clamp(min=1) / 4) / math.log(40 / 4) * 8).long()
    bucket = torch.where(d < 4, d, far.clamp(max=11))
    return scores + m.buckets(bucket).permute(2, 0, 1)


def test_buckets_by_logarithm_have_no_end() -> None:
    front = understand(Endless(scored(t5_buckets)).eval())
    assert plan_for(front, Recipe.load({}, max_tokens=100_000)).limits.max_tokens == 100_000


def check_values(front: Front) -> None:
    """The fake value of a site's attention, for which nothing is computed, is what the operator gives."""

    def form(x: Tensor) -> tuple[Any, ...]:
        return (*map(expr, (*x.shape, *x.stride(), x.storage_offset())), x.dtype, x.requires_grad)

    for site in front.sites:
        args, kwargs = torch.fx.map_arg((site.out.args, site.out.kwargs), value)
        with faking(value(site.out).fake_mode):
            assert form(value(site.out)) == form(site.out.target(*args, **kwargs))


@pytest.mark.parametrize("mode", ["quick", pytest.param("thorough", marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", cases(("all of them", "buckets", "any table"), ("all of them",)))
def test_the_products_own_verification_passes(form: str, mode: Any) -> None:
    model = Decoder(FORMS[form][0]).eval()
    front = understand(model)
    check_values(front)
    retention: dict[str, Any] = {"kind": "sink_window", "sinks": 2, "window": 9}
    if form != "any table":  # by distance: StreamingLLM counts it in the cache
        retention["positions"] = "in_cache"
    for cache in ({}, {"retention": retention}, {"keys": {"dtype": "int8"}}):
        plan = plan_for(front, Recipe.load({"cache": cache}, max_tokens=LIMIT))
        assert all(check.error < check.budget / 2 for check in verify(model, front, plan, mode))


def test_a_wrong_bias_is_seen_by_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Decoder(FORMS["buckets"][0]).eval()
    front = understand(model)
    plan = plan_for(front, Recipe.load({"compile": {"kernels": "reference"}}, max_tokens=LIMIT))
    inner = attend_one.applied
    for module in (attend_one, attend_many):
        monkeypatch.setattr(module, "applied", lambda mod, q, k, *rest: inner(mod, q + 1, k, *rest))
    with pytest.raises(VerificationError, match="layer 0"):
        verify(model, front, plan, "quick")


def test_layers_with_values_of_their_own_are_one_region() -> None:
    """Sinks and slopes are inputs of a region: layers that differ in nothing else are compiled once."""
    model = Decoder(all_of_them).eval()
    model.layers.extend(Layer(all_of_them) for _ in range(2))
    fast = kvcompile.optimize(model, max_tokens=LIMIT, compile={"mode": "none"})
    regions = fast.executor.regions
    assert (len(regions.modules), len(regions.calls)) == (3, 5)


def test_a_compiled_program_is_equal() -> None:
    model = Decoder(all_of_them)
    del model.layers[1:]
    model = model.eval()
    fast = kvcompile.optimize(model, max_tokens=LIMIT)
    with torch.no_grad():
        wanted = model(tokens())
    found = torch.cat([fast(part) for part in tokens().split(CHUNKS, 1)], 1)
    assert float((found - wanted).abs().max()) <= 2e-5 * float(wanted.abs().max())
