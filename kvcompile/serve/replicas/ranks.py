"""A replica over several ranks: its process is rank 0, and starts the others beside it.

Ranks of one replica are on one machine. They live and die with it: a rank ends when the pipe from its replica closes,
however that came; and where a rank dies, the engine on rank 0 ends (`kvcompile/serve/ranks.py`), so that Ray replaces
the replica, and all its ranks with it.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ray import cloudpickle

from kvcompile.errors import ServeError
from kvcompile.serve.replicas.replica import OwnedEngine

log = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_COMMAND = (sys.executable, "-m", "kvcompile.serve.replicas.ranks")
_SECONDS = 10.0  # that a rank has to end by itself
_WATCHED = 0.5  # seconds between two looks at ranks that start


def on_ranks(
    make: Callable[[], Any], ranks: int, give_up: Callable[[str], None] | None = None
) -> OwnedEngine:
    """Call `make` in this process, as rank 0, and in `ranks - 1` others, as `torchrun` would; gives rank 0's engine.

    Each process has RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, which
    `kvcompile.optimize(parallel=..)` reads.

    Args:
        make: gives an engine on rank 0; on another rank, `kvcompile.serve.follow` runs in it until that is closed.
        give_up: called with the reason where a rank ends before rank 0 has its engine, which would wait for it; None:
            this process ends, and Ray starts another replica.

    Raises:
        ServeError: rank 0 gave no engine.
    """
    started = Ranks(make, ranks, give_up or _end)
    try:
        engine = make()
        if engine is None:
            raise ServeError("rank 0 of a replica gave no engine: `make` must return one where RANK is 0")
    except BaseException:
        started.end()
        raise
    started.settled.set()
    weakref.finalize(engine, started.end)
    made: OwnedEngine = engine
    return made


class Ranks:
    """The processes of all ranks but 0; this process's environment says that it is that one."""

    def __init__(self, make: Callable[[], Any], ranks: int, give_up: Callable[[str], None]):
        self.settled = threading.Event()  # rank 0 has its engine, or does not need the others any more
        self._give_up = give_up
        with socket.socket() as free:
            free.bind((_HOST, 0))
            port = int(free.getsockname()[1])
        common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": _HOST, "MASTER_PORT": str(port)}
        given = cloudpickle.dumps((list(sys.path), cloudpickle.dumps(make)))  # type: ignore[no-untyped-call]
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, ranks):
            own = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, env=own)
            self.processes.append(process)
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it is dead already, which is seen below
                process.stdin.write(len(given).to_bytes(8, "big") + given)
                process.stdin.flush()
        os.environ.update(common, RANK="0", LOCAL_RANK="0")
        threading.Thread(target=self._watch, name="ranks that start", daemon=True).start()

    def _watch(self) -> None:
        while not self.settled.wait(_WATCHED):
            for rank, process in enumerate(self.processes, 1):
                if process.poll() is not None:
                    self._give_up(f"rank {rank} ended with {process.returncode} before the engine was there")
                    return

    def end(self) -> None:
        """Let all ranks end: by themselves, else by a signal."""
        self.settled.set()
        for process in self.processes:
            with suppress(BrokenPipeError):
                if process.stdin is not None:
                    process.stdin.close()
        for process in self.processes:
            try:
                process.wait(_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _end(reason: str) -> None:
    log.error("%s: this replica ends", reason)
    os._exit(1)


def main() -> None:
    """One rank: what `make` does there, until it returns or the replica is gone."""
    given = sys.stdin.buffer
    size = int.from_bytes(given.read(8), "big")
    path, made = pickle.loads(given.read(size))
    sys.path[:] = path
    threading.Thread(target=_end_with, args=(given,), name="the replica lives", daemon=True).start()
    cloudpickle.loads(made)()


def _end_with(pipe: Any) -> None:
    pipe.read()  # ends when the replica has closed it, or is gone
    os._exit(0)


if __name__ == "__main__":
    main()
