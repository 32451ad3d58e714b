"""Recipes: what is read, what is refused (all of it at once), and what each layer gets."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from kvcompile.errors import RecipeError
from kvcompile.layouts import (
    CacheLayout,
    Contiguous,
    Full,
    Paged,
    Ring,
    Scored,
    SinkWindow,
    Slots,
    Window,
    float_dtype,
    fp8,
    int8,
    model_dtype,
    mxfp4,
    nf4,
    per_channel,
    uint,
    with_hadamard,
    with_residual,
)
from kvcompile.recipe import Recipe, load_recipe, shipped_recipes, shipped_text
from kvcompile.recipe.retention import LayerContext


def problems(source: Any, **overrides: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(source, **overrides)
    assert len(caught.value.problems) == str(caught.value).count("\n  - ")
    return str(caught.value)


def layout(
    recipe: Recipe, layer: int = 0, layers: int = 4, attention: str = "causal", window: int = 64
) -> Any:
    config, _ = recipe.cache_for(layer, layers, attention)
    return config.build(LayerContext(window if attention == "sliding" else None, tokens=1000))


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_load_and_say_what_they_are(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name and recipe.description.endswith(".")
    assert load_recipe(f"{name}.yaml") == recipe
    assert load_recipe(recipe.model_dump(exclude_unset=True)) == recipe
    assert load_recipe(recipe) is recipe
    assert shipped_text(name).startswith(f"name: {name}\n")
    for attention in ("causal", "sliding"):
        assert layout(recipe, attention=attention).check() is None


def test_what_the_shipped_recipes_choose() -> None:
    assert layout(load_recipe("baseline")) == CacheLayout()
    assert layout(load_recipe("baseline"), attention="sliding") == CacheLayout(
        placement=Ring(), retention=Window(64)
    )
    assert layout(load_recipe("int8")) == CacheLayout(int8(), int8())
    assert layout(load_recipe("int4")).keys == uint(4, 32)
    assert layout(load_recipe("fp8")) == CacheLayout(fp8(), fp8())
    for bits in (2, 4):
        kivi = load_recipe(f"kivi{bits}")
        assert layout(kivi) == CacheLayout(per_channel(bits, 32, 128), with_residual(uint(bits, 32), 128))
        sliding = CacheLayout(uint(4, 32), uint(4, 32), Ring(), Window(64))
        assert layout(kivi, attention="sliding") == sliding
    for name, storage in (("paged", model_dtype()), ("paged_int8", int8())):
        recipe = load_recipe(name)
        assert layout(recipe) == CacheLayout(storage, storage, Paged(16))
        sliding = CacheLayout(storage, storage, Paged(16), Window(64))
        assert layout(recipe, attention="sliding") == sliding
    assert layout(load_recipe("h2o")) == CacheLayout(placement=Slots(), retention=Scored(4, 508, 512))
    assert layout(load_recipe("h2o_int8")).keys == int8()
    snapkv = Scored(0, 768, 256, "snapkv", "vote", rows=64, smooth=5)
    assert layout(load_recipe("snapkv")).retention == snapkv
    sinks = with_residual(fp8(), 0, sinks=4)
    of_1000 = Scored(4, 200, 100)
    assert layout(load_recipe("sinks_h2o_fp8")) == CacheLayout(sinks, sinks, Slots(), of_1000)
    bounded = Scored(4, 200, 512, prefill="bounded")
    assert layout(load_recipe("long_context")) == CacheLayout(int8(), int8(), Paged(64), bounded)
    assert layout(load_recipe("chat")) == CacheLayout(int8(), int8(), Paged(32))
    for name in ("h2o", "h2o_int8", "snapkv", "sinks_h2o_fp8", "long_context", "chat"):
        window = layout(load_recipe(name), attention="sliding")
        assert (window.placement, window.retention) == (Ring(), Window(64))


def test_budgets_that_fall_with_depth_add_up() -> None:
    """A pyramid is even, the first layer has `ratio` times the last, and the sum is that without it."""
    for heavy, ratio, layers in ((508, 4.0, 30), (100, 1.0, 7), (7, 3.0, 2), (33, 20.0, 31)):
        recipe = load_recipe(
            {"cache": {"retention": {"kind": "h2o", "heavy": heavy, "recent": 8, "pyramid": ratio}}}
        )
        config, _ = recipe.cache_for(0, layers, "causal")
        found = [
            config.build(LayerContext(layer=i, num_layers=layers)).retention.heavy for i in range(layers)
        ]
        assert sum(found) == heavy * layers
        steps = [a - b for a, b in itertools.pairwise(found)]
        assert all(step >= 0 for step in steps) and max(steps) - min(steps) <= 2
        assert abs(found[0] - ratio * found[-1]) <= ratio + 1


def test_fractions_of_all_tokens() -> None:
    recipe = load_recipe({"cache": {"retention": {"kind": "tova", "budget": 0.25}}})
    config, _ = recipe.cache_for(0, 1, "causal")
    assert config.build(LayerContext(tokens=1001)).retention.tokens == 250
    with pytest.raises(
        ValueError, match=r"budget: 0\.25 is a fraction of runtime\.max_tokens, which neither"
    ):
        config.build(LayerContext())


@pytest.mark.parametrize(
    ("retention", "reason"),
    [
        ({"kind": "h2o", "heavy": 8}, "cache.retention.recent: is required"),
        ({"kind": "h2o", "heavy": 1.5, "recent": 8}, "cache.retention.heavy"),
        ({"kind": "h2o", "heavy": 8, "recent": 8, "pyramid": 0.5}, "cache.retention.pyramid"),
        ({"kind": "h2o", "heavy": 8, "recent": 8, "positions": "in_cache"}, "use prefill: bounded"),
        ({"kind": "snapkv", "heavy": 8, "smooth": 4}, "an odd number, got 4"),
        ({"kind": "snapkv", "heavy": 8, "recent": 16}, "of which recent 16 stay: at most as many, got 32"),
        ({"kind": "tova", "budget": 1}, "at least 2 tokens"),
        ({"kind": "pyramidkv"}, "expected one of 'full', 'window', 'sink_window', 'h2o', 'tova', 'snapkv'"),
    ],
)
def test_retentions_that_make_no_sense(retention: dict[str, Any], reason: str) -> None:
    assert reason in problems({"cache": {"retention": retention}})
    streaming = layout(load_recipe("streaming"))
    assert streaming == CacheLayout(placement=Ring(), retention=SinkWindow(4, 1020, "in_cache"))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"dtype": "float32"}, float_dtype("float32")),
        ({"dtype": "bfloat16"}, float_dtype("bfloat16")),
        ({"dtype": "fp8_e4m3"}, fp8()),
        ({"dtype": "fp8_e5m2", "scale_dtype": "float32"}, fp8("e5m2", "token", "float32")),
        ({"dtype": "fp8_e4m3", "scale": "none"}, fp8("e4m3", "none")),
        ({"dtype": "int8", "mode": "symmetric"}, int8()),
        ({"dtype": "int8", "mode": "asymmetric"}, uint(8)),
        ({"dtype": "int8", "mode": "asymmetric", "group": 64}, uint(8, 64)),
        ({"dtype": "int3", "group": 32, "rotate": "hadamard"}, with_hadamard(uint(3, 32))),
        ({"dtype": "nf4"}, nf4()),
        (
            {"dtype": "nf4", "group": 64, "scale_dtype": "float32", "sinks": 2},
            with_residual(nf4(64, "float32"), 0, 2),
        ),
        ({"dtype": "mxfp4"}, mxfp4()),
        ({"dtype": "mxfp4", "group": 32, "rotate": "hadamard"}, with_hadamard(mxfp4())),
        ({"dtype": "int8", "residual": 16}, with_residual(int8(), 16)),
        ({"dtype": "int8", "sinks": 4}, with_residual(int8(), 0, 4)),
        ({"dtype": "fp8_e4m3", "residual": 7, "rotate": "hadamard"}, with_hadamard(with_residual(fp8(), 7))),
        (
            {"dtype": "int2", "axis": "channel", "group": 32, "residual": 64, "rotate": "hadamard"},
            with_hadamard(per_channel(2, 32, 64)),
        ),
        (
            {"dtype": "int8", "mode": "asymmetric", "axis": "channel", "group": 64, "residual": 64},
            per_channel(8, 64, 64),
        ),
    ],
    ids=str,
)
def test_storages_are_built_as_named(keys: dict[str, Any], expected: Any) -> None:
    assert layout(load_recipe({"cache": {"keys": keys}})) == CacheLayout(keys=expected)
    assert layout(load_recipe({"cache": {"values": keys}})) == CacheLayout(values=expected)


def test_a_file_takes_its_name_where_it_gives_none(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("cache: {values: {dtype: int8}}\n")
    recipe = load_recipe(file)
    assert recipe.name == "mine"
    assert layout(recipe) == CacheLayout(model_dtype(), int8())
    assert load_recipe(str(file)) == recipe


def test_all_problems_come_at_once_with_path_and_what_is_allowed(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(
        "cash: {}\n"
        "cache:\n"
        "  keys: {dtype: int7}\n"
        "  values: {dtype: int4, group: 48}\n"
        "  retention: {kind: sink_window, sinks: -1, window: 8}\n"
        "layers:\n"
        "  - where: {attention: diagonal}\n"
        "    cache: {}\n"
        "runtime: {max_batch: 0, max_tokens: many}\n"
        "verify: maybe\n"
    )
    text = problems(file)
    assert text.startswith(f"{file}: ")
    for path in (
        "cash: unknown key; allowed: name, description, auto, cache",
        "cache.keys.dtype",
        "'int7'",
        "cache.values.group",
        "cache.retention.sinks",
        "layers[0].where.attention",
        "runtime.max_batch",
        "runtime.max_tokens",
        "verify",
    ):
        assert path in text
    assert "sink_window.sinks" not in text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"cache": {"retention": {"kind": "lru"}}}, "cache.retention.kind: expected one of"),
        ({"cache": {"retention": {"window": 3}}}, "cache.retention.kind: is required"),
        ({"cache": {"retention": {"kind": "sink_window"}}}, "window: is required"),
        ({"cache": {"placement": {"kind": "ring"}}}, "must keep"),
        (
            {"cache": {"keys": {"dtype": "int8", "group": 32}}},
            "group is for int2, int3, int4, nf4 and int8 with mode",
        ),
        ({"cache": {"keys": {"dtype": "fp8_e4m3", "group": 32}}}, "group is for"),
        ({"cache": {"keys": {"dtype": "mxfp4", "group": 64}}}, "group of mxfp4 is always 32: leave it out"),
        (
            {"cache": {"values": {"dtype": "mxfp4", "scale_dtype": "float16"}}},
            "scale_dtype of mxfp4 is always e8m0: leave it out",
        ),
        (
            {"cache": {"keys": {"dtype": "nf4", "mode": "asymmetric"}}},
            "mode is for dtype int8 only, not for nf4",
        ),
        (
            {"cache": {"keys": {"dtype": "nf4", "axis": "channel", "group": 32, "residual": 32}}},
            "axis: channel is for int2, int3, int4 and int8 with mode: asymmetric only, not for nf4",
        ),
        ({"cache": {"keys": {"dtype": "model", "scale_dtype": "float32"}}}, "dtypes with a scale only"),
        (
            {"cache": {"keys": {"dtype": "fp8_e5m2", "scale": "none", "scale_dtype": "float16"}}},
            "not for fp8_e5m2 without a scale",
        ),
        (
            {"cache": {"keys": {"dtype": "int8", "scale": "none"}}},
            "scale is for fp8 dtypes only, not for int8",
        ),
        (
            {"cache": {"values": {"dtype": "fp8_e4m3", "scale": "head"}}},
            "scales: is required for scale: tensor",
        ),
        ({"cache": {"keys": {"dtype": "int4", "mode": "symmetric"}}}, "mode is for dtype int8 only"),
        ({"cache": {"keys": {"rotate": "hadamard"}}}, "rotate is for quantized dtypes only, not for model"),
        ({"cache": {"keys": {"dtype": "float16", "residual": 8}}}, "residual is for quantized dtypes only"),
        ({"cache": {"keys": {"dtype": "int2", "residual": -1}}}, "cache.keys.residual"),
        ({"cache": {"keys": {"dtype": "int8", "axis": "channel"}}}, "axis: channel is for int2, int3, int4"),
        ({"cache": {"keys": {"dtype": "int2", "axis": "channel"}}}, "axis: channel needs a group"),
        (
            {"cache": {"keys": {"dtype": "int2", "axis": "channel", "group": 32}}},
            "needs a residual that is a multiple of group 32, got 0",
        ),
        (
            {"cache": {"keys": {"dtype": "int2", "axis": "channel", "group": 64, "residual": 96}}},
            "multiple of group 64, got 96",
        ),
        (
            {
                "cache": {"keys": {"dtype": "int2", "axis": "channel", "group": 32, "residual": 32}},
                "layers": [{"where": {"attention": "sliding"}, "cache": {"retention": {"kind": "window"}}}],
            },
            "layers[0].cache: axis: channel needs slots in the order of tokens",
        ),
        ({"cache": {"keys": {"bits": 4}}}, "allowed: dtype, mode, axis, group, residual, sinks, scale"),
        ({"layers": [{"where": {}, "cache": {}}]}, "at least one of index, range, attention"),
        ({"layers": [{"where": {"range": [3, 1]}, "cache": {}}]}, "is empty"),
        ({"layers": [{"where": {"index": []}, "cache": {}}]}, "index is empty"),
        (
            {"layers": [{"where": {"index": True}, "cache": {}}]},
            "layers[0].where.index: expected a valid integer or a list, got True",
        ),
        (
            {"layers": [{"where": {"index": ["a"]}, "cache": {}}]},
            "where.index[0]: expected a valid integer, got 'a'",
        ),
        ({"layers": {}}, "layers: expected a list, got {}"),
        ({"runtime": None}, "runtime: expected a mapping, got None"),
        ({"cache": {1: 2}}, "cache: expected keys that are words, got 1"),
        (
            {"cache": {"keys": {"dtype": "int4", "group": False}}},
            "group: expected a valid integer, got False",
        ),
        ({"cache": {"keys": {"dtype": "int4", "group": 32.0}}}, "group: expected a valid integer, got 32.0"),
        ({"serve": {"watermark": False}}, "serve.watermark: expected a valid number, got False"),
        ({"serve": {"watermark": "0.5"}}, "serve.watermark: expected a valid number, got '0.5'"),
        ({"serve": {"memory": 1.5}}, "serve.memory: expected a valid integer or a valid string, got 1.5"),
        (
            {"cache": {"retention": {"kind": "h2o", "heavy": 1, "recnt": 1}}},
            "rows, pyramid; did you mean 'recent'?",
        ),
        ({"cache": {"selection": {"kind": "top_pages", "pags": 1}}}, "dense_layers; did you mean 'pages'?"),
        ({"auto": {"memory": "-1", "lost": "any"}}, "auto.lost: unknown key; allowed: memory, batch, tokens"),
        (
            {"layers": [{"where": {"index": 0}, "cache": {"keys": {"dtype": "x"}}}]},
            "layers[0].cache.keys.dtype",
        ),
        ({"layers": [{"where": {"index": 0}, "cache": {"placement": {"kind": "ring"}}}]}, "layers[0].cache"),
        ({"runtime": {"prefill_chunk": 1}}, "runtime.prefill_chunk"),
        ({"runtime": {"max_tokens": "4096"}}, "runtime.max_tokens"),
        ({"compile": {"mode": "fast"}}, "compile.mode"),
    ],
)
def test_what_makes_no_sense_is_refused(data: dict[str, Any], message: str) -> None:
    assert message in problems(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cache: [", "not safe YAML"),
        ("!!python/object/apply:os.system ['true']", "not safe YAML"),
        ("- 1\n- 2\n", "expected a mapping"),
        ("", "expected a mapping"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(text)
    assert message in problems(file)


def test_sources_that_are_no_recipe(tmp_path: Path) -> None:
    assert "shipped: auto, baseline" in problems("basline")
    assert "no such file" in problems(tmp_path / "none.yaml")
    assert "cannot be read" in problems(tmp_path)
    assert "got int" in problems(3)


def test_later_entries_of_layers_win_and_say_so() -> None:
    recipe = load_recipe(
        {
            "cache": {"keys": {"dtype": "int8"}, "values": {"dtype": "int8"}},
            "layers": [
                {"where": {"range": [0, -2]}, "cache": {"keys": {"dtype": "int4", "group": 32}}},
                {"where": {"index": [0, -1]}, "cache": {"values": {"dtype": "model"}}},
                {"where": {"attention": "sliding"}, "cache": {"retention": {"kind": "window"}}},
            ],
        }
    )
    assert recipe.cache_for(0, 4, "causal")[1] == (0, 1)
    assert layout(recipe, 0) == CacheLayout(uint(4, 32), model_dtype())
    assert layout(recipe, 2) == CacheLayout(uint(4, 32), int8())
    assert layout(recipe, 3) == CacheLayout(int8(), model_dtype())
    assert layout(recipe, 1, attention="sliding") == CacheLayout(uint(4, 32), int8(), Ring(), Window(64))


def test_an_entry_of_layers_is_over_those_before_it() -> None:
    """What makes no sense over `cache` alone may do so there."""
    rules = [
        {"where": {"range": [0, -1]}, "cache": {"keys": {"dtype": "int8"}}},
        {"where": {"index": 1}, "cache": {"keys": {"rotate": "hadamard"}}},
    ]
    recipe = load_recipe({"layers": rules})
    assert recipe.cache_for(0, 2, "causal")[0].keys.rotate == "none"
    keys = recipe.cache_for(1, 2, "causal")[0].keys
    assert keys.dtype == "int8" and keys.rotate == "hadamard"
    said = problems({"layers": [rules[1], *rules]})
    assert "layers[0].cache.keys: rotate is for quantized" in said and "layers[2]" not in said
    assert "layers[1].cache.keys.dtype: expected" in problems(
        {"layers": [rules[0], {"where": {"index": 1}, "cache": {"keys": {"dtype": "int9"}}}]}
    )


def test_a_recipe_stays_as_it_was_read() -> None:
    """Whoever makes several of one dict, or of one override, has several recipes."""
    change: dict[str, Any] = {"keys": {"dtype": "int8"}}
    data = {"layers": [{"where": {"index": 0}, "cache": change}]}
    made = [load_recipe(data), load_recipe("baseline", layers=data["layers"])]
    digests = [recipe.digest() for recipe in made]
    change["keys"]["dtype"] = "int3"
    assert [recipe.digest() for recipe in made] == digests
    assert all(recipe.cache_for(0, 1, "causal")[0].keys.dtype == "int8" for recipe in made)
    itself: dict[str, Any] = {}
    itself["cache"] = itself
    assert "cache.cache: unknown key" in problems(itself)


def test_placement_follows_the_retention_unless_given() -> None:
    window = {"kind": "window", "size": 8}
    assert layout(load_recipe({"cache": {"retention": window}})).placement == Ring()
    kept = load_recipe({"cache": {"retention": window, "placement": {"kind": "contiguous"}}})
    assert layout(kept).placement == Contiguous()
    assert layout(load_recipe("streaming", cache={"retention": {"kind": "full"}})) == CacheLayout()


def test_a_window_without_a_size_needs_a_layer_with_one() -> None:
    recipe = load_recipe({"cache": {"retention": {"kind": "window"}}})
    assert layout(recipe, attention="sliding", window=9).retention == Window(9)
    with pytest.raises(ValueError, match="no window of its own"):
        layout(recipe)


def test_overrides() -> None:
    recipe = load_recipe("streaming", max_tokens=77, cache={"retention": {"window": 252}}, verify="off")
    assert recipe.runtime.max_tokens == 77 and recipe.verify == "off"
    assert layout(recipe).retention == SinkWindow(4, 252, "in_cache")
    again = load_recipe(recipe, max_batch=2, runtime={"prefill_chunk": 64})
    assert (again.runtime.max_batch, again.runtime.max_tokens, again.runtime.prefill_chunk) == (2, 77, 64)
    assert isinstance(layout(load_recipe("baseline", cache={"keys": {"dtype": "int8"}})).retention, Full)
    assert "override 'max_token' is unknown; allowed:" in problems("baseline", max_token=3)
    assert "runtime.max_tokens" in problems("baseline", max_tokens=0)


def test_a_key_that_is_called_like_its_kind_is_named() -> None:
    said = problems({"cache": {"retention": {"kind": "window", "window": 9}}})
    assert "cache.retention.window: unknown key" in said


@pytest.mark.parametrize("written", ["off", "'off'", "Off"])
def test_off_needs_no_quotes(tmp_path: Path, written: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"cache: {{keys: {{dtype: int8}}}}\nverify: {written}\n")
    assert load_recipe(file).verify == "off"
    assert "verify: expected 'quick', 'thorough' or 'off', got True" in problems({"verify": True})


def test_the_digest_is_of_what_the_recipe_says() -> None:
    first = load_recipe("int8")
    assert first.digest() == load_recipe("int8.yaml").digest()
    assert (
        len({first.digest(), load_recipe("int4").digest(), load_recipe("int8", max_tokens=9).digest()}) == 3
    )
