"""Keys that are stored before RoPE, with positions of the sequence: rotated when they are read, and nothing else."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache

import kvcompile
from kvcompile.api import build
from kvcompile.errors import LimitError, PlanError, RecipeError, VerificationError
from kvcompile.kernels.ops import on_cpu
from kvcompile.kernels.oracle import quantize
from kvcompile.kernels.reference import attend_many, attend_one
from kvcompile.kernels.shared.rope import rotate
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import (
    CacheLayout,
    Contiguous,
    Full,
    InKeys,
    Ring,
    SinkWindow,
    Window,
    fp8,
    int8,
    model_dtype,
    per_channel,
    uint,
    with_hadamard,
    with_residual,
)
from kvcompile.pipeline import plan_for, understand
from kvcompile.recipe import Recipe
from kvcompile.specs import BiasSpec, MaskSpec, RotaryForm, ScoreSpec
from kvcompile.verify import check_program, verify
from tests.kernels.reference.test_attention import rope_tables
from tests.kernels.reference.test_storage import CHUNKS, D, T, close, inputs
from tests.support.models import NanoGPT, TinyLlama, make, tiny_hf
from tests.support.policy import policy_attention
from tests.support.runner import run
from tests.verify.test_verify import fronts

STORAGES: list[Any] = [
    model_dtype(),
    fp8(),
    with_hadamard(uint(4)),
    with_residual(int8(), 5, 2),
    with_hadamard(with_residual(uint(2, 32), 6)),
    per_channel(2, 4, 8),
    with_hadamard(per_channel(3, 3, 9, sinks=2)),
]
PLACED = [
    (Contiguous(), Full()),
    (Ring(), Window(7)),
    (Ring(), SinkWindow(2, 6)),
    (Contiguous(), SinkWindow(2, 9)),
]
ROPE = rope_tables(T)


@pytest.mark.parametrize("placed", PLACED, ids=lambda p: f"{p[0]}-{p[1]}")
def test_unrounded_keys_are_those_after_rope(placed: Any) -> None:
    """The oracle itself: queries and keys that are rotated by the model, and a plain layout."""
    q, k, v = inputs(2)
    positions = torch.arange(T).expand(2, -1)
    turned = [rotate(x, positions, *ROPE) for x in (q, k)]
    pads = torch.tensor([0, 0])
    late = SiteSpec(CacheLayout(model_dtype(), model_dtype(), *placed, before_rope=True), 0.125)
    plain = SiteSpec(CacheLayout(model_dtype(), model_dtype(), *placed), 0.125)
    close(policy_attention(q, k, v, late, ROPE, pads), policy_attention(*turned, v, plain, [], pads), pads)


@pytest.mark.few(2)
@pytest.mark.parametrize("placed", PLACED, ids=lambda p: f"{p[0]}-{p[1]}")
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_any_chunks_equal_the_policy(storage: Any, placed: Any) -> None:
    layout = CacheLayout(storage, with_residual(int8(), 4), *placed, before_rope=True)
    if layout.check() is not None:
        assert isinstance(placed[0], Ring)  # groups of tokens
        return
    args, pads = inputs(2), torch.tensor([0, 5])
    for spec in (
        SiteSpec(layout, 0.125),
        SiteSpec(layout, 0.125, MaskSpec("sliding", 9), ScoreSpec(3.0, BiasSpec("alibi"))),
    ):
        assert SiteSpec.from_json(spec.to_json()) == spec
        bias = {} if spec.score.plain else {"bias": torch.tensor([0.1, 0.2, 0.3, 0.4])}
        wanted = policy_attention(*args, spec, ROPE, pads, **bias)
        for chunks in CHUNKS[1:]:
            close(run(spec, args, chunks, pads, ROPE, **bias).out, wanted, pads)


@pytest.mark.parametrize("storage", [fp8(), *STORAGES[3:]], ids=str)
def test_latent_rows_with_a_rotary_part(storage: Any) -> None:
    args, pads = inputs(2, k_dim=D, v_dim=40, heads=1), torch.tensor([0, 3])
    rope, form = rope_tables(T, 8), RotaryForm("half", 48, 8)
    spec = SiteSpec(CacheLayout(storage, InKeys(40), before_rope=True), 0.125, rotary=form)
    wanted = policy_attention(*args, spec, rope, pads)
    for chunks in CHUNKS[1:]:
        close(run(spec, args, chunks, pads, rope).out, wanted, pads)


def test_channels_that_stand_out_stay_apart_before_rope() -> None:
    """What it is for: a channel of its own size before RoPE is spread over a pair, and over time, behind it."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, T, D, generator=g)
    x[..., [3, 40]] += 20
    after = rotate(x[None], torch.arange(T)[None], *ROPE)[0]
    errors = [quantize.older_and_newest(per_channel(2, 20, 20), y)[0] - y for y in (x, after)]
    assert errors[0].norm() < 0.5 * errors[1].norm()


# ---- what is refused


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (
            {"keys": {"rope": "before"}},
            "cache.keys: rope: before is for quantized dtypes only, not for model",
        ),
        ({"values": {"dtype": "int8", "rope": "before"}}, "cache.values.rope: unknown key; allowed: dtype"),
        ({"keys": {"dtype": "int8", "rope": "never"}}, "cache.keys.rope"),
        (
            {
                "keys": {"dtype": "int8", "rope": "after"},
                "retention": {"kind": "sink_window", "window": 9, "positions": "in_cache"},
            },
            "positions: in_cache always keeps keys before RoPE: leave out keys.rope: after",
        ),
    ],
)
def test_recipes_that_make_no_sense(cache: dict[str, Any], reason: str) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.load({"cache": cache})
    assert reason in str(caught.value)


BEFORE = {"keys": {"dtype": "int4", "rope": "before"}, "values": {"dtype": "int4"}}


def test_plans_that_make_no_sense() -> None:
    nano = understand(make(NanoGPT))
    with pytest.raises(
        PlanError, match=r"cache.keys.rope: before needs a rotary embedding .* use rope: after"
    ):
        plan_for(nano, Recipe.load({"cache": BEFORE}))
    ring = {**BEFORE, "retention": {"kind": "window", "size": 9}}
    _, front = fronts("tinyllama", "float32")
    with pytest.raises(
        PlanError, match="needs a table of all positions, and no layer limits them: set runtime"
    ):
        plan_for(front, Recipe.load({"cache": ring}))
    assert plan_for(front, Recipe.load({"cache": ring}, max_tokens=50)).limits.max_tokens == 50


# ---- whole models

RECIPES: dict[str, dict[str, Any]] = {
    "per token": BEFORE,
    "KIVI": {
        "keys": {"dtype": "int2", "axis": "channel", "group": 32, "residual": 32, "rope": "before"},
        "values": {"dtype": "int2", "residual": 32},
    },
    "in a ring, turned": {
        "keys": {"dtype": "int4", "rope": "before", "rotate": "hadamard", "residual": 4, "sinks": 2},
        "values": {"dtype": "int4", "rotate": "hadamard"},
        "retention": {"kind": "sink_window", "sinks": 2, "window": 20},
    },
}


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("what", "kind", "dtype"),
    [*itertools.product(RECIPES, ["llama"], ["float32", "bfloat16"]), ("KIVI", "tinyllama", "float32")],
)
def test_models_are_verified_and_take_the_memory_that_was_told(what: str, kind: str, dtype: str) -> None:
    model, front = fronts(kind, dtype)
    recipe = {"cache": RECIPES[what], "runtime": {"max_tokens": 80}, "compile": {"mode": "none"}}
    fast = build(model, front, Recipe.load(recipe))
    for result in verify(model, front, fast.plan, "thorough"):
        assert result.error < result.budget / 2, str(result)
    fast(torch.randint(3, 61, (2, 70)))
    assert fast.cache.nbytes == fast.plan.bytes(2)
    assert kvcompile.estimate(fast, batch=2, tokens=80).bytes == fast.cache.nbytes
    assert "before RoPE" in str(fast.plan.decisions[0].layout) and "rope+" in fast.plan.decisions[0].ops[1]
    with pytest.raises(LimitError):  # the table ends there, in a ring, too
        fast(torch.randint(3, 61, (2, 11)))


def test_layers_may_differ() -> None:
    model, front = fronts("llama", "float32")
    layers = [{"where": {"index": 1}, "cache": {"keys": {"rope": "after"}}}]
    plan = plan_for(front, Recipe.load({"cache": BEFORE, "layers": layers}, max_tokens=64))
    assert [d.layout.before_rope for d in plan.decisions] == [True, False, True]
    for result in verify(model, front, plan, "quick"):
        assert result.error < result.budget / 2, str(result)


def test_broken_on_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    model, front = fronts("llama", "float32")
    plan = plan_for(front, Recipe.load({"cache": BEFORE}, max_tokens=64))

    def late(x: Tensor, positions: Tensor, *tables: Tensor, form: Any) -> Tensor:
        """Keys one place on, where they are read together with many queries."""
        return rotate(x, positions + (x.shape[1] == 2), *tables, form=form)

    for module in (attend_one, attend_many, on_cpu):
        monkeypatch.setattr(module, "rotate", late)
    with pytest.raises(VerificationError, match="layer 0"):
        verify(model, front, plan, "quick")


def test_it_is_as_near_to_the_original_as_after_rope() -> None:
    """int8 rounds as little on either side: a rotation that is not the model's would be far off."""
    model = tiny_hf("llama")
    ids = torch.randint(3, 61, (1, 60), generator=torch.Generator().manual_seed(0))
    front = understand(model)
    with torch.no_grad():
        wanted = model(ids).logits
    errors = []
    for rope in ("before", "after"):
        cache = {"keys": {"dtype": "int8", "rope": rope}, "values": {"dtype": "int8"}}
        recipe = Recipe.load({"cache": cache}, max_tokens=64, verify="off", compile={"mode": "none"})
        fast: Any = build(model, front, recipe)
        got = torch.cat([fast(part).logits for part in ids.split([30, 1, 1, 28], dim=1)], dim=1)
        errors.append((got - wanted).norm())
    assert 0 < errors[0] < 2 * errors[1]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["KIVI", "in a ring, turned"])
def test_compiled_programs_equal_the_policy(what: str) -> None:
    model, front = fronts("llama", "float32")
    with fresh_cache():
        fast = build(model, front, Recipe.load({"cache": RECIPES[what]}, max_tokens=110, verify="off"))
        chunks = (29, 1, 1, 1, 1, 9, 1, 40, 1)
        check_program(lambda ids, mask: fast(ids, mask).logits, front, fast.plan, chunks)


def test_a_plain_module_with_its_own_tables() -> None:
    """Positions that the module makes itself, up to a limit."""
    model = make(TinyLlama)
    fast = kvcompile.optimize(model, {"cache": BEFORE}, max_tokens=50, compile={"mode": "none"})
    assert fast.program.constants["rope_0_cos"].shape == (50, 8)
