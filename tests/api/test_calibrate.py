"""Calibrated fp8: what is measured, what a file may say, who may use it, and what comes of it."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from typer.testing import CliRunner

import kvcompile
import kvcompile.models
from kvcompile.api import build
from kvcompile.cli import app
from kvcompile.errors import InputError, ModelError, PlanError, RecipeError, VerificationError
from kvcompile.kernels.oracle import quantize
from kvcompile.kernels.reference import codec
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import (
    BufferSpec,
    CacheLayout,
    Ring,
    SinkWindow,
    Storage,
    Window,
    fp8,
    model_dtype,
    per_channel,
    with_hadamard,
    with_residual,
)
from kvcompile.layouts import symbols as sy
from kvcompile.models import LoadedModel
from kvcompile.pipeline import Front, plan_for, understand
from kvcompile.recipe import Recipe
from kvcompile.recipe.scales import Scales
from kvcompile.verify import check_program, verify
from tests.passes.detect.test_shared_kv import CrossLayer
from tests.passes.rules.test_latent import RANK, ROPE, Latent
from tests.support.models import TinyLlama, make, tiny_hf
from tests.support.policy import policy_attention
from tests.support.runner import run

EAGER: dict[str, Any] = {"compile": {"mode": "none"}, "verify": "off"}
HEAD = {"keys": {"dtype": "fp8_e4m3", "scale": "head"}, "values": {"dtype": "fp8_e5m2", "scale": "tensor"}}
CALIBRATED = [fp8("e4m3", "tensor"), fp8("e4m3", "head"), fp8("e5m2", "head")]


@lru_cache
def model() -> Any:
    return tiny_hf("llama", layers=3)


@lru_cache
def front() -> Front:
    return understand(model())


def built(recipe: object, **overrides: Any) -> Any:
    """`optimize` of the model, which is understood once."""
    return build(model(), front(), Recipe.load(recipe, **overrides))


def ids(count: int = 150, seed: int = 0) -> Tensor:
    return torch.randint(3, 61, (count,), generator=torch.Generator().manual_seed(seed))


@lru_cache
def measured() -> Scales:
    return kvcompile.calibrate(model(), ids(), context=60)


@pytest.fixture
def file(tmp_path: Path) -> str:
    measured().save(tmp_path / "scales.json")
    return str(tmp_path / "scales.json")


# ---- what is measured


def sylvester(dim: int) -> Tensor:
    """The orthonormal Hadamard matrix of a power of two, as its definition has it."""
    matrix = torch.ones(1, 1)
    while len(matrix) < dim:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix * dim**-0.5


def test_it_is_the_largest_of_what_the_model_s_own_cache_holds() -> None:
    """Keys and values of transformers' own cache, and of its projections, over the same pieces of text."""
    seen: dict[str, list[Tensor]] = {}

    def note(name: str, x: Tensor) -> None:
        seen.setdefault(name, []).append(x.abs().amax((0, 2, 3)))
        seen.setdefault(f"{name} turned", []).append((x @ sylvester(8)).abs().amax((0, 2, 3)))

    def hook(layer: int) -> Any:
        return lambda m, a, out: note(f"before {layer}", out.view(1, -1, 2, 8).transpose(1, 2))

    hooks = [x.self_attn.k_proj.register_forward_hook(hook(i)) for i, x in enumerate(model().model.layers)]
    for piece in ids().split(50):  # 150 tokens in sequences of at most 60: three of 50
        with torch.no_grad():
            cache = model()(piece[None], use_cache=True).past_key_values
        for layer in range(3):
            note(f"keys {layer}", cache.layers[layer].keys)
            note(f"values {layer}", cache.layers[layer].values)
    for handle in hooks:
        handle.remove()
    largest = {name: torch.stack(parts).amax(0) for name, parts in seen.items()}
    for layer, found in enumerate(measured().layers):
        assert found.keys_before_rope and found.values and found.rows is None
        for name, extent in (
            ("keys", found.keys),
            ("before", found.keys_before_rope),
            ("values", found.values),
        ):
            assert extent.hadamard
            for key, value in (("", extent.plain), (" turned", extent.hadamard)):
                wanted = largest[f"{name} {layer}{key}"]
                torch.testing.assert_close(torch.tensor(value), wanted, rtol=1e-5, atol=0)
    assert measured().text.tokens == 150 and measured().text.context == 60
    assert measured().model.architecture == "LlamaForCausalLM" and measured().dtype == "float32"


def test_text_and_ids_and_fewer_tokens() -> None:
    def tokenizer(text: str, return_tensors: str) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([[int(word) for word in text.split()]])}

    text = " ".join(map(str, ids().tolist()))
    assert kvcompile.calibrate(model(), text, tokenizer=tokenizer, context=60) == measured()
    short = kvcompile.calibrate(model(), ids()[None], tokens=9)
    assert short.text.tokens == short.text.context == 9 and short.digest() != measured().digest()


def test_latent_rows_are_measured_beside_keys_and_values() -> None:
    found = kvcompile.calibrate(Latent(), ids(40)).layers[0]
    assert found.rows is not None and found.rows.num_kv_heads == 1
    assert (found.rows.head_dim, found.rows.v_head_dim) == (RANK + ROPE, RANK)
    assert found.rows.keys.hadamard is None  # 14 channels: no block of 4


@pytest.mark.parametrize(
    ("given", "more", "reason"),
    [
        ("words", {}, "text needs the model's tokenizer"),
        ([1, 2], {}, "expected text or an int64 tensor of token ids, got list"),
        (torch.zeros(3), {}, "got torch.float32"),
        (torch.zeros(2, 3, dtype=torch.int64), {}, r"\[S\] or \[1, S\], got \[2, 3\]"),
        (torch.zeros(0, dtype=torch.int64), {}, "the text has no tokens"),
        (ids(), {"tokens": 0}, "tokens: expected a whole number of at least 1, got 0"),
        (ids(), {"context": True}, "context: expected a whole number"),
    ],
)
def test_what_cannot_be_measured(given: Any, more: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        kvcompile.calibrate(model(), given, **more)


@pytest.mark.parametrize(("value", "what"), [(0.0, "0.0"), (float("inf"), "inf|nan")])
def test_a_head_without_a_scale_is_refused(value: float, what: str) -> None:
    broken = make(TinyLlama)
    with torch.no_grad():
        broken.layers[1].v_proj.weight[8:].fill_(value)  # type: ignore[index, union-attr, operator]
    with pytest.raises(ModelError, match=rf"layer 1 .*values of KV head 1 are ({what}) at most"):
        kvcompile.calibrate(broken, ids(20))


# ---- the file


def test_a_file_comes_back_as_it_was(tmp_path: Path, file: str) -> None:
    assert Scales.load(file) == measured() and Scales.load(file).digest() == measured().digest()
    with pytest.raises(InputError, match="cannot be written"):
        measured().save(tmp_path / "none" / "s.json")
    measured().save(file)
    assert [path.name for path in tmp_path.iterdir()] == ["scales.json"]


CHANGES: list[tuple[Any, str]] = [
    ("{", "is not JSON"),
    ("[]", 'is no scales file: expected "format": "kvcompile.scales"'),
    ({"format": "other"}, "is no scales file"),
    ({"version": 2}, "has version 2, and this kvcompile reads 1: run kvcompile calibrate again"),
    ({"extra": 1}, "extra: extra inputs"),
    ({"layers": [{"num_kv_heads": 2}]}, "layers[0].keys: field required"),
]
NUMBERS: list[tuple[Any, str]] = [
    (float("nan"), "expected"),
    (float("inf"), "expected a finite number"),
    (0.0, "expected greater than 0, got 0.0"),
    (-1.0, "expected greater than 0"),
    ("1", "expected a valid number"),
]


@pytest.mark.parametrize(("change", "reason"), [*CHANGES, *NUMBERS, (None, "1 numbers for 2 KV heads")])
def test_a_file_that_is_none_is_refused_before_anything_happens(
    tmp_path: Path, file: str, change: Any, reason: str
) -> None:
    data = json.loads(Path(file).read_text("utf-8"))
    if isinstance(change, dict):
        data |= change
    elif change is None:
        data["layers"][1]["values"]["plain"].pop()
    elif (change, reason) in NUMBERS:
        data["layers"][2]["keys"]["hadamard"][1] = change
        reason = f"layers[2].keys.hadamard[1]: {reason}"
    Path(file).write_text(change if isinstance(change, str) and "1" not in change else json.dumps(data))
    with pytest.raises(RecipeError) as caught:
        Recipe.load({"cache": HEAD, "scales": file})
    assert f"scales: {file}: " in str(caught.value) and reason in str(caught.value)


def test_a_recipe_names_its_file(tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text("cache: {keys: {dtype: fp8_e4m3, scale: head}}\nscales: scales.json\n")
    monkeypatch.chdir(tmp_path.parent)  # relative to the recipe's file, not to here
    recipe = Recipe.load(own)
    assert recipe.scales == file and recipe.cache.keys.build() == fp8("e4m3", "head")
    assert Recipe.load(own, scales=Path(file)) == recipe
    with pytest.raises(RecipeError, match="no such file; `kvcompile calibrate MODEL"):
        Recipe.load(own, scales="scales.json")
    (tmp_path / "other.json").write_bytes(Path(file).read_bytes())
    moved = Recipe.load(own, scales=str(tmp_path / "other.json"))
    plans = [plan_for(front(), r) for r in (recipe, moved)]
    assert moved.digest() == recipe.digest() and plans[0].digest() == plans[1].digest()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"cache": HEAD}, "scales: is required for scale: tensor and scale: head"),
        (
            {"layers": [{"where": {"index": 0}, "cache": {"keys": HEAD["keys"]}}]},
            "scales: is required for scale: tensor and scale: head",
        ),
        ({"scales": "x.json"}, "scales: is for fp8 with scale: tensor or scale: head only"),
        (
            {"cache": {"keys": {**HEAD["keys"], "scale_dtype": "float16"}}, "scales": "x.json"},
            "cache.keys: scale_dtype is for scales per token only: scale: head is kept in float32",
        ),
        (
            {"cache": {"keys": {"dtype": "int8", "scale": "head"}}},
            "scale is for fp8 dtypes only, not for int8",
        ),
    ],
)
def test_recipes_that_make_no_sense(data: dict[str, Any], reason: str) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.load(data)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (lambda: make(TinyLlama), "made for a LlamaForCausalLM, and this model is a TinyLlama"),
        (lambda: tiny_hf("llama"), "made for a model of 3 attention layers, and this one has 2"),
        (
            lambda: tiny_hf("llama", layers=3, intermediate_size=64),
            "made for a LlamaForCausalLM with weights of other names or shapes",
        ),
    ],
)
def test_a_foreign_model_is_refused(file: str, other: Any, reason: str) -> None:
    with pytest.raises(PlanError) as caught:
        kvcompile.optimize(other(), {"cache": HEAD, "scales": file}, max_tokens=64, **EAGER)
    assert f"scales: {file}: {reason}; run kvcompile calibrate on this one" in str(caught.value)


def test_estimate_compares_the_sizes_that_a_config_has(file: str) -> None:
    config = {**model().config.to_dict(), "num_key_value_heads": 6}
    with pytest.raises(
        PlanError, match="layer 0 of the file has 2 KV heads of 8 and 8 channels, and this layer"
    ):
        kvcompile.estimate(config, {"cache": HEAD, "scales": file})


def test_a_form_that_was_not_measured_is_refused(tmp_path: Path, file: str) -> None:
    layers = tuple(x.model_copy(update={"keys_before_rope": None}) for x in measured().layers)
    measured().model_copy(update={"layers": layers}).save(file)
    streaming = {"kind": "sink_window", "window": 9, "positions": "in_cache"}
    with pytest.raises(PlanError, match="no figures of keys before RoPE; run kvcompile calibrate again"):
        built({"cache": {**HEAD, "retention": streaming}, "scales": file}, **EAGER)


# ---- one vector


@pytest.mark.parametrize("storage", CALIBRATED, ids=str)
def test_a_calibrated_scale_decides_the_step_and_the_range(storage: Storage) -> None:
    g = torch.Generator().manual_seed(0)
    scale = torch.tensor([0.01, 0.5, 1e-6])
    reach = scale * 448
    x = (torch.rand(2, 3, 50, 16, generator=g) * 2 - 1) * reach[:, None, None]
    parts = [torch.empty(0), scale.expand(2, 3)[..., None]]
    back = codec.as_stored(storage, storage, x, parts)
    info = torch.finfo(storage.element.dtype)
    lost = x.abs() * info.eps / 2 + scale[:, None, None] * info.smallest_normal * info.eps / 2
    assert ((back - x).abs() <= lost * (1 + 1e-5)).all() and not torch.equal(back, x)
    beyond = codec.as_stored(storage, storage, x.sign() * 1e30, parts)
    torch.testing.assert_close(beyond, x.sign() * reach[:, None, None].expand_as(x))
    older, newest = quantize.older_and_newest(storage, x[0], scale)
    assert torch.equal(older, back[0]) and torch.equal(newest, back[0])


@given(
    storage=st.sampled_from(
        [*CALIBRATED, with_residual(fp8("e4m3", "head"), 5), with_hadamard(fp8("e4m3", "tensor"))]
    ),
    slots=st.integers(1, 90),
    batch=st.integers(1, 4),
)
def test_bytes_are_those_of_the_tensors(storage: Any, slots: int, batch: int) -> None:
    layout = CacheLayout(storage, storage)
    buffers = layout.buffers(3, 64, 32, torch.bfloat16, slots)
    real = sum(torch.empty((batch, *b.shape), dtype=b.dtype, device="meta").nbytes for b in buffers)
    values = {sy.B: batch, sy.T: slots, sy.H: 3, sy.D: 64, sy.Dv: 32, sy.P: 2}
    assert layout.bytes.subs(values) == real
    assert int(layout.bytes_per_slot.subs(values)) == 3 * (64 + 32)  # the scale is no part of a token
    assert CacheLayout.from_json(layout.to_json()) == layout


# ---- the cached reference

HQ, HKV, D, T = 4, 2, 64, 40
STORED: list[Any] = [*CALIBRATED, with_hadamard(fp8("e4m3", "head")), with_residual(fp8("e5m2", "tensor"), 6)]


@settings(max_examples=40, deadline=None)
@given(
    keys=st.sampled_from(STORED),
    values=st.sampled_from([*STORED, model_dtype(), per_channel(4, 4, 8)]),
    retention=st.sampled_from([None, Window(7), SinkWindow(2, 6)]),
    cuts=st.lists(st.integers(1, T - 1), max_size=7),
    padding=st.lists(st.integers(0, 9), min_size=1, max_size=2),
)
def test_any_chunks_equal_the_policy(keys: Any, values: Any, retention: Any, cuts: Any, padding: Any) -> None:
    layout = CacheLayout(keys, values)
    if retention is not None and not layout.residual:
        layout = replace(layout, placement=Ring(), retention=retention)
    spec, pads = SiteSpec(layout, D**-0.5), torch.tensor(padding)
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(len(padding), h, T, D, generator=g) for h in (HQ, HKV, HKV))
    # The second head saturates.
    known = {"keys.scale": torch.tensor([0.01, 0.003]), "values.scale": torch.tensor([0.02, 0.002])}
    calibrated = {
        side: known[f"{side}.scale"] if storage.calibration else None
        for side, storage in (("keys", keys), ("values", values))
    }
    edges = [0, *sorted(set(cuts)), T]
    chunks = [b - a for a, b in itertools.pairwise(edges)]
    scales = {f"{side}.scale": scale for side, scale in calibrated.items() if scale is not None}
    got = run(spec, (q, k, v), chunks, pads, scales=scales).out
    wanted = policy_attention(q, k, v, spec, [], pads, scales=(calibrated["keys"], calibrated["values"]))
    real = (torch.arange(T)[None] >= pads[:, None])[:, None, :, None].expand_as(got)
    assert (got - wanted).abs()[real].max() <= 64 * torch.finfo(torch.float32).eps * 4


# ---- whole models

PLACED: dict[str, dict[str, Any]] = {
    "full": {},
    "a ring, before RoPE": {
        "retention": {"kind": "sink_window", "sinks": 2, "window": 9, "positions": "in_cache"}
    },
    "turned": {"keys": {"dtype": "fp8_e5m2", "scale": "head", "rotate": "hadamard"}},
    "recent": {"values": {"dtype": "fp8_e4m3", "scale": "tensor", "residual": 8}},
}


@pytest.mark.parametrize("placed", PLACED)
def test_models_are_verified_and_take_the_memory_that_was_told(placed: str, file: str) -> None:
    recipe = {"cache": HEAD | PLACED[placed], "scales": file, "runtime": {"max_tokens": 64}}
    fast = built(recipe, verify="thorough", compile={"mode": "none"})
    for check in fast.report["checks"]:
        assert check.error < check.budget / 2, str(check)
    for batch in (1, 3):
        fast.reset()
        fast(ids(20).expand(batch, -1))
        assert fast.cache.nbytes == fast.plan.bytes(batch)
        assert kvcompile.estimate(model(), recipe, batch=batch, tokens=64).bytes == fast.cache.nbytes
    assert fast.plan.scales == measured().digest() and not fast.plan.lossless
    assert f"scales calibrated on 150 tokens ({measured().digest()})" in fast.plan.decisions[0].because


def test_the_scales_are_those_of_the_file(file: str) -> None:
    cache = {**HEAD, "retention": {"kind": "sink_window", "sinks": 2, "window": 9, "positions": "in_cache"}}
    fast = built({"cache": cache, "scales": file}, **EAGER)
    fast(ids(5).expand(2, -1))
    for layer, extents in enumerate(measured().layers):
        assert extents.keys_before_rope and extents.values
        k, v = (fast.cache.buffers[f"cache_{layer}_{side}_scale"] for side in ("keys", "values"))
        wanted = torch.tensor(extents.keys_before_rope.plain) / 448
        torch.testing.assert_close(k, wanted[None, :, None].expand(2, 2, 1))
        torch.testing.assert_close(v, torch.full((2, 2, 1), max(extents.values.plain) / 448))


def test_equal_layers_stay_one_region_and_other_scales_are_another_plan(file: str) -> None:
    recipe = {"cache": HEAD, "scales": file}
    fast = built(recipe, max_tokens=64, **EAGER)
    plain = built("fp8", max_tokens=64, **EAGER)
    assert len(fast.executor.regions.modules) == len(plain.executor.regions.modules) == 3
    kvcompile.calibrate(model(), ids(seed=1), context=60).save(file)
    other = built(recipe, max_tokens=64, **EAGER)
    assert other.plan.digest() != fast.plan.digest() and other.executor.digest() == fast.executor.digest()


def test_scales_stay_after_reset_release_and_another_batch(file: str) -> None:
    fast = built({"cache": HEAD, "scales": file}, max_tokens=64, **EAGER)
    text = ids(30).expand(3, -1)
    first = fast(text[:1]).logits
    fast.reset()
    assert torch.equal(fast(text[:1]).logits, first)
    fast.release()
    got = fast(text).logits
    torch.testing.assert_close(got, first.expand(3, -1, -1), rtol=0, atol=1e-5)
    fast.cache.reorder(torch.tensor([2, 0, 1]))
    step = fast(text[:, :1]).logits
    torch.testing.assert_close(step, step[:1].expand(3, -1, -1), rtol=0, atol=1e-5)


def test_scales_that_are_not_there_are_seen(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_for(front(), Recipe.load({"cache": HEAD, "scales": file}, max_tokens=64))
    monkeypatch.setattr(BufferSpec, "written", lambda self, buffer: buffer)
    with pytest.raises(VerificationError, match="layer 0"):
        verify(model(), front(), plan, "quick")


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", [Latent, CrossLayer], ids=["latent rows", "shared K and V"])
def test_other_kinds_of_layers(kind: type[nn.Module], tmp_path: Path) -> None:
    other = kind().eval()
    found = kvcompile.calibrate(other, ids(50))
    found.save(tmp_path / "s.json")
    cache = {side: {"dtype": "fp8_e4m3", "scale": "head"} for side in ("keys", "values")}
    recipe = {"cache": cache, "scales": str(tmp_path / "s.json"), "runtime": {"max_tokens": 64}}
    fast = kvcompile.optimize(other, recipe, compile={"mode": "none"})
    fast(ids(20)[None])
    assert fast.cache.nbytes == fast.plan.bytes(1)
    decision = fast.plan.decisions[-1]
    rows = found.layers[decision.kv_source].rows if decision.latent else found.layers[decision.kv_source]
    assert rows is not None
    wanted = tuple(x / 448 for x in rows.keys.plain)
    assert dict(decision.scales)["keys.scale"] == wanted
    if kind is Latent:  # the same file serves K and V expanded
        expanded = plan_for(understand(other), Recipe.load(recipe, cache={"latent": "off"}))
        assert len(dict(expanded.decisions[0].scales)["keys.scale"]) > 1


@pytest.mark.slow
def test_compiled_programs_equal_the_policy(file: str) -> None:
    """And layers with other scales are one compilation."""
    with fresh_cache():
        fast = built({"cache": HEAD, "scales": file}, max_tokens=64, verify="off")
        check_program(lambda x, mask: fast(x, mask).logits, front(), fast.plan, (29, 1, 1, 9, 1))


# ---- the command


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tokenizer(text: str, return_tensors: str) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([[int(word) for word in text.split()]])}

    loaded = LoadedModel(model(), tokenizer, "tiny")
    monkeypatch.setattr(kvcompile.models, "load_model", lambda *args: loaded)
    text, out = tmp_path / "text.txt", tmp_path / "scales.json"
    text.write_text(" ".join(map(str, ids().tolist())))

    def run(*args: str) -> Any:
        return CliRunner().invoke(app, ["calibrate", "tiny", *args])

    result = run("--text", str(text), "--context", "60", "-o", str(out))
    assert result.exit_code == 0, result.output
    assert Scales.load(out) == measured()
    recipe = tmp_path / "r.yaml"
    recipe.write_text("cache: {keys: {dtype: fp8_e4m3, scale: head}}\nscales: elsewhere.json\n")
    explained = CliRunner().invoke(app, ["explain", "--recipe", str(recipe), "--scales", str(out)])
    assert explained.exit_code == 0 and "calibrated on 150 tokens" in " ".join(explained.output.split())
    for args, reason in (
        (["--text", str(tmp_path / "none.txt")], "cannot be read as UTF-8 text"),
        (["--text", str(text), "-o", str(tmp_path / "no" / "s.json")], "no such folder"),
    ):
        failed = run(*args)
        assert failed.exit_code == 1 and reason in " ".join(failed.output.split())
