"""Scores against code not ours: NVIDIA/kvpress 0.5.5 (Apache-2.0), on what it scores by: attentions and keys.

Its hooks want an older transformers, so its scores are called as they are and the best taken, as its
`ScorerPress.compress` does.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvcompile

TOKENS, KEPT = 40, 20


@pytest.fixture(scope="module")
def presses() -> dict[str, Any]:
    """The three presses, without the package's own __init__ (which imports what other presses download)."""
    found = importlib.util.find_spec("kvpress")
    if found is None or not found.submodule_search_locations:
        pytest.skip("kvpress is not installed: pip install --no-deps kvpress==0.5.5")
    folder = found.submodule_search_locations[0]
    for name, path in (("kvpress", folder), ("kvpress.presses", f"{folder}/presses")):
        bare = types.ModuleType(name)
        bare.__path__ = [path]
        sys.modules[name] = bare
    names = {"snapkv_press": "SnapKVPress", "tova_press": "TOVAPress"}
    names["observed_attention_press"] = "ObservedAttentionPress"
    return {
        name: getattr(importlib.import_module(f"kvpress.presses.{file}"), name)
        for file, name in names.items()
    }


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # attention that is not the same everywhere
    return model


CASES = (
    (
        "SnapKVPress",
        {"window_size": 4, "kernel_size": 5},
        {"kind": "snapkv", "heavy": KEPT - 4, "recent": 4, "rows": 4, "smooth": 5},
    ),
    ("TOVAPress", {}, {"kind": "tova", "budget": KEPT}),
    (
        "ObservedAttentionPress",
        {},
        {"kind": "h2o", "sinks": 0, "heavy": KEPT - 1, "recent": 1, "score": "mean_age"},
    ),
)


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "options", "retention"), CASES, ids=[case[0] for case in CASES])
def test_same_tokens_stay(
    presses: dict[str, Any], model: Any, name: str, options: dict[str, Any], retention: dict[str, Any]
) -> None:
    ids = torch.randint(0, 64, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    cache = DynamicCache()
    with torch.no_grad():
        attentions = model(ids, past_key_values=cache, output_attentions=True).attentions
    press = presses[name](**options)
    recipe = {"name": "x", "cache": {"retention": retention}}
    fast = kvcompile.optimize(model, recipe, compile={"mode": "none"}, verify="off")
    fast(ids)
    differing = 0
    for layer, attention in enumerate(attentions):
        keys, values = cache.layers[layer].keys, cache.layers[layer].values
        module = model.model.layers[layer].self_attn
        scores = press.score(module, ids[..., None], keys, values, attention, {})
        # Its TOVA does not force the newest token in, nor do observed attentions: here it is always kept.
        scores[..., -1] = float("inf")
        theirs = scores.topk(KEPT, dim=-1).indices
        ours = fast.cache.buffers[f"cache_{layer}_slots_token"].long().expand_as(theirs)
        assert torch.equal(ours.sort(-1).values, theirs.sort(-1).values)
        differing += int((theirs.sort(-1).values != torch.arange(TOKENS - KEPT, TOKENS)).any())
    assert differing == len(attentions)  # and not simply the last ones
