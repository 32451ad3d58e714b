"""`kvcompile kernels --predict` and `kvcompile tune --predict`: once with kernels that are assembled, else made up."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvcompile.cli.app import app
from kvcompile.kernels.triton.config import Config
from kvcompile.kernels.triton.predict import cases, prior, step
from kvcompile.kernels.triton.tools import tune
from kvcompile.kernels.triton.tools.assemble import Assembled, Request
from kvcompile.kernels.triton.tools.ttgir import Pipeline
from tests.support.predicted import fact


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments])


def facts(requests: Iterable[Request], progress: object = None) -> dict[Request, Assembled | str]:
    """Of decode and prefill good ones; of tiles of 16 slow ones."""
    good, slow = (fact(instructions=count, pipeline=Pipeline(2, 2, 0)) for count in (300, 3000))
    small = fact(registers=32, shared=2048, instructions=100)
    return {
        one: small if one.spec.role not in ("decode", "prefill") else slow if one.spec.block_n == 16 else good
        for one in requests
    }


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path))


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "facts", facts)
    monkeypatch.setattr(step, "facts", facts)
    monkeypatch.setattr(prior, "facts", facts)


def test_a_step_from_its_machine_code(tmp_path: Path) -> None:
    """Assembled here, once: int8 at 32 x 4,096 takes more than its bytes and less than twice as long."""
    told = run("kernels", "--recipe", "int8", "--predict", "h200", "--json")
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    assert found["recipe"] == "int8" and found["machine"]["name"] == "h200" and found["assumed"]["launch"] > 0
    assert "A model, not a measurement" in found["note"]
    call = found["calls"]["a token"]
    decode = next(one for one in call["launches"] if one["role"] == "decode")
    least = 32 * 4096 * 8 * (2 * 128 + 4) / 4.3e12
    assert least < decode["seconds"] < 2 * least and decode["limit"] in decode["on"]
    assert call["seconds"] == pytest.approx(sum(one["seconds"] for one in call["launches"]))
    assert decode["share"] == pytest.approx(decode["bytes"] / decode["seconds"] / 4.3e12)
    kept = len(list((tmp_path / "assembled").iterdir()))
    assert kept == len(call["launches"])
    shown = run("kernels", "--recipe", "int8", "--predict", "h200")
    assert shown.exit_code == 0 and len(list((tmp_path / "assembled").iterdir())) == kept
    assert "a token: " in shown.stdout and "of a copy's bandwidth" in shown.stdout
    assert "A model, not a measurement" in shown.stderr


def test_goals(made_up: None) -> None:
    shown = run("kernels", "--predict", "h200", "--goals")
    assert shown.exit_code == 0, shown.output
    assert "softcap, window, ALiBi" in shown.stdout and "one of 64k among" in shown.stdout
    found = json.loads(run("kernels", "--predict", "h200", "--goals", "--json").stdout)
    assert [goal["goal"] for goal in found["goals"]] == [1, 2, 3, 4, 5, 6, 6, 7, 8, 8, 9, 10, 10]
    for goal in found["goals"]:
        sign, wanted = goal["wanted"].rsplit(" ", 1)
        values = [goal[name] for name in ("value", "kind", "harsh")]
        met = {value <= float(wanted) if sign == "at most" else value >= float(wanted) for value in values}
        assert goal["verdict"] == ("open" if len(met) == 2 else "met" if met == {True} else "missed")
    assert {goal["verdict"] for goal in found["goals"]} >= {"met", "open"}
    names = {case["name"]: case for case in found["cases"]}
    assert names["bf16 B1 32k"]["launches"] and set(names) == {
        *(case.name for case in cases.CASES),
        *step.STEPS,
    }


def test_candidates_of_the_tuner(made_up: None, monkeypatch: pytest.MonkeyPatch) -> None:
    own = [Config(block_n=size, waves=waves) for size in (16, 64) for waves in (1.0, 2.0, 3.0)]
    monkeypatch.setattr(tune, "candidates", lambda subject, device: own)
    shown = run("tune", "--predict", "h200", "--recipes", "int8", "--roles", "decode")
    assert shown.exit_code == 0, shown.output
    rows = [line for line in shown.stdout.splitlines() if " warps, " in line]
    times = [float(line.split("waves")[1].split()[0].replace(",", "")) for line in rows]
    assert len(rows) == 6 and times == sorted(times) and "16 x 16" in rows[-1]
    assert sum("the table's" in line for line in rows) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--predict", "tpu"], "--predict: device: expected one of a100"),
        (["--predict", "h200", "--arch", "80"], "--arch: h200 is sm_90, got 80"),
        (["--predict", "h200", "--target", "cpp"], "--predict is of GPUs"),
        (["--predict", "h200", "--assemble"], "--assemble: leave it out with --predict"),
        (["--predict", "h200", "--out", "x"], "--out: leave it out with --predict"),
        (
            ["--predict", "h200", "--prompt", "5000"],
            "--prompt: expected at most the 4,096 tokens of --context",
        ),
        (["--goals"], "--goals is of predictions: add --predict"),
        (["--json"], "--json is of predictions: add --predict"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], said: str) -> None:
    shown = run("kernels", *arguments)
    assert shown.exit_code == 1 and said in " ".join(shown.stderr.split())


def test_a_prefix_that_sequences_have_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for several, and by each; and what cannot be in common is refused with its reason."""
    from kvcompile.kernels.triton.predict import facts as facts_module

    monkeypatch.setattr(facts_module, "facts", facts)
    asked = ("kernels", "--recipe", "paged", "--predict", "a100", "--batch", "8", "--context", "4096")
    shown = run(*asked, "--prefix", "2048")
    assert shown.exit_code == 0, shown.output
    assert "a token: " in shown.stdout and "a token, each reading all: " in shown.stdout
    calls = json.loads(run(*asked, "--prefix", "2048", "--json").stdout)["calls"]
    once, each = calls["a token"], calls["a token, each reading all"]
    for kind in ("seconds", "seconds_where_l2_keeps_the_prefix"):
        assert 0 < once[kind] < each[kind]
    assert once["seconds"] > once["seconds_where_l2_keeps_the_prefix"]
    assert list(json.loads(run(*asked, "--json").stdout)["calls"]) == ["a token"]
    for more, said in (
        (("--prefix", "4096"), "--prefix: expected less than the 4,096 tokens of --context, got 4,096"),
        (("--prefix", "64", "--recipe", "int8"), "their slots are not in pages"),
    ):
        refused = run(*asked, *more)
        assert refused.exit_code == 1 and said in " ".join(refused.output.split())
