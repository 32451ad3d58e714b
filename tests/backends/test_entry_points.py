"""Optional backends: found by entry points, imported when they are asked for, and refused with what there is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import kvcompile
from kvcompile.decide import backend
from kvcompile.errors import PlanError, RecipeError
from kvcompile.plan import Plan
from kvcompile.recipe import Recipe
from tests.support.models import tiny_hf

Enter = Callable[..., None]
LIMITS: dict[str, Any] = {"max_tokens": 48, "max_batch": 2, "prefill_chunk": 16, "verify": "off"}


@pytest.fixture
def enter(monkeypatch: pytest.MonkeyPatch) -> Enter:
    """Enters backends as installed packages would: enter(name="module", ...), besides those that are installed."""
    found = metadata.entry_points

    def install(*points: tuple[str, str]) -> None:
        made = [metadata.EntryPoint(name, value, backend.GROUP) for name, value in points]

        def entry_points(**asked: Any) -> Any:
            return [*found(**asked), *made] if asked == {"group": backend.GROUP} else found(**asked)

        monkeypatch.setattr(metadata, "entry_points", entry_points)

    return install


@pytest.fixture
def dummy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A backend that runs regions as they are, and notes which."""
    module: Any = ModuleType("a_package_with_a_backend")
    module.compiled = []
    module.plans = []

    def compiler(plan: Plan, recipe: Recipe) -> Callable[[GraphModule, Sequence[Any], Any], Any]:
        module.plans.append((plan, recipe))

        def compile_one(region: GraphModule, inputs: Sequence[Any], tracer: Any) -> Any:
            module.compiled.append(
                {str(node.target) for node in region.graph.nodes if "kvcompile" in str(node.target)}
            )
            return region

        return compile_one

    module.unavailable = lambda device: None if device.type == "cpu" else "it is for CPUs alone"
    module.describe = lambda: "dummy: every region, as it is"
    module.compiler = compiler
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_a_package_brings_a_backend(enter: Enter, dummy: Any) -> None:
    enter(("dummy", dummy.__name__))
    assert backend.installed() == ("inductor", "dummy", "torch_tensorrt")
    model = tiny_hf("llama")
    fast = kvcompile.optimize(model, "int8", compile={"backend": "dummy"}, **LIMITS)
    plain = kvcompile.optimize(model, "int8", compile={"mode": "none", "kernels": "cpp"}, **LIMITS)
    ids = torch.randint(3, 60, (2, 21), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        got, want = fast(ids).logits, plain(ids).logits
        assert torch.equal(got, want)
        ids = want[:, -1:].argmax(-1)
    assert fast.plan.backend == "dummy" and dummy.plans == [(fast.plan, fast.recipe)]
    # Prompt and step: the region of a site, which all layers share, and three between and around sites.
    assert (
        dummy.compiled.count({"kvcompile.cached_attention.default"}) == 2 and dummy.compiled.count(set()) == 6
    )
    assert "dummy: every region, as it is" in str(kvcompile.explain(fast))


def test_those_of_this_package_are_installed() -> None:
    """If this fails: entry points are metadata of the installation, so install again (`pip install -e .`)."""
    from kvcompile.backends import torch_tensorrt

    assert "torch_tensorrt" in backend.installed()
    loaded: Any = backend.load("torch_tensorrt")
    assert loaded is torch_tensorrt


def test_it_says_where_it_cannot_compile(enter: Enter, dummy: Any) -> None:
    enter(("dummy", dummy.__name__))
    dummy.unavailable = lambda device: f"no {device} for me"
    with pytest.raises(
        PlanError, match=r"does not fit this model:\n  - compile.backend: dummy: no cpu for me"
    ):
        kvcompile.optimize(tiny_hf("llama"), "int8", compile={"backend": "dummy"}, **LIMITS)


def test_an_unknown_name_lists_what_is_installed(enter: Enter, dummy: Any) -> None:
    enter(("dummy", dummy.__name__))
    model = tiny_hf("llama")
    for ask in (
        lambda: kvcompile.optimize(model, "int8", compile={"backend": "dumy"}, **LIMITS),
        lambda: kvcompile.estimate(
            model.config, "int8", compile={"backend": "dumy"}
        ),  # no device, and no such name
    ):
        with pytest.raises(PlanError) as error:
            ask()
        assert str(error.value) == (
            "compile.backend: dumy: no installed package has a backend of this name; installed are inductor, dummy, "
            "torch_tensorrt"
        )


def test_broken_ones_say_what_is_wrong(enter: Enter, dummy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(("gone", "a_package_that_is_gone"), ("half", dummy.__name__), ("twice", "one"), ("twice", "two"))
    known = "installed are inductor, gone, half, torch_tensorrt, twice$"
    with pytest.raises(
        PlanError,
        match=r"backend: gone: a_package_that_is_gone does not load: ModuleNotFoundError: No module .*; "
        + known,
    ):
        backend.load("gone")
    del dummy.describe
    dummy.compiler = None
    with pytest.raises(
        PlanError, match=r"half: a_package.* is no backend: it has no describe, compiler\(\); " + known
    ):
        backend.load("half")
    with pytest.raises(PlanError, match="twice: several packages have one of this name: one, two; " + known):
        backend.load("twice")


def test_an_estimate_imports_none(enter: Enter) -> None:
    """Without a device nothing is asked of it, so nothing is loaded."""
    enter(("gone", "a_package_that_is_gone"))
    config = tiny_hf("llama").config
    assert kvcompile.estimate(config, "int8", compile={"backend": "gone"}).bytes > 0


@pytest.mark.parametrize("mode", ["cudagraphs", "max-autotune", "none"])
def test_modes_are_inductors(mode: str) -> None:
    with pytest.raises(RecipeError, match=f"backend: dummy has no mode: {mode}"):
        Recipe.load({"name": "x", "compile": {"backend": "dummy", "mode": mode}})
