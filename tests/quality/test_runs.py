"""Whole runs of `kvcompile.quality`: what is kept and found again, what is refused, the command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import kvcompile
from kvcompile.cli import app
from kvcompile.errors import KVCompileError, PlanError, QualityError, RecipeError
from kvcompile.models import LoadedModel
from kvcompile.report.quality import bench, digests, plot, store
from kvcompile.report.quality.text import tokens_of
from tests.quality.models import HIDDEN, SCORED, SINKS, TEXT, WINDOW
from tests.support.models import NanoGPT, make

# ---- What is kept


def test_nothing_is_measured_twice(model: Any, tokenizer: Any, tmp_path: Path, measured: list[str]) -> None:
    more = {
        **HIDDEN,
        **SCORED,
        "metrics": ("perplexity", "needle"),
        "ask": ("after",),
        "out": tmp_path,
        "plot": False,
    }

    def again(recipes: list[Any], tokens: Any = tokenizer, text: str = TEXT, **changes: Any) -> list[str]:
        measured.clear()
        kvcompile.quality(model, tokens, recipes, text, **{**more, **changes})
        return list(measured)

    first = kvcompile.quality(model, tokenizer, [WINDOW], TEXT, **more)
    assert len(measured) == 4
    assert again([WINDOW]) == []
    assert kvcompile.quality(model, tokenizer, [WINDOW], TEXT, **more) == first
    assert json.loads((tmp_path / "quality.json").read_text()) == json.loads(first.to_json())
    # Only what a change reaches:
    assert again([WINDOW, SINKS]) == ["sinks: perplexity", "sinks: needles in 160 tokens, asked after"]
    assert again([{**WINDOW, "name": "another"}]) == []
    wider = {"name": "window", "cache": {"retention": {"kind": "window", "size": 25}}}
    assert again([wider]) == ["window: perplexity", "window: needles in 160 tokens, asked after"]
    assert again([WINDOW], seed=1) == [
        f"{name}: needles in 160 tokens, asked after" for name in ("baseline", "window")
    ]
    assert again([WINDOW], prompt=41) == ["baseline: perplexity", "window: perplexity"]
    assert again([WINDOW], text=TEXT + TEXT) == [
        f"{name}: needles in 160 tokens, asked after" for name in ("baseline", "window")
    ]
    assert len(again([WINDOW], fresh=True)) == 4


def test_other_weights_and_other_code_are_measured(
    model: Any, tokenizer: Any, tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def again() -> int:
        measured.clear()
        kvcompile.quality(model, tokenizer, [], TEXT, out=tmp_path, plot=False, **SCORED)
        return len(measured)

    assert (again(), again()) == (1, 0)
    weight = model.model.layers[1].mlp.up_proj.weight
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            weight[3, 5] += 0.5
        assert again() == 1
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    assert again() == 0
    monkeypatch.setattr(digests, "_of_code", lambda: "changed")
    assert again() == 1


@pytest.mark.parametrize("damage", ["cut", "text", "field", "type", "metric"])
def test_a_line_that_cannot_be_read_is_said_and_measured_again(
    model: Any, tokenizer: Any, tmp_path: Path, measured: list[str], damage: str
) -> None:
    first = kvcompile.quality(model, tokenizer, [WINDOW], TEXT, out=tmp_path, plot=False, **SCORED)
    file = tmp_path / "results.jsonl"
    kept, broken = file.read_text().splitlines()
    data = json.loads(broken)
    data["result"] |= {"field": {"more": 1}, "type": {"perplexity": "low"}}.get(damage, {})
    data["metric"] = "taste" if damage == "metric" else data["metric"]
    lines = {"cut": broken[: len(broken) // 2], "text": "\x00 not JSON"}
    file.write_text(f"{kept}\n{lines.get(damage, json.dumps(data))}")
    measured.clear()
    again = kvcompile.quality(model, tokenizer, [WINDOW], TEXT, out=tmp_path, plot=False, **SCORED)
    assert measured == ["window: perplexity"]
    (note,) = again.notes
    assert note.startswith(f"{file}, line 2: cannot be read (") and note.endswith("is measured again")
    assert [r.perplexity.nll for r in again.rows if r.perplexity] == pytest.approx(
        [r.perplexity.nll for r in first.rows if r.perplexity]
    )
    measured.clear()
    kvcompile.quality(model, tokenizer, [WINDOW], TEXT, out=tmp_path, plot=False, **SCORED)
    assert measured == []


def test_stopping_loses_nothing_finished(
    model: Any, tokenizer: Any, tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes, plain = [WINDOW, SINKS], bench.perplexity

    def stop(fast: Any, *args: Any) -> Any:
        if fast.plan.recipe == "sinks":
            raise KeyboardInterrupt
        return plain(fast, *args)

    monkeypatch.setattr(bench, "perplexity", stop)
    with pytest.raises(KeyboardInterrupt):
        kvcompile.quality(model, tokenizer, recipes, TEXT, out=tmp_path, plot=False, **SCORED)
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 2
    monkeypatch.setattr(bench, "perplexity", plain)
    measured.clear()
    kvcompile.quality(model, tokenizer, recipes, TEXT, out=tmp_path, plot=False, **SCORED)
    assert measured == ["sinks: perplexity"]


# ---- What is refused


SMALL = {"name": "small", "runtime": {"max_tokens": 119}}
REFUSED: dict[str, tuple[dict[str, Any], type[KVCompileError], str]] = {
    "recipe": ({"recipes": ["nope", "nor"]}, RecipeError, "nope: no such file, and no shipped recipe"),
    "names": ({"recipes": [WINDOW, WINDOW]}, QualityError, "several are named window: give each a `name`"),
    "baseline": (
        {"recipes": [{**WINDOW, "name": "baseline"}]},
        QualityError,
        "several are named baseline",
    ),
    "short": ({"text": "Too short."}, QualityError, "text: has 11 tokens, and 120 are needed"),
    "tokenizer": ({"tokenizer": None}, QualityError, "tokenizer: a text must become tokens"),
    "limit": (
        {"recipes": [SMALL]},
        QualityError,
        "recipe 'small': runtime.max_tokens is 119, and 120 tokens are measured: raise it",
    ),
    "layers": (
        {
            "recipes": [
                {"name": "x", "layers": [{"where": {"index": 7}, "cache": {"keys": {"dtype": "int8"}}}]}
            ]
        },
        PlanError,
        "this model has no layer 7",
    ),
    "metrics": (
        {"metrics": ("taste",)},
        QualityError,
        "expected one or more of perplexity, needle, once each",
    ),
    "prompt": ({"prompt": 0}, QualityError, "prompt: expected a whole number of at least 1, got 0"),
    "tokens": ({"tokens": True}, QualityError, "tokens: expected a whole number of at least 1, got True"),
    "step": ({"step": 0}, QualityError, "step: expected auto or a whole number of tokens of at least 1"),
    "word": ({"step": "fast"}, QualityError, "step: expected auto or a whole number"),
    "depths": ({"depths": (0, 1.5)}, QualityError, "depths: expected different numbers from 0"),
    "no depths": ({"depths": ()}, QualityError, "got none"),
    "hay": ({"needle_tokens": (32,)}, QualityError, "needle_tokens: expected different whole numbers of at"),
    "ask": ({"ask": ("after", "after")}, QualityError, "ask: expected one or more of after, before, once"),
    "compile": (
        {"compile": "fast"},
        QualityError,
        "compile: expected one of auto, default, cudagraphs, max-autotune",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_runs(
    model: Any, tokenizer: Any, tmp_path: Path, measured: list[str], case: str
) -> None:
    changes, error, message = REFUSED[case]
    given = {
        "tokenizer": tokenizer,
        "recipes": [WINDOW],
        "text": TEXT,
        **SCORED,
        "out": tmp_path,
        "plot": False,
    } | changes
    with pytest.raises(error) as caught:
        kvcompile.quality(model, given.pop("tokenizer"), given.pop("recipes"), given.pop("text"), **given)
    assert message in str(caught.value)
    assert measured == []


def test_all_problems_come_at_once(model: Any) -> None:
    with pytest.raises(QualityError) as caught:
        kvcompile.quality(model, None, [], TEXT, prompt=0, needles=0)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["prompt", "needles", "tokenizer"]
    with pytest.raises(RecipeError) as refused:
        kvcompile.quality(model, None, ["nope", {"cash": 1}], TEXT)
    assert len(refused.value.problems) == 2


def test_a_needle_needs_room_for_its_question(model: Any, tokenizer: Any) -> None:
    recipe = {"name": "small", "runtime": {"max_tokens": 200}}
    with pytest.raises(QualityError, match=r"max_tokens is 200, and \d+ tokens \(160 and the question\)"):
        kvcompile.quality(model, tokenizer, [recipe], TEXT, **HIDDEN)


def test_a_model_that_ends_before(tokenizer: Any, measured: list[str]) -> None:
    from tests.support.models import TinyConfig

    model = make(NanoGPT, TinyConfig(vocab_size=258, max_seq_len=100))
    with pytest.raises(PlanError, match="the model has 100 positions"):
        kvcompile.quality(model, tokenizer, [], TEXT, **SCORED)
    assert measured == []


def test_a_plain_module_is_measured_too(tokenizer: Any) -> None:
    from tests.support.models import TinyConfig

    model = make(NanoGPT, TinyConfig(vocab_size=258, max_seq_len=512))
    report = kvcompile.quality(
        model, tokenizer, ["int8"], TEXT, **{**SCORED, **HIDDEN, "metrics": ("perplexity", "needle")}
    )
    ids = tokens_of(tokenizer, TEXT)[:120]
    with torch.no_grad():
        logits = model(ids[None])[0].double()
    expected = torch.nn.functional.cross_entropy(logits[39:-1], ids[40:])
    assert report.reference.perplexity is not None
    assert report.reference.perplexity.nll == pytest.approx(float(expected), rel=1e-5)
    assert report.model == "NanoGPT"


def test_a_folder_that_cannot_be_written(
    model: Any, tokenizer: Any, tmp_path: Path, measured: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(QualityError, match=r"out: .*file cannot be written"):
        kvcompile.quality(model, tokenizer, [], TEXT, out=tmp_path / "file", plot=False, **SCORED)
    assert measured == []


def test_without_matplotlib(
    model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot, "available", lambda: False)
    with pytest.raises(QualityError, match=r"needs matplotlib: pip install 'kvcompile\[plot\]'"):
        kvcompile.quality(model, tokenizer, [], TEXT, out=tmp_path, **SCORED)
    assert list(tmp_path.iterdir()) == []
    report = kvcompile.quality(model, tokenizer, [], TEXT, out=tmp_path, plot=False, **SCORED)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quality.json", "quality.md", "results.jsonl"]
    with pytest.raises(QualityError, match="needs matplotlib"):
        report.save(tmp_path)


# ---- The command


@pytest.fixture
def command(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    def load(name: str, *args: Any, **kwargs: Any) -> LoadedModel:
        return LoadedModel(model, None if name == "bare" else tokenizer, name)

    monkeypatch.setattr("kvcompile.models.load_model", load)
    (tmp_path / "text.txt").write_text(TEXT)
    fixed = ["quality", "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out")]
    fixed += [
        "--prompt",
        "40",
        "--tokens",
        "80",
        "--needle-tokens",
        "160",
        "--needles",
        "1",
        "--depths",
        "0,1",
    ]

    def run(*args: str) -> Any:
        return CliRunner().invoke(app, [*fixed, *args], env={"COLUMNS": "200", "TERM": "dumb"})

    yield run


def test_command(command: Any, tmp_path: Path, measured: list[str]) -> None:
    pytest.importorskip("matplotlib")
    result = command("--recipes", "int8,int4", "--ask", "after")
    assert result.exit_code == 0, result.output
    assert "int8" in result.stdout and "needles found in 160 tokens" in result.stdout
    assert f"written to {tmp_path / 'out'}" in result.stderr and "6/6 int4: needles" in result.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "quality.json",
        "quality.md",
        "quality.png",
        "results.jsonl",
    ]
    assert len(measured) == 6
    result = command("--recipes", "int8", "--ask", "after", "--json", "--set", "cache.values.dtype=int4")
    assert result.exit_code == 0, result.output
    assert len(measured) == 8  # the baseline is there
    assert json.loads(result.stdout)["rows"][1]["layout"].startswith("K int8")


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--recipes", "int8,nope"], 1, "nope: 1 problem"),
        (["--text", "no/such.txt"], 1, "text: no/such.txt cannot be read: No such file or directory"),
        (["--model", "bare"], 1, "tokenizer: a text must become tokens"),
        (["--tokens", "99999"], 1, "tokens, and 100,039 are needed"),
        (["--step", "few"], 2, "expected auto or a whole number, got 'few'"),
        (["--depths", "start"], 2, "--depths: expected numbers with commas between, got 'start'"),
        (["--depths", "2"], 1, "depths: expected different numbers from 0"),
    ],
)
def test_mistakes_on_the_command_line(
    command: Any, measured: list[str], args: list[str], code: int, message: str
) -> None:
    result = command("--no-plot", *args)
    assert result.exit_code == code and message in " ".join(result.output.split()), result.output
    assert measured == [] and "Traceback" not in result.output


def test_ctrl_c_says_how_to_go_on(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "retrieval", stop)
    result = command("--no-plot", "--recipes", "int8")
    assert result.exit_code == 130
    assert f"what is finished is in {tmp_path / 'out'}" in result.stderr and "stopped" in result.stderr
    assert len((tmp_path / "out" / store.FILE).read_text().splitlines()) == 1


def test_a_text_in_another_encoding(command: Any, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes("naïve".encode("latin-1"))
    assert "is not UTF-8 at byte 2" in command("--no-plot").output


def test_every_bar_reaches_its_end(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Of what is measured and of what was finished before; the last one is that of the last measurement."""
    for _ in range(2):
        told: dict[str, list[tuple[int, int]]] = {}

        def progress(
            stage: str, done: int, total: int, told: dict[str, list[tuple[int, int]]] = told
        ) -> None:
            told.setdefault(stage, []).append((done, total))

        kvcompile.quality(
            model,
            tokenizer,
            [WINDOW],
            TEXT,
            **{**HIDDEN, **SCORED, "metrics": ("perplexity", "needle")},
            out=tmp_path,
            plot=False,
            progress=progress,
        )
        assert list(told)[-1].startswith("6/6 window: needles")
        for stage, counts in told.items():
            assert counts[-1][0] == counts[-1][1] and counts == sorted(counts, key=lambda pair: pair[0]), (
                stage
            )
