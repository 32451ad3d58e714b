"""python -m tests.coverage: check every causal-LM type and write docs/coverage.md and docs/coverage.json.

python -m tests.coverage                       all types, and the table in the docs
python -m tests.coverage --fast                the types that CI checks; nothing is written
python -m tests.coverage llama gemma2 bloom    these types; nothing is written
python -m tests.coverage --tensor 2            all types over 2 ranks; writes docs/coverage_tensor.json
python -m tests.coverage --stages 2            all types over 2 stages; writes docs/coverage_stages.json
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("types", nargs="*", help="default: all")
    parser.add_argument("--fast", action="store_true", help="the types that CI checks")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one type")
    parser.add_argument("--tensor", type=int, help="over so many ranks")
    parser.add_argument("--stages", type=int, help="over so many stages")
    options = parser.parse_args(argv)
    if options.tensor and options.stages:
        parser.error("--tensor and --stages have tables of their own: one at a time")
    # One thread a process; read by OpenMP when torch is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.filterwarnings("ignore")
    import torch
    import transformers
    from rich.console import Console

    from tests.coverage.configs import all_types
    from tests.coverage.fast import FAST
    from tests.coverage.run import run
    from tests.coverage.sizes import one_sided, told
    from tests.coverage.table import write

    transformers.logging.set_verbosity_error()
    console = Console()
    started = time.perf_counter()

    def tell(row: Any, left: int) -> None:
        errors = " ".join(f"{name} {error:.0e}" for name, error in row.errors.items())
        found = f"{row.sites}/{row.expected}" if row.sites >= 0 else ""
        reason = " ".join(row.reason.split())[:200]
        style = {
            "verified": "green",
            "refused": "yellow",
            "whole": "yellow",
            "wrong": "red",
            "error": "red",
        }.get(row.outcome)
        sizes = f" ({told(row.tested)})" if told(row.tested) else ""
        line = (
            f"{left:>4} left  {row.type}: {row.outcome} {found}{sizes} {row.seconds:.0f} s {errors} {reason}"
        )
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    types = options.types or (FAST if options.fast else all_types())
    if options.tensor or options.stages:
        from tests.coverage import stages, tensor

        check: Callable[[str], Any] = partial(stages.check_stages, stages=options.stages)
        made: Callable[..., Any] = partial(stages.StagesRow, stages=options.stages)
        if options.tensor:
            check = partial(tensor.check_tensor, ranks=options.tensor)
            made = partial(tensor.TensorRow, ranks=options.tensor)
        alone = [] if options.types else tensor.not_rewritten(DOCS / "coverage.json", types, made)
        left = [name for name in types if name not in {row.type for row in alone}]
        over = sorted(
            [*alone, *run(left, options.jobs, options.limit, tell=tell, check=check)],
            key=lambda row: row.type,
        )
        versions = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"
        if not (options.types or options.fast):
            kind = "tensor" if options.tensor else "stages"
            tensor.write(over, versions, DOCS / f"coverage_{kind}.json")
        console.print(f"{tensor.summary(over)} of {len(over)} in {time.perf_counter() - started:.0f} s")
        return 1 if {"wrong", "error"} & {row.outcome for row in over} else 0
    rows = run(types, options.jobs, options.limit, tell=tell)
    seconds = time.perf_counter() - started
    if not (options.types or options.fast):
        versions = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"
        write(rows, versions, DOCS / "coverage.md", DOCS / "coverage.json")
    verified = sum(row.outcome == "verified" for row in rows)
    bad = [row.type for row in rows if row.outcome in ("wrong", "error")]
    bad += [row.type for row in rows if row.outcome == "verified" and one_sided(row.tested)]
    console.print(
        f"{verified} of {len(rows)} verified in {seconds:.0f} s; wrong, failed or tested on one side "
        f"only: {', '.join(bad) or 'none'}"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
