"""What decode.py makes of other engines: requests and answers, what fails, and slopes; no engine is installed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
# An engine that computes what is asked, but for the prompts that it has seen, and says so.
WORKER = """
import json, sys
print(json.dumps({"ready": "1.2 " + " ".join(sys.argv[1:])}), flush=True)
known = []
for line in sys.stdin:
    asked = json.loads(line)
    if asked["new"] == 99:
        sys.exit("out of memory\\nno more")
    same = next((n for n, (a, b) in enumerate(zip(asked["ids"], known)) if a != b), min(len(known), len(asked["ids"])))
    known = asked["ids"]
    found = {"prompt_tokens": max(len(known) - same, 1), "prompt_s": 0.5 * len(known)}
    print(json.dumps(found | {"steps": min(asked["new"], 8), "steps_s": 0.25 * asked["new"]}), flush=True)
"""


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`decode_peers`, with one engine of ours."""
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("decode_peers")
    worker = tmp_path / "env" / "worker.py"
    worker.parent.mkdir()
    worker.write_text(WORKER)
    engine = module.Engine("fake", (), str(worker))
    monkeypatch.setattr(module, "PEERS", {"fake_f16": (engine, "f16")})
    python = worker.parent / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    monkeypatch.setattr(module, "environment", lambda engine: python)
    return module


def test_a_peer_answers(peers: Any) -> None:
    peer = peers.start("fake_f16", Path("a.gguf"), 100, 2)
    try:
        assert peer.version == "1.2 a.gguf f16 2 100"
        assert peer.prompt(torch.tensor([[5, 6, 7]])) == 1.5
        assert peer.steps(4) == 1.0 and peer.steps(4) == 1.0
        assert peer.prompt(torch.tensor([[8, 6]])) == 1.0
    finally:
        peer.close()
    assert peer.process.returncode is not None


def test_what_was_not_computed_is_not_measured(peers: Any) -> None:
    peer = peers.start("fake_f16", Path("a.gguf"), 100, 2)
    try:
        peer.prompt(torch.tensor([[5, 6, 7]]))
        with pytest.raises(RuntimeError, match="fake_f16 computed 1 of 4 tokens of a prompt"):
            peer.prompt(torch.tensor([[5, 6, 7, 8]]))
        with pytest.raises(RuntimeError, match="fake_f16 gave 8 of 9 tokens"):
            peer.steps(9)
        with pytest.raises(RuntimeError, match="fake_f16 ended with 1: out of memory no more"):
            peer.steps(99)
    finally:
        peer.close()


def test_a_peer_that_fails_is_told_and_takes_no_further_part(peers: Any) -> None:
    decode = importlib.import_module("decode")
    ours = decode.InProcess(None)
    peer = peers.start("fake_f16", Path("a.gguf"), 100, 2)
    late = peers.start("fake_f16", Path("a.gguf"), 100, 2)
    variants: dict[Any, Any] = {(8, "int8"): ours, (8, "fake_f16"): peer, (16, "fake_f16"): late}
    failed: dict[str, str] = {}
    with decode.failures("fake_f16", variants, failed):
        peer.steps(99)
    assert late.process.returncode is not None
    assert list(variants) == [(8, "int8")] and "out of memory" in failed["fake_f16"]
    with decode.failures("llama_f16", variants, failed):
        raise RuntimeError("llama cannot be installed")
    assert failed["llama_f16"] == "llama cannot be installed"
    with pytest.raises(RuntimeError, match="ours"), decode.failures("int8", variants, failed):
        raise RuntimeError("ours")
    with pytest.raises(SystemExit):
        decode.main(["--peers", "nobody"])


def test_slopes(peers: Any) -> None:
    """Of two contexts within a round, which is one bandwidth: between rounds it may double."""
    decode = importlib.import_module("decode")

    def variants(int8: list[float], late: list[float]) -> Any:
        return {
            "variants": {
                name: {"rounds": [1e3 / ms for ms in own]} for name, own in (("int8", int8), ("late", late))
            }
        }

    contexts = {
        "4000": variants([30.0, 50.0, 27.0], [5.0, 5.0, 5.0]),
        "512": variants([23.0, 43.0, 23.0], [6.0, 6.0, 5.0]),
        "1000": variants([500.0] * 3, [5.0] * 3),
    }
    assert decode.slopes(contexts) == pytest.approx({"int8": 7 / 3.488, "late": -1 / 3.488})
    assert decode.slopes({"512": contexts["512"]}) == {}


def test_all_contexts_take_turns_in_a_round(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each variant stands once for every context; what fails leaves the others, and prompts come before all rounds."""
    decode = importlib.import_module("decode")
    events: list[str] = []

    class Own:
        def __init__(self, name: str):
            self.name = name

        def prefill(self, tokens: torch.Tensor) -> torch.Tensor:
            events.append(f"{self.name} prompt {tokens.shape[1]}")
            return tokens[:, -1:]

        def step(self, token: torch.Tensor) -> torch.Tensor:
            events.append(self.name)
            return token

        def cache_bytes(self) -> int:
            return 1

        def read_bytes(self, context: int) -> int:
            return context

    def make(name: str, model: Any, room: int, compiled: bool, progress: Any) -> Own:
        return Own(f"{name} {room}")

    monkeypatch.setattr(decode, "PEERS", peers.PEERS)
    monkeypatch.setattr(decode, "gguf_of", lambda model: Path("a.gguf"))
    monkeypatch.setattr(decode, "make", make)
    monkeypatch.setattr(decode, "weight_bytes", lambda model: 1000)
    monkeypatch.setattr(decode, "read_text", lambda loaded, tokens: torch.arange(tokens + 1)[None])
    monkeypatch.setattr(decode, "read_bandwidth", lambda: 1e9)
    monkeypatch.setattr("kvcompile.models.load_model", lambda *given: type("Loaded", (), {"model": None})())
    options = decode._parser().parse_args(
        [
            "--contexts",
            "20,12",
            "--variants",
            "dynamic,int8",
            "--rounds",
            "3",
            "--tokens",
            "2",
            "--peers",
            "fake_f16",
        ]
    )
    found = decode.measure_speed(options, lambda text: None)
    rounds = events[max(n for n, event in enumerate(events) if "prompt" in event) + 1 :]
    own = ["dynamic 19", "int8 19", "dynamic 27", "int8 27"]
    assert sorted(rounds[:8]) == sorted(own * 2) and len(rounds) == 24
    assert {rounds[8 * n] for n in range(3)} != {rounds[0]}
    for context in ("12", "20"):
        assert list(found["contexts"][context]["variants"]) == ["dynamic", "int8", "fake_f16"]
        assert found["contexts"][context]["variants"]["fake_f16"]["ms_token"] == 250.0
    assert found["peers"]["fake_f16"].startswith("1.2") and found["failed"] == {}
    assert decode.slopes(found["contexts"])["fake_f16"] == 0.0
