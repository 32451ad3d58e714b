"""quality.json, quality.md and quality.png of a report."""

from __future__ import annotations

from pathlib import Path

from kvcompile.errors import QualityError
from kvcompile.report.quality import plot as picture
from kvcompile.report.quality.report import QualityReport
from kvcompile.report.quality.table import markdown

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
        written[0].write_text(report.to_json(), "utf-8")
        if plot:
            written.append(folder / "quality.png")
            picture.draw(report, written[-1])
            text += "\n![quality against memory](quality.png)\n"
        written[1].write_text(text, "utf-8")
    except OSError as error:
        raise QualityError([f"out: {folder} cannot be written: {error.strerror or error}"]) from error
    return tuple(written)
