"""Many clients for a long time: whatever fails, leaves or lacks room, nothing stays behind and no text is another's.

`KVCOMPILE_SOAK_SECONDS=600 pytest -m slow tests/serve/test_soak.py` is the long one (that long without the variable).
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import psutil
import pytest
import torch

import kvcompile
from kvcompile.runtime.module import CachedModel
from kvcompile.serve import Engine
from tests.support.models import tiny_hf
from tests.support.serving import alone
from tests.support.soaking import Ends, Known, Mishaps, known_prompts, left_over, soak

SECONDS = float(os.environ.get("KVCOMPILE_SOAK_SECONDS", "600"))
SLICE = 12.0  # seconds of one engine
GROWTH = 16 << 20  # bytes that a process may grow by in the second half of the rounds
CHUNK, MOST, NEW = 16, 40, 12
MARGIN = 1e-3  # of the likeliest token before the next: more than batches of other sizes round


def pages(recipe: str, size: int = 8) -> dict[str, Any]:
    dtype = {"dtype": "int8"} if recipe == "int8" else {}
    return {"cache": {"keys": dtype, "values": dtype, "placement": {"kind": "paged", "page_size": size}}}


# What an engine is made with, and whether its texts are exactly those of the module alone.
CASES: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "paged": (pages("model"), {}, True),
    "paged_int8": (pages("int8"), {"prefix_cache": "on"}, False),
    "few pages": (pages("model"), {"pages": 14}, True),
    "host memory": (pages("model"), {"pages": 14, "host_memory": "64KiB"}, True),
    "ring in pages": ("streaming", {}, False),
    "scores": ("h2o", {}, False),
    "not in pages": ("baseline", {}, True),
}


@lru_cache
def module(case: str) -> CachedModel:
    return kvcompile.optimize(
        tiny_hf(),
        CASES[case][0],
        verify="off",
        compile={"mode": "none"},
        max_tokens=80,
        max_batch=6,
        prefill_chunk=CHUNK,
    )


def engine(case: str) -> Engine:
    options = dict(CASES[case][1])
    few = options.pop("pages", None)
    if few is not None:
        with Engine(module(case)) as whole:
            rules, rows = whole._scheduler.rules, whole._scheduler.rules.rows
        options["memory"] = (few + 1) * sum(rules.page_bytes) + rows * rules.row_bytes
    return Engine(module(case), max_queue=40, **options)


def clear(case: str, prompt: Any) -> tuple[int, ...]:
    """The likeliest text of a module alone; () where some token is not clearly the likeliest."""
    made = module(case)
    out = made.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)[0]
    text = out[len(prompt) :]
    best = alone(made, out[:-1].tolist(), len(prompt), CHUNK, False).topk(2)
    agreed = bool(
        (best.indices[:, 0] == text).all() and (best.values[:, 0] - best.values[:, 1] > MARGIN).all()
    )
    return tuple(text.tolist()) if agreed else ()


@lru_cache
def known() -> Known:
    return known_prompts(partial(clear, "not in pages"), 16, MOST)


def one(case: str, seconds: float, seed: int) -> tuple[Ends, Any, Mishaps]:
    exact = CASES[case][2]
    mishaps = Mishaps(run=0.01, move=0.01, fork=0.05, seed=seed)
    ends, stats = soak(partial(engine, case), known(), seconds, (1, MOST), mishaps, seed, exact=exact)
    return ends, stats, mishaps


@pytest.mark.parametrize("case", ["few pages", "host memory"])
def test_nothing_stays_behind(case: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "kvcompile")  # every mishap would be told
    ends, stats, mishaps = one(case, 2.0, seed=1)
    assert ends.of["finished"] > 20 and ends.compared > 5, ends
    assert ends.of["cancelled"] and ends.of["failed"] and mishaps.happened["run"], (ends, mishaps)
    assert stats.preemptions and stats.cached_tokens, stats
    assert bool(stats.swapped_bytes) == (case == "host memory")
    assert not left_over()


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 4 + 300)  # a process may be stopped meanwhile
def test_soak(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """Every layout in turn, a new engine each time, until the time is over."""
    caplog.set_level(logging.CRITICAL, "kvcompile")
    rounds = max(4, round(SECONDS / (SLICE * len(CASES))))
    total, mishaps, sizes = Ends(), Mishaps(), []
    preempted = swapped = 0
    for turn in range(rounds):
        for number, case in enumerate(CASES):
            ends, stats, happened = one(case, SLICE, seed=turn * len(CASES) + number)
            total.add(ends)
            mishaps.happened += happened.happened
            preempted, swapped = preempted + stats.preemptions, swapped + stats.swapped_bytes
            assert not left_over(), f"{case}, round {turn}"
        gc.collect()
        with suppress(AttributeError):  # not glibc, which keeps what was freed
            ctypes.CDLL(None).malloc_trim(0)
        sizes.append(psutil.Process().memory_info().rss)
        with capsys.disabled():
            print(
                f"\nround {turn + 1} of {rounds}: {dict(total.of)}, refused {dict(total.refused)}, "
                f"{total.compared} compared; mishaps {dict(mishaps.happened)}, {preempted} preemptions, "
                f"{swapped:,} bytes swapped; {sizes[-1] >> 20} MiB",
                flush=True,
            )
    assert preempted and swapped and total.of["cancelled"] and total.of["failed"] and total.refused
    # Threads take memory of their own as more of them meet, and keep it: that ends, and what leaks does not.
    assert sizes[-1] - sizes[(len(sizes) - 1) // 2] < GROWTH, sizes
