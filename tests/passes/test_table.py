"""The passes as a table: what is listed is what runs, and what may be left out changes no result."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import kvcompile
from kvcompile.cli.app import app
from kvcompile.errors import PlanError
from kvcompile.passes.table import PASSES, VARIABLE, disabled, graph_pass, totals, watched
from tests.support.models import tiny_hf

ROOT = Path(__file__).parents[2]
EAGER: dict[str, Any] = {"compile": {"mode": "none"}, "verify": "off", "max_tokens": 64}
OPTIONAL = [each.name for each in PASSES if each.optional]


def test_the_table_has_all_that_are_passes_and_where_they_are() -> None:
    listed = [(each.name, each.file) for each in PASSES]
    assert len({name for name, _ in listed}) == len(listed)
    found = [
        (name, str(path.relative_to(ROOT)))
        for folder in ("passes", "kvcompile")
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r'^@graph_pass\("(\w+)"\)', path.read_text(), re.MULTILINE)
    ]
    assert sorted(found) == sorted(listed)


def test_runs_are_noted_in_the_order_of_the_table() -> None:
    fast: Any = kvcompile.optimize(tiny_hf("llama", layers=4), "int8", **EAGER)
    ran = fast.report["passes"]
    order = [each.name for each in PASSES]
    names = [each.name for each in ran]
    assert names == sorted(names, key=order.index)
    assert {"capture", "traced_once", "inline", "clean", "detect", "canonicalize", "insert_cache"} <= set(
        names
    )
    by_name = {each.name: each for each in ran}
    assert by_name["capture"].runs == by_name["detect"].runs == by_name["insert_cache"].runs == 1
    assert 0 < by_name["clean"].seconds < by_name["capture"].seconds
    assert json.loads(json.dumps(fast.report.to_dict()))["passes"][0] == {
        "name": "capture",
        "runs": 1,
        "seconds": by_name["capture"].seconds,
    }


def test_first_runs_begin_in_the_order_of_the_table() -> None:
    with watched(code=True) as runs:
        kvcompile.optimize(tiny_hf("llama", layers=4), "int8", **EAGER)
    order = [each.name for each in PASSES]
    first = list(dict.fromkeys(run.name for run in runs))
    assert first == sorted(first, key=order.index)
    assert all(
        run.nodes and run.code for run in runs if run.name in ("capture", "clean", "detect", "insert_cache")
    )


def test_the_seconds_of_a_pass_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 1.0, 1.5, 4.0, 5.0, 7.0))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    inner = graph_pass("clean")(lambda: None)
    with watched() as runs:
        graph_pass("capture")(lambda: [inner(), inner()])()
    assert [(run.name, run.seconds) for run in runs] == [("capture", 5.5), ("clean", 0.5), ("clean", 1.0)]


def test_only_who_watches_notes_anything() -> None:
    @graph_pass("clean")
    def of_a_test(broken: bool) -> int:
        if broken:
            raise ValueError("on purpose")
        return 3

    assert of_a_test(False) == 3
    with watched() as runs:
        of_a_test(False)
        with watched(code=True) as inner, pytest.raises(ValueError, match="on purpose"):
            of_a_test(True)
        of_a_test(False)
    assert inner is runs and [run.name for run in runs] == ["clean"] * 2
    assert [(each.name, each.runs) for each in totals(runs)] == [("clean", 2)]
    of_a_test(False)
    assert len(runs) == 2
    with pytest.raises(AssertionError, match="not in the table"):
        graph_pass("sweep")


@pytest.mark.few(2)
@pytest.mark.parametrize("name", OPTIONAL)
def test_what_is_left_out_changes_no_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_hf("llama", layers=4)
    ids = torch.randint(3, 60, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = kvcompile.optimize(model, "int8", **EAGER)(ids).logits
        monkeypatch.setenv(VARIABLE, f" {name},")
        assert disabled(name)
        fast: Any = kvcompile.optimize(model, "int8", **EAGER)
        torch.testing.assert_close(fast(ids).logits, expected)
    assert name not in {each.name for each in fast.report["passes"]}


@pytest.mark.parametrize(
    ("name", "told"), [("detect", "'detect' cannot be left out"), ("sweep", "'sweep' is no pass")]
)
def test_other_names_are_refused(name: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f"gemv,{name}")
    with pytest.raises(PlanError, match=rf"KVCOMPILE_DISABLE={name}: {told}; .* are {', '.join(OPTIONAL)}"):
        kvcompile.optimize(tiny_hf("llama"), "int8", **EAGER)


def test_the_command_lists_them() -> None:
    listed = CliRunner().invoke(app, ["passes", "--json"])
    assert listed.exit_code == 0
    assert [each["name"] for each in json.loads(listed.stdout)] == [each.name for each in PASSES]
    shown = CliRunner().invoke(app, ["passes"]).stdout
    assert all(each.name in shown and each.file in shown for each in PASSES)
