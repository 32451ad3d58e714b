"""What the compiler makes for a machine is begun beside the capture: once, for what a recipe needs, and silently."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import codecache
from torch._inductor.utils import fresh_cache

import kvcompile
from kvcompile import api, pipeline, verify
from kvcompile.compile import ahead, instruction_sets
from kvcompile.errors import CompileError, DetectionError
from kvcompile.kernels.cpp import available
from kvcompile.kernels.cpp.host import compiler, ops, source
from kvcompile.kernels.cpp.spec import CppSpec
from kvcompile.passes.capture.attempt import Attempt
from kvcompile.passes.capture.captured import Captured
from kvcompile.passes.capture.route import Route
from kvcompile.passes.detect.detect import Detection
from kvcompile.pipeline import Front
from kvcompile.recipe import Recipe
from kvcompile.util import threads
from tests.passes.capture.test_own_positions import Asks
from tests.support.models import tiny_hf

MODEL = nn.Linear(2, 2)
BEGIN_KERNELS = ahead.begin_kernels  # which other tests do without (`tests/support/compiled_once.py`)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was made ahead, in order; nothing was begun before."""
    found: list[str] = []
    for name, empty in {"_begun": set(), "_looking": [], "_trials": [], "_optimizing": []}.items():
        monkeypatch.setattr(ahead, name, empty)
    monkeypatch.setattr(available, "problem", lambda device: found.append(f"launcher {device}"))
    monkeypatch.setattr(instruction_sets, "take", lambda: "the best")
    monkeypatch.setattr(instruction_sets, "confirmed", lambda best: False)
    monkeypatch.setattr(instruction_sets, "confirm", lambda best: bool(found.append("header tried")) or True)
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
    assert made == ["launcher cpu", "header tried", "linear layers torch.float32"]


def test_only_what_the_recipe_needs(made: list[str]) -> None:
    _begun(MODEL, mode="none")
    _begun(nn.Linear(2, 2, device="meta"))
    assert made == []
    _begun(MODEL, kernels="reference")
    assert made == ["header tried"]
    _begun(MODEL)
    assert made == ["header tried", "launcher cpu", "linear layers torch.float32"]


def test_what_does_not_depend_on_the_model_begins_before_it_is_loaded(made: list[str]) -> None:
    ahead.begin_for(torch.device("cpu"), None, Recipe.load("int8"))
    _ended()
    assert made == ["launcher cpu", "header tried"]
    _begun(MODEL)
    assert made[2:] == ["linear layers torch.float32"]


def test_what_fails_is_left_to_whoever_needs_it(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(device: torch.device) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(available, "problem", problem)
    _begun(MODEL)
    assert made == ["header tried", "linear layers torch.float32"]


def test_a_set_that_is_known_to_work_is_not_tried_and_the_header_comes_with_the_plan(
    made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a proof was kept, programs are likely to be, too: then nothing needs the header."""
    monkeypatch.setattr(instruction_sets, "confirmed", lambda best: True)
    _begun(MODEL, kernels="reference")
    assert made == []
    for _ in range(2):
        ahead.begin_header(torch.device("cpu"), Recipe.load("int8"))
        _ended()
    assert made == ["header"]


def test_a_header_that_was_tried_is_not_made_again(made: list[str]) -> None:
    _begun(MODEL, kernels="reference")
    ahead.begin_header(torch.device("cpu"), Recipe.load("int8"))
    _ended()
    assert made == ["header tried"]


def test_a_set_is_tried_though_the_header_was_made_for_a_plan_before(made: list[str]) -> None:
    """`build` begins the header without `begin`; whoever cannot compile later waits for the trial."""
    ahead.begin_header(torch.device("cpu"), Recipe.load("int8"))
    _begun(MODEL, kernels="reference")
    assert made == ["header", "header tried"]
    assert [trial.done() for trial in ahead._trials] == [True]


@pytest.mark.parametrize("cores", [2, 8])
def test_what_a_prompt_waits_for_comes_after_optimize_where_cores_are_few(
    cores: int, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher and the kernels of a plan do not wait; and who waits has no core."""
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(threads, "_beside", {})
    with ahead.optimizing():
        ahead.begin(MODEL, Recipe.load("int8"))
        ahead._begin({"a kernel": lambda: made.append("a kernel")}, nice=0)
        deadline = time.monotonic() + 60
        while len(made) < (2 if cores == 2 else 4) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        at_once, later = {"launcher cpu", "a kernel"}, {"header tried", "linear layers torch.float32"}
        assert set(made) == (at_once if cores == 2 else at_once | later)
        assert threads.cores_taken() == 0
    _ended()
    assert set(made) == at_once | later and len(made) == 4


@pytest.mark.parametrize("works", [True, False])
def test_who_compiles_within_optimize_does_not_wait_for_its_end(
    works: bool, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for a look at instruction sets, nor for the trial of one where something fails."""
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 2)
    if not works:
        monkeypatch.setattr(instruction_sets, "take", lambda: None)

    def make() -> None:
        raise RuntimeError("an unknown flag")

    done: list[bool] = []

    def within() -> None:
        with ahead.optimizing():
            ahead.begin(MODEL, Recipe.load("int8", compile={"kernels": "reference"}))
            with pytest.raises(RuntimeError, match="an unknown flag"):
                ahead.compiling(make)
            done.append(True)

    thread = threading.Thread(target=within, daemon=True)
    thread.start()
    thread.join(60)
    assert done and made == ["header tried" if works else "instruction sets"]
    _ended()


def test_where_a_set_cannot_be_taken_inductor_looks(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def take() -> None:
        raise AttributeError("check_build")

    monkeypatch.setattr(instruction_sets, "take", take)
    _begun(MODEL, kernels="reference")
    assert made == ["instruction sets"] and ahead._trials == []


def test_nobody_waits_for_a_look_that_failed(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(instruction_sets, "take", lambda: None)
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

    monkeypatch.setattr(instruction_sets, "take", lambda: None)
    monkeypatch.setattr(instruction_sets, "look", look)
    monkeypatch.setattr(
        instruction_sets, "precompile_header", lambda: later.wait(60) and made.append("header")
    )
    ahead.begin(MODEL, Recipe.load("int8", compile={"kernels": "reference"}))
    ahead.begin_header(torch.device("cpu"), Recipe.load("int8"))
    assert made == []
    go.set()
    ahead.wait()
    assert made == ["instruction sets"]
    later.set()
    _ended()
    assert made == ["instruction sets", "header"]


@pytest.mark.parametrize("works", [True, False])
def test_what_was_compiled_for_a_set_that_does_not_work_is_compiled_again(
    works: bool, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor takes the best set before it is tried: nobody waits, and a program may have been written for it."""
    go = threading.Event()
    monkeypatch.setattr(instruction_sets, "confirm", lambda best: go.wait(60) and works)
    ahead.begin(MODEL, Recipe.load("int8", compile={"kernels": "reference"}))
    asked: list[bool] = []

    def make() -> str:
        assert instruction_sets.COMPILING.locked()
        asked.append(go.is_set())
        go.set()
        if len(asked) == 1:
            raise RuntimeError("an unknown flag")
        return "a program"

    if works:
        with pytest.raises(RuntimeError, match="an unknown flag"):
            ahead.compiling(make)
        assert asked == [False]
    else:
        assert ahead.compiling(make) == "a program"
        assert asked == [False, True]
    asked.clear()
    with pytest.raises(RuntimeError, match="an unknown flag"):  # what is known by now is no excuse
        ahead.compiling(make)
    _ended()


def test_compilers_have_cores_until_they_end(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(available, "problem", lambda device: go.wait(60))
    ahead.begin(MODEL, Recipe.load("int8"))
    assert threads.cores_taken() == 1
    go.set()
    _ended()
    assert threads.cores_taken() == 0


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
    begun: dict[str, object] = {}
    monkeypatch.setattr(ahead, "begin_kernels", BEGIN_KERNELS)
    monkeypatch.setattr(ahead, "_begun", set())
    monkeypatch.setattr(ahead, "_begin", lambda wanted, nice: begun.update(wanted))
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


@pytest.mark.parametrize("cores", [2, 8])
def test_where_cores_are_few_the_launcher_comes_first(
    cores: int, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: cores)
    go = threading.Event()
    monkeypatch.setattr(available, "problem", lambda device: go.wait(60))
    with ahead.optimizing():
        first = ahead.begin(MODEL, Recipe.load("int8"))
        assert first.is_set() == (cores == 8)
        assert ahead.begin(MODEL, Recipe.load("int8")).is_set()  # nothing is left to be begun
        go.set()
        assert first.wait(60)
    _ended()


def test_nobody_waits_for_what_waits_for_the_optimization(
    made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 2)
    with ahead.optimizing():
        assert ahead.begin(MODEL, Recipe.load("int8", compile={"kernels": "reference"})).wait(60)
        assert made == []
    _ended()
    assert made == ["header tried"]


def test_kernels_are_begun_before_the_graph_is_compared_and_run_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of what an optimization does goes on beside their compiler, but what needs them."""
    came: list[str] = []

    def noted(module: Any, name: str) -> None:
        original = getattr(module, name)

        def run(*given: Any) -> Any:
            came.append(name)
            return original(*given)

        monkeypatch.setattr(module, name, run)

    noted(sys.modules[Route.__module__], "check_changes")
    noted(sys.modules[Route.__module__], "trace")
    noted(ahead, "begin")
    noted(pipeline, "detect")
    noted(ahead, "begin_kernels")
    noted(Attempt, "confirm")
    for name in ("first_asked", "_check_detection", "lossless", "_check_cache"):
        noted(verify, name)
    model = Asks(lambda x, positions, keep: x).eval()
    kvcompile.optimize(model, "int8", compile={"mode": "none", "kernels": "cpp"}, max_tokens=512)
    before = ["check_changes", "begin", "trace", "detect", "begin_kernels", "confirm", "begin_kernels"]
    assert came == [*before, "first_asked", "_check_detection", "lossless", "_check_cache"]


def test_kernels_of_no_layout_of_the_plan_are_not_run_by_its_verification(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    address_of = source.address_of
    monkeypatch.setattr(source, "address_of", lambda spec: asked.append(spec) or address_of(spec))
    ops.forget()
    fast = kvcompile.optimize(tiny_hf("llama", layers=1), "int8", compile={"mode": "none", "kernels": "cpp"})
    ops.forget()
    assert {check.name for check in fast.report["checks"]} >= {"lossless", "cache, own sizes"}
    layouts = [CppSpec.from_json(spec).site.layout for spec in asked if '"decode"' in spec]
    assert layouts == [fast.plan.decisions[0].layout]


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_foreseen_is_not_made_again(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it could not be, it is made once more, and tells why."""
    detected: list[Captured] = []
    detect = pipeline.detect

    def counted(captured: Captured, made_for: int | None) -> Detection:
        detected.append(captured)
        if fails and len(detected) == 1:
            raise DetectionError("not yet")
        return detect(captured, made_for)

    monkeypatch.setattr(pipeline, "detect", counted)
    seen: list[Front] = []
    front = pipeline.understand(Asks(lambda x, positions, keep: x).eval(), seen.append)
    assert len(detected) == 1 + fails and len(seen) == 1 - fails
    assert front.captured.seconds > 0 and [f.canonical for f in seen] == [front.canonical] * (1 - fails)


def test_a_front_that_was_foreseen_of_another_graph_is_not_taken() -> None:
    model = Asks(lambda x, positions, keep: x * 2 if positions else x).eval()
    seen: list[Front] = []
    traced: list[int] = []
    front = pipeline.understand(model, seen.append, lambda: traced.append(len(seen)))
    assert traced == [0]  # once, though there are two routes
    assert [each.captured.inputs.position_ids for each in seen] == [True, False]
    assert front.canonical is seen[1].canonical and not front.captured.inputs.position_ids


@pytest.mark.parametrize("known", [False, True], ids=["proved now", "proved before"])
def test_no_header_is_begun_for_a_model_that_was_proved_before(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its programs are likely to be kept, too; kernels are begun before that is known, and found."""
    kept = SimpleNamespace(
        read=lambda: SimpleNamespace(checks=(), made="before") if known else None, keep=lambda checks: None
    )
    monkeypatch.setattr(api, "Proof", SimpleNamespace(kept=lambda *given: True, of=lambda *given: kept))
    begun: list[str] = []
    monkeypatch.setattr(ahead, "begin_kernels", lambda plan: begun.append("kernels"))
    monkeypatch.setattr(ahead, "begin_header", lambda *given: begun.append("header"))
    fast = kvcompile.optimize(tiny_hf("llama"), "baseline", compile={"mode": "none"})
    assert begun == (["kernels"] if known else ["kernels", "kernels", "header"])
    assert fast.report["proved"] == ("before" if known else None)


def test_threads_that_want_one_library_compile_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path))
    compiled: list[Path] = []
    entered = threading.Barrier(4)

    def _compile(source: Path, library: Path, flags: object) -> None:
        compiled.append(library)
        time.sleep(0.05)
        library.write_bytes(Path(torch._C.__file__).read_bytes())  # any whole one

    def want() -> None:
        entered.wait(60)
        compiler.built("some", "int x;", ("-O1",))

    monkeypatch.setattr(compiler, "_compile", _compile)
    wanting = [threading.Thread(target=want) for _ in range(4)]
    for thread in wanting:
        thread.start()
    for thread in wanting:
        thread.join(60)
    assert len(compiled) == 1
