"""A decode step by calls that were noted: its bits, what moves and what stays, and what is not noted."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import kvcompile
from kvcompile.compile import cpu_step
from kvcompile.errors import KernelError
from kvcompile.kernels.cpp.host import ops
from kvcompile.kernels.cpp.host.step import StepProgram
from tests.support.budget import within
from tests.support.models import tiny_hf

RECIPES = ("baseline", "int8", "paged", "h2o", "streaming_int8")
QUICK = ("baseline", "h2o")  # a step of h2o that is computed twice gives another slot up


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def pair(recipe: str, **more: Any) -> tuple[Any, Any]:
    """A module whose steps are noted, and one whose steps are not, of the same model."""
    model = tiny_hf()
    noted, plain = (
        kvcompile.optimize(model, recipe, verify="off", **({"max_tokens": 256} | more)) for _ in range(2)
    )
    plain.executor.steps.problems = Everything()
    return noted, plain


class Everything(dict[Any, str]):
    def __contains__(self, key: object) -> bool:
        return True


def logits(module: Any, ids: Tensor) -> Tensor:
    found: Tensor = module(input_ids=ids).logits
    return found


def go(noted: Any, plain: Any, steps: int, batch: int = 1) -> None:
    for _ in range(steps):
        ids = torch.randint(3, 61, (batch, 1))
        assert torch.equal(logits(noted, ids), logits(plain, ids))


def prompt(noted: Any, plain: Any, tokens: int = 5, batch: int = 1) -> None:
    ids = torch.randint(3, 61, (batch, tokens))
    assert torch.equal(logits(noted, ids), logits(plain, ids))


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in RECIPES]
)
def test_steps_have_the_same_bits(recipe: str) -> None:
    """Whatever moves meanwhile: caches grow, texts begin anew, weights are written to, a fork goes on."""
    noted, plain = pair(recipe)
    prompt(noted, plain)
    go(noted, plain, 70)  # beyond a block of the span, and what a cache begins with
    assert noted.executor.steps.count and not noted.executor.steps.problems
    assert not plain.executor.steps.count
    with torch.no_grad():
        noted.model.lm_head.weight.mul_(1.5)
    go(noted, plain, 3)
    for module in (noted, plain):
        module.reset()
    prompt(noted, plain, 3)
    go(noted, plain, 4)
    for module in (noted, plain):
        module.release()
    assert noted.executor.steps.count == 0, "what stood in a cache that is gone"
    prompt(noted, plain, 9)
    go(noted, plain, 4)
    assert noted.executor.steps.count


def test_texts_of_many_lengths_share_a_step() -> None:
    """What is noted reads as many slots as there are tokens, so its span is a power of two, and at least 512."""
    noted, plain = pair("baseline", max_tokens=1024)
    for tokens, count in ((5, 1), (130, 1), (600, 2), (70, 2)):
        prompt(noted, plain, tokens)
        go(noted, plain, 4)
        assert noted.executor.steps.count == count, tokens
        for module in (noted, plain):
            module.reset()


@pytest.mark.parametrize(("room", "left"), [(1 << 20, 10), (0, 4)])
def test_steps_are_kept_as_far_as_memory_goes(room: int, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that ran last: texts come and go, and a step of as many as before need not be noted again."""
    monkeypatch.setattr(cpu_step, "_BYTES", room)
    ops.ready()
    weight, made, steps = torch.randn(3, 8), [], cpu_step.CpuSteps()

    def step(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
        made.append(inputs["number"])
        return (ops.cpp_linear(inputs["x"], inputs["weight"], None, "linear float"),)

    def run(number: int) -> Tensor:
        x = torch.randn(1, 8)
        (out,) = steps.run("all", step, [], {"x": x, "number": number}, {"weight": weight}, 0)
        within(out, x @ weight.T, x.double() @ weight.double().T, torch.float32, few=True)
        return out

    run(0)  # the first of a class runs as it is
    for number in range(10):
        run(number)
        run(0)
    assert steps.count == left and made.count(0) == 2, "once as it is, once noted"
    made.clear()
    for number in (0, 9, 8, 7):
        run(number)
    assert made == [], "the last ones are there"
    assert room == 0 or all(known.bytes >= 4 * (8 + 3) for known in steps._known.values())


def test_what_a_step_gave_stays() -> None:
    noted, plain = pair("baseline")
    prompt(noted, plain)
    go(noted, plain, 4)
    given = logits(noted, torch.tensor([[7]]))
    before = given.clone()
    for _ in range(3):
        logits(noted, torch.tensor([[9]]))
    assert torch.equal(given, before)
    # Texts of their own, in buffers of their own; the plain module's goes the way of the first.
    plain(input_ids=torch.tensor([[7]]))
    for _ in range(3):
        plain(input_ids=torch.tensor([[9]]))
    forks, ids = [module.handle.fork() for module in (noted, plain)], torch.tensor([[11]])
    for number in range(4):
        own, other = (
            module(input_ids=ids + number, past_key_values=fork).logits
            for module, fork in zip((noted, plain), forks, strict=True)
        )
        assert torch.equal(own, other)
        go(noted, plain, 1)
    fork = noted.handle.fork()
    # Under inference mode, and after it.
    for _ in range(3):
        with torch.inference_mode():
            own = noted(input_ids=ids, past_key_values=fork).logits
        assert torch.equal(own, logits(noted, ids))


def test_steps_of_which_somebody_sees_the_operators_are_made_one_by_one() -> None:
    names: set[str] = set()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.add(str(func))
            return func(*args, **(kwargs or {}))

    noted, plain = pair("baseline")
    prompt(noted, plain)
    go(noted, plain, 3)
    with Seen():
        logits(noted, torch.tensor([[7]]))
    assert "kvcompile.cpp_attend.default" in names
    logits(plain, torch.tensor([[7]]))
    go(noted, plain, 2)


@pytest.mark.slow
def test_steps_that_call_anything_else_run_as_before() -> None:
    """So many rows are left to PyTorch's library, by a linear layer's op that does not call its kernel."""
    noted, plain = pair("baseline", max_batch=65)
    prompt(noted, plain, batch=2)
    go(noted, plain, 4, batch=2)
    assert noted.executor.steps.count == 1
    for module in (noted, plain):
        module.reset()
    prompt(noted, plain, 2, batch=65)
    go(noted, plain, 4, batch=65)
    assert noted.executor.steps.count == 0
    assert any("noted" in why for why in noted.executor.steps.problems.values())


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [{"kernels": "reference"}, {"mode": "none"}])
def test_steps_without_kernels(compiled: dict[str, str]) -> None:
    """What Inductor makes of the reference is noted as well; what is not compiled is not."""
    noted, plain = pair("baseline", compile=compiled)
    prompt(noted, plain)
    go(noted, plain, 4)
    assert noted.executor.steps.count == ("kernels" in compiled)


def test_a_program_with_something_around_it_is_not_noted() -> None:
    """Nothing has run when that is found."""
    noted, plain = pair("baseline")
    prompt(noted, plain)
    shapes = noted._shapes(1, 1, 1)
    noted._prepare(shapes, None)
    programs = noted.executor._programs[shapes]
    own = programs[0]
    noted.executor._programs[shapes] = [lambda *args: own(*args), *programs[1:]]
    go(noted, plain, 4)
    assert noted.executor.steps.count == 0
    assert list(noted.executor.steps.problems.values()) == ["a region is no program of Inductor's"]


# ---- programs

FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


def test_functions_get_their_arguments() -> None:
    program, seen = StepProgram(), []
    function = FUNCTION(lambda *given: seen.append(given))
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    assert program.note_function(address, [1, -2, 2**62], alone=False)
    assert program.note_function(address, [4, 5, 6], alone=True)
    assert not program.note_function(address, [0] * 49, alone=False)
    assert len(program) == 2
    program.run()
    assert len(program.times()) == 2
    assert seen == [(1, -2, 2**62), (4, 5, 6)] * 2


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_a_team_does_all_of_the_work(threads: int) -> None:
    """Linear layers that follow each other, of more pieces than threads and fewer, by any number of threads."""
    torch.set_num_threads(threads)
    weights = [torch.randn(n, n) / n**0.5 for n in (512, 512, 512, 16, 512)]
    weights[3], weights[4] = torch.randn(16, 512), torch.randn(512, 16)
    x = torch.randn(1, 512)
    program, kept = StepProgram(), [x]
    with program.noting():
        for weight in weights:
            kept.append(ops.cpp_linear(kept[-1], weight, None, "linear float"))
    assert len(program) == len(weights)
    for _ in range(50):
        x.normal_()
        for y in kept[1:]:
            y.zero_()
        program.run()
        for own, weight, y in zip(kept, weights, kept[1:], strict=False):
            assert torch.equal(ops.cpp_linear(own, weight, None, "linear float"), y)


def test_what_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    noted, plain = pair("baseline")
    prompt(noted, plain)
    go(noted, plain, 3)

    def fail(self: StepProgram) -> None:
        raise KernelError("a decode step failed: as asked")

    columns = noted.cache.columns
    with monkeypatch.context() as patch:
        patch.setattr(cpu_step.StepProgram, "run", fail)
        with pytest.raises(KernelError, match="as asked"):
            logits(noted, torch.tensor([[7]]))
    assert noted.cache.columns == columns, "the token is not there"
    go(noted, plain, 3)
