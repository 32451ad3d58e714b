"""Ranks as processes of their own, over gloo."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp


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
    root = str(Path(__file__).parents[2])
    with pytest.MonkeyPatch.context() as patch:  # children import this file by its name
        patch.syspath_prepend(root)
        mp.spawn(_child, (ranks, port, body, given), nprocs=ranks)  # type: ignore[no-untyped-call]
