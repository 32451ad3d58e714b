"""Models over stages, in one process: where they are cut, what each has, that they compute what the model does."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import kvcompile
from kvcompile.errors import PlanError, VerificationError
from kvcompile.layouts import symbols as sy
from kvcompile.passes.stages.balance import Segment, balanced
from kvcompile.passes.stages.crossing import Crossing
from kvcompile.plan import Plan
from tests.coverage.configs import tiny_model
from tests.passes.shard.test_shard import Latent
from tests.support.marks import cases
from tests.support.models import NanoGPT, TinyConfig, TinyLlama, make, tiny_hf
from tests.support.ranks import TOKENS, OverRanks, over_ranks


def llama(layers: int = 4, **changes: Any) -> nn.Module:
    return make(TinyLlama, TinyConfig(num_layers=layers, vocab_size=64, **changes))


class Latents(nn.Module):
    """Two layers of MLA."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Latent() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layers[0].embed(ids)
        batch, size, _ = x.shape
        for layer in self.layers:
            rows = layer.up(layer.norm(layer.down(x)))
            k, v = rows.view(batch, size, 4, 16).transpose(1, 2).split(8, -1)
            q = layer.q(x).view(batch, size, 4, 8).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer.o(y.transpose(1, 2).reshape(batch, size, 32))
        return self.layers[1].head(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GQA": llama,
    "MHA, tied head, learned positions": lambda: make(NanoGPT),
    "one KV head": lambda: llama(num_heads=4, num_kv_heads=1),
    "experts": lambda: tiny_hf("mixtral"),
    "windows and two rotary tables": lambda: tiny_hf("gemma3"),
    "MLA": lambda: make(Latents),
    "recurrent state": lambda: tiny_model("lfm2"),
    "ALiBi": lambda: tiny_hf("bloom", attn="eager"),
    "positions counted from tokens": lambda: tiny_model("roberta"),
}
QUICK = (
    "MHA, tied head, learned positions",
    "experts",
    "windows and two rotary tables",
    "MLA",
    "recurrent state",
)


def check_parts(found: OverRanks) -> None:
    """Every node is computed on one stage, or is before attention; a stage reads nothing but inputs and one value."""
    stages = found.staging.stages
    assert len(stages) > 1
    for one, other in combinations(stages, 2):
        assert one.nodes & other.nodes <= one.again & other.again
    graph = found.front.canonical.graph
    needed = {node.name for node in graph.nodes if node.op == "call_function"}
    assert needed == set().union(*(stage.nodes for stage in stages))
    inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
    for number, stage in enumerate(stages):
        own = [node.name for node in stage.graph_module.graph.nodes if node.op == "placeholder"]
        assert own == (inputs if number == 0 else [*inputs, "stage_in"])
        (output,) = (node for node in stage.graph_module.graph.nodes if node.op == "output")
        assert len(output.args[0]) == 1 or stage.gives is None
        assert stage.takes == (stages[number - 1].gives if number else None)
        assert stage.sites or stage.states
    assert [i for stage in stages for i in stage.decisions] == list(range(len(found.plan.decisions)))
    # The caches of all stages are those of the plan.
    assert sum(_cache_bytes(stage.of(found.plan)) for stage in stages) == _cache_bytes(found.plan)


def _cache_bytes(plan: Plan) -> int:
    """Without tables of pages, of which every stage has its own."""
    return plan.bytes(2) - int(plan.table_bytes.subs({sy.B: 2, sy.T: plan.limits.max_tokens or 0}))


@pytest.mark.parametrize("name", cases(MODELS, QUICK))
def test_stages_compute_what_the_model_does(name: str) -> None:
    found = over_ranks(MODELS[name](), 1, stages=2)
    check_parts(found)
    found.verified()


@pytest.mark.parametrize("recipe", cases(("int8", "h2o", "kivi2", "paged", "streaming"), ("h2o", "kivi2")))
def test_recipes(recipe: str) -> None:
    found = over_ranks(
        llama(head_dim=32), 1, recipe, stages=3, **({"max_tokens": 64} if recipe == "paged" else {})
    )
    check_parts(found)
    found.verified()


def test_layers_that_differ_have_page_tables_of_their_own() -> None:
    """In a stage, tables are numbered anew: they must hold the pages of its own layers."""
    paged = {"placement": {"kind": "paged", "page_size": 8}}
    layers = [{"where": {"range": [2, 3]}, "cache": {"placement": {"kind": "paged", "page_size": 16}}}]
    found = over_ranks(llama(), 1, stages=2, cache=paged, layers=layers)
    assert len(found.plan.page_groups) == 2
    found.verified()


def test_latent_rows_and_ranks_of_each_stage() -> None:
    found = over_ranks(llama(num_heads=8, num_kv_heads=4), 2, "int8", stages=2)
    found.verified()
    assert len(found.staging.ranks) == 2
    assert [len(stage.sites) for stage in found.staging.ranks[1]] == [2, 2]
    assert found.staging.ranks[1][1].sites[0].num_kv_heads == 2


def test_logits_are_those_of_the_model() -> None:
    model = llama()
    ids = torch.randint(3, 61, (2, TOKENS - 5), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        right = model(ids)
    torch.testing.assert_close(over_ranks(model, 1, stages=4).logits(ids), right)


def test_stages_are_even_by_bytes() -> None:
    """A large head counts as several layers, and a large cache does."""
    light = over_ranks(llama(8), 1, stages=2)
    assert [len(stage.sites) for stage in light.staging.stages] == [4, 4]
    heavy = over_ranks(make(TinyLlama, TinyConfig(num_layers=8, vocab_size=997)), 1, stages=3)
    assert [len(stage.sites) for stage in heavy.staging.stages] == [2, 5, 1]
    late = [
        {
            "where": {"range": [0, 3]},
            "cache": {"retention": {"kind": "sink_window", "sinks": 2, "window": 14}},
        }
    ]
    cached = over_ranks(llama(8), 1, stages=2, layers=late, max_tokens=4096)
    assert len(cached.staging.stages[0].sites) > 4


SEGMENTS = st.lists(
    st.tuples(st.frozensets(st.sampled_from("abcdef"), max_size=3), st.integers(0, 9), st.integers(0, 2)),
    min_size=1,
    max_size=7,
)


@settings(max_examples=500, deadline=None)
@given(SEGMENTS, st.integers(1, 4))
def test_the_largest_stage_is_as_small_as_can_be(rows: list[Any], stages: int) -> None:
    sizes = {name: 2**place for place, name in enumerate("abcdef")}
    segments = [Segment(*row) for row in rows]

    def cost(start: int, stop: int) -> int | None:
        own = segments[start:stop]
        if not sum(each.work for each in own):
            return None
        weights = frozenset().union(*(each.weights for each in own))
        return sum(sizes[name] for name in weights) + sum(each.cache for each in own)

    ways = []
    for inner in combinations(range(1, len(segments)), stages - 1):
        edges = [0, *inner, len(segments)]
        costs = [cost(a, b) for a, b in pairwise(edges)]
        if None not in costs:
            ways.append(
                (max(c for c in costs if c is not None), sum(c for c in costs if c is not None), inner)
            )
    found = balanced(segments, sizes, stages)
    assert found == (min(ways)[2] if ways else None) or (
        found is not None and [w[:2] for w in ways if w[2] == found] == [min(ways)[:2]]
    )


class Doubled(nn.Module):
    """Two values go from layer to layer: the stream, and what the last attention gave."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 48)
        self.blocks = nn.ModuleList(NanoGPT(TinyConfig(num_layers=1)).h[0] for _ in range(layers))
        self.head = nn.Linear(48, 61)

    def forward(self, ids: Tensor) -> Tensor:
        x = before = self.embed(ids)
        for block in self.blocks:
            x, before = block(x) + before, x
        return self.head(x + before)


def test_where_two_values_cross_nothing_is_cut() -> None:
    with pytest.raises(
        PlanError,
        match=r"into 2 stages at most: between 1 of its 3 blocks.*fewest do, 2: add .*, attention .*tensor: 3",
    ):
        over_ranks(make(Doubled), 1, stages=3)
    with pytest.raises(PlanError, match=r"stages: 9: .* 2 stages at most: it has 2 attention blocks"):
        over_ranks(llama(2), 1, stages=9)
    with pytest.raises(PlanError, match=r"stages: 2: .* 1 stages at most: it has 1 attention blocks"):
        over_ranks(make(Latent), 1, stages=2)
    found = over_ranks(make(Doubled), 1, stages=2)  # the second value is before attention there
    check_parts(found)
    found.verified()


class TwoTables(TinyLlama):
    """The last two layers have a rotary embedding of their own."""

    def __init__(self) -> None:
        super().__init__(TinyConfig(num_layers=4, vocab_size=64))

    def forward(self, input_ids: Tensor) -> Tensor:
        angles = (
            torch.arange(input_ids.shape[1], device=input_ids.device)[None, :, None].float() * self.inv_freq
        )
        x = self.embed(input_ids)
        for number, layer in enumerate(self.layers):
            own = angles if number < 2 else 0.5 * angles
            own = torch.cat((own, own), dim=-1)[:, None]
            x = layer(x, own.cos(), own.sin())
        return self.lm_head(self.norm(x))


def test_each_stage_has_the_rotary_tables_of_its_own_layers() -> None:
    """They are numbered anew in every stage."""
    kept = {"retention": {"kind": "sink_window", "sinks": 2, "window": 14, "positions": "in_cache"}}
    found = over_ranks(make(TwoTables), 1, stages=2, cache=kept, max_tokens=64)
    assert len({site.rope.table for site in found.front.sites if site.rope}) == 2
    found.verified()


class Remembers(TinyLlama):
    """Every layer is given the embeddings again, which each stage then computes: both have the table."""

    def __init__(self) -> None:
        super().__init__(TinyConfig(num_layers=4, vocab_size=64))

    def forward(self, input_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        x = first = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x + 0.1 * first, angles.cos(), angles.sin())
        return self.lm_head(self.norm(x))


def test_what_is_before_attention_is_computed_again_and_its_weights_are_counted() -> None:
    found = over_ranks(make(Remembers), 1, stages=2)
    check_parts(found)
    found.verified()
    _, second = found.staging.stages
    assert any("embedding" in name for name in second.again)
    table = 64 * 48 * 4
    own = sum(
        p.numel() * 4
        for name, p in found.model.named_parameters()
        if "layers.2" in name or "layers.3" in name
    )
    assert second.weight_bytes >= own + 2 * table > own + table  # the head, and the table again


def test_layers_that_read_one_cache_stay_together() -> None:
    front = over_ranks(llama(), 1).front
    graph = front.canonical.graph
    order = {node: at for at, node in enumerate(graph.nodes)}
    sites = [order[site.out] for site in front.sites]
    apart, shared = (Crossing(graph, front.sites, of) for of in ([0, 1, 2, 3], [0, 1, 1, 3]))
    assert (apart.most(), shared.most()) == (4, 3)
    assert not any(sites[1] <= place.after < sites[2] for place in shared.places)
    assert "read one cache" in shared.reason()


def test_a_wrong_cut_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that takes what another value gives is seen by verification, before any process starts."""
    from kvcompile.verify import cached

    honest = cached._Stage.run

    def other(self: Any, inputs: Any, before: Any) -> Any:
        return honest(self, inputs, [[part[0] * 1.01] for part in before])

    monkeypatch.setattr(cached._Stage, "run", other)
    with pytest.raises(VerificationError, match="verification"):
        over_ranks(llama(), 1, stages=2).verified()


def test_explain_tells_what_each_stage_has() -> None:
    text = " ".join(str(kvcompile.explain(llama(), "int8", parallel={"stages": 2})).split())
    assert "over 2 stages, cut at 1 of" in text
    assert "stage 0: layers 0 to 1" in text and "passes on add (layers.1" in text
    assert "stage 1: layers 2 to 3" in text
