"""A pass that is added by its function, its line in the table and its call is listed, timed, dumped and switched off.

It does what the section "Add a pass" of CONTRIBUTING.md says, and nothing else.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import kvcompile
from kvcompile import pipeline
from kvcompile.cli.app import app
from kvcompile.errors import PlanError, VerificationError
from kvcompile.passes import table
from kvcompile.passes.capture.captured import Captured
from kvcompile.passes.detect.detect import Detection
from kvcompile.passes.graph import target_name
from kvcompile.passes.rewrite.canonicalize import Canonical, canonicalize
from kvcompile.passes.table import Pass, disabled, graph_pass
from tests.support.models import NanoGPT, make

NAME = "double_negation"
LINE = Pass(NAME, "drops what is negated twice", "tests/passes/test_new_pass.py", optional=True)
EAGER = {"cache": {"keys": {"dtype": "int8"}}, "compile": {"mode": "none"}}


class Twice(nn.Module):
    """An embedding that is negated twice."""

    def __init__(self, embed: nn.Module):
        super().__init__()
        self.embed = embed

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids).neg().neg()


@pytest.fixture
def model() -> NanoGPT:
    made = make(NanoGPT)
    assert isinstance(made, NanoGPT)
    made.wte = Twice(made.wte)  # type: ignore[assignment]
    return made


def add(monkeypatch: pytest.MonkeyPatch, careless: bool = False) -> None:
    """Its line behind that of `canonicalize`, its function, and its call there."""
    place = [each.name for each in table.PASSES].index("canonicalize") + 1
    monkeypatch.setattr(table, "PASSES", (*table.PASSES[:place], LINE, *table.PASSES[place:]))

    @graph_pass(NAME)
    def double_negation(canonical: Canonical) -> Canonical:
        if disabled(NAME):
            return canonical
        graph = canonical.graph_module.graph
        for node in graph.nodes:
            inner = node.all_input_nodes[0] if target_name(node) == "neg" else None
            if inner is not None and target_name(inner) == "neg":
                node.replace_all_uses_with(inner if careless else inner.all_input_nodes[0])
        graph.eliminate_dead_code()
        canonical.graph_module.recompile()
        return canonical

    def called(captured: Captured, detection: Detection) -> Canonical:
        return double_negation(canonicalize(captured, detection))

    monkeypatch.setattr(pipeline, "canonicalize", called)


def left_by(folder: Path, name: str) -> str:
    """The graph that the last run of a pass left, as it was dumped; empty: there is none."""
    found = sorted(folder.glob(f"*/passes/*_{name}.py"))
    return found[-1].read_text() if found else ""


def test_a_new_pass_is_listed_timed_and_dumped(
    model: NanoGPT, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    add(monkeypatch)
    listed = json.loads(CliRunner().invoke(app, ["passes", "--json"]).stdout)
    assert {each["name"]: each["optional"] for each in listed}[NAME]
    monkeypatch.setenv("KVCOMPILE_DUMP", str(tmp_path))
    fast = kvcompile.optimize(model, EAGER, max_tokens=64)  # which verifies it
    (ran,) = [each for each in fast.report["passes"] if each.name == NAME]
    assert ran.runs == 1 and ran.seconds > 0
    assert "aten.neg" in left_by(tmp_path, "canonicalize") and "aten.neg" not in left_by(tmp_path, NAME)
    assert "aten.neg" not in left_by(tmp_path, "insert_cache")
    ids = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(0))
    expected = fast(ids)

    monkeypatch.setenv(table.VARIABLE, NAME)
    without = tmp_path / "without"
    monkeypatch.setenv("KVCOMPILE_DUMP", str(without))
    other = kvcompile.optimize(model, EAGER, max_tokens=64)
    assert NAME not in {each.name for each in other.report["passes"]}
    assert not left_by(without, NAME) and "aten.neg" in left_by(without, "insert_cache")
    assert torch.equal(other(ids), expected)


def test_its_name_is_known_and_no_other(model: NanoGPT, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(table.VARIABLE, NAME)
    with pytest.raises(PlanError, match=f"'{NAME}' is no pass"):
        kvcompile.optimize(model, EAGER, max_tokens=64)
    with pytest.raises(AssertionError, match="not in the table"):
        graph_pass(NAME)


def test_a_pass_that_changes_results_is_found_out(model: NanoGPT, monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch, careless=True)
    with pytest.raises(VerificationError, match="detection"):
        kvcompile.optimize(model, EAGER, max_tokens=64)
