"""estimate: the published sizes, every kind of layer, and what fits, from configs alone."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    DeepseekV3Config,
    Gemma3Config,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
)

from kvcompile.decide import make_plan
from kvcompile.errors import KVCompileError, ModelError, PlanError, RecipeError
from kvcompile.recipe import Recipe
from kvcompile.report.estimate import estimate
from kvcompile.util.console import format_bytes, format_layers, parse_bytes

KiB = 1024
GiB = 1024**3

LLAMA_8B = LlamaConfig(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    dtype="bfloat16",
)
LLAMA_70B = LlamaConfig(
    hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, dtype="bfloat16"
)
LLAMA_405B = LlamaConfig(
    hidden_size=16384,
    num_hidden_layers=126,
    num_attention_heads=128,
    num_key_value_heads=16,
    dtype="bfloat16",
)
TINY: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "dtype": "float16",
}


@pytest.mark.parametrize(
    ("config", "per_token"), [(LLAMA_8B, 128 * KiB), (LLAMA_70B, 320 * KiB), (LLAMA_405B, 1008 * KiB)]
)
def test_published_bytes_per_token(config: LlamaConfig, per_token: int) -> None:
    cost = estimate(config, "baseline", batch=3, tokens=1000)
    assert cost.bytes_per_token == cost.full_bytes_per_token == per_token
    assert cost.bytes == 3 * 1000 * per_token
    assert cost.ratio == 1.0


def test_int8_and_int4_count_their_scales() -> None:
    int8 = estimate(LLAMA_8B, "int8")
    assert int8.bytes_per_token == 32 * 8 * 2 * (128 + 2)
    assert int8.ratio == pytest.approx(256 / 130)  # 1.97x
    int4 = estimate(LLAMA_8B, "int4")
    assert int4.bytes_per_token == 32 * 8 * 2 * (64 + 4 * (2 + 2))
    assert int4.tokens == 131072


def test_mla_is_counted_in_its_latent_form() -> None:
    config = DeepseekV3Config(dtype="bfloat16")
    cost = estimate(config, "baseline", tokens=1)
    assert cost.bytes_per_token == 61 * 576 * 2
    (note,) = (note for note in cost.notes if "MLA" in note)
    assert "latent" in note and format_bytes(61 * 128 * (128 + 64 + 128) * 2) in note
    assert "model · contiguous · full" in str(cost) and "1 x 576 (latent)" in str(cost)
    # No V: no scales for it either.
    assert estimate(config, "int8").bytes_per_token == 61 * (576 + 2)


def test_mistral_slides_and_stops_growing() -> None:
    config = MistralConfig(sliding_window=4096, dtype="bfloat16")
    cost = estimate(config, "baseline", tokens=32768, memory="1GiB")
    assert cost.layers[0].attention == "sliding(4096)"
    assert cost.bytes == 4096 * 128 * KiB and cost.bytes_per_token == 128 * KiB
    assert cost.ratio == 8.0
    assert cost.bytes_per_token_later == 0
    assert cost.fit is not None and cost.fit.tokens is None and cost.fit.sequences == 2


def test_gemma3_mixes_sliding_and_full_layers() -> None:
    config = Gemma3Config()
    text = config.get_text_config()
    cost = estimate(config, "baseline", tokens=10_000, dtype="bfloat16")
    sliding = text.layer_types.count("sliding_attention")
    full = len(text.layer_types) - sliding
    slot = 2 * text.num_key_value_heads * text.head_dim * 2
    assert cost.bytes == slot * (sliding * text.sliding_window + full * 10_000)
    assert cost.bytes_per_token_later == full * slot
    assert {group.attention for group in cost.layers} == {"causal", f"sliding({text.sliding_window})"}
    assert sum(len(group.layers) for group in cost.layers) == len(text.layer_types)


def test_chunked_layers_keep_one_chunk() -> None:
    config = AutoConfig.for_model("llama4_text")
    cost = estimate(config, "baseline", tokens=20_000, dtype="bfloat16")
    chunked = config.layer_types.count("chunked_attention")
    full = len(config.layer_types) - chunked
    slot = 2 * config.num_key_value_heads * config.head_dim * 2
    assert cost.bytes == slot * (chunked * config.attention_chunk_size + full * 20_000)
    assert {group.attention for group in cost.layers} == {"causal", f"chunked({config.attention_chunk_size})"}


def test_shared_layers_add_nothing() -> None:
    config = AutoConfig.for_model("gemma3n_text")
    cost = estimate(config, "baseline", tokens=100, dtype="bfloat16")
    own = config.num_hidden_layers - config.num_kv_shared_layers
    assert cost.bytes_per_token == own * 2 * config.num_key_value_heads * config.head_dim * 2
    assert sum(len(group.layers) for group in cost.layers if group.shared) == config.num_kv_shared_layers
    assert any("earlier layers" in note for note in cost.notes)


def test_layers_that_differ_are_read_one_by_one() -> None:
    config = AutoConfig.for_model("gemma4_text")
    cost = estimate(config, "baseline", tokens=100, dtype="bfloat16")
    assert {(g.attention.split("(")[0], g.shape.head_dim) for g in cost.layers} == {
        ("sliding", 256),
        ("causal", 512),
    }


def test_layers_without_attention_count_nothing() -> None:
    config = AutoConfig.for_model("jamba")
    attending = config.layer_types.count("full_attention")
    cost = estimate(config, "baseline", tokens=1, dtype="bfloat16")
    assert cost.bytes_per_token == attending * 2 * 8 * 128 * 2
    assert any("not counted" in note for note in cost.notes)


@pytest.mark.parametrize(
    ("config", "heads", "dim"),
    [
        (GPT2Config(), 12, 64),
        (AutoConfig.for_model("falcon"), 1, 64),
        (AutoConfig.for_model("gpt_bigcode"), 1, 64),
        ({"n_layer": 12, "n_embd": 768, "n_head": 12}, 12, 64),
        ({**TINY, "head_dim": 32}, 2, 32),
    ],
)
def test_heads_of_other_configs(config: Any, heads: int, dim: int) -> None:
    (group,) = estimate(config, "baseline", tokens=8).layers
    assert (group.shape.num_kv_heads, group.shape.head_dim) == (heads, dim)


def test_a_decoder_from_json_a_folder_a_dict_and_a_model_agree(tmp_path: Path) -> None:
    config = LlamaConfig(vocab_size=32, intermediate_size=64, max_position_embeddings=64, **TINY)
    config.save_pretrained(tmp_path)
    model = LlamaForCausalLM(config).half()
    first = estimate(config, "int8", tokens=50, memory="1MiB")
    for source in (tmp_path, str(tmp_path / "config.json"), config.to_dict(), model):
        assert estimate(source, "int8", tokens=50, memory="1MiB") == first
    assert estimate(model.float(), "baseline", tokens=1).dtype == "float32"


def test_an_optimized_module_is_estimated_by_its_plan() -> None:
    from kvcompile.report.estimate.planned import known_model, shape_of

    known = known_model(replace(shape_of(TINY), max_tokens=99), torch.float16, None, None)
    plan = make_plan(known, Recipe.load("int8"))
    fast = SimpleNamespace(plan=plan)
    assert estimate(fast, tokens=10).bytes == plan.bytes(1, 10)
    assert estimate(fast).tokens == 99
    assert estimate(fast, "baseline", tokens=10).bytes == 10 * 2 * 2 * 16 * 2 * 2


def test_missing_fields_are_all_named() -> None:
    with pytest.raises(ModelError, match=r"missing: .*num_hidden_layers.*num_key_value_heads.*head_dim"):
        estimate({"vocab_size": 100}, "baseline")
    with pytest.raises(ModelError, match="sliding_window"):
        estimate({**TINY, "layer_types": ["sliding_attention", "full_attention"]}, "baseline")
    with pytest.raises(ModelError, match="qk_rope_head_dim"):
        estimate({**TINY, "kv_lora_rank": 8}, "baseline")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({**TINY, "layer_types": ["full_attention", "telepathy"]}, "telepathy"),
        ({**TINY, "layer_types": ["full_attention"]}, "1 entries for 2 layers"),
        (AutoConfig.for_model("t5"), "encoder-decoder"),
        (AutoConfig.for_model("mamba"), "no layer has attention"),
        ({"model_type": "llama", "num_hidden_layers": "many"}, "not valid"),
        (torch.nn.Linear(2, 2), "has no .config"),
        (17, "got int"),
        ("/no/such/model", "no model"),
    ],
)
def test_models_that_cannot_be_estimated(source: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        estimate(source, "baseline")


def test_recipes_and_numbers_are_checked() -> None:
    with pytest.raises(PlanError, match="does not divide head_dim 16"):
        estimate(TINY, "int4")
    with pytest.raises(RecipeError):
        estimate(TINY, "baseline", no_such_key=1)
    for bad in ({"batch": 0}, {"tokens": -1}, {"batch": True}, {"dtype": "int7"}):
        with pytest.raises(ModelError):
            estimate(TINY, "baseline", **bad)  # type: ignore[arg-type]


def test_overrides_reach_the_recipe() -> None:
    assert estimate(TINY, "baseline", max_tokens=77).tokens == 77
    window = {"retention": {"kind": "window", "size": 16}}
    assert estimate(TINY, "baseline", tokens=1000, cache=window).bytes == 16 * 2 * 2 * 2 * 16 * 2


@settings(deadline=None, max_examples=40)
@given(
    recipe=st.sampled_from(["baseline", "int8", {"cache": {"values": {"dtype": "int4"}}}]),
    batch=st.integers(1, 9),
    tokens=st.integers(1, 5000),
    memory=st.integers(1, 10**7),
)
def test_what_fits_is_the_most_that_fits(recipe: Any, batch: int, tokens: int, memory: int) -> None:
    fit = estimate(TINY, recipe, batch=batch, tokens=tokens, memory=memory).fit
    assert fit is not None and fit.tokens is not None

    def size(batch: int, tokens: int) -> int:
        return batch * tokens * estimate(TINY, recipe, tokens=1).bytes

    assert size(batch, fit.tokens) <= memory < size(batch, fit.tokens + 1)
    assert size(fit.sequences, tokens) <= memory < size(fit.sequences + 1, tokens)


@pytest.mark.parametrize("kind", ["indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention"])
def test_layers_with_an_indexer_keep_all_tokens(kind: str) -> None:
    """By their name, and by those that transformers had for them until it took the first for all."""
    plain = estimate(TINY, "baseline")
    found = estimate({**TINY, "layer_types": [kind, "full_attention"]}, "baseline")
    assert found.bytes_per_token == plain.bytes_per_token
    assert any("indexer are not counted" in note for note in found.notes)


def test_fit_of_mixed_layers_solves_one_expression() -> None:
    config = {**TINY, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 100}
    slot = 2 * 2 * 16 * 2
    cost = estimate(config, "baseline", memory=slot * (100 + 333) + 5, tokens=200)
    assert cost.fit is not None and cost.fit.tokens == 333 and cost.fit.sequences == 433 // 300
    tight = estimate(config, "baseline", memory=slot * 99, tokens=200)
    assert tight.fit is not None and (tight.fit.tokens, tight.fit.sequences) == (0, 0)


def test_fit_of_llama_8b_in_24_gib() -> None:
    cost = estimate(LLAMA_8B, "baseline", tokens=8192, memory="24GiB")
    assert cost.fit is not None
    assert (cost.fit.tokens, cost.fit.sequences) == (24 * GiB // (128 * KiB), 24)
    assert cost.fit.tokens == 196_608


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * GiB),
        ("24GB", 24 * 10**9),
        ("512 MiB", 512 * KiB * KiB),
        ("1.5KiB", 1536),
        ("7", 7),
        (9, 9),
        ("2g", 2 * GiB),
        ("3 b", 3),
    ],
)
def test_memory_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "24 gigs", "-1", "0", 0, -5, 1.5, True, "1e9"])
def test_memory_that_is_none(text: Any) -> None:
    with pytest.raises(KVCompileError, match="memory: expected"):
        parse_bytes(text)


def test_format_of_sizes_and_layers() -> None:
    sizes = [0, 1, 1023, 1024, 1008 * KiB, 128 * KiB * KiB, 24 * GiB, 1536]
    assert [format_bytes(size) for size in sizes] == [
        "0 B", "1 B", "1,023 B", "1 KiB", "1,008 KiB", "128 MiB", "24 GiB", "1.50 KiB",
    ]  # fmt: skip
    assert format_layers((0, 1, 2, 5, 7, 8)) == "0-2, 5, 7-8"


def test_the_table_is_readable_at_100_columns() -> None:
    text = str(estimate(Gemma3Config(), "int8", batch=2, tokens=32768, memory="24GiB", dtype="bfloat16"))
    assert max(map(len, text.splitlines())) <= 100
    for part in ("sliding(", "int8 · ring", "24 GiB of cache holds", "smaller", "a token takes"):
        assert part in text


def test_to_dict_is_json() -> None:
    cost = estimate(LLAMA_8B, "int8", memory="1GiB")
    data = json.loads(json.dumps(cost.to_dict()))
    assert data["bytes_per_token"] == cost.bytes_per_token
    assert data["fit"]["memory"] == GiB and data["layers"][0]["layout"]["keys"]["code"] == "int8"
    assert data["ratio"] == pytest.approx(cost.ratio)


def test_the_modules_are_light_to_import() -> None:
    """So that the package can import them at once, and `--help` stays quick."""
    code = (
        "import sys, kvcompile.report.estimate, kvcompile.report.explain as _\n"
        "print('torch' in sys.modules, 'sympy' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]


def test_released_windows_are_told_with_their_bytes() -> None:
    """Gemma 3 in bfloat16: five of six layers see 512 tokens, with 4 KV heads of 256 channels in them."""
    recipe = {
        "cache": {"placement": {"kind": "paged"}},
        "layers": [
            {
                "where": {"attention": "sliding"},
                "cache": {
                    "retention": {"kind": "window"},
                    "placement": {"kind": "paged", "released": True},
                },
            }
        ],
        "runtime": {"prefill_chunk": 256},
    }
    config = Gemma3Config(
        text_config={
            "num_hidden_layers": 6,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 512,
            "max_position_embeddings": 8192,
        },
        dtype="bfloat16",
    )
    # What a chunk sees, 511 and 256 tokens, begins anywhere in its first page: 49 of 16 tokens.
    size = format_bytes(49 * 16 * 5 * 4 * 256 * 2 * 2)
    note = next(note for note in estimate(config, recipe, batch=1).notes if "behind the window" in note)
    assert note == (
        "layers 0-4: an engine gives back pages behind the window, so that a text of any length has at most 49 of 16 "
        f"tokens there ({size}, prompts in chunks of 256); a module alone keeps them"
    )
    assert not [n for n in estimate(config, "paged", batch=1).notes if "behind" in n]
