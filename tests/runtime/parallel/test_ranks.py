"""Processes that have a part of a model each: what they compute together, what each holds, and how failures end.

Whether the parts are right is shown in one process (`tests/passes/shard/`): here are real processes and gloo.
"""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

import kvcompile
from kvcompile.errors import InputError, PlanError, RankError
from kvcompile.pipeline import understand
from kvcompile.runtime.parallel.options import Parallel
from tests.support.budget import rms
from tests.support.models import NanoGPT, TinyConfig, TinyLlama, make, tiny_hf
from tests.support.processes import spawn
from tests.support.ranks import over_ranks

EAGER = {"mode": "none"}
IDS = torch.arange(2 * 9).view(2, 9) % 50 + 3
NEW = 10


def llama(queries: int = 8, keys: int = 4) -> nn.Module:
    return make(TinyLlama, TinyConfig(num_heads=queries, num_kv_heads=keys))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "8/4": llama,
    "8/2": lambda: llama(8, 2),
    "8/1": lambda: llama(8, 1),
    "nano": lambda: make(NanoGPT),
    "mixtral": lambda: tiny_hf("mixtral"),
    "gpt2": lambda: tiny_hf("gpt2"),
}


def whole(model: nn.Module, recipe: str = "baseline") -> Any:
    return kvcompile.optimize(model, recipe, max_tokens=64, verify="off", compile=EAGER)


def part(model: nn.Module, ranks: int, recipe: str = "baseline", **options: Any) -> Any:
    overrides = {"compile": EAGER, "verify": "off"} | options.pop("overrides", {})
    parallel = {"tensor": ranks, "timeout": 15, "start": 120} | options
    return kvcompile.optimize(model, recipe, max_tokens=64, parallel=parallel, **overrides)


def logits(out: Any) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out.logits


def _same_text(rank: int, ranks: int, name: str, recipe: str, share: float) -> None:
    model = MODELS[name]()
    alone = whole(model, recipe)
    fast = part(model, ranks, recipe)
    wanted = alone.generate(IDS, max_new_tokens=NEW)
    assert torch.equal(fast.generate(IDS, max_new_tokens=NEW), wanted)
    alone.reset(), fast.reset()
    found, truth = logits(fast(IDS)), logits(alone(IDS))
    # Each is within the budget that verification measures for the model without its layout: codes have to be the same.
    verified = over_ranks(model, ranks, recipe).verified()
    budget = 2 * next(check.budget for check in verified if check.name == "lossless")
    assert rms(found - truth) <= budget * rms(truth)
    assert float((found - truth).abs().max()) <= budget * float(truth.abs().max())
    assert fast.cache.nbytes == fast.plan.bytes(2, 64) == share * alone.cache.nbytes
    # A draw is the same on all ranks, though each has random numbers of its own.
    torch.manual_seed(rank)
    drawn = fast.generate(IDS, max_new_tokens=NEW, do_sample=True, temperature=2.0)
    others = [torch.zeros_like(drawn) for _ in range(ranks)]
    torch.distributed.all_gather(others, drawn)
    assert all(torch.equal(each, drawn) for each in others)
    _refusals(fast)
    weak, sizes = weakref.ref(next(model.parameters())), [p.numel() for p in model.parameters()]
    del model, alone
    gc.collect()
    held = sum(t.numel() for t in fast.executor.regions.weights.values())
    assert held < sum(sizes)
    assert weak() is None or any(weak() is t for t in fast.executor.regions.weights.values())


def _refusals(fast: Any) -> None:
    with pytest.raises(kvcompile.KVCompileError, match=r"is rank . of . and has a part of the model"):
        fast.save("nowhere")


@pytest.mark.parametrize(
    "name, ranks, recipe, share",
    [
        ("8/4", 2, "baseline", 0.5),
        ("mixtral", 2, "int8", 0.5),
        pytest.param("nano", 3, "baseline", 1 / 3, marks=pytest.mark.slow),
        pytest.param("8/4", 4, "h2o", 0.25, marks=pytest.mark.slow),
        pytest.param("8/2", 4, "baseline", 0.5, marks=pytest.mark.slow),
        pytest.param("8/1", 2, "baseline", 1.0, marks=pytest.mark.slow),
        pytest.param("gpt2", 2, "int8", 0.5, marks=pytest.mark.slow),
    ],
)
def test_ranks_give_what_one_gives(name: str, ranks: int, recipe: str, share: float) -> None:
    understand(MODELS[name]())  # for all ranks
    spawn(ranks, _same_text, name, recipe, share)


def _smollm2(rank: int, ranks: int) -> None:
    from kvcompile.models import load_model

    loaded = load_model("smollm2", "float32")
    tokens = loaded.tokenizer("The sea is", return_tensors="pt")
    fast = part(loaded.model, ranks)
    got = fast.generate(**tokens, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(got, loaded.model.generate(**tokens, max_new_tokens=NEW, do_sample=False))
    assert [d.num_kv_heads for d in fast.plan.decisions] == [1] * 30
    assert fast.report["whole"] == ()


@pytest.mark.slow
def test_smollm2_on_three_ranks() -> None:
    """9 query and 3 KV heads, real weights: the text of transformers' own generate()."""
    spawn(3, _smollm2)


def _compiled(rank: int, ranks: int) -> None:
    model = llama()
    wanted = whole(model).generate(IDS, max_new_tokens=NEW)
    fast = part(model, ranks, overrides={"compile": {"mode": "default"}}, timeout=250)
    assert torch.equal(fast.generate(IDS, max_new_tokens=NEW), wanted)
    assert len(fast.executor.compile_seconds) == 2


@pytest.mark.slow
def test_inductor_traces_the_collectives() -> None:
    spawn(2, _compiled)


def _several(rank: int, ranks: int) -> None:
    """What differs between ranks is told on all of them, before anything runs."""
    model = llama()
    with torch.no_grad():
        next(model.parameters())[rank] += rank
    with pytest.raises(
        RankError, match=r"weights: the part of rank 1 is .* on rank 0, .* on rank 1. Start all"
    ):
        part(model, ranks)
    with pytest.raises(RankError, match=r"plan: .* on rank 0, .* on rank 1"):
        part(llama(), ranks, "int8" if rank else "baseline")
    fast = part(llama(), ranks)
    with pytest.raises(InputError, match="called with different tokens: rank 1 not as rank 0"):
        fast(IDS + rank)
    fast(IDS)  # that refusal has moved nothing
    mesh = torch.distributed.device_mesh.init_device_mesh(
        "cpu", (1, ranks), mesh_dim_names=("data", "tensor")
    )
    fast = kvcompile.optimize(
        llama(), max_tokens=64, compile=EAGER, verify="off", parallel={"tensor": ranks}, device_mesh=mesh
    )
    assert fast.generate(IDS, max_new_tokens=3).shape == (2, 12)


def test_ranks_that_do_not_have_the_same_do_not_begin() -> None:
    spawn(2, _several)


def _dies(rank: int, ranks: int) -> None:
    fast = part(llama(), ranks)
    fast(IDS)
    if rank == 1:
        os._exit(0)
    started = time.monotonic()
    with pytest.raises(RankError, match="another rank has died"):
        for _ in range(50):
            fast(IDS[:, :1])
    with pytest.raises(RankError, match="is out of use"):
        fast(IDS)
    assert time.monotonic() - started < 40
    os._exit(0)


def test_a_rank_that_dies_is_an_error() -> None:
    spawn(2, _dies)


def _hangs(rank: int, ranks: int, seen: Any) -> None:
    fast = part(llama(), ranks, timeout=4)
    fast(IDS)
    if rank == 1:  # its process lives, and nothing comes of it
        seen.wait(60)
        os._exit(0)
    started = time.monotonic()
    with pytest.raises(RankError, match="did not answer within 4 s"):
        fast.group.agree = lambda ids, mask: None  # the graph's own collectives are waited for
        fast(IDS[:, :1])
    assert time.monotonic() - started < 20
    seen.set()
    os._exit(0)


def test_a_rank_that_hangs_is_an_error_within_the_time_limit() -> None:
    spawn(2, _hangs, mp.get_context("fork").Event())


def test_without_processes_it_is_said_how_to_start_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(PlanError, match="torchrun --nproc-per-node 2"):
        part(llama(), 2)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "x"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(PlanError, match="2 ranks, and torchrun has started 3 processes"):
        part(llama(), 2)


@pytest.mark.parametrize(
    "given, problem",
    [
        ({"tensor": 0}, "tensor: expected a number of ranks"),
        ({"tensor": True}, "tensor: expected a number of ranks"),
        ({"stages": 0}, "stages: expected a number of stages"),
        ({"tensors": 2}, "'tensors' is not known; known: tensor, stages, timeout, start"),
        ({"tensor": 2, "timeout": 0}, "timeout: expected seconds"),
        ("2", "expected a mapping"),
    ],
)
def test_what_parallel_may_say(given: Any, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        Parallel.of(given)
    assert Parallel.of(None).tensor == 1
