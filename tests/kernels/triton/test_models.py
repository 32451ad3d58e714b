"""Models end to end on generated kernels, in Triton's interpreter: verified, and the same text as the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import kvcompile
from kvcompile.recipe import shipped_recipes
from tests.coverage.configs import tiny_model
from tests.support.models import tiny_hf
from tests.support.triton_write import kernels_folder  # noqa: F401  (a fixture)

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
# What sliding layers do not show cannot be kept for them.
SLIDING = [{"where": {"attention": "sliding"}, "cache": {"retention": {"kind": "window"}}}]
STREAM = {
    "cache": {"retention": {"kind": "sink_window", "sinks": 2, "window": 9, "positions": "in_cache"}},
    "layers": SLIDING,
}
PAGES = {"cache": {"keys": {"dtype": "int8"}, "placement": {"kind": "paged", "page_size": 8}}}
H2O = {
    "cache": {
        "keys": {"dtype": "int8"},
        "values": {"dtype": "int8"},
        "retention": {"kind": "h2o", "sinks": 1, "heavy": 6, "recent": 5},
    },
    "layers": SLIDING,
}
QUEST = {
    "cache": {
        "keys": {"dtype": "int8"},
        "selection": {"kind": "top_pages", "page_size": 4, "pages": 2, "dense_layers": 0},
    }
}
RECENT = {"cache": {"keys": {"dtype": "int4", "residual": 6}, "values": {"dtype": "int8", "residual": 4}}}


def model_of(kind: str, **changes: Any) -> nn.Module:
    if kind == "deepseek_v3":
        return tiny_model(kind)
    attn = "eager" if kind in ("gpt_oss", "gemma2", "bloom") else "sdpa"
    # Sliding layers and full ones.
    return tiny_hf(kind, attn, 2 if kind in ("gpt_oss", "gemma2") else 1, **changes)


def generated(model: Any, recipe: Any, kernels: str, verify: str, **more: Any) -> Any:
    """The tokens that follow two prompts, one of them padded on the left where the model can have that."""
    own = {"compile": {"mode": "none", "kernels": kernels}, "verify": verify, "max_tokens": 32}
    fast: Any = kvcompile.optimize(model, recipe, **(own | more))
    assert {decision.kernels for decision in fast.plan.decisions} == {kernels}
    ids = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if model.config.model_type != "bloom":  # it counts positions itself
        mask[1, :4] = 0
    return fast.generate(ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False)


def check(model: Any, recipe: Any, verify: str = "quick", **more: Any) -> None:
    """What a model generates has a margin over other tokens that kernels' rounding does not use up."""
    tokens = generated(model, recipe, "triton", verify, **more)
    assert torch.equal(tokens, generated(model, recipe, "reference", "off", **more))


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        pytest.param("llama", "int8", marks=pytest.mark.slow),
        ("llama", H2O),
        ("llama", STREAM),
        ("llama", QUEST),
        ("gemma2", PAGES),  # sliding layers, softcap
        # What these have is tested kernel by kernel, too.
        pytest.param("gpt_oss", "baseline", marks=pytest.mark.slow),  # sink logits
        pytest.param("bloom", RECENT, marks=pytest.mark.slow),  # ALiBi
        pytest.param("deepseek_v3", "int8", marks=pytest.mark.slow),  # values in the keys
    ],
    ids=[
        "llama-int8",
        "llama-H2O",
        "llama-stream",
        "llama-quest",
        "gemma2-pages",
        "gpt_oss",
        "bloom-recent",
        "deepseek",
    ],
)
def test_models_generate_what_the_reference_does(kind: str, recipe: Any) -> None:
    """Verification, which takes minutes in the interpreter, runs for one of them, and for all of `test_more_models`."""
    check(model_of(kind), recipe, "quick" if recipe is H2O else "off")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss", "bloom", "phi", "mixtral"])
@pytest.mark.parametrize(
    "recipe", [PAGES, H2O, STREAM, RECENT, "int8"], ids=["pages", "H2O", "stream", "recent", "int8"]
)
def test_more_models(kind: str, recipe: Any) -> None:
    check(model_of(kind), recipe, max_tokens=64)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("head_dim", [32, 64])
@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes(name: str, head_dim: int) -> None:
    check(tiny_hf("llama", head_dim=head_dim, hidden_size=6 * head_dim), name, max_tokens=96)
