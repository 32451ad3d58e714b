"""An engine over two ranks says what one rank says: prefixes, preemption, swaps, snapshots; and a rank that goes.

What is compared is computed in the test's own process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

import kvcompile
from kvcompile.errors import KVCompileError, ServeError
from kvcompile.pipeline import understand
from kvcompile.serve import Engine, Sampling, follow
from tests.support.models import tiny_hf
from tests.support.processes import ended, started

RANKS = 2
START = 60.0  # seconds that ranks wait for each other before they serve
PAGED = {"cache": {"placement": {"kind": "paged", "page_size": 8}}}
SHARED = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
PROMPTS = [[*SHARED, 7, 7], [*SHARED, 1], [5] * 30, [*SHARED[:9], 2], [8, 6, 4], [*SHARED, 7, 7, 9]]

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "prefixes": (PAGED, {}),
    "few pages": (PAGED, {"memory": 12 * 2 * 8 * 2 * 8 * 4, "max_sequences": 3}),  # of one rank's heads
    "host memory": (PAGED, {"memory": 12 * 2 * 8 * 2 * 8 * 4, "max_sequences": 3, "host_memory": "1MiB"}),
    "snapshots": ({"cache": {}}, {"snapshot_memory": "4MiB", "prefill_tokens": 8}),
    "packed": (PAGED, {"packed": "on"}),
}


def module(recipe: dict[str, Any], ranks: int = 1, timeout: float = 10.0) -> Any:
    parallel = {"tensor": ranks, "timeout": timeout, "start": START} if ranks > 1 else None
    options: dict[str, Any] = {"verify": "off", "compile": {"mode": "none"}, "max_tokens": 64, "max_batch": 4}
    return kvcompile.optimize(tiny_hf(), recipe, parallel=parallel, **options)


def said(engine: Engine) -> list[Any]:
    """What an engine says to all prompts, twice: the second time it finds the first."""
    found: list[Any] = []
    for sampling in (Sampling(max_tokens=12), Sampling(max_tokens=9, temperature=0.7, seed=3, n=2)):
        results = engine.generate(PROMPTS, sampling)
        found += [[completion.tokens for completion in result.completions] for result in results]
    return found


def ranked(rank: int, run: Callable[..., Any], folder: str, given: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS
    )
    try:
        result = run(rank, *given)
    except KVCompileError as error:
        result = f"{type(error).__name__}: {error}"
    torch.save(result, f"{folder}/{rank}")


def over_ranks(run: Callable[..., Any], folder: Path, *given: Any, killed: int | None = None) -> list[Any]:
    """What `run(rank, ...)` gives on each rank; killed: one that is killed once it has made a file `begun`."""
    context = started(RANKS, ranked, run, str(folder), given)
    if killed is not None:
        deadline = time.monotonic() + 60
        while not (folder / "begun").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(context.processes[killed].pid, signal.SIGKILL)
        for process in context.processes:
            process.join(60)
        assert not any(process.is_alive() for process in context.processes)
    else:
        ended(context)
    return [
        torch.load(folder / str(rank), weights_only=False) if (folder / str(rank)).exists() else None
        for rank in range(RANKS)
    ]


def serve(rank: int, name: str) -> Any:
    recipe, options = CASES[name]
    fast = module(recipe, RANKS)
    if rank:
        return follow(fast)
    with Engine(fast, **options) as engine:
        engine.warmup()
        return said(engine), engine.stats()


def idle(rank: int) -> Any:
    """Nothing to do for more than twice the time limit of a rank."""
    fast = module(PAGED, RANKS, timeout=2.0)
    if rank:
        return follow(fast)
    with Engine(fast) as engine:
        time.sleep(4.5)
        return engine.generate([[5, 6, 7]], Sampling(max_tokens=3))[0].tokens


def wrong_sides(rank: int) -> Any:
    fast = module(PAGED, RANKS)
    return follow(fast) if rank == 0 else Engine(fast)


def no_room(rank: int) -> Any:
    fast = module(PAGED, RANKS)
    return follow(fast) if rank else Engine(fast, memory=500)


def nothing_shared(rank: int) -> Any:
    fast = module({"cache": {}}, RANKS)
    return follow(fast) if rank else Engine(fast, prefix_cache="on", snapshot_memory=0)


def with_a_store(rank: int) -> Any:
    fast = module(PAGED, RANKS)
    if rank:
        return follow(fast)
    try:
        return Engine(fast, store="here")
    except KVCompileError as error:
        Engine(fast, memory="1MiB").close()  # nothing was told before: the others still wait
        return str(error)


JOBS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    **{name: (serve, (name,)) for name in CASES},
    **{job.__name__: (job, ()) for job in (idle, wrong_sides, no_room, nothing_shared, with_a_store)},
}


def all_jobs(rank: int) -> dict[str, Any]:
    found = {}
    for name, (job, given) in JOBS.items():
        began = time.monotonic()
        try:
            found[name] = job(rank, *given)
        except KVCompileError as error:
            found[name] = f"{type(error).__name__}: {error}"
        found[f"{name} took"] = time.monotonic() - began
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@lru_cache
def answered(folder: Path) -> list[dict[str, Any]]:
    understand(tiny_hf())  # for all ranks and jobs
    return over_ranks(all_jobs, folder)


@pytest.fixture
def answers(folder: Path) -> list[dict[str, Any]]:
    """What each rank's jobs gave: processes are started once for all of them."""
    return answered(folder)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_ranks_say_what_one_says(name: str, answers: list[dict[str, Any]]) -> None:
    found, ranked = answers[0][name]
    recipe, options = CASES[name]
    whole = {key: value * 2 if key == "memory" else value for key, value in options.items()}
    with Engine(module(recipe), **whole) as engine:
        assert said(engine) == found
        assert ranked.bytes < 0.6 * engine.stats().bytes
    assert answers[1][name] is None
    assert ranked.cached_tokens > 0
    assert (ranked.preemptions > 0) == (name in ("few pages", "host memory"))
    assert (ranked.swapped_bytes > 0) == (name == "host memory")
    assert (ranked.packed_steps > 0) == (name == "packed")


def test_ranks_may_be_idle_for_long(answers: list[dict[str, Any]]) -> None:
    assert len(answers[0]["idle"]) == 3 and answers[1]["idle"] is None


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("wrong_sides", ("this module is rank 0", "an engine is made on rank 0")),
        ("no_room", ("takes at least", "takes at least")),
        ("nothing_shared", ("texts share nothing", "texts share nothing")),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(
    name: str, told: tuple[str, str], answers: list[dict[str, Any]]
) -> None:
    for text, rank in zip(told, answers, strict=True):
        assert text in rank[name]
        assert rank[f"{name} took"] < START, "one has waited for the other, who was gone"


def test_a_store_is_refused_before_anybody_is_told(answers: list[dict[str, Any]]) -> None:
    assert "store: ranks have none" in answers[0]["with_a_store"] and answers[1]["with_a_store"] is None


def dying(rank: int, folder: str) -> Any:
    fast = module(PAGED, RANKS)
    if rank:
        return follow(fast)
    with Engine(fast) as engine:
        handle = engine.submit([5, 6, 7], Sampling(max_tokens=50))
        next(iter(handle))
        Path(folder, "begun").touch()
        time.sleep(1)
        began = time.monotonic()
        try:
            for _ in range(1000):
                engine.submit([5, 6, 7], Sampling(max_tokens=50)).result(timeout=30)
        except ServeError as error:
            return str(error), time.monotonic() - began
    return "nobody noticed", 0.0


def test_a_rank_that_dies_ends_the_engine(tmp_path: Path) -> None:
    understand(tiny_hf())
    found, gone = over_ranks(dying, tmp_path, str(tmp_path), killed=1)
    error, seconds = found
    assert gone is None and seconds < 25
    assert "another rank has died" in error or "closed" in error


def test_one_module_has_nobody_to_follow() -> None:
    with pytest.raises(ServeError, match="on no ranks: make a"):
        follow(module(PAGED))
