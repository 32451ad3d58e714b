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
    variants: dict[str, Any] = {"int8": ours, "fake_f16": peer}
    failed: dict[str, str] = {}
    with decode.failures("fake_f16", variants, failed):
        peer.steps(99)
    assert list(variants) == ["int8"] and "out of memory" in failed["fake_f16"]
    with decode.failures("llama_f16", variants, failed):
        raise RuntimeError("llama cannot be installed")
    assert failed["llama_f16"] == "llama cannot be installed"
    with pytest.raises(RuntimeError, match="ours"), decode.failures("int8", variants, failed):
        raise RuntimeError("ours")
    with pytest.raises(SystemExit):
        decode.main(["--peers", "nobody"])


def test_slopes(peers: Any) -> None:
    decode = importlib.import_module("decode")
    contexts = {
        "4000": {"variants": {"int8": {"ms_token": 30.0}, "late": {"ms_token": 5.0}}},
        "512": {"variants": {"int8": {"ms_token": 23.0}, "late": {"ms_token": 6.0}}},
        "1000": {"variants": {"int8": {"ms_token": 500.0}, "late": {"ms_token": 5.0}}},
    }
    assert decode.slopes(contexts) == {"int8": 7 / 3.488, "late": -1 / 3.488}
    assert decode.slopes({"512": contexts["512"]}) == {}
