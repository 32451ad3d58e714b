"""python -m tests.fuzz --seeds 0:500: check decoders and print what came of them.

--out FILE     one JSON line per decoder; what is there already is not run again
--verify quick with the product's own verification (default: off, so that detection alone is tested)
--shrink SEED  make a failing decoder as plain as it can be
--show SEED    print a decoder
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0:300", help="first:end")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--verify", default="off")
    parser.add_argument("--shrink", type=int)
    parser.add_argument("--show", type=int)
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore")

    from tests.fuzz.check import check
    from tests.fuzz.draw import spec_from_seed
    from tests.fuzz.quick import quick
    from tests.fuzz.report import Row, print_table
    from tests.fuzz.shrink import shrink

    quick()
    if options.show is not None:
        print(spec_from_seed(options.show))
        return 0
    if options.shrink is not None:
        spec, outcome = shrink(spec_from_seed(options.shrink), options.verify)
        print(f"{outcome.kind}: {outcome.told}\n{spec}")
        return 0
    first, _, end = options.seeds.partition(":")
    rows: dict[int, Row] = {}
    if options.out is not None and options.out.exists():
        for line in options.out.read_text("utf-8").splitlines():
            row = Row(**json.loads(line))
            rows[row.seed] = row
    wanted = range(int(first), int(end))
    for seed in wanted:
        if seed in rows:
            continue
        spec = spec_from_seed(seed)
        outcome = check(spec, options.verify)
        rows[seed] = row = Row(seed, outcome.kind, outcome.told, outcome.seconds, spec.labels(), repr(spec))
        if options.out is not None:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row.__dict__) + "\n")
        if not outcome.good:
            print(
                f"{seed}: {outcome.kind}: {', '.join(spec.labels())}: {outcome.told.splitlines()[0]}",
                flush=True,
            )
    chosen = [rows[seed] for seed in wanted]
    print_table(chosen)
    return 1 if any(row.kind in ("WRONG", "CRASH") for row in chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
