"""Masks computed from activations: built anew over all slots, exact in any chunks, refused where they cannot be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kvcompile
from kvcompile.errors import DetectionError, PlanError
from kvcompile.plan import Decision
from tests.passes.detect.test_forms import CHUNKS, LONGEST
from tests.support.decoders import (
    DIM,
    HEADS,
    VOCAB,
    Decoder,
    Form,
    Layer,
    causal,
    distance,
    heads_first,
    hidden,
    merged,
)

SELECTED = 6
Mask = Callable[[Tensor, Tensor, Tensor, Layer], Tensor]


def by_dynamic(mask: Mask) -> Form:
    def attend(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
        shown = mask(q, k, v, layer)
        return merged(F.scaled_dot_product_attention(*heads_first(q, k, v), attn_mask=shown))

    return Form(attend)


def index_scores(q: Tensor, k: Tensor) -> Tensor:
    """[B, S, S]: an indexer with one shared key per token, as DeepSeek-V3.2 has it."""
    return torch.einsum("bqhd,bkd->bqhk", q, k.sum(2)).sum(2)


def selected(scores: Tensor, visible: Tensor) -> Tensor:
    """bool [B, 1, S, S]: the best of the visible keys."""
    size = scores.shape[-1]
    best = scores.topk(min(SELECTED, size), -1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
    return (chosen & visible)[:, None]


def indexer(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    visible = causal(q.shape[1])
    return selected(index_scores(q, k).masked_fill(~visible, -torch.inf), visible)


def hidden_by(far: float) -> Mask:
    """What a query does not see yet is scored `far` lower, as Hy-V4 does with its eager mask."""

    def mask(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
        visible = causal(q.shape[1])
        return selected(index_scores(q, k) + torch.where(visible, 0.0, far), visible)

    return mask


def the_worst(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    """The lowest scores: those of later keys come first."""
    visible = causal(q.shape[1])
    scores = index_scores(q, k).masked_fill(~visible, -torch.inf)
    worst = scores.topk(min(SELECTED, q.shape[1]), -1, largest=False).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, worst, True)
    return (visible & (chosen | torch.eye(q.shape[1], dtype=torch.bool)))[:, None]


def sorted_upwards(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    """Up to the lowest score but one: those of later keys come first."""
    visible = causal(q.shape[1])
    scores = index_scores(q, k).masked_fill(~visible, -torch.inf)
    worst = scores <= scores.sort(-1).values[..., 1:2]
    return (visible & (worst | torch.eye(q.shape[1], dtype=torch.bool)))[:, None]


def gates(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    """A bias that each key brings along, per head, as Doge has it."""
    bias = F.softplus(v.sum(-1)).transpose(1, 2)[:, :, None]
    return bias.expand(-1, -1, q.shape[1], -1).masked_fill(~causal(q.shape[1]), torch.finfo(q.dtype).min)


def by_distance(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    """A bias by distance that each query chooses, as Inkling has it."""
    far = distance(q.shape[1]).clamp(0, DIM - 1).expand(q.shape[0], HEADS, -1, -1)
    return hidden(q.transpose(1, 2).gather(-1, far), causal(q.shape[1]))


def selected_before_masking(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    return selected(index_scores(q, k), causal(q.shape[1])) | torch.eye(q.shape[1], dtype=torch.bool)


def shown_everything(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    return (index_scores(q, k) > 0)[:, None] | torch.eye(q.shape[1], dtype=torch.bool)


def permuted_tokens(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    """Keys in an order that the tokens decide: which key a column is cannot be told."""
    scores = index_scores(q, k)
    order = torch.argsort(k.sum((2, 3)), -1)[:, None].expand_as(scores)
    return hidden(scores.gather(-1, order), causal(q.shape[1]))[:, None]


def carries(decision: Decision) -> bool:
    """Whether what is computed from activations is among what the site's scores read."""
    mod = decision.score.mod
    return mod is not None and bool({"query", "key", "pair"} & set(mod.leaves))


def compare(
    model: nn.Module, recipe: object = "baseline", compile: str = "none"
) -> kvcompile.runtime.module.CachedModel:
    ids = torch.randint(0, VOCAB, (2, sum(CHUNKS)), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        reference = model(ids)
    fast = kvcompile.optimize(
        model, recipe=recipe, max_batch=2, max_tokens=LONGEST, compile={"mode": compile}
    )
    start, outs = 0, []
    for size in CHUNKS:
        outs.append(fast(ids[:, start : start + size]))
        start += size
    torch.testing.assert_close(torch.cat(outs, 1), reference, rtol=1e-4, atol=1e-4)
    assert fast.cache.nbytes == fast.plan.bytes(2)
    return fast


@pytest.mark.few(3)
@pytest.mark.parametrize(("mask", "kept"), [(indexer, DIM), (gates, HEADS), (by_distance, 0)])
def test_masks_from_activations(mask: Mask, kept: int) -> None:
    """kept: floats that the mask keeps of every token."""
    fast = compare(Decoder(by_dynamic(mask)))
    assert [decision.mask_bytes for decision in fast.plan.decisions] == [4 * kept] * 2
    assert all(carries(decision) for decision in fast.plan.decisions)
    assert fast.plan.bytes_per_token == 2 * (2 * HEADS * DIM + kept) * 4


@pytest.mark.parametrize("far", [-torch.inf, torch.finfo(torch.float32).min, -1e35])
def test_later_keys_below_every_score(far: float) -> None:
    """A topk takes them last, and what it takes of them is hidden."""
    compare(Decoder(by_dynamic(hidden_by(far))))


@pytest.mark.slow  # Inductor has no part in masks; test_scores.py compiles one
def test_they_compile() -> None:
    compare(Decoder(by_dynamic(indexer)), compile="default")


def test_layers_that_share_a_selection_keep_its_keys_once() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.index = nn.Embedding(VOCAB, 32), nn.Linear(32, 2 * DIM)
            # Equal tokens would be ties, among which a topk may choose.
            self.place = nn.Embedding(LONGEST, 32)
            self.qkv, self.head = nn.ModuleList(nn.Linear(32, 96) for _ in range(2)), nn.Linear(32, VOCAB)

        def forward(self, input_ids: Tensor) -> Tensor:
            batch, size = input_ids.shape
            x = self.embed(input_ids) + self.place(torch.arange(size))
            q, k = self.index(x).chunk(2, -1)
            visible = causal(size)
            mask = selected((q @ k.transpose(1, 2)).masked_fill(~visible, -torch.inf), visible)
            for layer in self.qkv:
                heads = [t.view(batch, size, HEADS, DIM).transpose(1, 2) for t in layer(x).chunk(3, -1)]
                x = x + merged(F.scaled_dot_product_attention(*heads, attn_mask=mask))
            return self.head(x)

    fast = compare(Shared().eval())
    assert [decision.mask_bytes for decision in fast.plan.decisions] == [4 * DIM, 0]


def test_added_to_eager_scores() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
        bias = torch.where(indexer(q, k, v, layer), 0.0, torch.finfo(q.dtype).min)
        q, k, v = heads_first(q, k, v)
        column = layer.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
        p = torch.cat([q @ k.transpose(-1, -2) * 0.3 + bias, column], -1).softmax(-1)
        return merged(p[..., :-1] @ v)

    fast = compare(Decoder(Form(attend)))
    assert [(d.sm_scale, carries(d)) for d in fast.plan.decisions] == [(pytest.approx(0.3), True)] * 2


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (selected_before_masking, "depends on later keys in aten.topk"),
        (hidden_by(-1e4), "depends on later keys in aten.topk"),
        (the_worst, "depends on later keys in aten.topk"),
        (sorted_upwards, "depends on later keys in aten.sort"),
        (shown_everything, "shows the future"),
        (permuted_tokens, "aten.gather.default by computed indices"),
    ],
)
def test_what_a_cache_cannot_hold_is_refused(mask: Mask, reason: str) -> None:
    with pytest.raises(DetectionError, match=reason) as caught:
        compare(Decoder(by_dynamic(mask)))
    assert "decoders.py:" in str(caught.value) or "test_dynamic_mask.py:" in str(caught.value)


def test_only_layouts_that_keep_every_token() -> None:
    with pytest.raises(PlanError, match="depend on the activations of all tokens before; use retention"):
        compare(Decoder(by_dynamic(gates)), {"cache": {"retention": {"kind": "window", "size": 8}}})


def test_quantized_keys_leave_the_mask_exact() -> None:
    model = Decoder(by_dynamic(indexer))
    fast = kvcompile.optimize(model, recipe="int8", max_tokens=LONGEST, compile={"mode": "none"})
    ids = torch.randint(0, VOCAB, (1, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(fast(ids), model(ids), rtol=0.1, atol=0.1)
    assert [decision.mask_bytes for decision in fast.plan.decisions] == [4 * DIM] * 2
