"""What the compiler makes for a machine is begun beside the capture: once, for what a recipe needs, and silently."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor import cpu_vec_isa

import kvcompile
from kvcompile.compile import ahead
from kvcompile.errors import CompileError
from kvcompile.kernels.cpp import available
from kvcompile.kernels.cpp.host import compiler
from kvcompile.recipe import Recipe
from tests.support.models import tiny_hf

MODEL = nn.Linear(2, 2)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was made ahead, in order; nothing was begun before."""
    found: list[str] = []
    monkeypatch.setattr(ahead, "_begun", set())
    monkeypatch.setattr(available, "problem", lambda device: found.append(f"launcher {device}"))
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", lambda: found.append("instruction sets"))
    return found


def _begun(model: nn.Module, **options: str) -> None:
    ahead.begin(model, Recipe.load("int8", compile=options))
    for thread in threading.enumerate():
        if thread.name == ahead._NAME:
            thread.join(60)


def test_each_thing_is_made_once(made: list[str]) -> None:
    _begun(MODEL)
    _begun(MODEL)
    assert made == ["launcher cpu", "instruction sets"]


def test_only_what_the_recipe_needs(made: list[str]) -> None:
    _begun(MODEL, mode="none")
    _begun(nn.Linear(2, 2, device="meta"))
    assert made == []
    _begun(MODEL, kernels="reference")
    assert made == ["instruction sets"]
    _begun(MODEL)
    assert made == ["instruction sets", "launcher cpu"]


def test_what_fails_is_left_to_whoever_needs_it(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(device: torch.device) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(available, "problem", problem)
    _begun(MODEL)
    assert made == ["instruction sets"]


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
    looking = threading.Thread()
    monkeypatch.setattr(looking, "join", lambda: looked.append(True))
    monkeypatch.setattr(ahead, "_running", [looking])
    with pytest.raises(CompileError, match="that is enough"):
        fast(torch.zeros(1, 2, dtype=torch.long))


def test_waiting_ends_with_what_was_begun(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def look() -> None:
        go.wait(60)
        made.append("instruction sets")

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", look)
    ahead.begin(MODEL, Recipe.load("int8", compile={"kernels": "reference"}))
    assert made == []
    go.set()
    ahead.wait()
    assert made == ["instruction sets"]


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
