"""Kernels are assembled in forks of one process, which has imported PyTorch and Triton once for all of them.

Triton decides at its import whether it interprets, so each batch of kernels that a test assembles runs in a process of
its own; to import takes longer than to assemble a small kernel. Here such a process is a fork of one that a worker
keeps: it runs the same module as `__main__`, with the environment and the input that it would have been given.
"""

from __future__ import annotations

import atexit
import gc
import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[2]
SERVER = "from tests.support.quick_assembling import serve; serve()"
BEFORE = ("-W", "ignore", "-m")  # what stands before a module's name
STREAMS = ("stdin", "stdout", "stderr")


class Forks:
    """Takes the place of `subprocess` in the modules that assemble."""

    def __init__(self) -> None:
        self.server: subprocess.Popen[str] | None = None
        self.imports = _imports(os.environ)
        self.asker = 0  # a rank that is forked from who has a server needs its own

    def run(self, command: Sequence[Any], **more: Any) -> Any:
        if tuple(command[:4]) != (sys.executable, *BEFORE) or _imports(more["env"]) != self.imports:
            return subprocess.run(command, **more)
        if self.server is None or self.asker != os.getpid():
            self.asker = os.getpid()
            self.server = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", SERVER],
                env=more["env"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        asked = {"module": command[4:], "input": more["input"], "env": more["env"], "folder": os.getcwd()}
        assert self.server.stdin is not None and self.server.stdout is not None
        try:
            self.server.stdin.write(f"{json.dumps(asked)}\n")
            self.server.stdin.flush()
            return SimpleNamespace(**json.loads(self.server.stdout.readline()))
        except BaseException:  # its answer may still come: another one answers what is asked next
            self.server.kill()
            self.server = None
            raise

    def close(self) -> None:
        if self.server is not None and self.asker == os.getpid():
            self.server.communicate()


def _imports(env: Mapping[str, str]) -> dict[str, str]:
    """What decides what a process imports, and may be another release of Triton."""
    return {name: value for name, value in env.items() if name.startswith(("PYTHON", "LD_"))}


def serve() -> None:
    """Fork for each line of the input, until it ends."""
    from triton.runtime import cache

    from kvcompile.backends.tensorrt_plugins import ptx
    from kvcompile.kernels.triton.host import source
    from kvcompile.kernels.triton.tools import assemble

    assert ptx and source and assemble  # imported for the forks
    cache.triton_key()  # what Triton is, which each process that compiles asks: half a second for all files of it
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            names = {name: Path(folder, name) for name in STREAMS}
            asked = json.loads(line)
            names["stdin"].write_text(asked["input"])
            child = os.fork()
            if child == 0:
                _become(asked, names)
            _, status = os.waitpid(child, 0)
            texts = {name: names[name].read_text() for name in STREAMS[1:]}
            print(json.dumps({"returncode": os.waitstatus_to_exitcode(status), **texts}), flush=True)


def _become(asked: dict[str, Any], names: dict[str, Path]) -> None:
    code = 1
    gc.disable()  # nothing that a compiler makes of one batch is worth the search for what can go
    try:
        for place, path in enumerate(names.values()):
            flags = os.O_RDONLY if place == 0 else os.O_WRONLY | os.O_CREAT
            os.dup2(os.open(path, flags, 0o600), place)
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))  # the other has read ahead
        os.chdir(asked["folder"])
        os.environ.clear()
        os.environ.update(asked["env"])
        sys.argv = asked["module"]
        runpy.run_module(asked["module"][0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


forks = Forks()


def install() -> None:
    """For this process."""
    from kvcompile.backends.tensorrt_plugins import ptx
    from kvcompile.kernels.triton.tools import assemble

    assemble.subprocess = ptx.subprocess = forks  # type: ignore[assignment]
    atexit.register(forks.close)
