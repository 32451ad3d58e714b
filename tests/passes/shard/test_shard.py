"""Models over ranks: what is cut and how, that the ranks together compute what the model does, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kvcompile
from kvcompile.errors import PlanError, VerificationError
from kvcompile.passes.shard import build, collectives
from kvcompile.passes.shard.shard import localized
from kvcompile.passes.shard.wishes import Wishes
from tests.support.decoders import FORMS, Decoder
from tests.support.marks import cases
from tests.support.models import NanoGPT, TinyConfig, TinyLlama, make, tiny_hf
from tests.support.ranks import TOKENS, over_ranks

# Heads of the forms of FORMS: 4, and KV heads 4, 2 or 1.
QUICK = (
    "sdpa, enable_gqa",
    "fused qkv",
    "sink logits",
    "ALiBi by distance",
    "one KV head",
    "bmm over batch and heads",
)
# Rows and heads in one dimension are not cut, nor is the only KV head.
LEFT = {"bmm over batch and heads": {"q"}, "one KV head": {"k", "v"}}
UNDIVIDED = ()


def heads(queries: int, keys: int, **changes: Any) -> nn.Module:
    return make(TinyLlama, TinyConfig(num_heads=queries, num_kv_heads=keys, vocab_size=64, **changes))


@pytest.mark.few(2)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", cases(FORMS, QUICK))
def test_forms_of_attention(form: str, ranks: int) -> None:
    found = over_ranks(Decoder(FORMS[form]), ranks, verify="quick")
    found.verified()
    assert all(division.divided for division in found.sharding.divisions) or form in UNDIVIDED
    assert found.sharding.by_rows == 4 or form in UNDIVIDED
    left = {each.where.split(".")[2].split(",")[0] for each in found.sharding.whole}
    assert left == LEFT.get(form, set()), [str(each) for each in found.sharding.whole]


@pytest.mark.few(3)
@pytest.mark.parametrize("queries, keys, ranks, share", [(8, 4, 4, 1 / 4), (8, 2, 4, 1 / 2), (8, 1, 2, 1.0)])
def test_kv_heads_are_divided_or_repeated(queries: int, keys: int, ranks: int, share: float) -> None:
    """Where ranks exceed KV heads, bytes of the cache do not fall."""
    found = over_ranks(heads(queries, keys), ranks)
    found.verified()
    assert found.share() == share
    for own in found.sharding.shards:
        assert [site.num_qo_heads for site in own.sites] == [queries // ranks] * 2
        assert [site.num_kv_heads for site in own.sites] == [max(keys // ranks, 1)] * 2


def test_logits_are_those_of_the_model() -> None:
    model = heads(6, 2)
    ids = torch.randint(3, 61, (2, TOKENS - 5), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        right = model(ids)
    torch.testing.assert_close(over_ranks(model, 2).logits(ids), right)


def test_everything_of_a_llama_is_cut() -> None:
    """q, k, v, gate, up and the head by columns, o and down by rows: two sums a layer, one gather."""
    found = over_ranks(heads(8, 4, hidden_size=64, intermediate_size=64), 2)
    sharding = found.sharding
    assert (sharding.by_columns, sharding.by_rows, sharding.sums, sharding.gathers) == (2 * 5 + 1, 4, 4, 1)
    assert not sharding.whole
    weights = {name for name in sharding.shards[0].pieces if "part" not in name}
    assert all("norm" in name or "embed" in name or "inv_freq" in name for name in weights)


def test_a_tied_head_is_cut_and_the_embedding_is_whole() -> None:
    found = over_ranks(make(NanoGPT), 3)
    placements = [p.placement for p in found.sharding.shards[0].pieces.values() if p.path == "lm_head.weight"]
    assert len(placements) == 2  # the table of ids, and the head's part of it
    found.verified()


@pytest.mark.parametrize(
    "kind, ranks, changes",
    [
        ("gpt2", 2, {}),
        ("mixtral", 2, {}),
        pytest.param("gpt_neox", 3, {}, marks=pytest.mark.slow),
        pytest.param("bloom", 2, {"attn": "eager"}, marks=pytest.mark.slow),
        pytest.param("gemma3", 2, {}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", 2, {"attn": "eager"}, marks=pytest.mark.slow),
        pytest.param("phi", 3, {}, marks=pytest.mark.slow),
        pytest.param("qwen3", 2, {}, marks=pytest.mark.slow),
    ],
)
def test_models_of_transformers(kind: str, ranks: int, changes: dict[str, Any]) -> None:
    found = over_ranks(tiny_hf(kind, **changes), ranks)
    found.verified()
    assert all(division.divided for division in found.sharding.divisions)
    assert found.sharding.by_rows >= 4


def test_experts_are_cut_by_columns_and_their_router_is_whole() -> None:
    sharding = over_ranks(tiny_hf("mixtral"), 2).sharding
    assert [each.where.split(" ")[0] for each in sharding.whole] == ["linear", "linear"]
    assert all("gate" in each.where and "used whole" in each.because for each in sharding.whole)
    cut = {piece.path for piece in sharding.shards[0].pieces.values() if any(piece.placement)}
    assert {path.split(".")[-1] for path in cut if "experts" in path} == {"gate_up_proj", "down_proj"}


class Latent(nn.Module):
    """MLA as one writes it: a latent row for all heads, keys and values made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 48)
        self.down, self.norm = nn.Linear(48, 16, bias=False), nn.LayerNorm(16)
        self.up, self.q = nn.Linear(16, 4 * 16, bias=False), nn.Linear(48, 4 * 8, bias=False)
        self.o, self.head = nn.Linear(32, 48, bias=False), nn.Linear(48, 61, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        batch, size, _ = x.shape
        k, v = self.up(self.norm(self.down(x))).view(batch, size, 4, 16).transpose(1, 2).split(8, -1)
        q = self.q(x).view(batch, size, 4, 8).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.o(y.transpose(1, 2).reshape(batch, size, 32)))


@pytest.mark.parametrize("latent, share", [("auto", 1.0), ("off", 0.5)])
def test_latent_rows_are_on_all_ranks(latent: str, share: float) -> None:
    found = over_ranks(make(Latent), 2, cache={"latent": latent})
    found.verified()
    assert found.share() == share
    assert [site.num_qo_heads for site in found.sharding.shards[1].sites] == [2]
    assert found.sharding.by_rows == 1


@pytest.mark.parametrize(
    "recipe", cases(("int8", "h2o", "kivi2", "streaming", "int4", "paged"), ("int8", "h2o"))
)
def test_recipes(recipe: str) -> None:
    found = over_ranks(heads(8, 4), 2, recipe, **({"max_tokens": 64} if recipe == "paged" else {}))
    found.verified()
    assert found.share() == pytest.approx(0.5, rel=0.02)


def test_what_a_rank_cannot_choose_is_refused() -> None:
    """Scores of a KV head come from all of its query heads; those of a layer from all heads."""
    with pytest.raises(PlanError, match=r"chosen by all query heads of a KV head.*on several ranks"):
        over_ranks(heads(8, 2), 4, "h2o")
    with pytest.raises(PlanError, match="over all heads, and a rank has some"):
        over_ranks(heads(8, 4), 2, "h2o", cache={"retention": {"granularity": "layer"}})


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(
        PlanError, match=r"9 query and 3 KV heads, which do not divide over 2 ranks.*tensor: 1, 3, 9"
    ):
        over_ranks(heads(9, 3), 2)
    with pytest.raises(PlanError, match="8 query and 4 KV heads"):
        over_ranks(heads(8, 4), 3)


def test_each_rank_has_its_own_scales_and_the_plan_of_its_heads() -> None:
    found = over_ranks(heads(8, 4), 2)
    plans = [localized(found.plan, found.sharding, rank) for rank in range(2)]
    assert [d.num_kv_heads for d in plans[0].decisions] == [2, 2]
    assert plans[0].digest() == plans[1].digest() != found.plan.digest()
    scales = (("keys.scale", (1.0, 2.0, 3.0, 4.0)), ("values.scale", (5.0,)))
    scaled = replace(found.plan, decisions=tuple(replace(d, scales=scales) for d in found.plan.decisions))
    own = [localized(scaled, found.sharding, rank).decisions[1].scales for rank in range(2)]
    assert own[0] == (("keys.scale", (1.0, 2.0)), ("values.scale", (5.0,)))
    assert own[1] == (("keys.scale", (3.0, 4.0)), ("values.scale", (5.0,)))


class Mixed(TinyLlama):
    """A norm over the whole projection of the queries: no rank can compute it from its heads."""

    def __init__(self) -> None:
        super().__init__(TinyConfig(num_heads=4, num_kv_heads=2, vocab_size=64))
        self.wide = nn.LayerNorm(32)
        for layer in self.layers:
            layer.q_proj = nn.Sequential(layer.q_proj, self.wide)  # type: ignore[assignment]


def test_what_is_used_whole_stays_whole_and_is_told() -> None:
    found = over_ranks(make(Mixed), 2)
    found.verified()
    assert len(found.sharding.whole) == 2
    assert all("q_proj" in each.where and "layer_norm" in each.because for each in found.sharding.whole)


def test_explain_tells_what_each_rank_has() -> None:
    model = heads(8, 2)
    alone, told = (kvcompile.explain(model, parallel={"tensor": n}) for n in (1, 4))
    assert told.plan.bytes_per_token * 2 == alone.plan.bytes_per_token
    text = str(told)
    assert "over 4 ranks: 11 linear layers by columns, 4 by rows, 0 whole" in " ".join(text.split())
    assert "layers 0, 1: a rank keeps KV heads, or latent rows, that other ranks keep as well" in " ".join(
        text.split()
    )


class Crossed(TinyLlama):
    """An MLP whose hidden channels meet each other between its layers."""

    def __init__(self) -> None:
        super().__init__(TinyConfig(num_heads=4, num_kv_heads=2, vocab_size=64))
        for layer in self.layers:
            layer.down = nn.Sequential(nn.Softmax(-1), layer.down)  # type: ignore[assignment]


def test_only_what_is_local_in_the_cut_channels_may_lie_between() -> None:
    found = over_ranks(make(Crossed), 2)
    found.verified()
    assert len(found.sharding.whole) == 6
    assert any("softmax" in each.because for each in found.sharding.whole)


@pytest.mark.parametrize(
    "name, how",
    [
        ("bias added on every rank", lambda graph, value: graph.call_function(collectives.wait, (value,))),
        ("sum left out", None),
    ],
)
def test_a_wrong_sum_is_noticed(name: str, how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks' own logits are compared, not what they should be."""
    if how is None:
        monkeypatch.setattr(collectives, "add_over_ranks", lambda graph, value: value)
    else:
        monkeypatch.setattr(collectives, "add_over_ranks", how)
    with pytest.raises(VerificationError, match="verification"):
        over_ranks(heads(8, 4), 2).verified()


def test_a_weight_cut_in_the_wrong_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = build.tensor_of

    def other(module: Any, piece: Any, rank: int) -> Tensor:
        return honest(module, piece, 1 - rank if "o_proj" in piece.path else rank)

    monkeypatch.setattr("kvcompile.passes.shard.shard.tensor_of", other)
    with pytest.raises(VerificationError, match="verification"):
        over_ranks(heads(8, 4), 2).verified()


def test_wishes_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any wish but the sites', what is computed is the same: only more of it is whole."""
    monkeypatch.setattr(Wishes, "row_linears", lambda self, ranks: None)
    monkeypatch.setattr(Wishes, "columns", lambda self, edge, placement: "")
    found = over_ranks(heads(8, 4), 2)
    found.verified()
    assert len(found.sharding.whole) == 3 * 2 + 1
