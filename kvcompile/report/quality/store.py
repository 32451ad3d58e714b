"""Finished measurements, one JSON line each, in `results.jsonl` of the output folder.

    {"key": "<hash of everything the figure depends on>", "recipe": "int4", "metric": "perplexity",
     "date": "2026-01-31 12:00 UTC", "result": {...}}

A line is written when its measurement is finished, in one piece, so stopping loses only the one that runs. A line that
cannot be read is reported and measured again; it stays where it is. Of equal keys the last line counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from kvcompile.errors import QualityError
from kvcompile.report.quality.decode import decode
from kvcompile.report.quality.report import NeedleScore, PerplexityScore

FILE = "results.jsonl"
KINDS: dict[str, type[PerplexityScore] | type[NeedleScore]] = {
    "perplexity": PerplexityScore,
    "needle": NeedleScore,
}
Score = PerplexityScore | NeedleScore


class Store:
    """The results of one folder; `folder` None keeps them in memory only."""

    def __init__(self, folder: Path | None, warn: Callable[[str], None], writes: bool = True):
        """
        writes: False finds what is there, and keeps what is new in memory: another rank writes it

        Raises:
            QualityError: the folder cannot be made, or its file not be read or written.
        """
        self._file = None if folder is None else folder / FILE
        self._known: dict[str, Score] = {}
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a+", encoding="utf-8", errors="replace") as file:
                file.seek(0)
                text = file.read()
                if writes and text and not text.endswith("\n"):
                    # A line that was cut off must not swallow the next one.
                    file.write("\n")
        except OSError as error:
            raise QualityError([f"out: {folder} cannot be written: {error.strerror or error}"]) from error
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                data = json.loads(line)
                self._known[data["key"]] = decode(KINDS[data["metric"]], data["result"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                reason = (str(error).splitlines() or [""])[0]
                warn(
                    f"{self._file}, line {number}: cannot be read ({type(error).__name__}: {reason}); what it held is "
                    "measured again"
                )
        if not writes:
            self._file = None

    def get(self, key: str) -> Score | None:
        """A finished measurement."""
        return self._known.get(key)

    def put(self, key: str, recipe: str, metric: str, score: Score) -> None:
        """Keep a finished measurement, on disk before this returns.

        Raises:
            QualityError: the file cannot be written (any more).
        """
        self._known[key] = score
        if self._file is None:
            return
        date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        line = {"key": key, "recipe": recipe, "metric": metric, "date": date, "result": asdict(score)}
        try:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise QualityError([f"out: {self._file} cannot be written: {error.strerror or error}"]) from error
