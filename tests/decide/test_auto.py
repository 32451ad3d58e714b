"""The recipe that chooses: the first that fits, and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvcompile
from kvcompile import pipeline
from kvcompile.decide import auto
from kvcompile.errors import PlanError, RecipeError
from kvcompile.recipe import Recipe
from kvcompile.recipe.auto import AutoConfig
from tests.support.models import tiny_hf

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("memory", "options", "expected"),
    [
        ("5GiB", {}, "baseline"),
        ("3GiB", {}, "int8"),
        ("1.5GiB", {}, "kivi4"),
        ("900MiB", {}, "kivi2"),
        ("700MiB", {}, "sinks_h2o_fp8"),
        ("200MiB", {}, "h2o_int8"),
        ("200MiB", {"workload": "document"}, "snapkv"),
        ("5GiB", {"workload": "stream"}, "streaming"),
        ("80MiB", {"workload": "stream"}, "streaming_int8"),
        ("1.5GiB", {"loss": "rounding"}, "kivi4"),
    ],
)
def test_the_first_that_fits(memory: str, options: dict[str, Any], expected: str) -> None:
    """Llama-3.1-8B, one sequence of 32,768 tokens."""
    cost = kvcompile.estimate(LLAMA_8B, "auto", tokens=32768, memory=memory, auto=options)
    assert cost.recipe == f"auto: {expected}"
    assert cost.fit is not None and cost.bytes <= cost.fit.memory
    assert cost.notes[0].startswith("chosen for 1 sequence of 32,768 tokens")
    assert any(note.startswith(f"{expected}: ") and "the first that fits" in note for note in cost.notes)


def test_every_candidate_has_a_turn() -> None:
    """Of those that keep every token, each takes less than the one before: what does not could never be chosen."""
    names = AutoConfig(loss="rounding").candidates
    sizes = [kvcompile.estimate(LLAMA_8B, name, tokens=32768).bytes for name in names]
    assert sizes == sorted(set(sizes), reverse=True)
    assert AutoConfig(loss="none").candidates == names[:1]
    assert AutoConfig(loss="any").candidates[: len(names)] == names


def test_more_sequences_need_more() -> None:
    one, four = (
        kvcompile.estimate(LLAMA_8B, "auto", tokens=32768, memory="4.5GiB", batch=batch) for batch in (1, 4)
    )
    assert (one.recipe, four.recipe) == ("auto: baseline", "auto: kivi2")


def test_nothing_fits() -> None:
    for loss in ("none", "rounding", "any"):
        with pytest.raises(PlanError, match=r"(?s)nothing fits .*baseline: 4 GiB.*auto\.loss"):
            kvcompile.estimate(LLAMA_8B, "auto", tokens=32768, memory="8MiB", auto={"loss": loss})


def test_a_candidate_that_the_model_cannot_have_is_passed_over() -> None:
    """int4 in groups of 32 needs a head of so many channels; what was refused is told."""
    odd = LLAMA_8B | {"head_dim": 40}
    cost = kvcompile.estimate(odd, "auto", tokens=32768, memory="650MiB")
    assert any(note.startswith("int4: not for this model (") for note in cost.notes)


def test_a_model_chooses_by_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert auto.free_memory(torch.device("cpu")) > 1 << 20  # type: ignore[operator]
    assert auto.free_memory(torch.device("meta")) is None
    model = tiny_hf("llama")
    full = kvcompile.estimate(model, "baseline", tokens=64).bytes
    for free, expected in ((2 * full, "baseline"), (2 * full - 2, "int8")):
        monkeypatch.setattr("kvcompile.decide.auto.free_memory", lambda device, free=free: free)
        fast = kvcompile.optimize(
            model, "auto", compile={"mode": "none"}, verify="off", max_tokens=64, max_batch=1
        )
        assert fast.plan.recipe == f"auto: {expected}"
        limits = {"max_tokens": 64, "max_batch": 1}
        assert kvcompile.estimate(model, "auto", tokens=64, **limits).recipe == fast.plan.recipe
        assert fast.plan.limits.max_tokens == 64
        fast(torch.arange(3, 9)[None])
        assert fast.cache.nbytes <= free // 2
        text = str(kvcompile.explain(fast))
        assert f"{expected}: " in text and "the first that fits" in text and "half of what is free" in text


def test_reasons_do_not_change_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_hf("llama")
    digests = set()
    for free in (10**9, 10**10):
        monkeypatch.setattr("kvcompile.decide.auto.free_memory", lambda device, free=free: free)
        digests.add(pipeline.analyze(model, Recipe.load("auto")).plan.digest())
    assert len(digests) == 1


def test_refused_when_read() -> None:
    with pytest.raises(RecipeError, match="auto chooses a recipe: leave out cache"):
        Recipe.load({"auto": {}, "cache": {}})
    with pytest.raises(RecipeError, match=r"auto\.memory"):
        Recipe.load("auto", auto={"memory": "much"})
    with pytest.raises(PlanError, match=r"set auto\.memory"):
        kvcompile.estimate(LLAMA_8B, "auto")
