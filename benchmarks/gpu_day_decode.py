"""Decode of a random model of Llama-3.1-8B's shape in bfloat16, beside transformers and what the memory could do.

Part of `gpu_day.sh`. Each variant runs in a process of its own, with the model made on the GPU, so that its peak memory
is its own and a failure stops no other. What is measured is written at once: a stopped run goes on after it.

With --together N, up to N processes get ready at once (made and compiled), and then measure one after the other while
the others wait: compiling is most of the time, and needs no GPU for itself.

A variant is `static` (transformers' StaticCache sized for the context, its decode step under
torch.compile(mode="reduce-overhead"), its prompt eager), `dynamic`, or a recipe, with `+MODE` for another compile mode:
`int8+cudagraphs`. Behind a colon stands an optional pass that is left out: `baseline+cudagraphs:gemv=off` has the
linear layers of a token from cuBLAS. The loop is the bare one (forward, argmax) on all sides. The limit is the copy
bandwidth measured in the same process, over the bytes of weights and cache that a token must read.

    OUT=folder python benchmarks/gpu_day_decode.py --contexts 1024 --variants static,int8
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

from decode import weight_bytes
from decode_variants import Ours, Plain, Variant
from gpu_day_record import read, update

# What the goals are of (1k and 32k, beside the static cache, and cuBLAS) comes first, should the time not be enough.
VARIANTS = (
    "static",
    "baseline+cudagraphs",
    "int8+cudagraphs",
    "baseline+cudagraphs:gemv=off",
    "baseline",
    "kivi4+cudagraphs",
    "paged+cudagraphs",
    "fp8+cudagraphs",
    "int4+cudagraphs",
    "paged_int8+cudagraphs",
    "streaming+cudagraphs",
)
REHEARSED = ("static", "int8+cudagraphs", "baseline+cudagraphs:gemv=off")
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}
TINY = LLAMA_8B | {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
TINY["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
LEAST = 60  # seconds under which no variant is begun
WARM, STEPS = 8, 3  # tokens of a prompt and of decode before anything is measured
EXTRA = STEPS + 1
READY = "ready\n"


def build(rehearse: bool) -> Any:
    """Random weights, made where they stay."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**(TINY if rehearse else LLAMA_8B))
    kind = torch.float32 if rehearse else torch.bfloat16
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        with torch.device("cpu" if rehearse else "cuda"):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def left_out(name: str) -> tuple[str, str]:
    """A variant without its `:PASS=off`, and that pass; "": all are there.

    Raises:
        ValueError: what is behind the colon is something else, or it is no variant of ours.
    """
    own, colon, said = name.partition(":")
    found, _, off = said.partition("=")
    if colon and (off != "off" or not found or own in ("static", "dynamic")):
        raise ValueError(f"{name}: expected a recipe, and behind a colon PASS=off")
    return own, found


def environment(name: str) -> dict[str, str]:
    """That of a variant's process."""
    _, off = left_out(name)
    return {**os.environ, "KVCOMPILE_DISABLE": off} if off else dict(os.environ)


def make(name: str, model: Any, room: int, longest: int, rehearse: bool) -> Variant:
    """room: tokens that a static cache must hold; longest: those of all contexts."""
    name, _ = left_out(name)
    if name == "dynamic":
        return Plain(model)
    if name == "static":
        return Plain(model, room, compiled=not rehearse, mode="reduce-overhead")
    recipe, _, mode = name.partition("+")
    chosen = "none" if rehearse else mode or "default"
    return Ours(model, recipe, True, None, max_tokens=longest, compile={"mode": chosen})


def measure(options: argparse.Namespace) -> None:
    """One variant at all contexts, in this process. Prints a line of JSON for each context."""
    import torch

    from kvcompile.kernels.triton.tools.timing import copy_bandwidth

    rehearse, name = options.rehearse, options.worker
    device = torch.device("cpu" if rehearse else "cuda")
    model = build(rehearse)
    weights, decoded = weight_bytes(model), options.rounds * options.tokens
    longest = max(options.contexts) + decoded + EXTRA
    text = torch.randint(3, model.config.vocab_size, (1, max(options.contexts)), device=device)

    def made(context: int) -> tuple[Variant, float]:
        started = time.perf_counter()
        variant = make(name, model, context + decoded + EXTRA, longest, rehearse)
        token = variant.prefill(text[:, :WARM])
        for _ in range(STEPS):  # a CUDA graph is captured in the second or the third
            token = variant.step(token)
        settle(device)
        return variant, time.perf_counter() - started

    variant, ready = made(options.contexts[0])
    print(READY, end="", flush=True)
    if not sys.stdin.readline():  # who would have asked is gone
        return
    bandwidth = copy_bandwidth(device, (1 << 20) if rehearse else (2 << 30), 20)
    for context in options.contexts:
        if name == "static" and context != options.contexts[0]:
            variant.free()
            torch.compiler.reset()
            variant, ready = made(context)
        row: dict[str, Any] = {"variant": name, "context": context}
        gc.collect()
        settle(device, reset=True)
        row["ready_s"] = round(ready, 1)
        began = time.perf_counter()
        token = variant.prefill(text[:, :context])
        settle(device)
        row["first_token_s"] = round(time.perf_counter() - began, 4)
        row["prompt_peak_bytes"] = peak(device)
        for _ in range(STEPS):
            token = variant.step(token)
        settle(device, reset=True)
        speeds = []
        for _ in range(options.rounds):
            began = time.perf_counter()
            for _ in range(options.tokens):
                token = variant.step(token)
            settle(device)
            speeds.append(options.tokens / (time.perf_counter() - began))
        read_bytes = weights + variant.read_bytes(context)
        limit, speed = bandwidth / read_bytes, statistics.median(speeds)
        row |= {"tokens_s": round(speed, 2), "rounds": [round(value, 2) for value in speeds]}
        row |= {"limit_tokens_s": round(limit, 2), "of_limit": round(speed / limit, 4)}
        row |= {"copy_gb_s": round(bandwidth / 1e9, 1), "read_bytes": read_bytes, "weight_bytes": weights}
        row |= {"cache_bytes": variant.cache_bytes(), "decode_peak_bytes": peak(device)}
        if isinstance(variant, Ours):
            kernels = {decision.kernels for decision in variant.fast.plan.decisions}
            row["kernels"] = sorted(str(kind) for kind in kernels)
        print(json.dumps(row), flush=True)


def settle(device: Any, reset: bool = False) -> None:
    """Wait for the device; reset: peaks count from here."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()
        if reset:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def peak(device: Any) -> int | None:
    """Bytes of tensors, weights with them, that were there at once."""
    import torch

    return int(torch.cuda.max_memory_allocated()) if device.type == "cuda" else None


class Worker:
    """A variant in a process of its own, which says when it is ready, and measures when it is told to.

    rows: what it measured, by context; status: "ok", "failed" or "stopped"; error: the end of what it said
    """

    def __init__(self, name: str, contexts: list[int], options: argparse.Namespace) -> None:
        command = [sys.executable, "-W", "ignore", __file__, "--worker", name]
        command += ["--rehearse"] if options.rehearse else []
        command += ["--contexts", ",".join(map(str, contexts))]
        command += ["--tokens", str(options.tokens), "--rounds", str(options.rounds)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.name, self.began, self.rows, self.said = name, time.monotonic(), dict[str, Any](), ""
        self.process = subprocess.Popen(command, text=True, env=environment(name), **pipes)  # type: ignore[call-overload]
        self.ready = threading.Event()
        self.readers = [threading.Thread(target=of, daemon=True) for of in (self._rows, self._errors)]
        for reader in self.readers:
            reader.start()

    def _rows(self) -> None:
        for line in self.process.stdout:
            if line == READY:
                self.ready.set()
            elif line.startswith("{"):
                row = json.loads(line)
                self.rows[str(row["context"])] = row
        self.ready.set()  # it is over

    def _errors(self) -> None:
        for line in self.process.stderr:
            self.said = (self.said + line)[-3000:]

    def measure(self, ends: float) -> str:
        """Let it measure, until `ends` on the monotonic clock; its status."""
        with contextlib.suppress(OSError):
            self.process.stdin.write("go\n")
            self.process.stdin.close()
        try:
            code = self.process.wait(max(1.0, ends - time.monotonic()))
            status = "ok" if code == 0 else "failed"
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = "stopped"
        for reader in self.readers:
            reader.join(5)
        return status


def run(options: argparse.Namespace) -> int:
    """All variants that are not measured yet, each in a process of its own."""
    ends = time.monotonic() + float(os.environ.get("GPU_DAY_SECONDS", "570")) - 5
    found: dict[str, Any] = {} if options.again else read("decode").get("variants", {})
    found = {name: row for name, row in found.items() if row.get("rehearsal", False) == options.rehearse}
    shape = {"shape": "tiny" if options.rehearse else "Llama-3.1-8B, bfloat16, random weights"}
    update("decode", **shape, tokens_per_round=options.tokens, variants=found)
    left = []
    for name in options.variants:
        contexts = _left(name, found, options)
        # A static cache is made for one context, and compiled for it.
        left += (
            [(name, [one]) for one in contexts] if name == "static" else [(name, contexts)] * bool(contexts)
        )
    failed: dict[str, Any] = {}
    while left:
        if ends - time.monotonic() < LEAST:
            print(f"{left[0][0]}: no time left in this call")
            return 124
        group, left = left[: options.together], left[options.together :]
        workers = [Worker(name, contexts, options) for name, contexts in group]
        for worker in workers:
            worker.ready.wait(max(0.0, ends - time.monotonic()))
        for worker in workers:
            status = worker.measure(ends)
            rows = dict(found.get(worker.name, {}).get("contexts", {})) | worker.rows
            row = {"status": status, "seconds": round(time.monotonic() - worker.began, 1), "contexts": rows}
            row |= {"rehearsal": options.rehearse} | ({"error": worker.said} if status != "ok" else {})
            # Of a variant of several processes, one that failed is not forgotten for the next.
            failed |= {worker.name: row} if status != "ok" else {}
            found[worker.name] = row | {
                key: failed[worker.name][key] for key in ("status", "error") if worker.name in failed
            }
            update("decode", variants=found)
            print(f"{worker.name}: {status} {worker.said[-600:] if status != 'ok' else ''}")
            for context, one in rows.items():
                said = f"{one['tokens_s']} tokens/s, {one['of_limit']:.0%} of {one['limit_tokens_s']}"
                print(f"  {context} tokens: {said}, first token {one['first_token_s']} s")
    return int(any(row["status"] != "ok" for row in found.values()))


def _left(name: str, found: dict[str, Any], options: argparse.Namespace) -> list[int]:
    rows = found.get(name, {}).get("contexts", {})
    return [context for context in options.contexts if str(context) not in rows]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--contexts", default="1024,32768,8192", help="tokens, separated by commas")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--tokens", type=int, default=32, help="in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--together", type=int, default=1, help="processes that get ready at once")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.contexts = [int(part) for part in options.contexts.split(",")]
    options.variants = options.variants.split(",")
    for name in options.variants:
        try:
            left_out(name)
        except ValueError as error:
            parser.error(f"--variants: {error}")
    if options.worker:
        measure(options)
        return 0
    if options.rehearse:
        options.contexts, options.tokens, options.rounds = [16, 40], 2, 2
        options.variants = [name for name in options.variants if name in REHEARSED]
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
