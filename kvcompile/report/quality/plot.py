"""The picture: quality against memory, one point per recipe, and the frontier through those that none beats."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from kvcompile.report.quality.report import QualityReport

INSTALL = "pip install 'kvcompile[plot]'"
_MIB = 2**20
_TICKS = (0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 5, 10, 20, 50, 100, 1000, 10_000)


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(report: QualityReport, file: Path) -> None:
    """Write a PNG: perplexity over that of the full cache, and needles found, each against the cache's size."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display is needed
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator

    scored = [row for row in report.rows if row.perplexity]
    hunted = [row for row in report.rows if row.needles]
    count = bool(scored) + bool(hunted)
    figure = Figure(figsize=(6.2 * count + 2.2, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    numbers = {row.recipe: number for number, row in enumerate(report.rows, start=1)}
    axes = figure.subplots(1, count, squeeze=False)[0]
    panel = 0
    if scored:
        full = report.reference.perplexity
        assert full is not None, "the full cache is measured with the others"
        points = [
            (numbers[r.recipe], r.memory.measured / _MIB, r.perplexity.perplexity / full.perplexity)
            for r in scored
            if r.perplexity
        ]
        _scatter(axes[panel], points, 1)
        best = [(r.memory.measured / _MIB, r.perplexity) for r in report.frontier()]
        axes[panel].step(
            [size for size, _ in best],
            [score.perplexity / full.perplexity for _, score in best if score],
            where="post",
            color="0.6",
            linewidth=1,
            zorder=1,
        )
        axes[panel].set_yscale("log")
        axes[panel].yaxis.set_major_locator(FixedLocator(_TICKS))
        axes[panel].yaxis.set_minor_locator(NullLocator())
        axes[panel].set_ylabel("perplexity ÷ that of the full cache")
        axes[panel].set_title(f"{report.settings['tokens']:,} tokens of text, teacher-forced", fontsize=10)
        _plain(axes[panel].yaxis)
        panel += 1
    if hunted:
        points = [
            (
                numbers[r.recipe],
                r.memory.measured / _MIB,
                sum(s.accuracy for s in r.needles) / len(r.needles),
            )
            for r in hunted
        ]
        _scatter(axes[panel], points, -1)
        axes[panel].set_ylim(-0.06, 1.06)
        axes[panel].set_ylabel("needles found")
        lengths = " and ".join(f"{n:,}" for n in report.settings["needle_tokens"])
        axes[panel].set_title(f"a number hidden in {lengths} tokens", fontsize=10)
    for each in axes:
        each.set_xscale("log", base=2)
        each.set_xlabel(f"MiB of cache, one sequence of {report.reference.memory.tokens:,} tokens")
        each.grid(alpha=0.25)
        _plain(each.xaxis)
    legend = "\n".join(f"{number:>2}  {name}" for name, number in numbers.items())
    figure.legend(
        [_nothing()], [legend], loc="outside right upper", handlelength=0, fontsize=8, frameon=False
    )
    figure.suptitle(f"{report.model}, {report.dtype}")
    figure.savefig(file, dpi=110, format="png", metadata={"Software": "kvcompile"})


def _scatter(axes: Any, points: list[tuple[int, float, float]], up: int) -> None:
    """Points with their numbers, one above (`up` 1) or below (-1) the other where points nearly meet."""
    colours = [f"C{(number - 1) % 10}" for number, _, _ in points]
    axes.scatter([x for _, x, _ in points], [y for _, _, y in points], s=28, c=colours, zorder=2)
    placed: list[tuple[float, float, int]] = []
    for number, x, y in sorted(points, key=lambda point: point[1:]):
        near = [level for px, py, level in placed if x / px < 1.25 and abs(y - py) < 0.05 * max(abs(y), 1e-9)]
        level = min(set(range(len(near) + 1)) - set(near))
        placed.append((x, y, level))
        axes.annotate(
            str(number), (x, y), xytext=(4, up * (4 + 9 * level) - 3), textcoords="offset points", fontsize=8
        )


def _plain(axis: Any) -> None:
    """Numbers as they are, not powers of two or ten."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))


def _nothing() -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], linestyle="none")
