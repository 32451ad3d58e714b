"""Whole decoders in the ways that people write them around attention: each is rewritten and equal to itself.

Forms of the attention alone are in `tests/support/decoders.py`. What stands here is around it: a configuration of the
model's own, modules of torch, masks that are given by other operators, `.data`, experts in a loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kvcompile
from kvcompile import verify
from kvcompile.errors import CaptureError, DetectionError, ModelError, PlanError, VerificationError
from kvcompile.passes.capture import trace
from tests.support.budget import within

VOCAB, WIDTH, HEADS, DIM, LONGEST = 61, 32, 4, 8, 96
CHUNKS = (9, 1, 1, 30, 1, 6)


class Skeleton(nn.Module):
    """Two layers, learned positions; `attend` is what a case writes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList(self.layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.eval()

    def layer(self) -> nn.Module:
        made = nn.Module()
        made.q, made.k, made.v, made.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        made.norm, made.mlp = nn.LayerNorm(WIDTH), nn.Sequential(nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH))
        made.other, made.share = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(HEADS, 1, 1) * 0.3)
        return made

    def heads(self, layer: Any, x: Tensor, *names: str) -> tuple[Tensor, ...]:
        batch, size, _ = x.shape
        found = (getattr(layer, name)(x) for name in names or ("q", "k", "v"))
        return tuple(t.view(batch, size, HEADS, DIM).transpose(1, 2) for t in found)

    def attend(self, layer: Any, x: Tensor) -> Tensor:
        return merged(F.scaled_dot_product_attention(*self.heads(layer, x), is_causal=True))

    def run(self, layer: Any, x: Tensor) -> Tensor:
        x = x + layer.o(self.attend(layer, layer.norm(x)))
        return x + layer.mlp(x)

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids) + self.place(torch.arange(input_ids.shape[1]))
        for layer in self.layers:
            x = self.run(layer, x)
        return self.head(x)


def merged(y: Tensor) -> Tensor:
    return y.transpose(1, 2).flatten(2)


def hidden(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).triu(1)


def probabilities(q: Tensor, k: Tensor, scale: float = DIM**-0.5) -> Tensor:
    return (q @ k.transpose(-1, -2) * scale).masked_fill(hidden(q.shape[2]), -1e9).softmax(-1)


@dataclass
class Settings:
    """A configuration of the model's own, which is none of transformers."""

    block_size: int = LONGEST


class OwnConfig(Skeleton):
    """nanoGPT keeps its settings in `config`, takes no `use_cache`, and gives the last token's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Settings()

    def forward(self, input_ids: Tensor, targets: Tensor | None = None) -> Any:
        assert input_ids.shape[1] <= self.config.block_size
        return super().forward(input_ids)[:, [-1]], None


class OldSchool(Skeleton):
    """`.data`, as the Annotated Transformer has it."""

    def attend(self, layer: Any, x: Tensor) -> Tensor:
        q, k, v = self.heads(layer, x)
        mask = (~hidden(x.shape[1])).type_as(x.data)
        scores = (q @ k.transpose(-2, -1) / math.sqrt(DIM)).masked_fill(mask == 0, -1e9)
        return merged(scores.softmax(-1) @ v)


class StackedMask(Skeleton):
    """Llama's own code puts a mask of nothing cached before it; fairseq fills zeros with -inf."""

    def attend(self, layer: Any, x: Tensor) -> Tensor:
        q, k, v = self.heads(layer, x)
        size = x.shape[1]
        mask = torch.zeros(size, size).fill_(-math.inf).triu(1)
        mask = torch.hstack([torch.zeros(size, 0), mask])
        return merged((q @ k.transpose(-2, -1) / math.sqrt(DIM) + mask).softmax(-1) @ v)


class ViewedAs(Skeleton):
    """`view_as` of what an attention gives, which may stand otherwise in memory once it is another operator."""

    def attend(self, layer: Any, x: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(*self.heads(layer, x), is_causal=True)
        return y.transpose(1, 2).contiguous().view_as(x)


class Encoder(Skeleton):
    """torch's encoder with a mask and no word about it, as in PyTorch's tutorial of language models."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()

    def forward(self, input_ids: Tensor) -> Any:
        size = input_ids.shape[1]
        x = self.embed(input_ids) + self.place(torch.arange(size))
        return self.head(self.encoder(x, self.mask(size)))

    def mask(self, size: int) -> Tensor:
        return nn.Transformer.generate_square_subsequent_mask(size)


@dataclass
class Output:
    """What a model gives, hidden states and a dictionary before the logits; a class that pytree does not know."""

    hidden: Tensor
    loss: Tensor | None = None
    more: dict[str, Tensor] | None = None
    logits: Tensor | None = None


class InDataclass(Skeleton):
    def forward(self, input_ids: Tensor) -> Any:
        out = super().forward(input_ids)
        return Output(out * 2, None, {"a": out * 3, "b": out * 4}, out)


class TwoValues(Skeleton):
    """One softmax weighs two values, the second of which is made of what the first has got."""

    def attend(self, layer: Any, x: Tensor) -> Tensor:
        q, k, v = self.heads(layer, x)
        p = probabilities(q, k)
        return merged(p @ torch.tanh(p @ v) + p @ v)


class SharedWeights(Skeleton):
    """Probabilities of the first layer weigh values of the second, too, whose own softmax comes before."""

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids) + self.place(torch.arange(input_ids.shape[1]))
        first, second = self.layers
        q, k, v = self.heads(first, x)
        p = probabilities(q, k)
        x = x + first.o(merged(p @ v))
        x = x + super().attend(second, x)
        return self.head(x + second.o(merged(p @ self.heads(second, x, "v")[0])))


class Differential(Skeleton):
    """One softmax of twice the heads, as the reference of the DIFF Transformer has it."""

    def attend(self, layer: Any, x: Tensor) -> Tensor:
        batch, size, _ = x.shape
        q, k = (f(x).view(batch, size, 2 * HEADS, DIM // 2).transpose(1, 2) for f in (layer.q, layer.k))
        scores = torch.nan_to_num(q @ k.transpose(-1, -2) * (DIM / 2) ** -0.5)
        scores = scores + torch.zeros(size, size).fill_(-math.inf).triu(1)
        p = scores.softmax(-1, dtype=torch.float32).type_as(scores).view(batch, HEADS, 2, size, size)
        share = torch.exp(layer.share.mean())
        return merged((p[:, :, 0] - share * p[:, :, 1]) @ self.heads(layer, x, "v")[0])


class ThreeSoftmaxes(Skeleton):
    """Sums of sums, numbers and weights of heads and of queries before them."""

    def attend(self, layer: Any, x: Tensor) -> Tensor:
        q, k, v = self.heads(layer, x)
        gate = torch.sigmoid(q.mean(-1, keepdim=True))
        first, second, third = probabilities(q, k), probabilities(k, q), probabilities(q, q)
        return merged((torch.sub(first, second * layer.share, alpha=0.5) + 0.3 * third * gate) @ v)


class GroupedEinsum(Skeleton):
    """Groups of heads as a dimension of einsum, behind each other and across."""

    def attend(self, layer: Any, x: Tensor) -> Tensor:
        batch, size, _ = x.shape
        k, v = (f(x)[..., : 2 * DIM].view(batch, size, 2, DIM) for f in (layer.k, layer.v))
        found = []
        for name, order in (("bqgrd", "bgrqk"), ("bqrgd", "brgqk")):
            q = layer.q(x).view(batch, size, 2, 2, DIM)
            scores = torch.einsum(f"{name},bkgd->{order}", q, k) * DIM**-0.5
            p = torch.where(hidden(size), -1e30, scores).softmax(-1)
            found.append(torch.einsum(f"{order},bkgd->{name}", p, v).reshape(batch, size, WIDTH))
        return found[0] + found[1]


class OneKeyHead(Skeleton):
    def attend(self, layer: Any, x: Tensor) -> Tensor:
        q, k, v = self.heads(layer, x)
        return merged(probabilities(q, k[:, :1]) @ v + probabilities(q, k) @ v[:, :1])


class FromTheEnd(Skeleton):
    """A mask that is read from the end of its table: which of the table is read depends on the length."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", self.shown(torch.arange(LONGEST)))

    def shown(self, i: Tensor) -> Tensor:
        return (i[:, None] >= i) & (i[:, None] - i < 20)

    def attend(self, layer: Any, x: Tensor) -> Tensor:
        q, k, v = self.heads(layer, x)
        mask = self.part(x.shape[1])
        return merged((q @ k.transpose(-1, -2)).masked_fill(~mask, -math.inf).softmax(-1) @ v)

    def part(self, size: int) -> Tensor:
        return self.table[-size:, -size:]


class Experts(nn.Module):
    """Mixtral's reference: each expert takes the tokens that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.each = nn.Linear(WIDTH, 4), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, WIDTH)
        weights, chosen = torch.topk(self.gate(rows), 2)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.each):
            token, place = torch.where(chosen == number)
            out[token] += weights.softmax(1)[token, place, None] * expert(self.before(rows[token]))
        return out.view_as(x)

    def before(self, rows: Tensor) -> Tensor:
        return rows


class CrowdedExperts(Experts):
    """They look at what the other tokens of theirs are."""

    def before(self, rows: Tensor) -> Tensor:
        return rows - rows.mean(0)


class Mixture(Skeleton):
    experts: Callable[[], nn.Module] = Experts

    def layer(self) -> nn.Module:
        made = super().layer()
        made.mlp = self.experts()
        return made


class Crowd(Mixture):
    experts = CrowdedExperts


def logits(out: Any) -> Tensor:
    found = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    return next(leaf for leaf in out if isinstance(leaf, Tensor)) if found is None else found


def check(kind: Callable[[], nn.Module]) -> Any:
    """The rewritten model in a prompt, chunks and single tokens against the model itself; gives what it is."""
    fast: Any = kvcompile.optimize(kind(), max_batch=2, max_tokens=60, compile={"mode": "none"})
    ids = torch.randint(0, VOCAB, (2, sum(CHUNKS)), generator=torch.Generator().manual_seed(1))
    start = 0
    with torch.no_grad():
        for size in CHUNKS:
            found = logits(fast(ids[:, start : start + size]))
            start += size
            wanted, truth = (logits(of(ids[:, :start]))[:, -size:] for of in (kind(), kind().double()))
            within(found, wanted, truth, torch.float32)
    return fast


WRITTEN = [
    *(OwnConfig, OldSchool, StackedMask, ViewedAs, Encoder, InDataclass, TwoValues),
    *(Differential, ThreeSoftmaxes, GroupedEinsum, OneKeyHead, FromTheEnd),
]


@pytest.mark.parametrize("kind", WRITTEN)
def test_as_written(kind: type[Skeleton]) -> None:
    check(kind)


def test_sites_stand_in_the_order_of_their_results() -> None:
    """Whatever the order of their softmaxes: what runs first is the first layer of a plan."""
    fast = check(SharedWeights)
    assert [decision.idiom for decision in fast.plan.decisions] == ["softmax", "sdpa", "softmax"]


class OwnCache(Skeleton):
    """Llama's own code: keys are written into a cache of the layer's, and read again."""

    def layer(self) -> nn.Module:
        made = super().layer()
        self.keep(made, torch.zeros(8, HEADS, LONGEST, DIM))
        return made

    def keep(self, layer: Any, cache: Tensor) -> None:
        layer.register_buffer("cache", cache, persistent=False)

    def attend(self, layer: Any, x: Tensor) -> Tensor:
        q, k, v = self.heads(layer, x)
        batch, size, _ = x.shape
        layer.cache[:batch, :, :size] = k
        return merged(probabilities(q, layer.cache[:batch, :, :size]) @ v)


class PlainCache(OwnCache):
    def keep(self, layer: Any, cache: Tensor) -> None:
        layer.cache = cache


def test_a_cache_of_the_models_own() -> None:
    """What this forward has written is what it reads: harmless in a buffer; in what is no buffer, export fails."""
    check(OwnCache)
    with pytest.raises(
        CaptureError, match=r"copy_.*cache, an input or a weight, is written to; .*registered buffer"
    ):
        check(PlainCache)


class Chooser(Skeleton):
    """A router in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)

    def run(self, layer: Any, x: Tensor) -> Tensor:
        best, _ = layer.other(x).topk(2)
        return super().run(layer, x) + best.sum(-1, keepdim=True)


def test_near_ties_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a model in half precision chooses, an error of verification says what may be the cause; elsewhere not."""

    def fails(*_: Any) -> Any:
        raise VerificationError("layer 0 differs", 0)

    monkeypatch.setattr(verify, "_verified", fails)
    with pytest.raises(
        VerificationError, match=r"layer 0 differs\. The model chooses by a topk .* near ties"
    ):
        check(Chooser)
    with pytest.raises(VerificationError, match=r"^layer 0 differs$"):
        check(OneKeyHead)


class OpenRow(Encoder):
    def mask(self, size: int) -> Tensor:
        return super().mask(size).masked_fill(torch.arange(size)[:, None] == 3, 0.0)


def test_a_mask_that_torch_would_look_at_is_read_all_the_same() -> None:
    """The hint that is left out decides nothing: a mask that is not quite causal is not taken for one."""
    with pytest.raises(DetectionError, match="shows the future: query 3 sees key 4"):
        check(OpenRow)


class MeanOfData(Skeleton):
    def attend(self, layer: Any, x: Tensor) -> Tensor:
        return super().attend(layer, x + x.data.mean(1, keepdim=True))


class WrittenData(Skeleton):
    """What is written to `.data` is written to the tensor."""

    def run(self, layer: Any, x: Tensor) -> Tensor:
        x = x * 1.0
        x.data[..., :4] = 0
        return super().run(layer, x)


class WrittenWeight(Skeleton):
    def run(self, layer: Any, x: Tensor) -> Tensor:
        layer.q.weight.data.mul_(0.9)
        return super().run(layer, x)


def test_data_is_what_it_is_of() -> None:
    check(WrittenData)
    with pytest.raises(DetectionError, match=r"mean of .* over the sequence"):
        check(MeanOfData)
    with pytest.raises(ModelError, match=r"changes the buffer layers\.0\.q\.weight"):
        check(WrittenWeight)


def test_what_tracing_takes_for_a_constant_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Export's strict way has `.data` as a constant without values, of the sizes that the example had."""
    monkeypatch.setattr(trace, "_data_as_detached", trace._masks_as_given)
    with pytest.raises(CaptureError, match="took what is computed from the tokens for a constant"):
        check(OldSchool)


def test_experts_that_choose_their_tokens_by_values_run_as_python() -> None:
    fast = check(Mixture)
    assert "layers.0.mlp treats each token alone as far as running it shows (96 tokens)" in str(
        kvcompile.explain(fast)
    )
    with pytest.raises(DetectionError, match="tokens mix outside attention"):
        check(Crowd)


class Received(Skeleton):
    """What a token gets from all queries gates it: later ones decide."""

    def attend(self, layer: Any, x: Tensor) -> Tensor:
        q, k, v = self.heads(layer, x)
        p = probabilities(q, k)
        return merged(p @ v * p.sum(2)[..., None])


class Turned(Skeleton):
    def attend(self, layer: Any, x: Tensor) -> Tensor:
        q, k, v = self.heads(layer, x)
        p = probabilities(q, k)
        return merged(p @ v + p.transpose(-1, -2) @ v)


class OpenSecond(Skeleton):
    def attend(self, layer: Any, x: Tensor) -> Tensor:
        q, k, v = self.heads(layer, x)
        return merged((probabilities(q, k) - 0.3 * (k @ q.transpose(-1, -2)).softmax(-1)) @ v)


class Clipped(Skeleton):
    def attend(self, layer: Any, x: Tensor) -> Tensor:
        q, k, v = self.heads(layer, x)
        return merged((probabilities(q, k) - probabilities(k, q)).relu() @ v)


class GatedByKeys(Skeleton):
    """A factor that each key brings along belongs to the product."""

    def attend(self, layer: Any, x: Tensor) -> Tensor:
        q, k, v = self.heads(layer, x)
        gate = torch.sigmoid(k.sum(-1))[:, :, None]
        return merged((probabilities(q, k) - gate * probabilities(k, q)) @ v)


class OtherRow(Skeleton):
    """The first sequence's probabilities in all of them."""

    def attend(self, layer: Any, x: Tensor) -> Tensor:
        q, k, v = self.heads(layer, x)
        p = probabilities(q, k)
        return merged((p - 0.3 * p[0]) @ v)


class ChunksFromTheEnd(FromTheEnd):
    """Where chunks begin depends on the length."""

    def shown(self, i: Tensor) -> Tensor:
        return (i[:, None] >= i) & (i[:, None] // 16 == i // 16)


class RowsFromTheEnd(FromTheEnd):
    def part(self, size: int) -> Tensor:
        return self.table[-size:, :size]


MISSES = {
    Received: "the probabilities are used by matmul, output, expected products with values",
    Turned: "the scores pass through what cannot be carried: aten.softmax.int over",
    OpenSecond: "the mask is bidirectional",
    GatedByKeys: "what weighs the values is not the softmax of the scores",
    Clipped: "what weighs the values is not the softmax of the scores",
    OtherRow: "the scores are read at other places than the query's and the key's",
    ChunksFromTheEnd: "the mask never shows the future is not proved",
    RowsFromTheEnd: "the mask never shows the future is not proved",
}


@pytest.mark.parametrize("kind", MISSES)
def test_near_misses(kind: type[Skeleton]) -> None:
    with pytest.raises(DetectionError, match=MISSES[kind]):
        check(kind)


def test_a_mask_from_the_end_of_its_table_ends_with_it() -> None:
    with pytest.raises(PlanError, match=f"set at most {LONGEST}"):
        kvcompile.optimize(FromTheEnd(), max_tokens=LONGEST + 1, compile={"mode": "none"})


def test_attention_maps_are_told() -> None:
    """Who gives probabilities is told what to do."""

    class Given(Skeleton):
        def forward(self, input_ids: Tensor) -> Any:
            x = self.embed(input_ids)
            q, k, v = self.heads(self.layers[0], x)
            p = probabilities(q, k)
            return {"logits": self.head(merged(p @ v)), "attentions": p}

    with pytest.raises(DetectionError, match="a cache has no maps of attention, so the model must not give"):
        check(Given)
