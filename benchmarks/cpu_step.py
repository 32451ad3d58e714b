"""A whole decode step on a CPU, at a width that people use, beside transformers and what memory gives.

    python benchmarks/cpu_step.py                       # a random model of 4 layers, 2048 / 8192 wide, bf16 and fp32
    python benchmarks/cpu_step.py --model smollm2 --dtypes bfloat16 --context 512
    python benchmarks/cpu_step.py --busy                # with another process that keeps a core busy
    python benchmarks/cpu_step.py --profile             # what of a step takes how long, of kvcompile

Both stand in one process with the same tokens in their caches and take turns; figures are medians of the rounds, and a
probe reads memory in every round. The limit is the bytes that a step must read (weights and cache) over the bandwidth.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from compile_time import machine, write
from decode import read_bandwidth
from decode_variants import Ours, Plain

VARIANTS = ("dynamic", "baseline")


def wide(dtype: str) -> Any:
    """A random model: 32 query heads and 8 KV heads of 64 channels, 4 layers, a vocabulary of 32,000."""
    import torch
    from torch import nn
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=4,
        vocab_size=32000,
        max_position_embeddings=4096,
        dtype=dtype,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        model = model.to_empty(device="cpu")
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if "norm" in name:
            nn.init.ones_(weight)
        else:
            weight.data.copy_((torch.rand(weight.shape, generator=generator) - 0.5) * 0.03)
    rotary = model.model.rotary_emb
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, 64, 2).float() / 64)
    rotary.inv_freq = rotary.original_inv_freq = frequencies
    return model.eval()


def loaded(name: str, dtype: str) -> Any:
    if name == "wide":
        return wide(dtype)
    from kvcompile.models import load_model

    return load_model(name, dtype).model


def weight_bytes(model: Any) -> int:
    """Bytes of weights that a step reads: all but the embedding, of which it reads a row."""
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    return sum(p.nbytes for p in model.parameters()) - (0 if tied else embedding.nbytes)


@contextmanager
def neighbour(busy: bool) -> Iterator[None]:
    """A process that keeps one core busy, where that is asked for."""
    if not busy:
        yield
        return
    program = "x = 0\nwhile True:\n    x += 1"
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measured(options: argparse.Namespace, dtype: str) -> list[dict[str, Any]]:
    """A row for each variant."""
    import torch

    model = loaded(options.model, dtype)
    ids = torch.randint(3, 30000, (1, options.context), generator=torch.Generator().manual_seed(0))
    tokens = options.rounds * options.tokens + options.context + 64
    variants: dict[str, Any] = {
        "dynamic": Plain(model),
        "baseline": Ours(model, "baseline", True, None, max_tokens=-(-tokens // 64) * 64),
    }
    bytes_ = weight_bytes(model)
    last, times, probes = {}, {name: [] for name in variants}, []
    for name, variant in variants.items():
        last[name] = variant.prefill(ids)
        last[name] = variant.step(last[name])
    if options.profile:
        profile(variants["baseline"], last["baseline"])
        return []
    with neighbour(options.busy):
        for _ in range(options.rounds):
            probes.append(read_bandwidth())
            for name, variant in variants.items():
                for _ in range(options.tokens):
                    began = time.perf_counter()
                    last[name] = variant.step(last[name])
                    times[name].append(time.perf_counter() - began)
    bandwidth = statistics.median(probes)
    rows = []
    for name, variant in variants.items():
        took = statistics.median(times[name])
        limit = (bytes_ + variant.read_bytes(options.context)) / bandwidth
        rows.append(
            {
                "model": options.model,
                "dtype": dtype,
                "context": options.context,
                "busy": options.busy,
                "variant": name,
                "ms": round(took * 1e3, 2),
                "limit_ms": round(limit * 1e3, 2),
                "of_limit": round(limit / took, 3),
                "over_dynamic": round(statistics.median(times["dynamic"]) / took, 2),
                "probe_gbs": round(bandwidth / 1e9, 1),
            }
        )
    return rows


def profile(variant: Any, token: Any) -> None:
    """Print what the calls of a step take that was noted, then what torch.profiler says of ten steps."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    began = time.perf_counter()
    for _ in range(10):
        token = variant.step(token)
    print(f"{(time.perf_counter() - began) * 100:.2f} ms a step, not profiled", file=sys.stderr)
    steps = variant.fast.executor.steps
    if steps.count:
        rounds = [steps.times() for _ in range(20)]
        took: dict[str, list[float]] = {}
        for number, (name, _) in enumerate(rounds[0]):
            took.setdefault(name, []).append(statistics.median(times[number][1] for times in rounds) * 1e3)
        for name, each in sorted(took.items(), key=lambda item: -sum(item[1])):
            print(f"{sum(each):7.2f} ms in {len(each):3} calls of {name}")
    with profiler(activities=[ProfilerActivity.CPU]) as made:
        for _ in range(10):
            token = variant.step(token)
    print(made.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=70))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="wide", help="wide, smollm2, or what load_model takes")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--context", type=int, default=270)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=4, help="of a turn")
    parser.add_argument("--busy", action="store_true", help="with another process that keeps a core busy")
    parser.add_argument("--profile", action="store_true", help="show where a step's time goes, and stop")
    parser.add_argument(
        "--out", default="", help="name of the JSON in benchmarks/results; none: it is printed"
    )
    options = parser.parse_args()
    rows = [row for dtype in options.dtypes.split(",") for row in measured(options, dtype)]
    for row in rows:
        print(*(f"{key}={value}" for key, value in row.items()))
    if options.out and rows:
        print(write({"machine": machine(), "rows": rows}, options.out))


if __name__ == "__main__":
    main()
