"""Processes that have some layers of a model each: what they compute together, what each holds, and failures.

Where a graph is cut, and that its stages compute what it does, is shown in one process (`tests/passes/stages/`).
"""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

import kvcompile
from kvcompile.errors import InputError, PlanError, RankError
from kvcompile.models import load_model
from kvcompile.pipeline import understand
from kvcompile.serve import Engine
from tests.support.budget import rms
from tests.support.models import NanoGPT, TinyConfig, TinyLlama, make, tiny_hf
from tests.support.processes import spawn
from tests.support.ranks import over_ranks

EAGER = {"mode": "none"}
IDS = torch.arange(2 * 9).view(2, 9) % 50 + 3
NEW = 10

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: make(TinyLlama, TinyConfig(num_layers=4, num_heads=8, num_kv_heads=4)),
    "nano": lambda: make(NanoGPT),
    "mixtral": lambda: tiny_hf("mixtral", layers=3),
    "gemma3": lambda: tiny_hf("gemma3"),
}


def whole(model: nn.Module, recipe: str = "baseline") -> Any:
    return kvcompile.optimize(model, recipe, max_tokens=64, verify="off", compile=EAGER)


def part(model: nn.Module, recipe: str = "baseline", **options: Any) -> Any:
    overrides = {"compile": EAGER, "verify": "off"} | options.pop("overrides", {})
    parallel = {"stages": 2, "timeout": 15, "start": 120} | options
    return kvcompile.optimize(model, recipe, max_tokens=64, parallel=parallel, **overrides)


def logits(out: Any) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out.logits


def _same_text(rank: int, ranks: int, name: str, recipe: str, tensor: int) -> None:
    model, stages = MODELS[name](), ranks // tensor
    alone = whole(model, recipe)
    fast = part(model, recipe, stages=stages, tensor=tensor)
    assert torch.equal(fast.generate(IDS, max_new_tokens=NEW), alone.generate(IDS, max_new_tokens=NEW))
    alone.reset(), fast.reset()
    found, truth = logits(fast(IDS)), logits(alone(IDS))
    verified = over_ranks(model, tensor, recipe, stages).verified()
    budget = 2 * next(check.budget for check in verified if check.name == "lossless")
    assert rms(found - truth) <= budget * rms(truth)
    # Every rank keeps the caches of its own layers, and they all make the whole.
    kept = [0] * ranks
    torch.distributed.all_gather_object(kept, (fast.cache.nbytes, fast.plan.bytes(2, 64)))
    assert all(own == told for own, told in kept) and all(own for own, _ in kept)
    if tensor == 1:
        assert sum(own for own, _ in kept) == alone.cache.nbytes
    layers: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(layers, [d.layer for d in fast.plan.decisions])
    assert [n for own in layers[::tensor] for n in own] == [d.layer for d in alone.plan.decisions]
    # A draw is the same on all ranks, though each has random numbers of its own.
    torch.manual_seed(rank)
    drawn = fast.generate(IDS, max_new_tokens=NEW, do_sample=True, temperature=2.0)
    others = [torch.zeros_like(drawn) for _ in range(ranks)]
    torch.distributed.all_gather(others, drawn)
    assert all(torch.equal(each, drawn) for each in others)
    with pytest.raises(PlanError, match=r"stages: \d: an engine keeps the pages of all layers"):
        Engine(fast)
    # It has copies of its own weights, and nobody has the others.
    mine = {
        t.untyped_storage().data_ptr(): t.untyped_storage() for t in fast.executor.regions.weights.values()
    }
    sizes = sum(p.nbytes for p in model.parameters())
    weights = [weakref.ref(p) for p in model.parameters()]
    del model, alone
    gc.collect()
    assert not [own for own in (each() for each in weights) if own is not None]
    assert sum(storage.nbytes() for storage in mine.values()) < 0.8 * sizes


@pytest.mark.parametrize(
    "name, ranks, recipe, tensor",
    [
        ("llama", 2, "int8", 1),
        pytest.param("mixtral", 3, "baseline", 1, marks=pytest.mark.slow),
        pytest.param("nano", 2, "h2o", 1, marks=pytest.mark.slow),
        pytest.param("gemma3", 2, "int8", 1, marks=pytest.mark.slow),
        pytest.param("llama", 3, "kivi2", 1, marks=pytest.mark.slow),
        pytest.param("llama", 4, "int8", 2, marks=pytest.mark.slow),
    ],
)
def test_stages_give_what_one_process_gives(name: str, ranks: int, recipe: str, tensor: int) -> None:
    understand(MODELS[name]())  # for all ranks
    spawn(ranks, _same_text, name, recipe, tensor)


def _mapped(folder: str) -> bool:
    """Whether some of the checkpoint's files is mapped into this process."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return any(folder in line for line in maps)


def _lets_go(rank: int, ranks: int, folder: str, parallel: dict[str, Any]) -> None:
    loaded = load_model(folder)
    sizes = sum(p.nbytes for p in loaded.model.parameters())
    assert _mapped(folder)
    fast: Any = kvcompile.optimize(
        loaded.model, max_tokens=64, compile=EAGER, verify="off", parallel=parallel
    )
    del loaded
    gc.collect()
    assert not _mapped(folder)
    held = {
        t.untyped_storage().data_ptr(): t.untyped_storage() for t in fast.executor.regions.weights.values()
    }
    assert sum(storage.nbytes() for storage in held.values()) < 0.7 * sizes
    fast(IDS)


@pytest.mark.parametrize("kind", ["stages", pytest.param("tensor", marks=pytest.mark.slow)])
def test_a_rank_lets_go_of_the_checkpoint(kind: str, tmp_path: Path) -> None:
    """Files are mapped while they are read, and a rank's part is copied out of them."""
    tiny_hf("llama").save_pretrained(tmp_path)
    spawn(2, _lets_go, str(tmp_path), {kind: 2, "start": 120})


def _compiled(rank: int, ranks: int) -> None:
    model = MODELS["llama"]()
    wanted = whole(model).generate(IDS, max_new_tokens=NEW)
    fast = part(model, overrides={"compile": {"mode": "default"}}, timeout=250)
    assert torch.equal(fast.generate(IDS, max_new_tokens=NEW), wanted)
    assert len(fast.executor.compile_seconds) == 2


@pytest.mark.slow
def test_stages_are_compiled() -> None:
    spawn(2, _compiled)


def _several(rank: int, ranks: int, seen: Any) -> None:
    """What differs is told on all ranks before anything runs; then one that dies is an error on the other."""
    model = MODELS["llama"]()
    with torch.no_grad():
        list(model.parameters())[-1][rank] += rank  # the head, which the last stage has
    with pytest.raises(
        RankError, match=r"weights: the part of rank 1 is .* on rank 0, .* on rank 1. Start all"
    ):
        part(model)
    fast = part(MODELS["llama"](), timeout=4)
    with pytest.raises(InputError, match="called with different tokens: rank 1 not as rank 0"):
        fast(IDS + rank)
    fast(IDS)  # that refusal has moved nothing
    if rank == 1:  # its process lives, and nothing comes of it
        seen.wait(60)
        os._exit(0)
    started = time.monotonic()
    fast.group.agree = lambda ids, mask: None  # the stages' own messages are waited for
    with pytest.raises(RankError, match="another rank has died, or did not answer within 4 s"):
        fast(IDS[:, :1])
    with pytest.raises(RankError, match="is out of use"):
        fast(IDS)
    assert time.monotonic() - started < 18
    seen.set()
    os._exit(0)


def test_stages_begin_alike_and_wait_no_longer_than_they_are_told() -> None:
    spawn(2, _several, mp.get_context("fork").Event())


def _dies(rank: int, ranks: int) -> None:
    fast = part(MODELS["llama"]())
    fast(IDS)
    if rank == 0:  # the next one waits for what it would send
        os._exit(0)
    fast.group.agree = lambda ids, mask: None
    with pytest.raises(RankError, match="another rank has died"):
        fast(IDS[:, :1])
    os._exit(0)


@pytest.mark.slow
def test_a_stage_that_dies_is_an_error() -> None:
    spawn(2, _dies)


def test_without_processes_it_is_said_how_to_start_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        PlanError, match=r"tensor: 2, stages: 3 needs 6 processes.*torchrun --nproc-per-node 6"
    ):
        part(MODELS["llama"](), stages=3, tensor=2)
    with pytest.raises(PlanError, match="of stages, the groups are made of the default one"):
        kvcompile.optimize(MODELS["llama"](), parallel={"stages": 2}, device_mesh=object())
