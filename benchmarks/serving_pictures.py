"""Pictures of what serving.py measured: throughput against concurrency, and how long requests wait.

    python benchmarks/serving_pictures.py

That reads benchmarks/results/serving.json and writes docs/serving.png, by matplotlib, which nothing else here needs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_OURS, _OTHER = "#1b9e77", "#7570b3"


def drawn(result: dict[str, Any], path: Path) -> None:
    """Three pictures side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (rates, waits, engines) = pyplot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    loads = result["loads"]
    by = {int(texts): row for texts, row in loads["concurrency"].items() if texts.isdigit()}
    for key, label, line in (("all_tokens_s", "with prompts", "-"), ("new_tokens_s", "new tokens", "--")):
        rates.plot([*by], [row[key] for row in by.values()], line, marker="o", color=_OURS, label=label)
    rates.set_xscale("log", base=2)
    rates.set_xticks(list(by), [str(texts) for texts in by])
    rates.set(xlabel="texts at a time", ylabel="tokens/s", title="throughput, offline load", ylim=(0, None))
    rates.legend(fontsize="small")

    arrivals = loads["arrivals"]
    for key, label, colour in (
        ("first_token_all_s", "first token", _OTHER),
        ("gaps_all_s", "next token", _OURS),
    ):
        values = arrivals[key]
        shares = [100 * (place + 1) / len(values) for place in range(len(values))]
        waits.plot(shares, values, color=colour, label=label)
    waits.set_yscale("log")
    waits.set(
        xlabel="percentile",
        ylabel="seconds",
        title=f"waiting at 70 % load, {arrivals['per_second']:.2f} requests/s",
    )
    waits.legend(fontsize="small")

    found = sorted((name, row["all_tokens_s"]) for name, row in loads.get("peers", {}).get("of", {}).items())
    found.sort(key=lambda pair: pair[1])
    engines.barh(
        [name for name, _ in found],
        [rate for _, rate in found],
        color=[_OURS if name in ("ours", "static") else _OTHER for name, _ in found],
    )
    if found:
        engines.bar_label(engines.containers[0], fmt="%.0f", padding=3)
    engines.set(xlabel="tokens/s, with prompts", title="offline load, by engine")
    machine = result["machine"]
    figure.suptitle(
        f"{result['model']}, float32, {machine['cpu']}, {machine['cores']} cores, {machine['date']}", size=9
    )
    figure.savefig(path, dpi=110)


def main(argv: list[str]) -> int:
    if argv:
        print(__doc__)
        return 2
    result = json.loads((ROOT / "benchmarks" / "results" / "serving.json").read_text("utf-8"))
    path = ROOT / "docs" / "serving.png"
    drawn(result, path)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
