"""What the compiler makes for a machine is begun beside the capture: once, for what a recipe needs, and silently."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor import codecache
from torch._inductor.utils import fresh_cache

import kvcompile
from kvcompile.compile import ahead, instruction_sets
from kvcompile.errors import CompileError
from kvcompile.kernels.cpp import available
from kvcompile.kernels.cpp.host import compiler, ops, source
from kvcompile.layouts import CacheLayout
from kvcompile.plan import Plan
from kvcompile.recipe import Recipe
from tests.support.models import tiny_hf

MODEL = nn.Linear(2, 2)
BEGIN_KERNELS = ahead.begin_kernels  # which other tests do without (`tests/support/compiled_once.py`)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was made ahead, in order; nothing was begun before."""
    found: list[str] = []
    monkeypatch.setattr(ahead, "_begun", set())
    monkeypatch.setattr(ahead, "_looking", [])
    monkeypatch.setattr(available, "problem", lambda device: found.append(f"launcher {device}"))
    monkeypatch.setattr(instruction_sets, "look", lambda: found.append("instruction sets"))
    monkeypatch.setattr(instruction_sets, "precompile_header", lambda: found.append("header"))
    monkeypatch.setattr(source, "linear_kernels", lambda dtype: found.append(f"linear layers {dtype}"))
    return found


def _begun(model: nn.Module, **options: str) -> None:
    ahead.begin(model, Recipe.load("int8", compile=options))
    _ended()


def _ended() -> None:
    for thread in threading.enumerate():
        if thread.name == ahead._NAME:
            thread.join(60)


def test_each_thing_is_made_once(made: list[str]) -> None:
    _begun(MODEL)
    _begun(MODEL)
    assert made == ["launcher cpu", "instruction sets", "header", "linear layers torch.float32"]


def test_only_what_the_recipe_needs(made: list[str]) -> None:
    _begun(MODEL, mode="none")
    _begun(nn.Linear(2, 2, device="meta"))
    assert made == []
    _begun(MODEL, kernels="reference")
    assert made == ["instruction sets", "header"]
    _begun(MODEL)
    assert made == ["instruction sets", "header", "launcher cpu", "linear layers torch.float32"]


def test_what_does_not_depend_on_the_model_begins_before_it_is_loaded(made: list[str]) -> None:
    ahead.begin_for(torch.device("cpu"), None, Recipe.load("int8"))
    _ended()
    assert made == ["launcher cpu", "instruction sets", "header"]
    _begun(MODEL)
    assert made[3:] == ["linear layers torch.float32"]


def test_what_fails_is_left_to_whoever_needs_it(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(device: torch.device) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(available, "problem", problem)
    _begun(MODEL)
    assert made == ["instruction sets", "header", "linear layers torch.float32"]


def test_nobody_waits_for_a_look_that_failed(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(instruction_sets, "look", look)
    _begun(MODEL)
    assert [looked.is_set() for looked in ahead._looking] == [True]


def test_inductor_compiles_when_no_other_thread_looks_at_instruction_sets(
    made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a thread tries a flag, Inductor would have it in the command lines of all."""
    looked: list[bool] = []

    def compiles(*args: object, **options: object) -> None:
        assert looked
        raise RuntimeError("that is enough")

    monkeypatch.setattr(torch._inductor, "standalone_compile", compiles)
    fast = kvcompile.optimize(tiny_hf("llama"), "int8", verify="off", compile={"kernels": "reference"})
    looking = threading.Event()
    monkeypatch.setattr(looking, "wait", lambda: looked.append(True))
    monkeypatch.setattr(ahead, "_looking", [looking])
    with pytest.raises(CompileError, match="that is enough"):
        fast(torch.zeros(1, 2, dtype=torch.long))


def test_waiting_ends_with_the_look_and_not_with_what_comes_after_it(
    made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    go, later = threading.Event(), threading.Event()

    def look() -> None:
        go.wait(60)
        made.append("instruction sets")

    monkeypatch.setattr(instruction_sets, "look", look)
    monkeypatch.setattr(
        instruction_sets, "precompile_header", lambda: later.wait(60) and made.append("header")
    )
    ahead.begin(MODEL, Recipe.load("int8", compile={"kernels": "reference"}))
    assert made == []
    go.set()
    ahead.wait()
    assert made == ["instruction sets"]
    later.set()
    _ended()
    assert made == ["instruction sets", "header"]


def test_the_header_is_that_of_inductors_kernels_and_nothing_else_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, str]] = []

    def precompile(header: str, command_line: str, **options: object) -> str:
        asked.append((header, command_line))
        return header

    monkeypatch.setattr(codecache, "_precompile_header", precompile)
    compiled: list[object] = []
    with fresh_cache(), monkeypatch.context() as patched:
        patched.setattr(codecache, "_worker_compile_cpp", lambda *given: compiled.append(given))
        instruction_sets.precompile_header()
    (of_ahead,) = asked
    assert compiled == []
    asked.clear()
    with fresh_cache():
        torch.compile(lambda x: x.cos() + 1)(torch.zeros(64))
    assert of_ahead in asked


@pytest.mark.parametrize("recipe", ["baseline", "int8", "h2o"])
def test_the_kernels_of_a_plan_are_begun_and_no_others(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification and a generation ask for the kernels that were begun; without verification the plan's are enough."""
    begun: list[str] = []
    monkeypatch.setattr(ahead, "begin_kernels", BEGIN_KERNELS)
    monkeypatch.setattr(ahead, "_begun", set())
    monkeypatch.setattr(ahead, "_begin", lambda wanted, nice, looked=None: begun.extend(wanted))
    asked: list[str] = []
    address_of = source.address_of
    monkeypatch.setattr(source, "address_of", lambda spec: asked.append(spec) or address_of(spec))
    ops.forget()
    fast = kvcompile.optimize(
        tiny_hf("llama"), recipe, verify="off", compile={"mode": "none", "kernels": "cpp"}
    )
    assert len(begun) == 2
    fast.generate(torch.arange(3, 9)[None], max_new_tokens=3, min_new_tokens=3, do_sample=False)
    ops.forget()
    assert sorted(asked) == sorted(begun)


def test_verification_has_the_kernels_of_the_lossless_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Plan] = []
    monkeypatch.setattr(ahead, "begin_kernels", lambda *plans: begun.extend(plans))
    kvcompile.optimize(tiny_hf("llama"), "int8", compile={"mode": "none"})
    assert [plan.decisions[0].layout == CacheLayout() for plan in begun] == [False, True]


def test_threads_that_want_one_library_compile_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path))
    compiled: list[Path] = []
    entered = threading.Barrier(4)

    def _compile(source: Path, library: Path, flags: object) -> None:
        compiled.append(library)
        time.sleep(0.05)
        library.touch()

    def want() -> None:
        entered.wait(60)
        compiler.built("some", "int x;", ("-O1",))

    monkeypatch.setattr(compiler, "_compile", _compile)
    threads = [threading.Thread(target=want) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(compiled) == 1
