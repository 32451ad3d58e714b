"""All linear layers of SmolLM2, of few rows: the C++ kernel beside PyTorch's BLAS, and what reading them takes.

    python benchmarks/cpu_rows.py
    python benchmarks/cpu_rows.py --rows 1,8,64 --rounds 9

A step of several sequences, and what is left of a prompt after a prefix was found, have few rows: the weights of all
layers together are read from memory, as in a step of one token. The kernel and the BLAS take turns; a round's result is
that of all layers, and the table has medians. The limit is the time of summing as many bytes, with the same threads.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from compile_time import machine, write

LAYERS, WIDTH, INNER, KEYS, WORDS = 30, 576, 1536, 192, 49152  # of SmolLM2-135M


def weights(dtype: Any) -> list[Any]:
    """Of every layer queries, keys and values; the output; gate and up; down; at last the head."""
    import torch

    generator = torch.Generator().manual_seed(0)
    shapes = [(WIDTH + 2 * KEYS, WIDTH), (WIDTH, WIDTH), (2 * INNER, WIDTH), (WIDTH, INNER)] * LAYERS
    return [torch.randn(shape, generator=generator).to(dtype) for shape in (*shapes, (WORDS, WIDTH))]


def forms(rows: int, layers: list[Any]) -> dict[str, Callable[[], Any]]:
    """Each runs all layers over so many rows, and gives the last result."""
    import torch
    from torch.nn.functional import linear as aten

    from kvcompile.kernels.cpp.host.linear import linear, linear_many

    generator, dtype = torch.Generator().manual_seed(1), layers[0].dtype
    given = {width: torch.randn(1, rows, width, generator=generator).to(dtype) for width in (WIDTH, INNER)}

    def through(run: Callable[[Any, Any], Any]) -> Any:
        return [run(given[weight.shape[1]], weight) for weight in layers][-1]

    kernel = linear if rows == 1 else linear_many
    return {"kernel": lambda: through(kernel), "BLAS": lambda: through(aten)}


def measured(options: argparse.Namespace, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for each dtype and number of rows: milliseconds of each form, and of reading the weights."""
    import torch

    found = []
    for dtype in options.dtypes:
        layers = weights(getattr(torch, dtype))
        words = torch.zeros(sum(weight.nbytes for weight in layers) // 8, dtype=torch.int64)
        for rows in options.rows:
            tell(f"{dtype}, {rows} rows")
            runs = forms(rows, layers) | {"limit": words.sum}
            kernel, blas = runs["kernel"]().double(), runs["BLAS"]().double()
            off = float((kernel - blas).abs().max() / blas.abs().max())
            if off > 8 * torch.finfo(getattr(torch, dtype)).eps:
                raise RuntimeError(f"{dtype}, {rows} rows: the kernel is off by {off:.1e}")
            seconds: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(options.rounds):
                for name, run in runs.items():
                    began = time.perf_counter()
                    run()
                    seconds[name].append(time.perf_counter() - began)
            ms = {name: statistics.median(taken) * 1e3 for name, taken in seconds.items()}
            found.append({"dtype": dtype, "rows": rows, **ms})
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["float32"])
    parser.add_argument(
        "--rows",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[1, 2, 4, 8, 16, 32, 64, 128],
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", default="cpu_rows")
    options = parser.parse_args(argv)
    from rich.console import Console

    from kvcompile.kernels.cpp.isa import isa
    from kvcompile.util.console import render, table

    with Console(stderr=True).status("starting") as status:
        found = measured(options, lambda text: status.update(text))
    result = {"benchmark": "cpu_rows", "machine": machine(), "isa": isa().name, "rounds": options.rounds}
    path = write(result | {"rows": found}, options.out)
    names = ("rows", "kernel ms", "BLAS ms", "limit ms")
    made = table("dtype", *names, right=names)
    for row in found:
        figures = (f"{row[name]:.1f}" for name in ("kernel", "BLAS", "limit"))
        made.add_row(row["dtype"], str(row["rows"]), *figures)
    print(render(made) + f"\nwritten to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
