"""One function decides: what `estimate` says of a config is what `optimize` plans for the model, layer by layer."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kvcompile
from kvcompile import decide, pipeline
from kvcompile.decide.known import KnownModel
from kvcompile.errors import PlanError
from kvcompile.layouts import CacheLayout, int8
from kvcompile.pipeline import Front, plan_for, understand
from kvcompile.plan import Plan
from kvcompile.recipe import Recipe
from kvcompile.report.estimate import Estimate
from tests.support.models import tiny_hf

RECIPES = sorted(path.stem for path in (Path(__file__).parents[2] / "recipes").glob("*.yaml"))
TOKENS = 300
_WIDE: dict[str, Any] = {"head_dim": 64, "max_position_embeddings": 2048}
_MLA: dict[str, Any] = {
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 6,
    "first_k_dense_replace": 99,
}
_SHARED: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 0,
    "global_head_dim": 64,
    "sliding_window": 9,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "one KV head for each query head": ("llama", _WIDE | {"num_key_value_heads": 6}),
    "grouped queries": ("qwen3", _WIDE),
    "heads too small for groups of 32": ("llama", {}),
    "sliding": ("mistral", _WIDE),
    "sliding and full": ("gemma3", _WIDE),
    "latent rows": ("deepseek_v3", _MLA),
    "shared caches": ("gemma4", _WIDE | _SHARED | {"layers": 4}),
}


@cache
def understood(kind: str) -> tuple[nn.Module, Front]:
    name, changes = MODELS[kind]
    model = tiny_hf(name, **changes)
    return model, understand(model)


def more(recipe: str) -> dict[str, Any]:
    """What a recipe that chooses must be told to choose the same, whatever is free here."""
    return {"auto": {"memory": "300KiB", "tokens": TOKENS}} if recipe == "auto" else {}


def estimated(source: Any, recipe: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Estimate, Plan]:
    """An estimate, and the plan that it was given."""
    made: list[Plan] = []

    def spy(model: KnownModel, recipe: Recipe) -> Plan:
        made.append(decide_plan(model, recipe))
        return made[-1]

    decide_plan = decide.make_plan
    with monkeypatch.context() as patch:
        patch.setattr(decide, "make_plan", spy)
        cost = kvcompile.estimate(source, recipe, tokens=TOKENS, dtype="float32", **more(recipe))
    return cost, made[-1]  # of an outer call: `auto` plans its candidates with the same function


def reasons(error: PlanError) -> set[str]:
    """Why a recipe was refused, without the places in the model's code, which a config does not know."""
    return {re.sub(r"\(([^(]*, [^(]*)\)|layers? [\d, ]+", "", line) for line in str(error).splitlines()[1:]}


@pytest.mark.few(10)  # every recipe, and every kind, with some of the others
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", MODELS)
def test_estimate_and_optimize_agree(kind: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts, bytes and reasons of every layer; or the refusal."""
    model, front = understood(kind)
    try:
        planned = plan_for(front, Recipe.load(recipe, **more(recipe)))
    except PlanError as refused:
        with pytest.raises(PlanError) as found:
            kvcompile.estimate(model.config, recipe, tokens=TOKENS, dtype="float32", **more(recipe))
        assert reasons(found.value) == reasons(refused) != set()
        return
    itemsize = planned.torch_dtype.itemsize
    for source in (model.config, model):
        cost, plan = estimated(source, recipe, monkeypatch)
        of_layer = {layer: group for group in cost.layers for layer in group.layers}
        assert sorted(of_layer) == [d.layer for d in planned.decisions]
        for decision, own in zip(planned.decisions, plan.decisions, strict=True):
            group = of_layer[decision.layer]
            assert group.layout == own.layout == decision.layout
            assert own.because == decision.because and own.lossless == decision.lossless
            assert (group.latent, group.shared) == (decision.latent, not decision.owns)
            assert group.bytes_per_token == decision.bytes_per_token(itemsize)
            if source is model:  # whose device is known
                assert (own.kernels, own.kernels_because) == (decision.kernels, decision.kernels_because)
        assert cost.bytes == planned.bytes(1, TOKENS)
        assert (plan.limits, plan.step, plan.backend) == (planned.limits, planned.step, planned.backend)
        if source is model:
            assert (plan.recipe, plan.recipe_digest, plan.notes) == (
                planned.recipe,
                planned.recipe_digest,
                planned.notes,
            )


def test_there_are_kinds_of_every_sort() -> None:
    """Or the test above shows less than it says."""
    found = {kind: plan_for(understood(kind)[1], Recipe.load("baseline")).decisions for kind in MODELS}
    assert all(d.latent for d in found["latent rows"])
    assert [d.kv_source for d in found["shared caches"]] == [0, 1, 0, 1]
    assert [d.mask.kind for d in found["sliding and full"]] == ["sliding", "causal"]
    assert {d.num_qo_heads // d.num_kv_heads for d in found["grouped queries"]} == {3}
    with pytest.raises(PlanError, match="does not divide head_dim 8"):
        plan_for(understood("heads too small for groups of 32")[1], Recipe.load("int4"))


def test_what_no_config_tells() -> None:
    """An estimate takes a rotary embedding to be in every layer: only the graph of GPT-2 shows that it has none."""
    model = tiny_hf("gpt2")
    assert kvcompile.estimate(model.config, "streaming").bytes > 0
    with pytest.raises(PlanError, match="in_cache needs a rotary embedding"):
        plan_for(understand(model), Recipe.load("streaming"))


def test_estimate_shows_what_was_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another decision for one layer, and the estimate is another: it has no word of its own in it."""
    model, _ = understood("grouped queries")
    own = decide.make_plan

    def other(known: KnownModel, recipe: Recipe) -> Plan:
        plan = own(known, recipe)
        first, *rest = plan.decisions
        return replace(plan, decisions=(replace(first, layout=CacheLayout(int8(), int8())), *rest))

    plain = kvcompile.estimate(model.config, "baseline", tokens=TOKENS, dtype="float32")
    monkeypatch.setattr(decide, "make_plan", other)
    cost = kvcompile.estimate(model.config, "baseline", tokens=TOKENS, dtype="float32")
    assert [group.layout for group in cost.layers] == [CacheLayout(int8(), int8()), CacheLayout()]
    slot = 2 * 2 * (64 * 4 - (64 + 2))  # K and V of two heads: fp32 less int8 with a scale
    assert plain.bytes - cost.bytes == TOKENS * slot
    assert plain.full_bytes == cost.full_bytes


def test_optimize_asks_the_same_function() -> None:
    assert pipeline.make_plan is decide.make_plan


def test_a_device_that_is_not_known_refuses_nothing() -> None:
    """What only a device can say no to is left open in an estimate of a config, and refused of a model."""
    model, front = understood("grouped queries")
    asked = {"compile": {"mode": "cudagraphs"}}
    assert kvcompile.estimate(model.config, "baseline", tokens=TOKENS, **asked).bytes > 0
    with pytest.raises(PlanError, match="needs an NVIDIA GPU, and the model is on cpu"):
        kvcompile.estimate(model, "baseline", tokens=TOKENS, **asked)
    with pytest.raises(PlanError, match="needs an NVIDIA GPU, and the model is on cpu"):
        plan_for(front, Recipe.load("baseline", **asked))
    assert front.device == torch.device("cpu")
