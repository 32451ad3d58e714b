"""Runs the code cells of a notebook in one namespace, without Jupyter: plain Python; what is printed is the output.

KVCOMPILE_ACCEPT=1 pytest -m slow tests/examples/test_notebook.py writes what they print into the notebook.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
from pathlib import Path
from typing import Any


def read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return data


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def kept(cell: dict[str, Any]) -> str:
    """What the notebook says that the cell printed."""
    return "".join(text for output in cell["outputs"] for text in output["text"])


def run(notebook: dict[str, Any]) -> list[str]:
    """What each code cell prints to stdout."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for number, cell in enumerate(code_cells(notebook), 1):
        tree = ast.parse("".join(cell["source"]), filename=f"cell {number}")
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(tree, f"cell {number}", "exec"), namespace)
        printed.append(said.getvalue())
    return printed


def accept(path: Path, notebook: dict[str, Any], printed: list[str]) -> None:
    """Write the notebook with these outputs."""
    for number, (cell, text) in enumerate(zip(code_cells(notebook), printed, strict=True), 1):
        cell["execution_count"] = number
        stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell["outputs"] = [stream] if text else []
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")
