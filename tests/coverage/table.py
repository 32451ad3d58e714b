"""The coverage table of the docs, from rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.coverage.check import RECIPES, Row
from tests.coverage.sizes import told

BEGIN, END = "<!-- coverage -->", "<!-- /coverage -->"


def markdown(rows: Sequence[Row], versions: str) -> str:
    """The table with its summary, between its markers."""
    counts = Counter(row.outcome for row in rows)
    attention = [row for row in rows if row.outcome not in ("no attention", "not built")]
    lines = [
        BEGIN,
        f"{versions}. {len(rows)} types, {len(attention)} with attention that could be built:",
        f"**{counts['verified']} verified**, {counts['refused']} refused, {counts['wrong']} silently wrong, "
        f"{counts['error']} failed otherwise. Without attention: {counts['no attention']}; not built: "
        f"{counts['not built']}.",
        "",
        "| type | sites found / expected | masks | sizes | rotary | captured by | "
        + " | ".join(RECIPES)
        + " |",
        "|---|---|---|---|---|---|" + "---|" * len(RECIPES),
    ]
    lines += [_row(row) for row in rows if row.outcome == "verified"]
    partly = [(row, name, reason) for row in rows for name, reason in row.refused.items()]
    if partly:
        lines += [
            "",
            "Recipes and configurations that do not fit a type that others fit:",
            "",
            "| type | recipe or configuration | reason |",
            "|---|---|---|",
        ]
        lines += [f"| {row.type} | {name} | {_short(reason)} |" for row, name, reason in partly]
    lines += ["", "Not rewritten, and why:", "", "| type | outcome | reason |", "|---|---|---|"]
    lines += [f"| {r.type} | {r.outcome} | {_short(r.reason)} |" for r in rows if r.outcome != "verified"]
    return "\n".join([*lines, END])


def write(rows: Sequence[Row], versions: str, page: Path, data: Path) -> None:
    """Put the table into `page` (between its markers) and the rows into `data` as JSON."""
    text = page.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    page.write_text(before + markdown(rows, versions) + after)
    content = {"versions": versions, "rows": [row.to_dict() for row in rows]}
    data.write_text(json.dumps(content, indent=1) + "\n")


def _row(row: Row) -> str:
    errors = " | ".join(f"{row.errors[name]:.0e}" if name in row.errors else "refused" for name in RECIPES)
    route = row.route.removeprefix("export, ").replace("_", r"\_")
    sizes = told(row.tested).replace("_", r"\_")
    return (
        f"| {row.type} | {row.sites} / {row.expected} | {', '.join(row.masks)} | {sizes} | {', '.join(row.rope)} "
        f"| {route} | {errors} |"
    )


def _short(reason: str) -> str:
    """A reason on one line: of several attention blocks that miss for one reason, the first."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    head = lines[0] if lines else ""
    first = next((line for line in lines[1:] if line.startswith("- ")), "")
    return f"{head} {first}".strip().replace("|", r"\|")[:400]
