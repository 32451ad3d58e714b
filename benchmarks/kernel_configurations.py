"""Cases of the kernels' benchmark under every configuration that the tuner knows: microseconds of each, on a GPU.

`kvcompile tune` looks for what serves several batches and lengths; this shows, case by case, how much there is to gain.
A case has its share of the time, and what is not reached then is not measured; what the table says now comes first, and
once more at the end. Those of about as many warps as a multiprocessor holds come first. Linear layers of one token have
no table: rows of a program and warps are tried beside the form that `kernels/triton/host/linear.py` takes.

    python benchmarks/kernel_configurations.py --seconds 60 --out configurations.json
    python benchmarks/kernel_configurations.py --only int4 --only "pages of 16"
    python benchmarks/kernel_configurations.py --dry-run   # no GPU: tiny, in Triton's interpreter; times mean nothing
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from kernel_cases import Case

    from kvcompile.kernels.triton.config import Config
    from kvcompile.kernels.triton.tools.synthetic_cache import Sample

ROOM = 256 << 20  # bytes of caches that a turn reads at least
COPIES = 8  # of a cache, at most
WARPS = 8.0  # of a multiprocessor, that decode programs fill well


def tried(case: Case, problem: Sample) -> list[Config]:
    """What the table says now, then what else fits."""
    from kvcompile.kernels.triton.config import config
    from kvcompile.kernels.triton.device import device_of
    from kvcompile.kernels.triton.tools.tune import Subject, candidates

    own = device_of(problem.q.device)
    subject = Subject(
        case.name, role_of(case), problem.site, problem.heads, problem.dims, problem.q.dtype, ()
    )
    now = replace(config(subject.case, problem.site, own), source="")
    others = sorted(candidates(subject, own), key=lambda one: abs(one.num_warps * one.waves - WARPS))
    return list(dict.fromkeys((now, *others)))


def role_of(case: Case) -> str:
    return "prefill" if case.new > 1 else "decode"


def measure(case: Case, device: torch.device, ends: float, options: argparse.Namespace) -> dict[str, Any]:
    """A case: rows of block_m, block_n, warps, stages, waves and microseconds, the fastest first."""
    import torch
    from kernel_problem import problem_of

    from kvcompile.kernels.triton.tools.timing import Timed, medians
    from kvcompile.kernels.triton.tools.tune import call_of, too_large

    dry = device.type == "cpu"
    kind, room = (torch.float32, 1) if dry else (torch.bfloat16, ROOM if case.new == 1 else 1)
    problem = problem_of(case.tiny() if dry else case, device, kind, room)
    copies = range(min(len(problem.caches), COPIES))

    def of(one: Config) -> list[float] | None:
        try:
            timed = Timed([call_of(role_of(case), one, problem, copy) for copy in copies], device)
        except too_large():
            return None
        us = medians({"own": timed}, options.rounds)["own"]
        return [one.block_m, one.block_n, one.num_warps, one.num_stages, one.waves, round(us, 2)]

    return tried_until(ends, tried(case, problem), of)


def measure_linear(
    case: Any, device: torch.device, ends: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Linear layers: lists of rows of a program, columns of a load, warps and microseconds, the fastest first.

    Raises:
        ArithmeticError: a form gives something else than float64.
    """
    from dataclasses import astuple

    from kernel_linear import allowed, call_in, error_of, exact, forms, problem_of

    from kvcompile.kernels.triton.tools.timing import Timed, medians
    from kvcompile.kernels.triton.tools.tune import too_large

    dry = device.type == "cpu"
    problem = problem_of(case.tiny() if dry else case, device, 1 if dry else ROOM)
    expected = exact(problem)
    limit = allowed(problem, expected)

    def of(one: Any) -> list[float] | None:
        try:
            error = error_of(call_in(one, problem)(), expected)
            if not error <= limit:
                raise ArithmeticError(f"{case.name}, {one}: relative error {error:.2e}, at most {limit:.2e}")
            timed = Timed([call_in(one, problem, copy) for copy in range(len(problem.weights))], device)
        except too_large():
            return None
        return [*astuple(one), round(medians({"own": timed}, options.rounds)["own"], 2)]

    return tried_until(ends, forms(problem), of)


def tried_until(ends: float, every: Sequence[Any], of: Callable[[Any], list[float] | None]) -> dict[str, Any]:
    """What is measured of all until `ends`, the first of them at the beginning and at the end."""
    rows = [of(every[0])]
    for one in every[1:]:
        if time.monotonic() > ends:
            break
        rows.append(of(one))
    rows.append(of(every[0]))
    found = sorted((row for row in rows if row), key=lambda row: row[-1])
    return {"now": rows[0], "again": rows[-1], "measured": len(found), "of": len(every), "rows": found}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="cases with this in their name"
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="of all cases together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry-run", "--rehearse", action="store_true")
    parser.add_argument("--out", type=Path, help="the file; without it, what is fastest is printed alone")
    options = parser.parse_args(arguments)
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
        options.rounds = 1
    import torch
    from compile_time import machine
    from kernel_cases import CASES
    from kernel_linear import LINEAR, SWEPT
    from kernel_linear import Case as Linear

    if not options.dry_run and not torch.cuda.is_available():
        print("needs an NVIDIA GPU; --dry-run shows that the script works", file=sys.stderr)
        return 1
    device = torch.device("cpu" if options.dry_run else "cuda")
    cases: list[Any] = [
        case
        for case in (*CASES, *LINEAR, *SWEPT)
        if not options.only or any(text in case.name for text in options.only)
    ]
    if not cases:
        parser.error(f"no case has {' or '.join(options.only)} in its name")
    began, found = time.monotonic(), dict[str, Any]()
    for number, case in enumerate(cases):
        now = time.monotonic()
        share = (began + options.seconds - now) / (len(cases) - number)
        measured = measure_linear if isinstance(case, Linear) else measure
        own = found[case.name] = measured(case, device, now + share, options)
        print(
            f"{case.name}: now {own['now']}, best of {own['measured']} of {own['of']}: {own['rows'][0]}",
            flush=True,
        )
        if options.out:  # a run that is stopped keeps what it measured
            about = {"machine": machine(), "meaningless": options.dry_run, "cases": found}
            options.out.write_text(json.dumps(about) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
