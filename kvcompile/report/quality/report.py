"""The figures of `quality`, as data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcompile.util.console import render

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


@dataclass(frozen=True)
class Segment:
    """Scored tokens `start` to `start + tokens` of the text; means over them, in nats."""

    start: int
    tokens: int
    nll: float
    kl: float


@dataclass(frozen=True)
class Memory:
    """Bytes of one sequence's cache, allocated for `tokens`: counted in the buffers, and what `estimate` says."""

    tokens: int
    measured: int
    estimated: int


@dataclass(frozen=True)
class PerplexityScore:
    """Teacher-forced, over all scored tokens.

    nll:       mean negative log-likelihood, nats
    kl:        mean KL(full || recipe) of the next token's distribution, nats; 0 for the full cache
    agreement: share of positions whose likeliest next token is that of the full cache
    step:      tokens fed at a time
    """

    tokens: int
    perplexity: float
    nll: float
    kl: float
    agreement: float
    step: int
    memory: Memory
    segments: tuple[Segment, ...]
    seconds: float


@dataclass(frozen=True)
class NeedleAnswer:
    """One question. `behind`: tokens between the end of the fact and the end of the prompt."""

    depth: float
    behind: int
    expected: str
    answer: str
    found: bool


@dataclass(frozen=True)
class NeedleScore:
    """Needles in texts of `tokens` tokens, asked for "after" or "before" the text."""

    tokens: int
    ask: str
    answers: tuple[NeedleAnswer, ...]
    memory: Memory
    seconds: float

    @property
    def accuracy(self) -> float:
        """Share of the needles that were found."""
        return _share(self.answers)

    def by_depth(self) -> dict[float, float]:
        """Share found at each depth."""
        depths = dict.fromkeys(answer.depth for answer in self.answers)
        return {depth: _share([a for a in self.answers if a.depth == depth]) for depth in depths}


@dataclass(frozen=True)
class RecipeQuality:
    """One recipe's figures; None or empty: not asked for."""

    recipe: str
    layout: str
    bytes_per_token: int
    perplexity: PerplexityScore | None
    needles: tuple[NeedleScore, ...]

    @property
    def memory(self) -> Memory:
        """Of the longest measurement."""
        scores = [score.memory for score in (self.perplexity, *self.needles) if score is not None]
        return max(scores, key=lambda memory: memory.tokens)


@dataclass(frozen=True)
class QualityReport:
    """All recipes on one text, the full cache first. `notes`: what a reader should know of the figures."""

    model: str
    dtype: str
    text: dict[str, Any]  # tokens, digest
    settings: dict[str, Any]
    versions: dict[str, str]
    rows: tuple[RecipeQuality, ...]
    notes: tuple[str, ...]

    @property
    def reference(self) -> RecipeQuality:
        """The full cache."""
        return self.rows[0]

    def frontier(self) -> tuple[RecipeQuality, ...]:
        """Recipes that no other one beats in perplexity and memory at once, by memory."""
        points = [(r.memory.measured, r.perplexity.perplexity, r) for r in self.rows if r.perplexity]
        best = [
            (size, r)
            for size, ppl, r in points
            if not any(s <= size and p <= ppl and (s, p) != (size, ppl) for s, p, _ in points)
        ]
        return tuple(row for _, row in sorted(best, key=lambda point: point[0]))

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it (lists, no tuples), with accuracies."""
        data = json.loads(json.dumps(asdict(self)))
        for row, written in zip(self.rows, data["rows"], strict=True):
            for score, item in zip(row.needles, written["needles"], strict=True):
                item["accuracy"] = score.accuracy
                item["by_depth"] = {str(depth): share for depth, share in score.by_depth().items()}
        return {**data, "frontier": [row.recipe for row in self.frontier()]}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> QualityReport:
        """What `to_dict` made (quality.json), as a report again.

        Raises:
            ValueError: something else.
        """
        from kvcompile.report.quality.decode import decode

        def without(mapping: dict[str, Any], *derived: str) -> dict[str, Any]:
            return {key: value for key, value in mapping.items() if key not in derived}

        rows = [
            {**row, "needles": [without(score, "accuracy", "by_depth") for score in row["needles"]]}
            for row in data["rows"]
        ]
        return decode(QualityReport, {**without(data, "frontier"), "rows": rows})

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1) + "\n"

    def save(self, folder: str | Path, plot: bool = True) -> tuple[Path, ...]:
        """Write quality.json, quality.md and, with `plot`, quality.png; returns their paths.

        Raises:
            QualityError: a file cannot be written, or matplotlib is missing.
        """
        from kvcompile.report.quality.files import save

        return save(self, Path(folder), plot)

    def __str__(self) -> str:
        return render(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from kvcompile.report.quality.table import parts

        yield from parts(self)


def _share(answers: Sequence[NeedleAnswer]) -> float:
    return sum(answer.found for answer in answers) / len(answers)
