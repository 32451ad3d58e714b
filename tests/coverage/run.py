"""Checks many types, each in a forked process of its own: a hang, a crash or a leak costs one row."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.coverage.check import RECIPES, Row, check_type


def run(
    types: Iterable[str],
    jobs: int = 1,
    limit: float = 300.0,
    recipes: tuple[str, ...] = RECIPES,
    tell: Callable[[Any, int], None] | None = None,
    check: Callable[[str], Any] | None = None,
) -> list[Any]:
    """The rows of `types`, sorted by type.

    Args:
        jobs: processes at a time; each computes on one thread.
        limit: seconds after which a type counts as an error.
        check: gives the row of a type; None: `check_type` with these recipes.
        tell: called with every finished row and the number of those still to do.
    """
    # Forked, so that torch and transformers are imported once.
    import kvcompile.api
    import kvcompile.runtime.huggingface  # noqa: F401

    context = multiprocessing.get_context("fork")
    check = check or partial(check_type, recipes=recipes)
    waiting = list(types)
    running: dict[Connection, tuple[str, Any, float]] = {}
    rows: list[Any] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            model_type = waiting.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(model_type, check, theirs))
            process.start()
            theirs.close()
            running[ours] = (model_type, process, time.monotonic() + limit)
        soonest = min(end for _, _, end in running.values())
        ready = wait(list(running), timeout=max(0.0, soonest - time.monotonic()))
        late = [pipe for pipe, (_, _, end) in running.items() if end <= time.monotonic()]
        for pipe in {*ready, *late}:
            assert isinstance(pipe, Connection)
            model_type, process, _ = running.pop(pipe)
            try:
                row = pipe.recv() if pipe.poll() else None
            except EOFError:
                row = None
            if row is None:
                why = f"no result after {limit:.0f} s" if pipe in late else "the process died"
                row = Row(model_type, outcome="error", reason=why)
            process.kill() if pipe in late else None
            process.join()
            pipe.close()
            rows.append(row)
            if tell:
                tell(row, len(waiting) + len(running))
    return sorted(rows, key=lambda row: row.type)


def _child(model_type: str, check: Callable[[str], Any], pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries warn on stderr; the row says what matters
    pipe.send(check(model_type))
    pipe.close()
