"""What a cache that grows costs a decode step, and how much memory it takes beside what it holds.

    python benchmarks/growth.py                # a small model, 8,000 tokens; about two minutes

A text is decoded token by token from an empty cache, once where its memory comes as it grows, once where all of it has
been touched before; they take turns. The model is small, so that a step is short and its cache long beside it: whatever
growth costs is a larger part of such a step than of a real model's. Memory is that of the process.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from typing import Any

from compile_time import machine, write


def small(limit: int) -> Any:
    """A random Llama in bfloat16: 4 layers, 8 KV heads of 64 channels; 8 KiB of cache a token."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=limit,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


def in_memory() -> int:
    """Bytes of this process that are in memory."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def decoded(fast: Any, tokens: int, touched: bool) -> dict[str, Any]:
    """Milliseconds a step, and the bytes that the process took while it held `held`."""
    import torch

    fast.cache.release()
    gc.collect()
    ids = torch.full((1, 1), 7)
    fast(ids)  # takes the addresses
    before = in_memory()
    if touched:
        for buffer in fast.cache.buffers.values():
            buffer.zero_()
    times = []
    for _ in range(tokens):
        began = time.perf_counter()
        fast(ids)
        times.append(time.perf_counter() - began)
    return {
        "ms": 1000 * statistics.mean(times),
        "median_ms": 1000 * statistics.median(times),
        "held": fast.cache.nbytes,
        "taken": in_memory() - before,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default="growth", help="a name in benchmarks/results, or a path")
    options = parser.parse_args(argv)
    import kvcompile

    limit = options.tokens + 64
    fast: Any = kvcompile.optimize(small(limit), "baseline", max_tokens=limit, verify="off")
    fast.warmup()
    decoded(fast, 300, touched=True)
    rounds: dict[str, list[dict[str, Any]]] = {"grows": [], "touched before": []}
    for _ in range(options.rounds):
        for name, found in rounds.items():
            found.append(decoded(fast, options.tokens, name != "grows"))
    grows, touched = (statistics.median(run["ms"] for run in rounds[name]) for name in rounds)
    last = rounds["grows"][-1]
    result = {
        "benchmark": "growth",
        "machine": machine(),
        "tokens": options.tokens,
        "grows_ms": grows,
        "touched_ms": touched,
        "growth_costs": grows / touched - 1,
        "taken_over_held": last["taken"] / last["held"],
        "rounds": rounds,
    }
    print(
        f"a step: {grows:.3f} ms where the cache grows, {touched:.3f} ms where it was touched before", end=" "
    )
    print(f"({100 * result['growth_costs']:+.1f} %)")
    print(f"memory: {last['taken'] / 2**20:.1f} MiB taken, {last['held'] / 2**20:.1f} MiB held")
    print(f"written to {write(result, options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
