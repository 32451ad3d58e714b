"""Compiled with Inductor: the numbers of the eager graph, once per class of shapes, repeated layers once.

Torch's own counters say what compiles: `counters["aot_autograd"]["total"]` counts every graph that goes through
AOTAutograd, Inductor's FX graph cache its misses (code was generated) and hits; test_the_counters_move shows it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import kvcompile
from kvcompile.compile.inductor import ShapeClass
from kvcompile.pipeline import Front, understand
from kvcompile.verify import Check, check_program
from tests.support.exports import tiny
from tests.support.marks import cases
from tests.support.models import tiny_hf

LAYERS = 3
SMALL = {"retention": {"sinks": 3, "window": 8}}  # wraps within the tests' few dozen tokens
RECIPES: dict[str, dict[str, Any]] = {
    "baseline": {"max_tokens": 200},
    "int8": {"max_tokens": 200},
    "streaming_int8": {"cache": SMALL},
}

QUICK = ("streaming_int8",)  # what the others have, its ring and its bits have as well


def optimize(model: Any, recipe: str, mode: str) -> Any:
    return kvcompile.optimize(
        model, recipe, verify="off", prefill_chunk=32, compile={"mode": mode}, **RECIPES[recipe]
    )


@pytest.fixture(scope="module", autouse=True)
def empty_inductor_cache() -> Iterator[None]:
    with fresh_cache():
        yield


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_hf("llama", layers=LAYERS)


@pytest.fixture(scope="module")
def front(model: Any) -> Front:
    return understand(model)


class Modules(dict[str, Any]):
    """Each recipe's module, made when it is first asked for; what a test compiles, the later ones find compiled."""

    def __init__(self, model: Any, mode: str) -> None:
        self.model, self.mode = model, mode

    def __missing__(self, recipe: str) -> Any:
        self[recipe] = optimize(self.model, recipe, self.mode)
        return self[recipe]


@pytest.fixture(scope="module")
def compiled(model: Any) -> dict[str, Any]:
    return Modules(model, "default")


@pytest.fixture(scope="module")
def eager(model: Any) -> dict[str, Any]:
    return Modules(model, "none")


def compilations() -> dict[str, int]:
    return {
        "graphs": counters["aot_autograd"]["total"],
        "misses": counters["inductor"]["fxgraph_cache_miss"],
        "hits": counters["inductor"]["fxgraph_cache_hit"],
    }


def since(before: dict[str, int]) -> dict[str, int]:
    return {name: count - before[name] for name, count in compilations().items()}


NOTHING = {"graphs": 0, "misses": 0, "hits": 0}


def tokens(batch: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 61, (batch, count), generator=torch.Generator().manual_seed(seed))


def run(fast: Any, ids: Tensor, chunks: list[int]) -> Tensor:
    fast.reset()
    outs, start = [], 0
    for size in chunks:
        outs.append(fast(ids[:, start : start + size]).logits)
        start += size
    return torch.cat(outs, dim=1)


CHUNKS = [21, 1, 1, 7, 1, 14]


def of_policy(fast: Any, front: Front) -> Check:
    """The program over prompt, chunks and steps, ragged, against the oracle of its policy."""
    fast.reset()
    return check_program(lambda ids, mask: fast(ids, mask).logits, front, fast.plan, CHUNKS)


@pytest.mark.parametrize("recipe", cases(RECIPES, QUICK))
def test_compiled_equals_eager_and_the_policy(
    front: Front, compiled: dict[str, Any], eager: dict[str, Any], recipe: str
) -> None:
    """The budget is verify's: how far a few units in the last place move the policy's own logits."""
    check = of_policy(compiled[recipe], front)
    of_policy(eager[recipe], front)
    ids = tokens(2, sum(CHUNKS))
    got, expected = (run(models[recipe], ids, CHUNKS).double() for models in (compiled, eager))
    assert (got - expected).square().mean().sqrt() <= check.budget * expected.square().mean().sqrt()


@pytest.mark.slow  # quick as ONNX
@pytest.mark.parametrize(
    ("group", "placement"),
    [
        (64, {"kind": "contiguous"}),
        pytest.param(128, {"kind": "paged", "page_size": 128}, marks=pytest.mark.slow),
    ],
)
def test_groups_of_tokens_of_any_size(group: int, placement: dict[str, Any]) -> None:
    """Also where one group holds all that was there when the graph was traced."""
    part = {"dtype": "int4", "axis": "channel", "group": group, "residual": group}
    sizes = {"max_tokens": 4 * group, "max_batch": 2}
    recipe = {"cache": {"keys": part, "placement": placement}, "runtime": sizes, "verify": "off"}
    model = tiny(layers=1)
    fast = kvcompile.optimize(model, recipe)
    chunks = (3, 1, group + 30, 1, 1, group, 30, 1)
    check = check_program(lambda ids, mask: fast(ids, mask).logits, understand(model), fast.plan, chunks)
    assert check.tokens == sum(chunks)


@pytest.mark.slow  # quick ones compare the ring with its oracle
def test_compiled_baseline_equals_the_original(model: Any, compiled: dict[str, Any]) -> None:
    """Within twice this dtype's own error against float64, plus rounding."""
    ids = tokens(2, sum(CHUNKS))
    with torch.no_grad():
        own, exact = model(ids).logits, copy.deepcopy(model).double()(ids).logits
    budget = 2 * (own - exact).abs().max() + 64 * torch.finfo(own.dtype).eps * exact.abs().max()
    assert (run(compiled["baseline"], ids, CHUNKS) - own).abs().max() <= budget


@pytest.mark.parametrize("recipe", cases(RECIPES, QUICK))
def test_nothing_compiles_again(compiled: dict[str, Any], recipe: str) -> None:
    fast = compiled[recipe]
    fast.reset()
    fast(tokens(2, 9))
    fast(tokens(2, 1))
    before = compilations()
    for step in range(40):  # over a block of 64 slots, and round the ring
        fast(tokens(2, 1, step))
    for size in (7, 7, 2, 19, 7):
        fast(tokens(2, size))
    fast(tokens(2, 70))  # in three passes
    for batch in (3, 5, 2):
        fast.reset()
        fast(tokens(batch, 13))
        fast(tokens(batch, 1))
    fast.release()
    mask = torch.ones(2, 11, dtype=torch.int64)
    mask[0, :4] = 0
    fast(tokens(2, 11), mask)
    fast(tokens(2, 1))
    assert since(before) == NOTHING


def test_the_counters_move(compiled: dict[str, Any]) -> None:
    """The control: one sequence is another class of shapes, and each of its regions compiles, once."""
    fast = compiled["streaming_int8"]
    before = compilations()
    fast.reset()
    fast(tokens(1, 1))
    assert since(before) == {"graphs": 3, "misses": 3, "hits": 0}
    fast(tokens(1, 1))
    assert since(before) == {"graphs": 3, "misses": 3, "hits": 0}
    assert {str(shapes) for shapes in fast.executor._programs} == {
        "prefill, a batch",
        "decode, a batch",
        "decode, one sequence",
    }


def test_layers_that_repeat_compile_once(model: Any, compiled: dict[str, Any]) -> None:
    """Six layers have the regions of three; so they find all of their code in Inductor's cache."""
    deep = optimize(tiny_hf("llama", layers=2 * LAYERS), "streaming_int8", "default")
    shallow = compiled["streaming_int8"]
    regions, fewer = deep.executor.regions, shallow.executor.regions
    assert len(regions.modules) == len(fewer.modules) == 3
    assert [call.region for call in fewer.calls] == [0, 1, 1, 2]
    assert [call.region for call in regions.calls] == [0, 1, 1, 1, 1, 1, 2]
    run(shallow, tokens(2, 9), [8, 1])
    before = compilations()
    run(deep, tokens(2, 9), [8, 1])
    assert since(before) == {"graphs": 6, "misses": 0, "hits": 6}


def test_a_second_optimize_finds_the_code(model: Any, compiled: dict[str, Any]) -> None:
    run(compiled["streaming_int8"], tokens(2, 9), [8, 1])
    again = optimize(model, "streaming_int8", "default")
    before = compilations()
    run(again, tokens(2, 9), [8, 1])
    assert since(before) == {"graphs": 6, "misses": 0, "hits": 6}


def test_warmup_leaves_nothing_for_generate(compiled: dict[str, Any]) -> None:
    """Prompt and decode step of a batch, as generate() calls them (the last logits only)."""
    fast = compiled["streaming_int8"]
    told: list[tuple[str, int, int]] = []
    seconds = fast.warmup(batch=2, progress=lambda *args: told.append(args))
    assert set(seconds) >= {"prefill, a batch", "decode, a batch"} and min(seconds.values()) > 0
    assert told and all(done <= total for _, done, total in told)
    before = compilations()
    fast.generate(tokens(2, 40), max_new_tokens=5)
    assert since(before) == NOTHING
    made = fast.executor._programs
    assert any(one == ShapeClass(False, False, True, one.span) for one in made)
