"""What each recipe costs SmolLM2 in quality, and variants beside the shipped ones.

    python benchmarks/quality.py            # about 40 minutes on one core; goes on where it was stopped
    python benchmarks/quality.py --parts table
    python benchmarks/quality.py --parts table --only nf4 --only mxfp4     # the other rows stay as they are

| part | what is measured |
|---|---|
| table | perplexity, KL, needles in 768 tokens, for all shipped recipes and VARIANTS |
| scores | at 256 tokens: windows and retentions by scores; needles in 768 tokens, asked after and before |
| long | needles in 2,048 tokens, asked after and before, for a few of them |
| beyond | perplexity by position up to 10,240 tokens, past the 8,192 that the model was made for |

Results are kept in build/quality. At the end they go to benchmarks/results/quality.json and docs/quality.png, and
the tables of docs/quality.md are made from them.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT, PAGE = ROOT / "benchmarks/results/quality.json", ROOT / "docs/quality.md"
PARTS = ("table", "scores", "long", "beyond")


def _window(sinks: int, window: int, positions: str = "original") -> dict[str, Any]:
    return {"retention": {"kind": "sink_window", "sinks": sinks, "window": window, "positions": positions}}


def _both(**storage: Any) -> dict[str, Any]:
    return {"keys": storage, "values": storage}


def _h2o(heavy: int, recent: int, **more: Any) -> dict[str, Any]:
    return {"retention": {"kind": "h2o", "sinks": 4, "heavy": heavy, "recent": recent, **more}}


KIVI2_BEFORE = {
    "keys": {"dtype": "int2", "axis": "channel", "group": 32, "residual": 128, "rope": "before"},
    "values": {"dtype": "int2", "group": 32, "residual": 128},
}
KIVI3 = {
    "keys": {"dtype": "int3", "axis": "channel", "group": 32, "residual": 128},
    "values": {"dtype": "int3", "group": 32, "residual": 128},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "K int8, V int4": {"keys": {"dtype": "int8"}, "values": {"dtype": "int4", "group": 32}},
    "int4, Hadamard": _both(dtype="int4", group=32, rotate="hadamard"),
    "nf4 as it is": _both(dtype="nf4", group=32),
    "mxfp4 as it is": _both(dtype="mxfp4"),
    "K int8, V mxfp4": {"keys": {"dtype": "int8"}, "values": {"dtype": "mxfp4"}},
    "kivi3": KIVI3,
    "kivi2 before RoPE": KIVI2_BEFORE,
    "sinks 4 + 252": _window(4, 252),
    "4 + 252 in_cache": _window(4, 252, "in_cache"),
    "window 256": {"retention": {"kind": "window", "size": 256}},
    "sinks 4 + 60": _window(4, 60),
    "window 64": {"retention": {"kind": "window", "size": 64}},
}
# Which 256 tokens to keep: the last, or those that queries looked at.
SCORES: dict[str, dict[str, Any]] = {
    "window 256": {"retention": {"kind": "window", "size": 256}},
    "sinks 4 + 252": _window(4, 252),
    "h2o 4 + 124 + 128": _h2o(124, 128),
    "h2o mean_age": _h2o(124, 128, score="mean_age"),
    "tova 256": {"retention": {"kind": "tova", "budget": 256}},
    "snapkv 192 + 64": {"retention": {"kind": "snapkv", "heavy": 192, "recent": 64}},
}
BEYOND: dict[str, dict[str, Any]] = {
    "1020 in_cache": _window(4, 1020, "in_cache"),
    "1020 original": _window(4, 1020),
}
EDGES = (512, 2560, 4608, 6656, 8192, 9216, 10240)  # of the blocks in which perplexity is told


def recipes(part: str) -> list[Any]:
    """What a part measures, besides baseline."""
    from kvcompile.recipe import shipped_recipes

    if part == "long":
        return ["int8", "streaming"]
    named = {"beyond": BEYOND, "scores": SCORES}.get(part, VARIANTS)
    own = [{"name": name, "cache": cache} for name, cache in named.items()]
    # What auto takes is one of the others.
    return (
        own
        if part in ("beyond", "scores")
        else [*(name for name in shipped_recipes() if name != "auto"), *own]
    )


def options_of(part: str) -> dict[str, Any]:
    """What `kvcompile.quality` is told."""
    if part == "beyond":
        return {"metrics": ("perplexity",), "tokens": EDGES[-1] - EDGES[0], "prompt": EDGES[0]}
    if part == "scores":
        return {"tokens": 1024, "needles": 2}
    if part == "long":
        return {"metrics": ("needle",), "needle_tokens": (2048,), "needles": 1}
    return {"needles": 2, "ask": ("after",)}


def blocks(row: dict[str, Any]) -> list[float]:
    """Perplexity between EDGES, from the means of its segments."""
    found = []
    for first, last in pairwise(EDGES):
        inside = [s for s in row["perplexity"]["segments"] if first <= s["start"] < last]
        found.append(math.exp(sum(s["nll"] * s["tokens"] for s in inside) / sum(s["tokens"] for s in inside)))
    return found


def page(result: dict[str, Any]) -> dict[str, str]:
    """The tables of docs/quality.md, by the name of their place."""
    from kvcompile.report.quality.report import QualityReport
    from kvcompile.report.quality.table import tables

    made = {
        part: "\n".join(tables(QualityReport.from_dict(result[part])))
        for part in ("table", "scores", "long")
        if part in result
    }
    if "beyond" in result:
        rows = result["beyond"]["rows"]
        edges = [f"{a:,} to {b:,}" for a, b in pairwise(EDGES)]
        lines = [
            "| tokens | " + " | ".join(row["recipe"] for row in rows) + " |",
            "|---" + "|---:" * len(rows) + "|",
        ]
        columns = [blocks(row) for row in rows]
        lines += [
            f"| {edge} | " + " | ".join(f"{column[i]:.2f}" for column in columns) + " |"
            for i, edge in enumerate(edges)
        ]
        made["beyond"] = "\n".join(lines)
    return made


def chosen_of(part: str, only: list[str]) -> list[Any]:
    """The recipes of a part, or those of them that `only` names."""
    return [
        recipe
        for recipe in recipes(part)
        if not only or (recipe if isinstance(recipe, str) else recipe["name"]) in only
    ]


def merged(old: dict[str, Any] | None, new: dict[str, Any], part: str) -> dict[str, Any]:
    """`old` with the rows that were measured now, in the order of the part's recipes.

    Raises:
        SystemExit: they were measured on another model or text, or by other settings, and stand in no table together.
    """
    from kvcompile.report.quality.report import QualityReport

    if old is None:
        return new
    for key in ("model", "dtype", "text", "settings"):
        if old[key] != new[key]:
            raise SystemExit(f"error: {key}: {old[key]} there and {new[key]} now: measure all rows again")
    order = ["baseline", *(name if isinstance(name, str) else name["name"] for name in recipes(part))]
    rows = {row["recipe"]: row for row in (*old["rows"], *new["rows"])}
    own = [rows[name] for name in dict.fromkeys(order) if name in rows]
    return QualityReport.from_dict({**old, "rows": own}).to_dict()


def fill(text: str, made: dict[str, str]) -> str:
    """A page with what stands between `<!-- results:NAME -->` and its end replaced."""
    for name, table in made.items():
        place = re.compile(rf"(<!-- results:{name} -->\n).*?(<!-- /results:{name} -->)", re.DOTALL)
        text = place.sub(lambda match, table=table: f"{match[1]}{table}\n{match[2]}", text)
    return text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--only", action="append", default=[], help="a recipe or variant; once for each")
    parser.add_argument("--out", type=Path, default=ROOT / "build/quality", help="where results are kept")
    chosen = parser.parse_args(argv)
    parts = chosen.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: expected some of {','.join(PARTS)}, got {','.join(sorted(unknown))}")

    import kvcompile
    from kvcompile.cli.quality import bars
    from kvcompile.models import load_model
    from kvcompile.report.quality import plot
    from kvcompile.report.quality.report import QualityReport

    only = chosen.only

    try:
        loaded = load_model(chosen.model, chosen.dtype)
        result = json.loads(RESULT.read_text("utf-8")) if RESULT.exists() else {}
        for part in parts:
            with bars() as progress:
                report = kvcompile.quality(
                    loaded.model,
                    loaded.tokenizer,
                    chosen_of(part, only),
                    out=chosen.out / part,
                    name="SmolLM2-135M-Instruct" if chosen.model == "smollm2" else loaded.name,
                    progress=progress,
                    **options_of(part),
                )
            print(report)
            result[part] = merged(result.get(part), report.to_dict(), part) if only else report.to_dict()
            if part == "table":
                plot.draw(QualityReport.from_dict(result[part]), ROOT / "docs/quality.png")
            RESULT.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
            PAGE.write_text(fill(PAGE.read_text("utf-8"), page(result)), "utf-8")
    except kvcompile.KVCompileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
