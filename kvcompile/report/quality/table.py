"""The figures of `quality` as tables: for a terminal, and in Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvcompile.report.quality.report import NeedleScore, QualityReport, RecipeQuality
from kvcompile.util.console import format_bytes, table

if TYPE_CHECKING:
    from rich.console import RenderableType

Cells = tuple[tuple[str, ...], list[tuple[str, ...]]]  # header and rows


def overview(report: QualityReport) -> Cells:
    """A row per recipe: memory, perplexity, and needles by length and order."""
    scored = any(row.perplexity for row in report.rows)
    kinds = _kinds(report)
    header = ["recipe", "cache", "smaller"]
    header += ["perplexity", "× full", "KL", "same top"] if scored else []
    header += [f"{tokens:,} {ask}" for tokens, ask in kinds]
    best = {row.recipe for row in report.frontier()}
    rows = []
    for row in report.rows:
        whole, size = report.reference.memory.measured, row.memory.measured
        cells = [
            row.recipe + (" *" if row.recipe in best else ""),
            format_bytes(size),
            f"{whole / size:.2f}×",
        ]
        if scored:
            cells += _perplexity(report.reference, row)
        found = {(s.tokens, s.ask): s for s in row.needles}
        cells += [f"{found[kind].accuracy:.2f}" if kind in found else "" for kind in kinds]
        rows.append(tuple(cells))
    return tuple(header), rows


def depths(report: QualityReport, tokens: int, ask: str) -> Cells:
    """A row per recipe: the share of needles found at each depth."""
    scores = [(row, score) for row in report.rows for score in row.needles if _kind(score) == (tokens, ask)]
    columns = list(scores[0][1].by_depth())
    header = ("recipe", *(f"{depth:g}" for depth in columns), "all")
    rows = [
        (row.recipe, *(f"{score.by_depth()[d]:.2f}" for d in columns), f"{score.accuracy:.2f}")
        for row, score in scores
    ]
    return header, rows


def parts(report: QualityReport) -> Iterator[RenderableType]:
    """For a terminal."""
    from rich.markup import escape

    yield f"[bold]{escape(report.model)}[/bold], {report.dtype}"
    yield ""
    yield _rich(overview(report))
    for tokens, ask in _kinds(report):
        yield ""
        yield f"needles found in {tokens:,} tokens, by depth; the question {ask} the text"
        yield _rich(depths(report, tokens, ask))
    yield ""
    for note in notes(report):
        yield escape(note)


def markdown(report: QualityReport) -> str:
    """All tables and notes as a page."""
    lines = [f"# Quality of caches: {report.model}, {report.dtype}", "", *tables(report)]
    lines += ["", *(f"- {note}" for note in notes(report))]
    return "\n".join(lines) + "\n"


def tables(report: QualityReport) -> list[str]:
    """The tables alone, as lines of Markdown."""
    lines = _markdown(overview(report))
    for tokens, ask in _kinds(report):
        lines += ["", f"Needles found in {tokens:,} tokens, by depth; the question {ask} the text:", ""]
        lines += _markdown(depths(report, tokens, ask))
    return lines


def notes(report: QualityReport) -> Iterator[str]:
    """What the columns mean, and what the run found to say."""
    settings = report.settings
    length = report.reference.memory.tokens
    yield f"cache: bytes of one sequence of {length:,} tokens, counted in the buffers"
    if any(row.perplexity for row in report.rows):
        yield "*: no other recipe is both smaller and better in perplexity"
        yield (
            f"perplexity: of {settings['tokens']:,} tokens behind a prompt of {settings['prompt']:,}, teacher-forced; "
            "KL(full || recipe) in nats a token; same top: the likeliest next token is that of the full cache"
        )
    if any(row.needles for row in report.rows):
        asked = settings["needles"] * len(settings["depths"])
        yield f"needles: share of {asked} numbers answered exactly, question after or before a text of so many tokens"
    yield from report.notes


def _perplexity(full: RecipeQuality, row: RecipeQuality) -> list[str]:
    score, reference = row.perplexity, full.perplexity
    if score is None or reference is None:
        return [""] * 4
    ratio = score.perplexity / reference.perplexity
    return [f"{score.perplexity:.2f}", f"{ratio:.3f}", f"{score.kl:.4f}", f"{100 * score.agreement:.1f} %"]


def _kind(score: NeedleScore) -> tuple[int, str]:
    return score.tokens, score.ask


def _kinds(report: QualityReport) -> list[tuple[int, str]]:
    return list(dict.fromkeys(_kind(score) for row in report.rows for score in row.needles))


def _rich(cells: Cells) -> RenderableType:
    from rich.markup import escape

    header, rows = cells
    made = table(*header, right=header[1:])
    for row in rows:
        made.add_row(*map(escape, row))
    return made


def _markdown(cells: Cells) -> list[str]:
    header, rows = cells
    line = "| " + " | ".join(header) + " |"
    return [
        line,
        "|---" + "|---:" * (len(header) - 1) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
