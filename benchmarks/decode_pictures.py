"""Pictures of what decode.py measured: tokens/s against context, and what a cached token adds to a step.

    python benchmarks/decode_pictures.py decode_peers

That reads benchmarks/results/decode_peers.json and writes docs/decode_peers.png, by matplotlib, which nothing else here
needs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Of whom a name is, and in which colour that is drawn.
_COLOURS = {"llama": "#d95f02", "openvino": "#7570b3", "dynamic": "#666666", "static": "#999999"}
_OURS = "#1b9e77"


def colour(name: str) -> str:
    return next((own for start, own in _COLOURS.items() if name.startswith(start)), _OURS)


def drawn(result: dict[str, Any], path: Path) -> None:
    """Both pictures side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (speed, slope) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    contexts = sorted(result["contexts"], key=int)
    lines = ("-", "--", ":", "-.")
    drawn_of: dict[str, int] = {}
    for name in result["contexts"][contexts[-1]]["variants"]:
        number = drawn_of[colour(name)] = drawn_of.get(colour(name), -1) + 1
        rates = [result["contexts"][context]["variants"][name]["tokens_s"] for context in contexts]
        places = [int(context) for context in contexts]
        speed.plot(places, rates, lines[number % 4], marker="o", color=colour(name), label=name)
    speed.set(xlabel="tokens of context", ylabel="tokens/s", title="decode speed", ylim=(0, None))
    speed.legend(fontsize="small", ncols=2)
    found = sorted(result["slopes"].items(), key=lambda pair: pair[1], reverse=True)
    slope.barh(
        [name for name, _ in found], [ms for _, ms in found], color=[colour(name) for name, _ in found]
    )
    slope.bar_label(slope.containers[0], fmt="%.2f", padding=3)
    slope.set(xlabel="ms per 1,000 cached tokens", title="what the cache adds to a step")
    machine = result["machine"]
    figure.suptitle(
        f"{result['model']}, {machine['cpu']}, {machine['cores']} cores, {machine['date']}", size=9
    )
    figure.savefig(path, dpi=110)


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print(__doc__)
        return 2
    result = json.loads((ROOT / "benchmarks" / "results" / f"{argv[0]}.json").read_text("utf-8"))
    path = ROOT / "docs" / f"{argv[0]}.png"
    drawn(result, path)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
