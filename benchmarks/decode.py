"""Decode speed, time to first token and memory of recipes, beside transformers and what the memory could do.

Speed: all variants stand in one process, each once for every length of text, and take turns, a few tokens each.
Figures are medians of the rounds; ratios, and slopes (what 1,000 more cached tokens add to a step), are taken within
a round. Between the turns a probe reads memory, so that the limit (bytes of weights and cache that a token must read,
over the bandwidth) is of the same minutes.
Memory: every variant runs alone in its own process; peak is that of the process less what it had before the
prompt, with the model loaded and warm.

The loop is the bare one (forward, argmax) on both sides, without what generate() adds. `static` is transformers'
StaticCache sized for the context, its decode step under torch.compile and its prompt eager, as generate() does.

    python benchmarks/decode.py                                   # 15 to 20 minutes on 2 cores
    python benchmarks/decode.py --contexts 512 --rounds 3 --variants dynamic,int8
    python benchmarks/decode.py --dtype bfloat16 --contexts 512,4000 --variants dynamic,baseline,int8 --peers

With --peers, others' engines take turns, too (`decode_peers.py`).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from compile_time import machine, write
from decode_peers import PEERS, Peer, gguf_of, start
from decode_variants import InProcess, Variant, make

Turn = tuple[int, str]  # a context, and who has it in its cache
VARIANTS = ("dynamic", "static", "baseline", "int8", "streaming_int8")
WARM_TOKENS = 8  # a short prompt that compiles and touches everything before anything is measured


def measure_speed(options: argparse.Namespace, tell: Callable[[str], None]) -> dict[str, Any]:
    """Time to first token and decode speed by context and variant, and what fails of others' engines."""
    import torch

    from kvcompile.models import load_model

    tell("loading")
    loaded = load_model(options.model, options.dtype)
    prompts = {c: options.prompts or max(1, min(options.rounds, 1024 // c)) for c in options.contexts}
    text = read_text(loaded, max(options.contexts) + sum(prompts.values()))
    weights = weight_bytes(loaded.model)
    variants: dict[Turn, InProcess | Peer] = {}
    failed: dict[str, str] = {}
    for context in options.contexts:
        room = context + options.rounds * options.tokens + 1
        for name in options.variants:
            tell(f"{context}: preparing {name}")
            own = make(name, loaded.model, room, options.compile, lambda stage, done, total: tell(stage))
            variants[context, name] = InProcess(own)
            warm = own.prefill(text[:, :WARM_TOKENS])
            for _ in range(2):
                warm = own.step(warm)
        for name in options.peers:
            if name in failed:
                continue
            tell(f"{context}: preparing {name}")
            with failures(name, variants, failed):
                most = context + options.tokens + 64
                peer = start(name, gguf_of(options.model), most, torch.get_num_threads())
                variants[context, name] = peer
                for end in (-1 - WARM_TOKENS, -1):
                    peer.prompt(text[:, end - WARM_TOKENS : end])
    first: dict[Turn, list[float]] = {turn: [] for turn in variants}
    speed: dict[Turn, list[float]] = {turn: [] for turn in variants}
    begin = 0  # of a prompt: no two begin with the same token, as engines keep what they have computed
    for context in options.contexts:
        for number in range(prompts[context]):
            for turn in [turn for turn in variants if turn[0] == context]:
                tell(f"{context}: prompt {number + 1} of {prompts[context]}, {turn[1]}")
                with failures(turn[1], variants, failed):
                    if turn in variants:
                        first[turn].append(variants[turn].prompt(text[:, begin : begin + context]))
            begin += 1
    compiled = compilations()
    bandwidth = []
    for number in range(options.rounds):
        tell(f"round {number + 1} of {options.rounds}")
        bandwidth.append(read_bandwidth())
        # Another one begins in each round, so that none always follows the same one.
        turns = [*variants]
        leader = number % len(turns)
        for turn in (*turns[leader:], *turns[:leader]):
            with failures(turn[1], variants, failed):
                if turn in variants:
                    speed[turn].append(options.tokens / variants[turn].steps(options.tokens))
    if compilations() != compiled:
        raise RuntimeError("something was compiled while decode was timed; the speeds are void")
    measured = statistics.median(bandwidth)
    figures: dict[str, Any] = {}
    for context in options.contexts:
        rows = {}
        against = speed.get((context, "dynamic"))
        for (length, name), variant in variants.items():
            if length != context:
                continue
            median = statistics.median(speed[context, name])
            row: dict[str, Any] = {
                "first_token_s": statistics.median(first[context, name]),
                "prompts": len(first[context, name]),
            }
            row |= {"tokens_s": median, "ms_token": 1e3 / median, "rounds": speed[context, name]}
            row["ratio_to_dynamic"] = (
                None
                if against is None
                else statistics.median(a / b for a, b in zip(speed[context, name], against, strict=True))
            )
            if isinstance(variant, InProcess):
                own = variant.variant
                limit = measured / (weights + own.read_bytes(context))
                row |= {"limit_tokens_s": limit, "of_limit": median / limit, "cache_bytes": own.cache_bytes()}
            rows[name] = row
        figures[str(context)] = {"bandwidth_gb_s": measured / 1e9, "variants": rows}
    peers = {turn[1]: variant.version for turn, variant in variants.items() if isinstance(variant, Peer)}
    for variant in variants.values():
        if isinstance(variant, Peer):
            variant.close()
    return {
        "weight_bytes": weights,
        "bandwidth_rounds_gb_s": [value / 1e9 for value in bandwidth],
        "contexts": figures,
        "peers": peers,
        "failed": failed,
    }


@contextmanager
def failures(name: str, variants: dict[Turn, InProcess | Peer], failed: dict[str, str]) -> Iterator[None]:
    """A peer that fails takes no further part, and what it said is in the result; ours must not fail."""
    own = {turn: variant for turn, variant in variants.items() if turn[1] == name}
    try:
        yield
    except RuntimeError as error:
        if any(isinstance(variant, InProcess) for variant in own.values()):
            raise
        failed[name] = str(error)
        for turn in [turn for turn in variants if turn[1] == name]:
            gone = variants.pop(turn)
            if isinstance(gone, Peer):
                gone.close()


def slopes(contexts: dict[str, Any]) -> dict[str, float]:
    """What 1,000 more cached tokens add to a step, in ms, between the least and the greatest context, within rounds."""
    low, high = min(contexts, key=int), max(contexts, key=int)
    if low == high:
        return {}
    few, many = contexts[low]["variants"], contexts[high]["variants"]
    more = (int(high) - int(low)) / 1e3
    found = {}
    for name in many:
        rounds = zip(few[name]["rounds"], many[name]["rounds"], strict=True)
        found[name] = statistics.median((1e3 / far - 1e3 / near) / more for near, far in rounds)
    return found


def measure_memory(options: argparse.Namespace) -> dict[str, Any]:
    """Peak memory of one variant in this process, by context. Linux: elsewhere there is no way to reset a peak."""
    from kvcompile.models import load_model

    name = options.worker
    loaded = load_model(options.model, options.dtype)
    text = read_text(loaded, max(options.contexts))
    variant: Variant | None = None
    result = {}
    for context in options.contexts:
        if variant is None or name == "static":
            room = context + options.tokens + 1
            variant = make(name, loaded.model, room, options.compile, None)
            token = variant.prefill(text[:, :WARM_TOKENS])
            for _ in range(2):
                token = variant.step(token)
        variant.free()
        before = _settled()
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        token = variant.prefill(text[:, :context])
        prompt_peak = _status("VmHWM") - before
        for _ in range(options.tokens):
            token = variant.step(token)
        token.item()
        if _status("VmHWM") - before < 0.98 * variant.cache_bytes():
            # An earlier cache was still in `before`: what is left would be far too small.
            raise RuntimeError(f"{name}, {context}: the peak is less than the cache; the figures are void")
        result[str(context)] = {
            "prompt_peak_bytes": prompt_peak,
            "peak_bytes": _status("VmHWM") - before,
            "cache_bytes": variant.cache_bytes(),
            "process_bytes": _status("VmRSS"),
        }
        variant.free()
    return result


def _settled() -> int:
    """Bytes of this process once the C library has given back what was freed; it keeps it otherwise."""
    gc.collect()
    with suppress(AttributeError):  # not glibc: the check of the peak tells
        ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


def compilations() -> tuple[int, int, int]:
    """A count that rises with everything torch compiles, or takes from its cache, in this process."""
    from torch._dynamo.utils import counters

    inductor = counters["inductor"]
    graphs = counters["stats"]["unique_graphs"]
    return graphs, inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"]


def _status(key: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def read_text(loaded: Any, tokens: int) -> Any:
    """The first tokens of pydoc_data.topics, [1, tokens + 1] int64."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return loaded.tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][:, : tokens + 1]


def weight_bytes(model: Any) -> int:
    """Bytes of weights that a token must read: all, but of an embedding that is not the head too, one row."""
    total = sum(parameter.nbytes for parameter in model.parameters())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    apart = head is None or embedding.weight is not head.weight
    return int(total - (embedding.weight.nbytes if apart else 0))


def read_bandwidth() -> float:
    """Bytes per second that all threads together read from memory; the best of three passes over 1 GiB."""
    import torch

    if not hasattr(read_bandwidth, "block"):
        read_bandwidth.block = torch.ones(2**28)  # type: ignore[attr-defined]
    block = read_bandwidth.block  # type: ignore[attr-defined]
    best = 0.0
    for _ in range(3):
        began = time.perf_counter()
        block.sum()
        best = max(best, block.nbytes / (time.perf_counter() - began))
    return best


def _alone(name: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", name, "--model", options.model]
    command += ["--contexts", ",".join(map(str, options.contexts)), "--tokens", str(options.tokens)]
    command += ["--dtype", options.dtype] if options.dtype else []
    command += [] if options.compile else ["--no-compile"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: " + "\n".join(done.stderr.splitlines()[-8:]))
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _tables(result: dict[str, Any]) -> list[Any]:
    from kvcompile.util.console import format_bytes, table

    tables = []
    for context, speeds in result["contexts"].items():
        numbers = (
            "first token",
            "tokens/s",
            "× dynamic",
            "limit",
            "of limit",
            "cache",
            "peak",
            "per 1,000 more",
        )
        made = table("variant", *numbers, right=numbers)
        made.title = f"{context} tokens of context, {speeds['bandwidth_gb_s']:.1f} GB/s read"
        for name, row in speeds["variants"].items():
            ratio, peak = row["ratio_to_dynamic"], result["memory"].get(name, {}).get(context)
            ours = "limit_tokens_s" in row
            made.add_row(
                name,
                f"{row['first_token_s']:.2f} s",
                f"{row['tokens_s']:.1f}",
                "" if ratio is None else f"{ratio:.2f}",
                f"{row['limit_tokens_s']:.1f}" if ours else "",
                f"{row['of_limit']:.0%}" if ours else "",
                format_bytes(row["cache_bytes"]) if ours else "",
                format_bytes(peak["peak_bytes"]) if peak else "",
                f"{result['slopes'][name]:.2f} ms" if name in result["slopes"] else "",
            )
        tables.append(made)
    return tables


def _parser() -> argparse.ArgumentParser:
    def numbers(text: str) -> list[int]:
        return sorted(int(part) for part in text.split(","))

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="as for kvcompile.models.load_model")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--contexts", type=numbers, default=[512, 2048, 8000], help="512,2048,8000")
    parser.add_argument("--tokens", type=int, default=16, help="new tokens of each variant in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--variants",
        type=lambda text: text.split(","),
        default=list(VARIANTS),
        help=f"of {','.join(VARIANTS)}, or any recipe",
    )
    parser.add_argument(
        "--prompts", type=int, default=None, help="of each context; without it, as many as 1,024 tokens hold"
    )
    parser.add_argument(
        "--peers",
        type=lambda text: [name for name in text.split(",") if name],
        nargs="?",
        const=list(PEERS),
        default=[],
        help=f"others' engines beside ours, of {','.join(PEERS)} (all where none is named)",
    )
    parser.add_argument("--out", default="decode", help="a name in benchmarks/results, or a path")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="without the memory runs")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="run everything eagerly")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    unknown = [name for name in options.peers if name not in PEERS]
    if unknown:
        _parser().error(f"--peers: there is no {unknown[0]}; of {', '.join(PEERS)}")
    if options.worker:
        print(json.dumps(measure_memory(options)))
        return 0
    from rich.console import Console

    from kvcompile.errors import KVCompileError
    from kvcompile.util.console import render

    progress = Console(stderr=True)
    result: dict[str, Any] = {"benchmark": "decode", "model": options.model, "machine": machine()}
    result |= {"tokens_per_round": options.tokens, "rounds": options.rounds, "compiled": options.compile}
    began = time.perf_counter()
    try:
        with progress.status("starting") as status:

            def tell(text: str) -> None:
                status.update(f"{time.perf_counter() - began:4.0f} s  {text}")

            result |= measure_speed(options, tell)
            result["slopes"] = slopes(result["contexts"])
            result["memory"] = {}
            # One after the other: this process keeps its own model, which the others do not count.
            for name in options.variants if options.memory and Path("/proc/self/clear_refs").exists() else ():
                tell(f"memory of {name}, in a process of its own")
                result["memory"][name] = _alone(name, options)
    except (KVCompileError, RuntimeError) as error:
        progress.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 1
    result["seconds"] = time.perf_counter() - began
    path = write(result, options.out)
    for made in _tables(result):
        print(render(made) + "\n")
    for name, reason in result["failed"].items():
        print(f"{name}: {reason}")
    print(f"peak: above the loaded model. {result['seconds']:.0f} s in all; written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
