"""Puts what serving.py measured into docs/benchmarks.md, between the marks of its section.

python benchmarks/serving_tables.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serving_goals import lines

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- results:serving -->", "<!-- /results:serving -->"


def section(result: dict[str, Any]) -> str:
    """All tables, as Markdown."""
    loads, machine = result["loads"], result["machine"]
    dates = sorted(load["date"] for load in loads.values())
    quick = [name for name, load in loads.items() if load["quick"]]
    parts = [
        f"{result['model']}, float32, `{result['recipe']}`, {machine['cpu']}, {machine['cores']} cores, "
        f"torch {machine['torch']}, transformers {machine['transformers']}, {dates[0]} to "
        f"{dates[-1]} (`benchmarks/results/serving.json`)."
        + (f" Measured with --quick, one round of fewer requests: {', '.join(quick)}." if quick else ""),
        table(("goal", "bound", "measured", "met"), lines(loads)),
    ]
    for part in (_engines, _steps, _concurrency, _waits):
        parts += part(loads)
    return "\n\n".join(parts)


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    made = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join([*made, *("| " + " | ".join(row) + " |" for row in rows)])


def _engines(loads: dict[str, Any]) -> list[str]:
    if "peers" not in loads:
        return []
    found = loads["peers"]
    rows = [
        (
            f"{name} {found['versions'].get(name, '')}".strip(),
            f"{row['seconds']:.1f}",
            f"{row['new_tokens_s']:.1f}",
            f"{row['all_tokens_s']:.0f}",
            f"{found['ratio'][name]:.2f}",
        )
        for name, row in sorted(found["of"].items(), key=lambda pair: pair[1]["seconds"])
    ]
    one = next(iter(found["of"].values()))
    told = (
        f"The offline load ({one['requests']} requests, {one['prompt_tokens']:,} tokens of prompts, "
        f"{one['new_tokens']:,} new), all engines in turns:"
    )
    made = [
        told,
        table(
            ("engine", "s", "new tokens/s", "tokens/s with prompts", "ours is faster by a factor of"), rows
        ),
    ]
    return made + [f"{name} failed: {reason}" for name, reason in found["failed"].items()]


def _steps(loads: dict[str, Any]) -> list[str]:
    found = loads.get("decodes")
    if found is None:
        return []
    return [
        f"Decode at 512 tokens of context: {found['one_tokens_s']:.1f} tokens/s with one text, "
        f"{found['eight_tokens_s']:.1f} with eight. A step of eight takes {found['step_of_eight_ms']:.1f} ms: the "
        f"pass {found['pass_ms']:.1f}, choosing tokens {found['pick_ms']:.2f}, all else {found['rest_ms']:.2f}. "
        f"Prompts alone: {found['prompt_tokens_s']:.0f} tokens/s."
    ]


def _concurrency(loads: dict[str, Any]) -> list[str]:
    found = {key: row for key, row in loads.get("concurrency", {}).items() if key.isdigit()}
    if not found:
        return []
    rows = [
        (key, f"{row['new_tokens_s']:.1f}", f"{row['all_tokens_s']:.0f}", f"{1e3 * row['gap_p50_s']:.0f}")
        for key, row in found.items()
    ]
    names = ("texts at a time", "new tokens/s", "tokens/s with prompts", "ms to the next token (median)")
    return [table(names, rows)]


def _waits(loads: dict[str, Any]) -> list[str]:
    rows = []
    if "arrivals" in loads:
        row = loads["arrivals"]
        for key, name in (("first_token_s", "first token"), ("gap_s", "next token")):
            own = row[key]
            told = " / ".join(f"{own[share]:.3f}" for share in ("p50", "p90", "p99"))
            rows.append((f"{row['per_second']:.2f} requests/s (70 %): {name}, p50 / p90 / p99", f"{told} s"))
    if "shared" in loads:
        row = loads["shared"]
        rows.append(
            (
                "first token after 1,024 common and 32 own tokens, cold / hit",
                f"{row['cold_s']:.2f} / {row['hit_s']:.2f} s",
            )
        )
    if "turns" in loads:
        row = loads["turns"]
        told = " / ".join(f"{row[name]['first_token_s_by_turn'][-1]:.2f}" for name in ("off", "on"))
        rows.append(("first token of the last turn of eight talks, prefix cache off / on", f"{told} s"))
    if "long_prompt" in loads:
        for chunk, row in loads["long_prompt"].items():
            if chunk.isdigit():
                rows.append(
                    (
                        f"next token while 2,048 tokens come in by {chunk}, p99 (a step without: "
                        f"{row['step_without_s']:.2f} s)",
                        f"{row['gap_p99_s']:.2f} s",
                    )
                )
    if "squeeze" in loads:
        row = loads["squeeze"]
        half = row["of"]["half"]
        rows.append(
            (
                f"offline load in half its pages / with host memory / ample; {half['preemptions']} preemptions, "
                f"{half['recomputed_tokens']:,} tokens twice",
                " / ".join(f"{row['seconds'][name]:.1f}" for name in ("half", "half_host", "ample")) + " s",
            )
        )
    return [table(("waits", ""), rows), "![throughput, waiting times, engines](serving.png)"] if rows else []


def main(argv: list[str]) -> int:
    if argv:
        print(__doc__)
        return 2
    result = json.loads((ROOT / "benchmarks" / "results" / "serving.json").read_text("utf-8"))
    path = ROOT / "docs" / "benchmarks.md"
    before, _, rest = path.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rest or not after:
        print(f"{path} has no {BEGIN} .. {END}", file=sys.stderr)
        return 1
    path.write_text(f"{before}{BEGIN}\n{section(result)}\n{END}{after}", encoding="utf-8")
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
