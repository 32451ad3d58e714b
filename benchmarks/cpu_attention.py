"""Decode attention alone on a CPU: generated C++ kernels beside PyTorch's, and beside what memory gives.

    python benchmarks/cpu_attention.py
    python benchmarks/cpu_attention.py --contexts 4096 --storages baseline,int8 --rounds 20

All cases of a context stand in one process and take turns; figures are medians of the rounds. Each has as many layers
as fill about 250 MB, so that no cache of the processor holds them. A probe reads memory in every round. Each case runs
over all layers twice in a row, and the second is timed. What is timed is one call of the op: the write of the new
token, its softmax over all slots, and the result; `sdpa` is `scaled_dot_product_attention` (with `enable_gqa`) over the
keys and values of `baseline`, without a write, and `flex` is `flex_attention`, compiled, over the same. `h2o` holds as
many tokens as `baseline`, and each step one of them goes. Results are compared with `sdpa` before anything is timed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from compile_time import machine, write

SHAPES = {"smollm2": (9, 3, 64), "llama": (32, 8, 128)}
OTHERS = ("sdpa", "flex")
_BYTES = 250e6


@dataclass
class Case:
    """One attention to time. run: calls it for every layer; layers: how many; bytes: of one layer's cache"""

    run: Callable[[], Any]
    layers: int
    bytes: int


def storages(context: int) -> dict[str, Any]:
    """Layouts by name; those of a budget hold `context` tokens."""
    from kvcompile.layouts import CacheLayout, Paged, Scored, Slots, fp8, int8, uint

    half = context // 2

    return {
        "baseline": CacheLayout(),
        "paged": CacheLayout(placement=Paged(16)),
        "fp8": CacheLayout(fp8(), fp8()),
        "int8": CacheLayout(int8(), int8()),
        "paged_int8": CacheLayout(int8(), int8(), placement=Paged(16)),
        "int4": CacheLayout(uint(4, 32), uint(4, 32)),
        "h2o": CacheLayout(placement=Slots(), retention=Scored(4, context - half - 4, half)),
    }


def others(name: str) -> Callable[..., Any]:
    """PyTorch's attention of a query, keys and values."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    if name == "sdpa":
        return partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)
    return partial(torch.compile(flex_attention, dynamic=False), enable_gqa=True)


def cases(names: list[str], shape: tuple[int, int, int], context: int, dtype: Any) -> dict[str, Case]:
    """Those of one context, compared with each other."""
    import torch
    from torch import Tensor

    from kvcompile.kernels.cpp.host.attention import spec_of
    from kvcompile.kernels.cpp.host.ops import cpp_attend
    from kvcompile.kernels.cpp.isa import widens
    from kvcompile.kernels.ops import cached_attention as ops
    from kvcompile.kernels.spec import SiteSpec

    heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(0)
    layers = max(2, min(30, int(_BYTES / (2 * context * kv_heads * dim * dtype.itemsize))))
    k, v = (torch.randn(1, kv_heads, context, dim, generator=generator).to(dtype) for _ in range(2))
    q = torch.randn(1, heads, 1, dim, generator=generator).to(dtype)
    last = torch.tensor([[context - 1]])
    found: dict[str, Case] = {}
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).float()

    def ours(name: str) -> Case:
        layout = storages(context)[name]
        site = SiteSpec(layout, dim**-0.5, kernels="cpp")
        size = getattr(layout.placement, "page_size", 0)
        pages = -(-context // size) if size else 0
        table = torch.arange(1, pages + 1).int()[None] if size else None
        specs = layout.buffers(kv_heads, dim, dim, dtype, context)
        buffers = [torch.zeros(1 + pages if b.paged else 1, *b.shape, dtype=b.dtype) for b in specs]
        for spec, buffer in zip(specs, buffers, strict=True):
            spec.written(buffer)

        def call(own: list[Tensor], tokens: slice, kernels: str = "cpp") -> Tensor:
            at = torch.arange(tokens.start, tokens.stop)[None]
            queries = (
                q if tokens.stop - tokens.start == 1 else q.expand(-1, -1, tokens.stop - tokens.start, -1)
            )
            text = site.to_json() if kernels == "cpp" else SiteSpec(layout, dim**-0.5).to_json()
            seen = torch.tensor([tokens.start])
            out: Tensor = ops.cached_attention(
                queries,
                k[:, :, tokens],
                v[:, :, tokens],
                own,
                at,
                seen,
                [],
                tokens.stop,
                text,
                page_table=table,
            )
            return out

        chunk = 512
        for start in range(0, context - 1, chunk):
            call(buffers, slice(start, min(start + chunk, context - 1)), "reference")
        got = call(buffers, slice(context - 1, context)).float()
        off = float((got - wanted).abs().max() / wanted.abs().max())
        if off > {"int4": 0.25, "fp8": 0.1}.get(name, 0.05):
            raise RuntimeError(f"{name}, {context} tokens: off by {off:.1%} of the largest result")
        copies = [[b.clone() for b in buffers] for _ in range(layers)]
        new = [x[:, :, -1:].contiguous() for x in (k, v)]
        # As compiled code calls it: the op around it is made of Python, which only tracing runs.
        text = spec_of(site, (heads, kv_heads), (dim, dim), str(dtype), wide=widens(dtype)).to_json()

        # Where slots are full, a token has to go.
        now = last + 1 if layout.retention.by_score else last

        def run() -> None:
            for own in copies:
                cpp_attend(q, *new, own, now, [], None, None, table, None, [], dim, text)

        return Case(run, layers, sum(b.nbytes for b in buffers))

    for name in names:
        if name in OTHERS:
            attend = others(name)
            off = float((attend(q, k, v).float() - wanted).abs().max() / wanted.abs().max())
            if off > 0.05:
                raise RuntimeError(f"{name}, {context} tokens: off by {off:.1%} of the largest result")
            copies = [(k.clone(), v.clone()) for _ in range(layers)]

            def run(copies: Any = copies, attend: Any = attend) -> None:
                for own in copies:
                    attend(q, *own)

            found[name] = Case(run, layers, k.nbytes + v.nbytes)
        else:
            found[name] = ours(name)
    return found


def measured(options: argparse.Namespace, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for each shape, dtype, context and case."""
    import torch
    from decode import read_bandwidth

    rows = []
    for shape in options.shapes:
        for dtype in options.dtypes:
            for context in options.contexts:
                tell(f"{shape}, {dtype}, {context} tokens")
                found = cases(options.storages, SHAPES[shape], context, getattr(torch, dtype))
                for case in found.values():
                    case.run()
                seconds: dict[str, list[float]] = {name: [] for name in found}
                bandwidth = []
                for _ in range(options.rounds):
                    bandwidth.append(read_bandwidth())
                    for name, case in found.items():
                        case.run()  # the first of a kind pays for what woke up after another
                        began = time.perf_counter()
                        case.run()
                        seconds[name].append((time.perf_counter() - began) / case.layers)
                probe = statistics.median(bandwidth)
                for name, case in found.items():
                    median = statistics.median(seconds[name])
                    row = {"shape": shape, "dtype": dtype, "context": context, "case": name}
                    row |= {"us": median * 1e6, "least_us": min(seconds[name]) * 1e6, "bytes": case.bytes}
                    row |= {"gb_s": case.bytes / median / 1e9, "probe_gb_s": probe / 1e9}
                    rows.append(row | {"of_probe": case.bytes / median / probe})
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def names(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--shapes", type=names, default=[*SHAPES])
    parser.add_argument("--dtypes", type=names, default=["bfloat16", "float32"])
    parser.add_argument(
        "--contexts", type=lambda text: [int(n) for n in text.split(",")], default=[4096, 16384]
    )
    parser.add_argument(
        "--storages",
        type=names,
        default=["sdpa", "flex", "baseline", "paged", "fp8", "int8", "paged_int8", "int4"],
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", default="cpu_attention")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    from rich.console import Console

    from kvcompile.kernels.cpp.isa import isa
    from kvcompile.util.console import render, table

    with Console(stderr=True).status("starting") as status:
        rows = measured(options, lambda text: status.update(text))
    result = {"benchmark": "cpu_attention", "machine": machine(), "isa": isa().name, "rounds": options.rounds}
    path = write(result | {"rows": rows}, options.out)
    numbers = ("tokens", "µs", "GB/s", "of the probe")
    made = table("shape", "dtype", "case", *numbers, right=numbers)
    for row in rows:
        figures = (f"{row['context']:,}", f"{row['us']:,.0f}", f"{row['gb_s']:.1f}", f"{row['of_probe']:.0%}")
        made.add_row(row["shape"], row["dtype"], row["case"], *figures)
    print(render(made) + f"\nwritten to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
