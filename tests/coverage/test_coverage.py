"""The coverage table: a subset in every run, all of it under `slow`; and the page says what the rows say."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch

from tests.coverage import stages, tensor
from tests.coverage.__main__ import DOCS
from tests.coverage.check import RECIPES, TOLERANCE, Row, _Count, check_type
from tests.coverage.configs import all_types, tiny_model
from tests.coverage.fast import FAST
from tests.coverage.run import run
from tests.coverage.settings import MORE
from tests.coverage.sizes import one_sided
from tests.coverage.table import BEGIN, END, markdown


@pytest.fixture(scope="module")
def known() -> dict[str, Row]:
    rows = json.loads((DOCS / "coverage.json").read_text())["rows"]
    return {row["type"]: Row(**row) for row in rows}


def test_the_page_has_the_rows(known: dict[str, Row]) -> None:
    data = json.loads((DOCS / "coverage.json").read_text())
    page = (DOCS / "coverage.md").read_text()
    assert markdown(list(known.values()), data["versions"]) in page
    assert page.count(BEGIN) == page.count(END) == 1


def test_the_goal_is_met(known: dict[str, Row]) -> None:
    outcomes = [row.outcome for row in known.values()]
    assert outcomes.count("verified") >= 165
    assert not {"wrong", "error"} & set(outcomes)
    assert all(row.reason for row in known.values() if row.outcome != "verified")
    for row in known.values():
        if row.outcome == "verified":
            others = {name for name, _ in MORE.values()}
            assert (set(row.errors) | set(row.refused)) - others == set(RECIPES) and row.sites > 0
            assert set(row.refused) <= {"streaming", *others}
            assert all(error <= TOLERANCE[name] for name, error in row.errors.items())


# Kinds of positions, masks, scores, heads and states that no other quick test has as a type of transformers, and an
# encoder. Bamba, Bloom, DeepSeek, Gemma 2, GPT-2, gpt-oss and Mamba are in tests/passes/detect/test_detect.py,
# tests/passes/recurrent/test_state.py and tests/serve/test_numerics.py.
QUICK = ("bert", "gptj", "llama4_text", "qwen3_next")
PARTS = [QUICK, pytest.param(tuple(name for name in FAST if name not in QUICK), marks=pytest.mark.slow)]


def test_parts_are_of_the_types_that_ci_checks() -> None:
    assert len(set(FAST)) >= 40 and set(QUICK) < set(FAST)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", PARTS, ids=["one of each kind", "the others"])
def test_fast_types(known: dict[str, Row], part: tuple[str, ...]) -> None:
    """What the table says of these types is still so."""
    # Types in turns are tried with one of the recipes beside `baseline`; all of them is slow.
    rows = [
        row
        for number, other in enumerate(RECIPES[1:])
        for row in run(part[number::2], os.cpu_count() or 1, 300, (RECIPES[0], other))
    ]
    rows.sort(key=lambda row: row.type)
    assert [(row.type, row.outcome, row.reason if row.outcome == "wrong" else "") for row in rows] == [
        (name, known[name].outcome, "") for name in sorted(part)
    ]
    for row in rows:
        assert row.outcome != "verified" or (row.tested and not one_sided(row.tested))
        assert (row.sites, row.masks, row.rope) == tuple(
            getattr(known[row.type], field) for field in ("sites", "masks", "rope")
        )


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_all_types(known: dict[str, Row]) -> None:
    rows = run(all_types(), jobs=os.cpu_count() or 1, limit=600)
    assert [(row.type, row.outcome) for row in rows] == [(r.type, r.outcome) for r in known.values()]


@pytest.mark.parametrize("kind, name, least", [("tensor", "ranks", 150), ("stages", "stages", 150)])
def test_over_two_the_goal_is_met(known: dict[str, Row], kind: str, name: str, least: int) -> None:
    """The rows of `--tensor 2` and `--stages 2`: what one process computes, two do, or it is said why not."""
    rows = json.loads((DOCS / f"coverage_{kind}.json").read_text())["rows"]
    outcomes = [row["outcome"] for row in rows]
    assert outcomes.count("verified") >= least
    assert not {"wrong", "error"} & set(outcomes)
    assert {row["type"] for row in rows} == set(known)
    for row in rows:
        rewritten = known[row["type"]].outcome == "verified"
        assert rewritten == (row["outcome"] in ("verified", "whole", "refused"))
        assert row["outcome"] == "verified" or row["reason"]
        assert row["outcome"] != "verified" or (row["error"] <= TOLERANCE["baseline"] and row[name] == 2)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_types_over_two_ranks(name: str) -> None:
    row = tensor.check_tensor(name)
    assert row.outcome == "verified" and row.by_rows and row.weights < 1 and row.cache == 0.5


def test_a_type_over_two_stages() -> None:
    row = stages.check_stages("gpt2")
    assert row.outcome == "verified" and row.places and row.weights < 1 and row.cache == 0.5


def test_the_harness_sees_a_wrong_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rewrite that gives other logits is called wrong, whatever verification says."""
    from kvcompile.runtime.huggingface import HuggingFaceCachedModel

    honest = HuggingFaceCachedModel.forward

    def off_by_little(self: HuggingFaceCachedModel, *args: Any, **kwargs: Any) -> Any:
        out = honest(self, *args, **kwargs)
        out.logits[:, -1] += 0.01
        return out

    monkeypatch.setattr(HuggingFaceCachedModel, "forward", off_by_little)
    row = check_type("llama", ("baseline",))
    assert row.outcome == "wrong" and "logits differ" in row.reason


def test_sites_are_counted_without_detection() -> None:
    ids = torch.randint(3, 61, (2, 27))
    for name, blocks in (("llama", 2), ("gemma2", 2), ("mamba", 0)):
        with _Count(27) as count, torch.no_grad():
            tiny_model(name)(ids, use_cache=False)
        assert count.blocks == blocks


def test_a_type_that_hangs_or_dies_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    import tests.coverage.run as runner

    def check(model_type: str, recipes: tuple[str, ...]) -> Row:
        if model_type == "dies":
            os._exit(3)
        while model_type == "hangs":
            pass
        return Row(model_type, outcome="verified")

    monkeypatch.setattr(runner, "check_type", check)
    rows = run(["fine", "dies", "hangs"], jobs=2, limit=2)
    assert [(row.type, row.outcome, row.reason) for row in rows] == [
        ("dies", "error", "the process died"),
        ("fine", "verified", ""),
        ("hangs", "error", "no result after 2 s"),
    ]
