"""Which kernels run a site: `compile.kernels`, the device and what kernels can do; where each reason is told."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcompile
from kvcompile import pipeline
from kvcompile.api import build
from kvcompile.decide.kernel_choice import KernelChoice, choose
from kvcompile.errors import PlanError, RecipeError
from kvcompile.expression import Instruction, ScoreMod
from kvcompile.kernels.cpp import available as cpp_available
from kvcompile.kernels.cpp import products
from kvcompile.kernels.cpp import supports as cpp_supports
from kvcompile.kernels.cpp.isa import isa, multiplies_pairs
from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.ops import cached_attention as ops
from kvcompile.kernels.reference import attention as reference
from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton import available
from kvcompile.kernels.triton import device as devices
from kvcompile.kernels.triton.supports import refusal
from kvcompile.layouts import CODES, CacheLayout, Contiguous, Full, Paged, Scale, Storage, int8, with_hadamard
from kvcompile.pipeline import plan_for, understand
from kvcompile.plan import Plan
from kvcompile.recipe import Recipe
from kvcompile.report.explain import Explanation
from kvcompile.runtime.cache import KVCache
from kvcompile.runtime.cache_spec import CacheShape
from kvcompile.specs import RotaryForm, ScoreSpec
from tests.passes.detect.test_shared_kv import CrossLayer
from tests.support.models import tiny_hf
from tests.verify.test_verify import fronts

SITE = SiteSpec(CacheLayout(), 0.125)
# A mask that the model computes of its tokens.
DYNAMIC = ScoreSpec(mod=ScoreMod((Instruction("leaf", "bool", (), 0),), ("pair",), mask=0))
# What weighs probabilities once more.
WEIGHED = ScoreSpec(mod=replace(DYNAMIC.mod, weight=0)) if DYNAMIC.mod else ScoreSpec()
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
EAGER = {"compile": {"mode": "none"}, "verify": "off"}


def chosen(wanted: Any, device: torch.device | None, site: SiteSpec = SITE, **more: Any) -> KernelChoice:
    return choose(wanted, site, (8, 2), more.pop("dims", (64, 64)), torch.bfloat16, device, **more)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels can run on any device."""
    monkeypatch.setattr(available, "problem", lambda device: None)
    monkeypatch.setattr(cpp_available, "problem", lambda device: None)


@pytest.fixture
def runs_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for own in (available, cpp_available):
        monkeypatch.setattr(own, "problem", lambda device: f"none on {device}")


# ---- what a layout says


# A code that no kernel knows: int8 is one that they do.
ROUNDED = replace(CODES["int8"], name="rounded")


@pytest.fixture
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CODES, "rounded", ROUNDED)


def rounded(**more: Any) -> Storage:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CODES, "rounded", ROUNDED)
        return Storage("rounded", Scale("vector"), **more)


@dataclass(frozen=True)
class Halves(Full):
    """A retention that no kernel knows."""


@dataclass(frozen=True)
class Elsewhere(Contiguous):
    """A placement that no kernel knows."""


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        (CacheLayout(rounded()), "for keys in 'int8'"),
        (CacheLayout(values=rounded()), "for values in 'int8'"),
        (CacheLayout(rounded(residual=8)), "for keys in 'int8'"),
        (CacheLayout(rounded(hadamard=True)), "for keys in 'int8'"),
        (CacheLayout(rounded(residual=8, hadamard=True)), "for keys in 'int8'"),
        (CacheLayout(retention=Halves()), f"for retention '{Halves()}'"),
        (CacheLayout(placement=Elsewhere()), f"for placement '{Elsewhere()}'"),
    ],
    ids=[
        "keys",
        "values",
        "beside a residual",
        "after hadamard",
        "after hadamard, beside a residual",
        "retention",
        "placement",
    ],
)
@pytest.mark.usefixtures("_known")
def test_what_no_kernel_was_written_for_is_refused_by_the_plan(layout: CacheLayout, told: str) -> None:
    """Whatever is added to an axis runs on the reference until kernels are written for it, and raises at no launch."""
    site = replace(SITE, layout=layout)
    for family in (refusal, cpp_supports.refusal):
        assert family(site, (8, 2), (64, 64), torch.float32) == f"no kernels are written {told}"


def test_what_kernels_cannot_do_has_a_reason() -> None:
    def reason(site: SiteSpec = SITE, dims: tuple[int, int] = (64, 64), **more: Any) -> str:
        return refusal(site, (8, 2), dims, more.pop("dtype", torch.bfloat16), **more) or ""

    turned = CacheLayout(with_hadamard(int8()), int8(), before_rope=True)
    form = RotaryForm("half", 0, 64)
    assert reason() == ""
    assert "computed from activations" in reason(replace(SITE, score=DYNAMIC))
    assert "torch.float64" in reason(dtype=torch.float64)
    assert [bool(reason(dims=(dim, 64))) for dim in (3, 4, 576, 577)] == [True, False, False, True]
    assert "its values have 577 channels" in reason(dims=(64, 577))
    assert "before RoPE" in reason(replace(SITE, layout=turned, rotary=form))
    assert reason(replace(SITE, layout=turned)) == ""  # a layer without positions
    assert reason(replace(SITE, layout=replace(turned, before_rope=False), rotary=form)) == ""


# ---- what the recipe says


def test_auto_takes_triton_where_it_can(runs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "floats_are_faster", lambda: False)
    assert chosen("auto", CUDA) == KernelChoice("triton", "the model is on cuda:0")
    assert chosen("auto", CPU) == KernelChoice("cpp", f"the model is on cpu, compiled for {isa().name}")
    assert chosen("auto", torch.device("mps")) == KernelChoice("reference", "the model is on mps")
    dynamic = chosen("auto", CUDA, replace(SITE, score=DYNAMIC))
    assert dynamic.kernels == "reference" and "computed from activations" in dynamic.because
    assert chosen("auto", None).kernels == "reference"
    monkeypatch.setattr(products, "floats_are_faster", lambda: True)
    widened = multiplies_pairs()  # of the others, none has products of bfloat16
    assert chosen("auto", CPU).because.endswith("multiplied in float32, which is faster here") == widened


def test_auto_says_why_a_gpu_runs_the_reference(runs_nowhere: None) -> None:
    assert chosen("auto", CUDA) == KernelChoice("reference", "none on cuda:0")
    assert chosen("auto", CPU) == KernelChoice("reference", "none on cpu")


def test_auto_asks_no_compiler_where_nothing_is_compiled(runs: None) -> None:
    assert chosen("auto", CPU, compiles=False).kernels == "reference"
    assert chosen("cpp", CPU, compiles=False).kernels == "cpp"
    assert chosen("auto", CUDA, compiles=False).kernels == "triton"


def test_cpp_is_an_order() -> None:
    assert chosen("cpp", CPU) == KernelChoice("cpp", "the recipe asks for C++")
    with pytest.raises(ValueError, match=r"cpp cannot run this layer: .* for CPUs, .* on cuda:0; use"):
        chosen("cpp", CUDA)
    with pytest.raises(
        ValueError, match=r"kernels: cpp cannot run this layer: what the softmax gives is weighed"
    ):
        chosen("cpp", CPU, replace(SITE, score=WEIGHED))


def test_what_cpp_kernels_cannot_do_has_a_reason() -> None:
    def reason(
        site: SiteSpec = SITE, heads: tuple[int, int] = (8, 2), dims: tuple[int, int] = (64, 64)
    ) -> str:
        return cpp_supports.refusal(site, heads, dims, torch.bfloat16) or ""

    turned = CacheLayout(with_hadamard(int8()), int8(), before_rope=True)
    assert reason() == reason(dims=(3, 5)) == ""
    assert "577 channels" in reason(dims=(577, 64)) and "577 channels" in reason(dims=(64, 577))
    assert "129 query heads" in reason(heads=(129, 1))
    assert reason(replace(SITE, layout=turned, rotary=RotaryForm("half", 0, 64))) == ""
    assert reason(replace(SITE, score=DYNAMIC)) == "" and "once more" in reason(replace(SITE, score=WEIGHED))
    assert "torch.float64" in (cpp_supports.refusal(SITE, (8, 2), (64, 64), torch.float64) or "")


def test_reference_is_the_reference(runs: None) -> None:
    assert chosen("reference", CUDA).kernels == "reference"


def test_triton_is_an_order(runs: None) -> None:
    assert chosen("triton", CPU).kernels == chosen("triton", CUDA).kernels == "triton"
    with pytest.raises(
        ValueError,
        match=r"compile.kernels: triton cannot run this layer: its keys have 2 .* use kernels: auto",
    ):
        chosen("triton", CUDA, dims=(2, 2))


def test_an_order_that_no_device_can_carry_out(runs_nowhere: None) -> None:
    with pytest.raises(ValueError, match="none on cpu; use kernels: auto or reference"):
        chosen("triton", CPU)
    assert chosen("triton", None).kernels == "triton"  # an estimate: the device is not known


# ---- what the machine says


def test_a_cpu_has_the_interpreter_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "interpreted", lambda: True)
    assert available.problem(CPU) is None
    monkeypatch.setattr(available, "interpreted", lambda: False)
    assert "TRITON_INTERPRET=1" in str(available.problem(CPU))
    assert "this model is on meta" in str(available.problem(torch.device("meta")))


def test_gpus_that_are_too_old_or_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "interpreted", lambda: False)
    for found, says in (((7, 5), "8.0 or later, and cuda:0 has 7.5"), ((8, 0), "None"), ((10, 0), "None")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=found: found)
        assert says in str(available.problem(CUDA))
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert "AMD" in str(available.problem(CUDA))


def test_a_machine_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "Triton cannot be imported" in str(available.problem(CUDA))


@pytest.mark.parametrize("interpret", [False, True])
def test_how_triton_was_imported_decides(interpret: bool) -> None:
    """In processes of their own, as it is decided when Triton is imported, whatever the environment says later."""
    script = (
        "import os, triton, torch\n"
        f"os.environ['TRITON_INTERPRET'] = {'0' if interpret else '1'!r}\n"
        "from kvcompile.kernels.triton import available\n"
        "print(available.interpreted(), available.problem(torch.device('cpu')) is None)"
    )
    environment = {"TRITON_INTERPRET": "1" if interpret else "0"}
    assert python(script, environment) == f"{interpret} {interpret}"


def python(script: str, environment: dict[str, str]) -> str:
    import os

    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_the_reference_imports_no_kernels() -> None:
    """What asks whether they can run, and nothing that Triton is needed for (torch imports it by itself)."""
    script = (
        "import sys, torch, kvcompile\n"
        "from tests.support.models import TinyConfig, TinyLlama, make\n"
        "from tests.support.short_texts import short\n"
        "short(True)\n"
        "model = make(TinyLlama, TinyConfig(num_layers=1))\n"
        "fast = kvcompile.optimize(model, 'int8', max_tokens=32, compile={'mode': 'none'})\n"
        "fast(torch.ones(1, 3, dtype=torch.int64))\n"
        "print(sorted(n for n in sys.modules if n.startswith('kvcompile.kernels.triton')))"
    )
    assert python(script, {}) == (
        "['kvcompile.kernels.triton', 'kvcompile.kernels.triton.available', 'kvcompile.kernels.triton.device', "
        "'kvcompile.kernels.triton.supports']"
    )


# ---- plans


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"compile\.kernels: expected"):
        Recipe.load({"compile": {"kernels": "cuda"}})


def test_a_plan_names_the_layers_that_have_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "interpreted", lambda: False)
    _, front = fronts("llama", "float32")
    with pytest.raises(PlanError) as caught:
        plan_for(front, Recipe.load("int8", compile={"kernels": "triton"}))
    text = str(caught.value)
    assert "layers 0, 1, 2 (model.layers.0.self_attn" in text
    assert (
        "compile.kernels: triton cannot run this layer: " in text and "use kernels: auto or reference" in text
    )


def test_estimates_need_no_device() -> None:
    model = tiny_hf("llama", head_dim=16)
    for kernels in ("auto", "triton"):
        assert kvcompile.estimate(model.config, "int8", compile={"kernels": kernels}).bytes > 0


@pytest.fixture
def triton_plan(runs: None) -> Any:
    model = tiny_hf("llama", head_dim=16)
    front = understand(model)
    recipe = Recipe.load("int8", compile={"mode": "none", "kernels": "triton"}, verify="off")
    return model, front, recipe, plan_for(front, recipe)


def test_the_choice_is_in_plan_text_digest_and_json(triton_plan: Any) -> None:
    *_, plan = triton_plan
    assert {d.kernels for d in plan.decisions} == {"triton"}
    other = replace(plan, decisions=tuple(replace(d, kernels="reference") for d in plan.decisions))
    assert plan.digest() != other.digest()
    assert "triton kernels" in str(plan) and "reference kernels" in str(other)
    assert plan.to_dict()["decisions"][0]["kernels"] == "triton"


def test_explain_tells_kernels_and_reasons(triton_plan: Any) -> None:
    *_, plan = triton_plan

    def told(plan: Any) -> str:
        return " ".join(Explanation(plan, (), "export", (), 0.0, 0.0).render().split())

    assert "kernels triton: the recipe asks for Triton" in told(plan)
    first, *others = plan.decisions
    mixed = replace(
        plan, decisions=(replace(first, kernels="reference", kernels_because="a reason"), *others)
    )
    assert "reference in 0: a reason" in told(mixed) and "triton in 1: the recipe" in told(mixed)


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("paged", "pages that sequences of a step have in common are read once for up to 4 of them"),
        ("int8", ""),
        ("paged kivi", "each sequence of a step reads its own pages: tokens stand in full beside the pages"),
    ],
)
def test_explain_tells_what_sequences_have_in_common(runs: None, recipe: str, said: str) -> None:
    changes: dict[str, Any] = {"compile": {"mode": "none", "kernels": "triton"}, "verify": "off"}
    if "kivi" in recipe:
        changes["cache"] = {"keys": {"dtype": "int8", "residual": 8}}
    loaded = Recipe.load(recipe.split()[0], **changes)
    plan = plan_for(understand(tiny_hf("llama", head_dim=16)), loaded)
    text = " ".join(Explanation(plan, (), "export", (), 0.0, 0.0).render().split())
    assert said in text and ("reads its own pages" in text or "in common" in text) == bool(said)


# ---- the op


def test_specs_of_the_reference_are_the_text_they_were() -> None:
    assert "kernels" not in json.loads(SITE.to_json())
    generated = replace(SITE, kernels="triton")
    assert SiteSpec.from_json(generated.to_json()) == generated


def test_the_op_goes_to_the_generated_kernels(monkeypatch: pytest.MonkeyPatch, triton_plan: Any) -> None:
    """A stand-in for them computes what the reference does, and notes that it was asked."""
    model, front, recipe, _ = triton_plan
    asked: list[SiteSpec] = []

    def cached_attention(x: AttendInputs) -> Tensor:
        asked.append(x.spec)
        return reference.cached_attention(x)

    stand_in = ModuleType("kvcompile.kernels.triton.host.attention")
    stand_in.cached_attention = cached_attention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    fast: Any = build(model, front, recipe)
    plain: Any = build(model, front, Recipe.load("int8", **EAGER))
    outs = [
        torch.cat([m(ids[:, :7]).logits, m(ids[:, 7:8]).logits, m(ids[:, 8:]).logits], 1)
        for m in (fast, plain)
    ]
    assert len(asked) == 2 * 3 and {spec.kernels for spec in asked} == {"triton"}
    torch.testing.assert_close(*outs)
    assert ops.cached_attention is torch.ops.kvcompile.cached_attention.default


# ---- caches


def test_layers_of_one_cache_have_the_same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CrossLayer().eval()
    front = understand(model)

    def plan_without(*refused: int) -> Plan:
        counter = iter(range(5))

        def made(*args: Any, **more: Any) -> KernelChoice:
            refuses = next(counter) in refused
            return KernelChoice("reference", "a reason") if refuses else KernelChoice("triton", "")

        monkeypatch.setattr("kvcompile.decide.kernels.choose", made)
        return plan_for(front, Recipe.load("int8", max_tokens=32))

    # Layer 2 reads the cache of layer 0, and so does layer 4.
    plans = [plan_without(), plan_without(2)]
    assert [d.kernels for d in plans[0].decisions] == ["triton"] * 5
    assert [d.kernels for d in plans[1].decisions] == [
        "reference" if layer % 2 == 0 else "triton" for layer in range(5)
    ]
    assert plans[1].decisions[0].kernels_because == "layer 2 reads the same cache: a reason"


def test_fp8_comes_as_bytes_to_kernels_that_take_it_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of compiled regions; the cache itself is of the type that it says."""
    model = tiny_hf("llama", head_dim=16)
    front = understand(model)
    plan = plan_for(front, Recipe.load("fp8", max_tokens=32))
    generated = replace(plan, decisions=tuple(replace(d, kernels="triton") for d in plan.decisions))
    names = pipeline.rewrite(front, plan)[0].caches
    for form, of, kinds in (
        ("bits", generated, {torch.uint8, torch.float16}),
        ("native", generated, {torch.float8_e4m3fn, torch.float16}),
        ("bits", plan, {torch.float8_e4m3fn, torch.float16}),
    ):
        monkeypatch.setattr("kvcompile.runtime.cache_spec.fp8_form", lambda device, form=form: form)
        cache = KVCache(CacheShape.of(of, names, CPU), CPU)
        cache.reserve(2)
        assert (
            {x.dtype for x in cache.inputs().values()}
            == {dtype for _, dtype, _ in cache.shapes().values()}
            == kinds
        )
        for name, x in cache.inputs().items():
            assert x.data_ptr() == cache.buffers[name].data_ptr()
        assert {x.dtype for x in cache.buffers.values()} == {torch.float8_e4m3fn, torch.float16}


def test_which_gpus_convert_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "interpreted", lambda: False)
    monkeypatch.setattr(devices, "_device_of", devices._device_of.__wrapped__)  # which asks once
    for (major, minor), form in (((8, 0), "bits"), ((8, 9), "native"), ((9, 0), "native")):
        found = SimpleNamespace(name="a GPU", major=major, minor=minor, multi_processor_count=100)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=found: found)
        assert available.fp8_form(CUDA) == form
    assert available.fp8_form(CPU) == "bits"
    # Interpreted, all of a GPU's instructions are Triton's own.
    monkeypatch.setattr(devices, "interpreted", lambda: True)
    assert available.fp8_form(CUDA) == "bits"


def test_verification_runs_the_kernels_that_were_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its small budgets are those that the kernels of a site have."""
    front = understand(tiny_hf("llama", head_dim=16))
    plan = plan_for(front, Recipe.load("paged", max_tokens=256, compile={"kernels": "reference"}))
    generated = replace(plan, decisions=tuple(replace(d, kernels="triton") for d in plan.decisions))
    asked = []

    def refuses(kernels: str, site: SiteSpec, *args: Any) -> str | None:
        if kernels == "reference":
            return None
        asked.append(site.layout.placement)
        return "too small" if site.layout.placement == Paged(4) else None

    monkeypatch.setattr(importlib.import_module("kvcompile.verify.shrink"), "refusal", refuses)
    small = [
        importlib.import_module("kvcompile.verify.shrink").shrink(of).decisions[0].layout.placement
        for of in (plan, generated)
    ]
    assert small == [Paged(4), Paged(16)] and asked[:2] == [Paged(4), Paged(16)]
