"""The serving engine: throughput, waiting times and pages of fixed loads, beside what it is held to.

SmolLM2-135M in float32 with its real weights, greedy, every text as long as was asked whatever it says. Steps are timed
from outside (`serving_watch.py`), loads have fixed seeds (`serving_loads.py`). Loads that are compared take turns.

    python benchmarks/serving.py                            # all loads, about 15 minutes on 2 cores
    python benchmarks/serving.py --only offline --quick
    python benchmarks/serving.py --only peers               # others' engines beside ours (serving_peers.py)

Each load writes its figures to benchmarks/results/serving.json, and leaves there what others have written.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import serving_peers
import serving_room
import serving_speed
import serving_waits
from compile_time import RESULTS, machine, write
from serving_goals import lines
from serving_loads import Text

LOADS: dict[str, Callable[[serving_speed.Bench], dict[str, Any]]] = {
    "decodes": serving_speed.decodes,
    "offline": serving_speed.all_at_once,
    "shared": serving_waits.shared,
    "no_hits": serving_speed.no_hits,
    "turns": serving_waits.turns,
    "squeeze": serving_speed.squeeze,
    "arrivals": serving_waits.arrivals,
    "concurrency": serving_speed.concurrency,
    "long_prompt": serving_waits.long_prompt,
    "samples": serving_room.samples,
    "waste": serving_room.waste,
    "int8": serving_room.int8,
    "peers": serving_peers.peers,
}
MAX_TOKENS = 2560  # of a text in any load
TEXTS = 32  # at a time


def prepared(options: argparse.Namespace, tell: Callable[[str], None]) -> serving_speed.Bench:
    """SmolLM2, optimized and compiled."""
    import torch

    import kvcompile
    from kvcompile.models import load_model

    torch.set_num_threads(options.threads)
    tell("loading")
    loaded = load_model(options.model, "float32")
    tell("optimizing")
    # Capture is the same for each recipe; what it proves is in the tests.
    module = kvcompile.optimize(
        loaded.model, options.recipe, verify="off", max_tokens=MAX_TOKENS, max_batch=TEXTS
    )
    text = Text(loaded.tokenizer)
    return serving_speed.Bench(
        options.model,
        module,
        text,
        options.quick,
        options.rounds,
        options.threads,
        tuple(options.peers),
        tell,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--recipe", default="paged")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=list(LOADS),
        help=f"of {','.join(LOADS)}",
    )
    parser.add_argument(
        "--peers",
        type=lambda text: [name for name in text.split(",") if name],
        default=list(serving_peers.PEERS),
        help=f"others' engines in the load `peers`, of {','.join(serving_peers.PEERS)}",
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds and requests, for a first look")
    parser.add_argument("--rounds", type=int, default=5, help="at most so many of each load")
    parser.add_argument("--out", default="serving", help="a name in benchmarks/results, or a path")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    unknown = [name for name in options.only if name not in LOADS]
    if unknown:
        _parser().error(f"--only: there is no {unknown[0]}; of {', '.join(LOADS)}")
    strange = [name for name in options.peers if name not in serving_peers.PEERS]
    if strange:
        _parser().error(f"--peers: there is no {strange[0]}; of {', '.join(serving_peers.PEERS)}")
    path = Path(options.out) if options.out.endswith(".json") else RESULTS / f"{options.out}.json"
    result: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    result |= {"benchmark": "serving", "model": options.model, "recipe": options.recipe}
    began = time.perf_counter()

    def tell(text: str) -> None:
        print(f"{time.perf_counter() - began:4.0f} s  {text}", file=sys.stderr, flush=True)

    bench = prepared(options, tell)
    result["machine"] = machine()
    loads = result.setdefault("loads", {})
    for name in options.only:
        loads[name] = {**LOADS[name](bench), "date": machine()["date"], "quick": options.quick}
        path = write(result, str(path))
        print(name, json.dumps(_short(loads[name])), flush=True)
    for goal, bound, value, met in lines(loads):
        print(f"{goal:65} {bound:>8} {value:>14} {met:>4}")
    print(f"{time.perf_counter() - began:.0f} s in all; written to {path}")
    return 0


def _short(found: Any) -> Any:
    """Figures without long lists, to look at."""
    if isinstance(found, dict):
        return {key: _short(value) for key, value in found.items() if not key.endswith("_all_s")}
    if isinstance(found, list):
        return [_short(value) for value in found[:8]]
    return round(found, 4) if isinstance(found, float) else found


if __name__ == "__main__":
    sys.exit(main())
