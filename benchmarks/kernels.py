"""Generated kernels on a GPU: microseconds, bytes and share of the copy bandwidth, beside other kernels.

Everything stands in one process: the copy bandwidth, our kernels and the peers, each over several copies of its cache
(`kernels/triton/tools/timing.py`) and in turns; figures are medians. Each case is compared with the reference before it
is measured. Attention alone is measured, without the write of the new token, unless a case says so; `linear` cases are
linear layers of one token (`kernel_linear.py`).

    make bench-kernels                        # all cases; a few minutes on an H200
    python benchmarks/kernels.py --only int8 --rounds 50
    python benchmarks/kernels.py --dry-run    # no GPU: tiny caches in Triton's interpreter, times mean nothing
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
ROOM = 256 << 20  # bytes of caches that a turn reads at least, several times the L2 cache
COPY = 2 << 30
LARGEST_ERROR = {
    "bf16": 0.01,
    "other": 0.02,
}  # kernels round what they multiply; see tests/support/budget.py


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All figures, as the file has them."""
    import torch
    from compile_time import machine, write
    from kernel_cases import APPENDS, CASES, GOALS, Figure
    from kernel_linear import LINEAR

    from kvcompile.kernels.triton.tools.timing import copy_bandwidth

    device = torch.device("cpu" if options.dry_run else "cuda")
    dtype = torch.float32 if options.dry_run else torch.bfloat16
    cases = [case.tiny() if options.dry_run else case for case in (*CASES, *APPENDS, *LINEAR)]
    chosen = [case for case in cases if not options.only or any(text in case.name for text in options.only)]
    bandwidth = copy_bandwidth(device, (1 << 20) if options.dry_run else COPY, options.rounds)
    rows = resumed(options)
    figures = {row["case"]: Figure(row["us"], row["bytes"], row["share"]) for row in rows if "us" in row}
    for case in chosen:
        if any(row["case"] == case.name for row in rows):
            continue
        print(case.name, file=sys.stderr, flush=True)
        try:
            row = measure(case, device, dtype, bandwidth, options)
        except Exception as error:  # the others are measured all the same
            traceback.print_exc()
            row = {
                "case": case.name,
                "wrong": f"failed: {(str(error) or type(error).__name__).splitlines()[0]}",
            }
        rows.append(row)
        if "us" in row:
            figures[case.name] = Figure(row["us"], row["bytes"], row["share"])
        if options.resume:  # a run that is stopped keeps what it measured
            write({"benchmark": "kernels", "meaningless": options.dry_run, "cases": rows}, options.out)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    goals = [judged(goal, figures) for goal in GOALS]
    import triton

    return {
        "benchmark": "kernels",
        "meaningless": options.dry_run,
        "machine": machine() | {"triton": triton.__version__},
        "copy_bandwidth": round(bandwidth / 1e9, 1),
        "rounds": options.rounds,
        "cases": rows,
        "goals": [goal for goal in goals if goal["value"] is not None],
    }


def resumed(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of an earlier run that gave figures, of the same kind."""
    if not options.resume or options.again or not Path(options.out).is_file():
        return []
    before = json.loads(Path(options.out).read_text("utf-8"))
    if before.get("meaningless") != options.dry_run:
        return []
    return [row for row in before["cases"] if "us" in row]


def measure(
    case: Any, device: Any, dtype: Any, bandwidth: float, options: argparse.Namespace
) -> dict[str, Any]:
    """One case: ours and the peers, in turns."""
    from kernel_linear import Case as Linear
    from kernel_peers import PEERS, attempt
    from kernel_problem import call_of, dense_of, error_of, problem_of

    from kvcompile.kernels.triton.tools.timing import Timed, medians

    if case.name.startswith("append"):
        return measure_append(case, device, dtype, bandwidth, options)
    if isinstance(case, Linear):
        return measure_linear(case, device, bandwidth, options)
    room = 1 if options.dry_run else ROOM
    problem = problem_of(case, device, dtype, room)
    row: dict[str, Any] = {"case": case.name, "batch": case.batch, "context": case.context}
    row |= {"heads": list(case.heads), "layout": str(problem.site.layout), "bytes": problem.bytes}
    error = error_of(problem)
    limit = LARGEST_ERROR["bf16" if not case.cache else "other"]
    if not error <= limit:
        return row | {
            "wrong": f"relative error {error:.4f} against the reference, at most {limit} is due to rounding"
        }
    copies = range(len(problem.caches))
    timed = {"ours": Timed([call_of(problem, copy) for copy in copies], device)}
    peers: dict[str, Any] = {}
    if case.peers:
        expected = call_of(problem)()
        for name, make in PEERS.items():
            first = attempt(make, dense_of(problem), expected)
            if isinstance(first, str):
                peers[name] = first
                continue
            calls = [first, *(make(dense_of(problem, copy)) for copy in copies[1:])]
            timed[name] = Timed(calls, device)
    found = medians(timed, options.rounds)
    peers |= {
        name: {"us": round(us, 2), **({"note": timed[name].note} if timed[name].note else {})}
        for name, us in found.items()
        if name != "ours"
    }
    row |= figures_of(found["ours"], problem.bytes, bandwidth) | {"error": error, "peers": peers}
    return row | ({"tflops": round(case.flops / found["ours"] * 1e-6, 1)} if case.new > 1 else {})


def measure_append(
    case: Any, device: Any, dtype: Any, bandwidth: float, options: argparse.Namespace
) -> dict[str, Any]:
    """RoPE on queries and keys, encoding, and the write of one token a sequence: one launch."""
    from kernel_problem import append_of, problem_of

    from kvcompile.kernels.triton.tools.timing import Timed, medians

    problem = problem_of(case, device, dtype, 0)
    call = append_of(problem)
    moved = 2 * problem.q.nbytes + problem.k.nbytes + problem.v.nbytes
    moved += sum(buffer[:, :, :1].nbytes for buffer in problem.caches[0])
    row = {"case": case.name, "batch": case.batch, "context": case.context, "heads": list(case.heads)}
    row |= {"layout": str(problem.site.layout), "bytes": moved}
    found = medians({"ours": Timed([call] * (1 if options.dry_run else 20), device)}, options.rounds)
    return row | figures_of(found["ours"], moved, bandwidth)


def measure_linear(case: Any, device: Any, bandwidth: float, options: argparse.Namespace) -> dict[str, Any]:
    """Linear layers of one token, in the case's own dtype: one launch, and PyTorch's calls beside it."""
    from dataclasses import astuple

    from kernel_linear import PEER, allowed, call_of, error_of, exact, form_now, peer_of, problem_of

    from kvcompile.kernels.triton.tools.timing import Timed, medians

    problem = problem_of(case, device, 1 if options.dry_run else ROOM)
    row: dict[str, Any] = {"case": case.name, "columns": case.columns, "rows": list(case.rows)}
    row |= {"dtype": str(case.dtype).removeprefix("torch."), "form": astuple(form_now(problem))}
    row |= {"bytes": problem.bytes}
    expected = exact(problem)
    error, limit = error_of(call_of(problem)(), expected), allowed(problem, expected)
    if not error <= limit:
        return row | {
            "wrong": f"relative error {error:.2e} against float64, at most {limit:.2e} is due to rounding"
        }
    copies = range(len(problem.weights))
    calls = {"ours": call_of, PEER: peer_of}
    timed = {name: Timed([of(problem, copy) for copy in copies], device) for name, of in calls.items()}
    found = medians(timed, options.rounds)
    peers = {PEER: {"us": round(found[PEER], 2)}}
    return row | figures_of(found["ours"], problem.bytes, bandwidth) | {"error": error, "peers": peers}


def figures_of(us: float, moved: int, bandwidth: float) -> dict[str, Any]:
    rate = moved / (us * 1e-6)
    return {"us": round(us, 2), "gb_per_s": round(rate / 1e9, 1), "share": round(rate / bandwidth, 4)}


def judged(goal: Any, figures: Mapping[str, Any]) -> dict[str, Any]:
    """A goal with its value; None where a case of it was not measured."""
    try:
        value = round(goal.value(figures), 3)
    except KeyError:
        value = None
    met = None if value is None else goal.met(value)
    sign = "at most" if goal.at_most else "at least"
    return {
        "goal": goal.number,
        "text": goal.text,
        "wanted": f"{sign} {goal.wanted}",
        "value": value,
        "met": met,
    }


def table(result: Mapping[str, Any]) -> str:
    """The figures as Markdown."""
    about, lines = result["machine"], []
    said = f"{about['device']}, torch {about['torch']}, triton {about['triton']}, {about['date']}. "
    lines += [f"{said}Copy bandwidth: {result['copy_bandwidth']:,} GB/s.", ""]
    if result["meaningless"]:
        lines += ["**A dry run in Triton's interpreter: the times mean nothing.**", ""]
    names = list(dict.fromkeys(name for row in result["cases"] for name in row.get("peers", {})))
    names = [name for name in names if any(isinstance(_peer(row, name), dict) for row in result["cases"])]
    lines += [
        f"| case | µs | GB/s | of copy bandwidth | {' | '.join([*names, ''])}".rstrip(" "),
        "|---" * (4 + len(names)) + "|",
    ]
    for row in result["cases"]:
        if "wrong" in row:
            lines.append(f"| {row['case']} | {row['wrong']} |" + " |" * (2 + len(names)))
            continue
        peers = [_peer(row, name) for name in names]
        cells = [f"{peer['us']:,.1f} µs" if isinstance(peer, dict) else "" for peer in peers]
        shown = [
            row["case"] + (f" ({row['tflops']:,.0f} TFLOPS)" if "tflops" in row else ""),
            f"{row['us']:,.1f}",
            f"{row['gb_per_s']:,.0f}",
            f"{100 * row['share']:.0f} %",
            *cells,
        ]
        lines.append(f"| {' | '.join(shown)} |")
    lines += ["", "| goal | wanted | reached |", "|---|---|---|"]
    for goal in result["goals"]:
        missed = "" if goal["met"] else " (missed)"
        lines.append(f"| {goal['goal']}: {goal['text']} | {goal['wanted']} | {goal['value']}{missed} |")
    return "\n".join(lines)


def _peer(row: Mapping[str, Any], name: str) -> Any:
    return row.get("peers", {}).get(name)


def update(docs: Path, text: str) -> None:
    """The page with what stands between the marks replaced."""
    place = re.compile(r"(<!-- results:kernels -->\n).*?(<!-- /results:kernels -->)", re.DOTALL)
    docs.write_text(
        place.sub(lambda found: f"{found[1]}{text}\n{found[2]}", docs.read_text("utf-8")), "utf-8"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="cases whose name has this; repeatable"
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--dry-run", "--rehearse", action="store_true", help="tiny, in Triton's interpreter, on the CPU"
    )
    parser.add_argument("--out", help="the file, or its name in benchmarks/results (default: kernels-<GPU>)")
    parser.add_argument(
        "--resume", action="store_true", help="go on with the cases that --out has no figures of"
    )
    parser.add_argument("--again", action="store_true", help="with --resume: measure all of them")
    parser.add_argument("--docs", action="store_true", help="put the tables into docs/benchmarks.md")
    options = parser.parse_args(arguments)
    if options.resume and not (options.out or "").endswith(".json"):
        parser.error("--resume goes on with the file of --out: give its path")
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
        options.rounds = min(options.rounds, 1)
    import torch
    from compile_time import write

    if not options.dry_run and not torch.cuda.is_available():
        print("needs an NVIDIA GPU; --dry-run shows that the script works", file=sys.stderr)
        return 1
    result = run(options)
    chip = re.sub(r"[^a-z0-9]+", "-", result["machine"]["device"].lower()).strip("-")
    if not options.dry_run or options.out:
        print(write(result, options.out or f"kernels-{chip}"), file=sys.stderr)
    text = table(result)
    print(text)
    if options.docs and not options.dry_run:
        update(DOCS, text)
    wrong = [row["case"] for row in result["cases"] if "wrong" in row]
    if wrong:
        print(f"wrong or failed: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
