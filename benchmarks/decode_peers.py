"""Other engines beside ours in decode.py: each in an environment and a process of its own, asked by turns.

An environment is made on request, in the user's cache; nothing is installed where kvcompile is. All read the same
.gguf file, whose weights have 4 bits: their whole steps read fewer bytes than ours, so that steps do not compare, but
what a cached token adds to a step does, and prompts do. Between its turns a process is stopped, as idle threads may
spin.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Engine:
    """packages: what pip installs; worker: the script that runs it"""

    name: str
    packages: tuple[str, ...]
    worker: str


_LLAMA = Engine("llama", ("xllamacpp==2026.10.11549",), "peer_llama.py")
_OPENVINO = Engine("openvino", ("openvino-genai==2026.4.1.0",), "peer_openvino.py")
# The engine and what it keeps keys and values in.
PEERS = {
    "llama_f16": (_LLAMA, "f16"),
    "llama_q8_0": (_LLAMA, "q8_0"),
    "llama_q4_0": (_LLAMA, "q4_0"),
    "openvino_f16": (_OPENVINO, "f16"),
    "openvino_u8": (_OPENVINO, "u8"),
}


def environment(engine: Engine) -> Path:
    """The Python of an engine's environment, which is made if it is not there.

    Raises:
        RuntimeError: it cannot be installed; the message has what pip said last.
    """
    from kvcompile.util.cache_dir import make_cache_dir

    folder = make_cache_dir() / "peers" / f"{engine.name}-{'-'.join(engine.packages).replace('==', '-')}"
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        venv.create(folder, clear=True, with_pip=True)
        done = subprocess.run(
            [python, "-m", "pip", "install", "-q", *engine.packages],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{engine.name} cannot be installed: {_without_paths(done.stderr)}")
        ready.touch()
    return python


@dataclass
class Peer:
    """A process with one engine, as `decode_variants.InProcess`: what a prompt and some tokens take, in seconds.

    What it says beside its answers goes to `log`.
    """

    name: str
    log: Path
    process: subprocess.Popen[str]
    version: str = ""
    ids: list[int] = field(default_factory=list)

    def ask(self, new: int) -> dict[str, Any]:
        """The answer to a request for `new` tokens behind `ids`."""
        return self.say({"ids": self.ids, "new": new})

    def say(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to any request."""
        assert self.process.stdin is not None
        os.kill(self.process.pid, signal.SIGCONT)
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        found = self.answer()
        os.kill(self.process.pid, signal.SIGSTOP)
        return found

    def answer(self) -> dict[str, Any]:
        """The next line.

        Raises:
            RuntimeError: the process ended.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"{self.name} ended with {self.process.wait()}: {_without_paths(self.log.read_text(errors='replace'))}"
            )
        found: dict[str, Any] = json.loads(line)
        return found

    def prompt(self, tokens: Any) -> float:
        self.ids = tokens[0].tolist()
        found = self.ask(1)
        if found["prompt_tokens"] != len(self.ids):
            raise RuntimeError(
                f"{self.name} computed {found['prompt_tokens']} of {len(self.ids)} tokens of a prompt"
            )
        return float(found["prompt_s"])

    def steps(self, count: int) -> float:
        """Behind the same text each time: what it computed of it before, it has kept."""
        found = self.ask(count)
        if found["steps"] != count:
            raise RuntimeError(f"{self.name} gave {found['steps']} of {count} tokens")
        return float(found["steps_s"])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def start(name: str, model: Path, tokens: int, threads: int) -> Peer:
    """The process of a peer, ready to be asked, with room for so many tokens.

    Raises:
        RuntimeError: its engine cannot be installed or does not start.
    """
    engine, storage = PEERS[name]
    python = environment(engine)
    command = [str(python), str(Path(__file__).parent / engine.worker), str(model), storage]
    return begin(name, python.parents[1] / f"{name}.log", [*command, str(threads), str(tokens)])


def _without_paths(log: str) -> str:
    """The end of a log in one line, as results tell it: of paths, which are of one machine, the last name."""
    return re.sub(r"/[^\s\"']*/", "", " ".join(" ".join(log.splitlines()[-3:]).split()))


def begin(name: str, log: Path, command: Sequence[str]) -> Peer:
    """The process of a command that says when it is ready, stopped until it is asked; raises as `start`."""
    with log.open("w") as said:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
    peer = Peer(name, log, process)
    peer.version = str(peer.answer()["ready"])
    os.kill(process.pid, signal.SIGSTOP)
    return peer


def gguf_of(model: str) -> Path:
    """The .gguf file of a model that `load_model` takes.

    Raises:
        RuntimeError: it is no such file.
    """
    from kvcompile.models import _locate

    path = _locate(model)
    if path.suffix != ".gguf":
        raise RuntimeError(f"{model} is no .gguf file, which is what peers read")
    return path


if __name__ == "__main__":
    for wanted in sys.argv[1:] or PEERS:
        print(wanted, environment(PEERS[wanted][0]))
