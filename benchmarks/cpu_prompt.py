"""What a prompt takes on a CPU, piece by piece: attention and linear layers by C++ kernels, beside PyTorch's.

    python benchmarks/cpu_prompt.py
    python benchmarks/cpu_prompt.py --tokens 4096 --dtypes bfloat16 --rounds 9

All cases of a row stand in one process and take turns; figures are medians of the rounds. Of attention, `kernel` is
`kvcompile::cpp_attend_many` over keys and values in the model's dtype, `sdpa causal` is PyTorch's fastest form of the
same, and `sdpa mask` what the reference runs, with a mask from positions. Of a linear layer of SmolLM2, `kernel` is
`kvcompile::cpp_linear` of many tokens, which compiled modules take where the processor lacks products of the dtype or
has slower ones than of float32, and `aten` is `torch.nn.functional.linear`. Results are compared before
anything is timed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from compile_time import machine, write
from cpu_attention import SHAPES

LINEAR = (576, 1536)  # of SmolLM2's feed-forward layers: from, to
_OFF = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2}  # of the largest result, at most
Cases = dict[str, Callable[[], Any]]


def attention(shape: tuple[int, int, int], tokens: int, dtype: Any) -> tuple[Cases, float]:
    """The forms of a layer's attention over a prompt, and its floating-point operations."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from kvcompile.kernels.cpp.host.prefill import attend_many
    from kvcompile.kernels.inputs import AttendInputs
    from kvcompile.kernels.spec import SiteSpec
    from kvcompile.layouts import CacheLayout

    heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, count, tokens, dim, generator=generator).to(dtype)
        for count in (heads, kv_heads, kv_heads)
    )
    at = torch.arange(tokens)[None]
    x = AttendInputs(q, k, v, [], at, torch.zeros(1).long(), [], tokens, SiteSpec(CacheLayout(), dim**-0.5))
    mask = (at[:, :, None] >= at[:, None])[:, None]
    found: Cases = {
        "kernel": lambda: attend_many(x, k, v, at),
        "sdpa causal": lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        "sdpa mask": lambda: scaled_dot_product_attention(q, k, v, mask, enable_gqa=True),
    }
    return found, 2.0 * heads * tokens * tokens * dim


def linear(tokens: int, dtype: Any) -> tuple[Cases, float]:
    """The forms of a linear layer, and its floating-point operations."""
    import torch

    from kvcompile.kernels.cpp.host.linear import linear_many

    generator = torch.Generator().manual_seed(0)
    columns, rows = LINEAR
    x, weight = (torch.randn(n, columns, generator=generator).to(dtype) for n in (tokens, rows))
    found: Cases = {
        "kernel": lambda: linear_many(x, weight),
        "aten": lambda: torch.nn.functional.linear(x, weight),
    }
    return found, 2.0 * tokens * rows * columns


def measured(options: argparse.Namespace, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for each piece, dtype, number of tokens and case."""
    import torch

    rows = []
    for dtype in options.dtypes:
        for tokens in options.tokens:
            pieces = {
                f"attention, {name}": attention(SHAPES[name], tokens, getattr(torch, dtype))
                for name in SHAPES
            }
            if dtype != "float32":  # whose kernel leaves so many rows to aten: benchmarks/cpu_rows.py
                pieces["linear, 576 to 1,536"] = linear(tokens, getattr(torch, dtype))
            for piece, (found, operations) in pieces.items():
                tell(f"{piece}, {dtype}, {tokens} tokens")
                first, *others = (case().float() for case in found.values())
                for name, other in zip([*found][1:], others, strict=True):
                    off = float((other - first).abs().max() / first.abs().max())
                    if off > _OFF[dtype]:
                        raise RuntimeError(f"{piece}, {dtype}, {tokens} tokens: {name} is off by {off:.1%}")
                seconds: dict[str, list[float]] = {name: [] for name in found}
                for _ in range(options.rounds):
                    for name, case in found.items():
                        began = time.perf_counter()
                        case()
                        seconds[name].append(time.perf_counter() - began)
                for name, taken in seconds.items():
                    median = statistics.median(taken)
                    row = {"piece": piece, "dtype": dtype, "tokens": tokens, "case": name, "ms": median * 1e3}
                    rows.append(row | {"least_ms": min(taken) * 1e3, "gflop_s": operations / median / 1e9})
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dtypes", type=lambda text: text.split(","), default=["bfloat16", "float16", "float32"]
    )
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=[512, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default="cpu_prompt")
    options = parser.parse_args(argv)
    from rich.console import Console

    from kvcompile.kernels.cpp.isa import isa
    from kvcompile.util.console import render, table

    with Console(stderr=True).status("starting") as status:
        rows = measured(options, lambda text: status.update(text))
    result = {"benchmark": "cpu_prompt", "machine": machine(), "isa": isa().name, "rounds": options.rounds}
    path = write(result | {"rows": rows}, options.out)
    made = table("piece", "dtype", "tokens", "case", "ms", "GFLOP/s", right=("tokens", "ms", "GFLOP/s"))
    for row in rows:
        figures = (f"{row['tokens']:,}", row["case"], f"{row['ms']:,.1f}", f"{row['gflop_s']:.0f}")
        made.add_row(row["piece"], row["dtype"], *figures)
    print(render(made) + f"\nwritten to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
