"""A decode step as one CUDA graph: what is captured when, what a replay reads, and what forgets it.

There is no GPU here. `Recorder` stands in for CUDA: a capture leaves everything as it was, and a replay runs the same
step on the same tensors again, as a graph does. So a stale input, a buffer that has moved or a step that is computed
twice shows in the numbers. `test_on_a_gpu` holds the real one to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcompile.api import build
from kvcompile.compile.cudagraph import StepGraphs
from kvcompile.compile.inductor import _patches
from kvcompile.decide.decode_step import with_step
from kvcompile.errors import CompileError, PlanError
from kvcompile.pipeline import plan_for, understand
from kvcompile.recipe import Recipe
from kvcompile.report.explain import Explanation
from tests.support.models import NanoGPT, TinyConfig, make, tiny_hf
from tests.verify.test_verify import fronts

CUDA = torch.device("cuda", 0)
Run = Callable[[], tuple[Tensor, ...]]


class Recorder:
    """Captures on a CPU; `state` gives all tensors that a step may change."""

    def __init__(self, state: Callable[[], list[Tensor]]):
        self.state = state
        self.log: list[str] = []

    def warm(self, run: Run) -> tuple[Tensor, ...]:
        self.log.append("warm")
        return run()

    def capture(self, run: Run) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
        self.log.append("capture")
        before = [tensor.clone() for tensor in self.state()]
        outputs = run()
        for tensor, old in zip(self.state(), before, strict=True):
            tensor.copy_(old)

        def replay() -> None:
            self.log.append("replay")
            for output, value in zip(outputs, run(), strict=True):
                output.copy_(value)

        for output in outputs:
            output.zero_()  # nothing has been computed yet
        return replay, outputs


def modules(kind: str, recipe: str, **more: Any) -> tuple[Any, Any, Recorder]:
    """The module with captured steps, the same without, and what captures."""
    if kind == "nanogpt":
        model = make(NanoGPT, TinyConfig(num_layers=1))
        front = understand(model)
    else:
        model, front = fronts(kind, "float32")
    made = Recipe.load(recipe, **({"verify": "off", "compile": {"mode": "none"}, "max_tokens": 64} | more))
    captured, plain = (build(model, front, made) for _ in range(2))
    recorder = Recorder(lambda: list(captured.cache.buffers.values()))
    captured.executor.graphs = StepGraphs(recorder)
    return captured, plain, recorder


def logits(out: Any) -> Tensor:
    found: Tensor = out if isinstance(out, Tensor) else out.logits
    return found


def both(captured: Any, plain: Any, batch: int, tokens: int, mask: Tensor | None = None) -> None:
    ids = torch.randint(3, 61, (batch, tokens))
    got, wanted = (
        logits(module(ids, mask) if mask is not None else module(ids)) for module in (captured, plain)
    )
    assert torch.equal(got, wanted)


RECIPES: dict[str, dict[str, Any]] = {
    "int8": {},
    "streaming": {"cache": {"retention": {"window": 20}}},
    "h2o": {"cache": {"retention": {"heavy": 8, "recent": 9}}},  # a step twice would count its scores twice
    "kivi2": {"cache": {"values": {"group": 0}}},
    "paged_int8": {},  # the pool grows, and its buffers move
}


@pytest.mark.few(2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_replayed_steps_equal_those_that_are_run(recipe: str) -> None:
    captured, plain, recorder = modules("llama", recipe, **RECIPES[recipe])
    mask = torch.ones(2, 11, dtype=torch.int64)
    mask[1, :3] = 0
    for padding in (None, mask):
        captured.reset(), plain.reset()
        both(captured, plain, 2, 11, padding)
        for _ in range(30):
            both(captured, plain, 2, 1)
        both(captured, plain, 2, 7)  # many tokens are not captured
        both(captured, plain, 2, 1)
    assert recorder.log.count("replay") > 30
    if recipe != "paged_int8":
        assert recorder.log.count("warm") == recorder.log.count("capture") == 1


def test_what_is_handed_out_stays() -> None:
    captured, plain, _ = modules("nanogpt", "int8")
    both(captured, plain, 1, 3)
    ids = torch.randint(3, 61, (1, 5))
    kept, wanted = ([logits(m(ids[:, i : i + 1])) for i in range(5)] for m in (captured, plain))
    assert all(torch.equal(a, b) for a, b in zip(kept, wanted, strict=True))


def test_each_key_has_its_graph() -> None:
    """One sequence and batches of two sizes; spans of 512, 1,024 and the capacity."""
    captured, plain, recorder = modules("nanogpt", "int8", max_tokens=128)
    for batch in (1, 2, 3):
        captured.reset(), plain.reset()
        both(captured, plain, batch, 5)
        for _ in range(4):
            both(captured, plain, batch, 1)
    # Other buffers stand elsewhere: the graphs of the batch before are gone.
    assert captured.executor.graphs.count == 1 and recorder.log.count("capture") == 3
    long, _, _ = modules("llama", "int8", max_tokens=1500)
    spans = [long._span(tokens, True) for tokens in (1, 512, 513, 1024, 1025, 1500)]
    assert spans == [512, 512, 1024, 1024, 1500, 1500]
    assert [long._span(tokens, False) for tokens in (1, 65, 1500)] == [64, 128, 1500]


def test_another_span_is_another_graph() -> None:
    captured, plain, recorder = modules("llama", "int8", max_tokens=1024, prefill_chunk=512)
    both(captured, plain, 1, 508)
    for _ in range(8):
        both(captured, plain, 1, 1)
    assert captured.executor.graphs.count == 2
    assert recorder.log == ["warm", "capture", *["replay"] * 3, "warm", "capture", *["replay"] * 3]


def test_buffers_that_move_are_noticed() -> None:
    captured, plain, recorder = modules("nanogpt", "paged_int8")
    both(captured, plain, 1, 14)
    versions = set()
    for _ in range(40):
        both(captured, plain, 1, 1)
        versions.add(captured.cache.version)
    assert len(versions) > 1 and recorder.log.count("capture") == len(versions)
    captured.release(), plain.release()
    assert captured.executor.graphs.count == 0 and captured.cache.version not in versions
    both(captured, plain, 1, 14)
    for _ in range(3):
        both(captured, plain, 1, 1)


def test_beams_are_reordered_under_the_graph() -> None:
    captured, plain, _ = modules("llama", "paged_int8", max_tokens=40)
    both(captured, plain, 2, 19)
    for order in ([0, 1], [1, 1], [0, 0], [1, 0]):
        for module in (captured, plain):
            module.cache.reorder(torch.tensor(order))
        for _ in range(3):
            both(captured, plain, 2, 1)


def test_a_failed_capture_says_what_to_do() -> None:
    captured, plain, recorder = modules("nanogpt", "int8")
    both(captured, plain, 1, 5)
    both(captured, plain, 1, 1)

    def fails(run: Run) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    recorder.capture = fails  # type: ignore[method-assign]
    with pytest.raises(
        CompileError, match=r"not permitted .* Nothing was computed; compile: \{mode: default\}"
    ):
        captured(torch.tensor([[3]]))
    captured.executor.graphs = None
    both(captured, plain, 1, 1)  # the cache is as it was


# ---- who gets it


def test_modes_of_a_plan() -> None:
    _, front = fronts("llama", "float32")
    plan = plan_for(front, Recipe.load("int8", max_tokens=64))
    for mode in ("default", "none"):
        assert with_step(plan, mode, CUDA, ()) is plan
    for mode in ("cudagraphs", "max-autotune"):
        made = with_step(plan, mode, CUDA, ())
        assert made.step == "cudagraph" and made.digest() != plan.digest()
        assert f"one CUDA graph: mode {mode}" in Explanation(made, (), "export", (), 0.0, 0.0).render()
    assert with_step(plan, "max-autotune", torch.device("cpu"), ()).step == "regions"
    python = with_step(plan, "max-autotune", CUDA, ("layers.0.mixer",))
    assert python.step == "regions" and "layers.0.mixer runs as Python" in python.step_because
    with pytest.raises(
        PlanError, match=r"layers\.0\.mixer and 1 more run as Python, which a CUDA graph cannot hold"
    ):
        with_step(plan, "cudagraphs", CUDA, ("layers.0.mixer", "layers.1.mixer"))


def test_a_cpu_has_no_cuda_graphs() -> None:
    _, front = fronts("llama", "float32")
    with pytest.raises(
        PlanError, match=r"compile.mode: cudagraphs: .* the model is on cpu; use mode: default"
    ):
        plan_for(front, Recipe.load("int8", compile={"mode": "cudagraphs"}))
    assert plan_for(front, Recipe.load("int8", compile={"mode": "max-autotune"})).step == "regions"


def test_inductor_makes_none_of_single_regions() -> None:
    for mode in ("default", "cudagraphs", "max-autotune"):
        assert _patches(mode)["triton.cudagraphs"] is False
    assert _patches("max-autotune")["max_autotune"] is True


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["int8", "paged_int8", "h2o_int8"])
def test_on_a_gpu(recipe: str) -> None:
    model = tiny_hf("llama", head_dim=16).to("cuda")
    front = understand(model)
    captured, plain = (
        build(model, front, Recipe.load(recipe, max_tokens=256, compile={"mode": mode}))
        for mode in ("cudagraphs", "default")
    )
    ids = torch.randint(3, 61, (2, 80), device="cuda")
    outs: list[Any] = [
        [logits(m(ids[:, :40])), *(logits(m(ids[:, i : i + 1])) for i in range(40, 80))]
        for m in (captured, plain)
    ]
    for got, wanted in zip(*outs, strict=True):
        torch.testing.assert_close(got, wanted)
    assert captured.executor.graphs is not None and captured.executor.graphs.count
