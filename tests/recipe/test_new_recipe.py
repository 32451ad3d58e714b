"""A recipe is a file: found by its path, or by its name where it stands beside the shipped ones.

It does what the section "Add a recipe" of CONTRIBUTING.md says, and nothing else.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import kvcompile
from kvcompile.cli.app import app
from kvcompile.layouts import CacheLayout, Ring, SinkWindow, int8, uint
from kvcompile.recipe import load, load_recipe, shipped_recipes
from tests.support.models import NanoGPT, make

TEXT = """\
name: narrow
description: Keys in int8 and values in int4, of the first token and the newest eight.
cache:
  keys:      {dtype: int8}
  values:    {dtype: int4, group: 0}
  retention: {kind: sink_window, sinks: 1, window: 8}
compile: {mode: none}
"""
LAYOUT = CacheLayout(int8(), uint(4), Ring(), SinkWindow(1, 8))


def test_a_new_recipe_is_used_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "recipes" / "narrow.yaml"
    file.parent.mkdir()
    file.write_text(TEXT)
    fast = kvcompile.optimize(make(NanoGPT), file, max_tokens=64)  # which verifies it
    assert fast.recipe.name == "narrow"
    assert {decision.layout for decision in fast.plan.decisions} == {LAYOUT}
    ids = torch.randint(0, 61, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        cached = torch.cat([fast(ids[:, :30]), *(fast(ids[:, i : i + 1]) for i in range(30, 40))], dim=1)
    assert cached.shape == (1, 40, 61) and cached.isfinite().all()
    run = CliRunner().invoke
    assert "ok (narrow)" in run(app, ["validate", str(file)]).stdout


def test_a_new_recipe_needs_no_registration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the shipped recipes and one more, in the place of the package's."""
    for item in resources.files("kvcompile.recipes").iterdir():
        if item.name.endswith(".yaml"):
            (tmp_path / item.name).write_text(item.read_text("utf-8"))
    before = shipped_recipes()
    monkeypatch.setattr(load, "resources", SimpleNamespace(files=lambda package: tmp_path))
    assert shipped_recipes() == before
    (tmp_path / "narrow.yaml").write_text(TEXT)
    assert set(shipped_recipes()) == {*before, "narrow"}
    assert load_recipe("narrow").name == "narrow"
    run = CliRunner().invoke
    assert "of the first token and the newest eight" in run(app, ["recipes", "list"]).stdout
    assert run(app, ["recipes", "show", "narrow"]).stdout == TEXT
    assert "ok (narrow)" in run(app, ["validate", "narrow"]).stdout
