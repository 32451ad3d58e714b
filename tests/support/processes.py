"""Ranks as processes of their own, over gloo.

They are forked: what this process has imported, and what it has understood of models
(`tests/support/understood_once.py`), they have from it.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessContext


def started(ranks: int, body: Any, *given: Any) -> ProcessContext:
    """So many processes that begin with `body(rank, *given)`."""
    context = mp.start_processes(body, given, ranks, join=False, start_method="fork")  # type: ignore[no-untyped-call]
    assert isinstance(context, ProcessContext)
    return context


def ended(context: ProcessContext) -> None:
    """Wait for all of them; what fails in one, fails here."""
    while not context.join():  # type: ignore[no-untyped-call]
        pass


def _child(rank: int, ranks: int, port: int, body: Any, given: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    body(rank, ranks, *given)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def spawn(ranks: int, body: Any, *given: Any) -> None:
    """`body(rank, ranks, *given)` in so many processes; what fails in one, fails here."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ended(started(ranks, _child, ranks, port, body, given))
