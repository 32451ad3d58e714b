"""quality.json, quality.md and quality.png of a report."""

from __future__ import annotations

from pathlib import Path

from kvcompile.errors import QualityError
from kvcompile.report.quality import plot as picture
from kvcompile.report.quality.report import QualityReport
from kvcompile.report.quality.table import markdown
from kvcompile.util.whole_file import whole_file

NEEDS_MATPLOTLIB = (
    f"plot: the picture needs matplotlib: {picture.INSTALL}, or go without it (plot=False, --no-plot)"
)


def save(report: QualityReport, folder: Path, plot: bool) -> tuple[Path, ...]:
    """Write the report's files; see `QualityReport.save`."""
    if plot and not picture.available():
        raise QualityError([NEEDS_MATPLOTLIB])
    written = [folder / "quality.json", folder / "quality.md"]
    text = markdown(report)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(written[0], report.to_json())
        if plot:
            written.append(folder / "quality.png")
            with whole_file(written[-1]) as made:
                picture.draw(report, made)
            text += "\n![quality against memory](quality.png)\n"
        _write(written[1], text)
    except OSError as error:
        raise QualityError([f"out: {folder} cannot be written: {error.strerror or error}"]) from error
    return tuple(written)


def _write(path: Path, text: str) -> None:
    with whole_file(path) as made:
        made.write_text(text, "utf-8")
