"""explain: one row per run of equal layers, totals, misses with their source lines, and JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvcompile.passes.records import NoMatch
from kvcompile.plan import Decision, Limits, Plan
from kvcompile.recipe import Recipe
from kvcompile.recipe.retention import LayerContext
from kvcompile.report.explain import Explanation, explain
from kvcompile.specs import MaskSpec, RotaryForm

MISS = NoMatch("sdpa", "scale is not a number", "sdpa_7", "modeling_x.py:123", "model.layers.3.attn")


def decision(layer: int, window: int | None = None, recipe: str = "baseline") -> Decision:
    mask = MaskSpec("sliding", window) if window else MaskSpec("causal")
    config, _ = Recipe.load(recipe).cache_for(layer, 30, mask.kind)
    return Decision(
        layer=layer,
        module_path=f"model.layers.{layer}.self_attn",
        source=f"modeling_tiny.py:{100 + layer}",
        idiom="sdpa",
        num_qo_heads=9,
        num_kv_heads=3,
        head_dim=64,
        v_head_dim=64,
        sm_scale=0.125,
        mask=mask,
        layout=config.build(LayerContext(window)),
        lossless=recipe == "baseline",
        because=("the recipe's cache", "keeps all that a causal mask shows"),
        kv_source=layer,
        rope=RotaryForm("half", 0, 64),
    )


def plan(decisions: tuple[Decision, ...], max_tokens: int | None = 8192) -> Plan:
    return Plan("baseline", "digest", "bfloat16", Limits(8, max_tokens, 512), decisions)


def explanation(*decisions: Decision, misses: tuple[NoMatch, ...] = (), **limits: Any) -> Explanation:
    return Explanation(plan(decisions, **limits), misses, "export, sdpa", ("tried eager first",), 1.25, 0.5)


def test_equal_layers_are_one_row_and_full_unfolds_them() -> None:
    made = explanation(*(decision(layer) for layer in range(30)))
    text = made.render()
    assert "0-29" in text and "model.layers.*.self_attn" in text
    assert text.count("9/3 heads x 64") == 1 and "22.50 KiB" in text
    assert "modeling_tiny.py" not in text
    full = made.render(full=True)
    assert full.count("9/3 heads x 64") == 30
    assert "model.layers.7.self_attn" in full and "modeling_tiny.py:107" in full


def test_only_consecutive_layers_are_folded() -> None:
    text = explanation(decision(0), decision(1), decision(2, window=128), decision(3)).render()
    assert text.count("heads x") == 3
    assert "0-1" in text and "sliding(128)" in text and "model · ring · window 128" in text


def test_everything_a_row_should_say_is_there() -> None:
    text = " ".join(explanation(decision(0, recipe="streaming_int8"), max_tokens=None).render().split())
    for part in (
        "int8 · ring · sinks 4 + window 1020 in_cache",
        "append[ring], rope+attend[K int8, V int8]",
        "because the recipe's cache; keeps all",
        "causal (sdpa, proved)",
        "a sequence of any length",
        "until the budget is full",
        "lossy",
    ):
        assert part in text


def test_totals_at_the_limits() -> None:
    made = explanation(*(decision(layer) for layer in range(30)))
    data = made.to_dict()
    assert data["bytes_per_token"] == 30 * 3 * 128 * 2
    assert data["bytes_per_sequence"] == 8192 * data["bytes_per_token"]
    assert data["bytes_at_max_batch"] == 8 * data["bytes_per_sequence"]
    text = made.render()
    assert "a sequence of 8,192 tokens" in text and "180 MiB" in text
    assert "8 of them (max_batch)" in text and "1.41 GiB" in text
    assert "captured by export, sdpa in 1.2 s, detected in 0.5 s" in text
    assert made.plan.digest() in text and "exact" in text


def test_misses_come_with_their_source_lines() -> None:
    text = " ".join(explanation(decision(0), misses=(MISS,)).render().split())
    assert "nearest misses" in text
    assert "[sdpa] scale is not a number (model.layers.3.attn, modeling_x.py:123, sdpa_7)" in text
    many = explanation(decision(0), misses=(MISS,) * 40)
    assert "and 28 more" in many.render()
    assert many.render(full=True).count("modeling_x.py:123") == 40


@pytest.mark.parametrize("width", [80, 100, 160])
def test_no_line_is_wider_than_asked(width: int) -> None:
    made = explanation(*(decision(i, recipe="streaming_int8") for i in range(3)), misses=(MISS,))
    assert max(map(len, made.render(width=width).splitlines())) <= width
    assert max(map(len, str(made).splitlines())) <= 100


def test_json_has_everything() -> None:
    data = json.loads(explanation(decision(0), decision(1, window=8), misses=(MISS,)).to_json())
    assert [d["mask"]["kind"] for d in data["plan"]["decisions"]] == ["causal", "sliding"]
    assert data["misses"][0]["source"] == "modeling_x.py:123"
    assert data["route"] == "export, sdpa" and data["reasons"] == ["tried eager first"]
    assert data["lossless"] is True and len(data["digest"]) == 16


@dataclass(frozen=True)
class Analysis:
    plan: Plan
    misses: tuple[NoMatch, ...] = (MISS,)
    route: str = "export, sdpa"
    reasons: tuple[str, ...] = ()
    capture_seconds: float = 1.0
    detect_seconds: float = 2.0


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Recipe]]:
    """A stand-in for kvcompile.pipeline that notes what it was asked."""
    calls: list[tuple[Any, Recipe]] = []

    def analyze(model: Any, recipe: Recipe, ranks: int = 1, stages: int = 1) -> Analysis:
        assert ranks == stages == 1
        calls.append((model, recipe))
        return Analysis(replace(plan((decision(0),)), recipe=recipe.name))

    module = ModuleType("kvcompile.pipeline")
    module.analyze = analyze  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvcompile.pipeline", module)
    return calls


def test_explain_analyzes_the_model(pipeline: list[tuple[Any, Recipe]]) -> None:
    model = torch.nn.Linear(2, 2)
    assert explain(model).plan.recipe == "baseline"
    made = explain(model, "int8", max_tokens=99)
    assert [(m is model, r.name, r.runtime.max_tokens) for m, r in pipeline] == [
        (True, "baseline", None),
        (True, "int8", 99),
    ]
    assert made.misses == (MISS,) and made.detect_seconds == 2.0


def test_an_optimized_module_explains_itself(pipeline: list[tuple[Any, Recipe]]) -> None:
    fast = SimpleNamespace(plan=plan((decision(0),)), analysis=Analysis(plan((decision(0),)), route="known"))
    assert explain(fast).route == "known" and not pipeline
    assert explain(fast, "int8").route == "export, sdpa" and len(pipeline) == 1


def test_a_traced_model_end_to_end() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    made = explain(LlamaForCausalLM(config).eval(), "int8")
    assert made.plan.bytes_per_token == 2 * 2 * 2 * (16 + 2)
    assert "0-1" in str(made) and "4/2 heads x 16" in str(made)
