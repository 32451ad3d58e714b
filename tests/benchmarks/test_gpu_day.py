"""benchmarks/gpu_day.sh: what can be known without a GPU. The pieces themselves are rehearsed by its --rehearse."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_day.sh"
PIECES = ("import", "numerics", "kernels", "tune", "kernels-tuned", "decode")


def run(*arguments: str, out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env={**os.environ, "OUT": str(out), "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script of benchmarks/, as `python benchmarks/<name>.py` would load it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_the_script_is_valid_and_names_its_pieces(tmp_path: Path) -> None:
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False).returncode == 0
    said = run("--help", out=tmp_path)
    assert said.returncode == 0 and f"Pieces: {' '.join(PIECES)}." in said.stdout
    for name in re.findall(r"benchmarks/(\w+\.py)", SCRIPT.read_text("utf-8")):
        assert (ROOT / "benchmarks" / name).is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decod"], "no piece 'decod': expected wheels, ahead, import"),
        (["--seconds", "ten", "decode"], "--seconds: expected a number of seconds, got 'ten'"),
        (["--total"], "--total: expected a number of seconds, got ''"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = run(*arguments, out=tmp_path)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = run("all", out=tmp_path / "out")
    assert done.returncode == 2 and not done.stdout and not (tmp_path / "out").exists()
    assert (
        done.stderr
        == "gpu_day: needs an NVIDIA GPU, and there is none here; --rehearse shows that the script works\n"
    )


def test_a_failed_piece_stops_no_other_and_a_done_one_is_left_out(tmp_path: Path) -> None:
    """With a Python that fails one piece and passes the others at once."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/bash\ncase $1 in *_import.py) echo broken; exit 3 ;; *_decode.py) echo "ran"; exit 0 ;; esac\n'
        f'exec "{sys.executable}" "$@"\n'
    )
    python.chmod(0o755)
    out = tmp_path / "out"
    done = run("--rehearse", "import", "decode", out=out, PYTHON=str(python))
    assert done.returncode == 1, done.stderr
    assert "failed or not finished: import" in done.stderr
    for piece, status, code in (("import", "failed", 3), ("decode", "ok", 0)):
        data = json.loads((out / f"{piece}.json").read_text())
        assert (data["piece"], data["status"], data["exit_code"]) == (piece, status, code)
        assert data["rehearsal"] is True and len(data["calls_s"]) == 1 and data["ended"].endswith(" UTC")
    assert "broken" in (out / "day.log").read_text()
    again = run("--rehearse", "decode", out=out, PYTHON=str(python))
    assert again.returncode == 0 and "decode: done before" in again.stdout and "ran" not in again.stdout
    late = run("--rehearse", "--total", "1", "--again", "decode", out=out, PYTHON=str(python))
    assert late.returncode == 1 and "decode: no time left in this call" in late.stdout


def test_kernels_are_compiled_ahead(tmp_path: Path) -> None:
    """Machine code of what a case launches lies in Triton's cache, and nothing has run."""
    script = ROOT / "benchmarks" / "gpu_day_ahead.py"
    asked = ["--what", "kernels", "--only", "append int8 B1", "--only", "linear SmolLM2 o", "--jobs", "1"]
    own = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    own["KVCOMPILE_CACHE_DIR"] = str(tmp_path / "own")
    (tmp_path / "own").mkdir(mode=0o700)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *asked],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    line = r"kernels, {}: 1 kernels, \d+ s, ok\n"
    assert re.fullmatch(line.format("append int8 B1") + line.format("linear SmolLM2 o"), done.stdout)
    kept = sorted(path.name for path in (tmp_path / "triton").rglob("*.cubin"))
    assert kept == ["append.cubin", "linear.cubin"]


@pytest.mark.parametrize("name", ["static", "int8+cudagraphs:gemv=off"])
def test_decode_measures_what_its_file_has(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decode = module("gpu_day_decode", monkeypatch)
    monkeypatch.setattr("sys.stdin", io.StringIO("go\n"))
    decode.measure(argparse.Namespace(rehearse=True, worker=name, contexts=[12, 24], tokens=2, rounds=2))
    ready, *lines = capsys.readouterr().out.splitlines()
    assert ready == decode.READY.strip()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert [(row["variant"], row["context"]) for row in rows] == [(name, 12), (name, 24)]
    for row in rows:
        assert row["tokens_s"] > 0 and row["limit_tokens_s"] > 0 and len(row["rounds"]) == 2
        assert row["read_bytes"] > row["weight_bytes"] > 0 and row["cache_bytes"] > 0
        assert {"first_token_s", "of_limit", "copy_gb_s", "prompt_peak_bytes", "decode_peak_bytes"} <= set(
            row
        )


def test_a_pass_is_left_out_in_the_process_of_its_variant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decode = module("gpu_day_decode", monkeypatch)
    whole, *without = (name for name in decode.VARIANTS if name.startswith("baseline+cudagraphs"))
    assert "KVCOMPILE_DISABLE" not in decode.environment(whole)
    assert [decode.environment(name)["KVCOMPILE_DISABLE"] for name in without] == ["gemv", "norms"]
    assert decode.left_out(without[0]) == (whole, "gemv")
    for name in ("int8:gemv", "int8:gemv=on", "int8:=off", "static:gemv=off"):
        with pytest.raises(SystemExit):
            decode.main(["--variants", name])
        assert f"--variants: {name}: expected a recipe" in capsys.readouterr().err


def test_the_model_has_the_shape_that_it_is_named_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """8.03 billion parameters, counted without making them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    decode = module("gpu_day_decode", monkeypatch)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**decode.LLAMA_8B))
    assert sum(parameter.numel() for parameter in model.parameters()) == 8_030_261_248


def test_kernels_go_on_with_what_has_no_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernels, file = module("kernels", monkeypatch), tmp_path / "kernels.json"
    rows = [{"case": "one", "us": 1.0, "bytes": 8, "share": 0.5}, {"case": "two", "wrong": "failed: no"}]
    file.write_text(json.dumps({"meaningless": False, "cases": rows}))
    options = argparse.Namespace(resume=True, again=False, out=str(file), dry_run=False)
    assert kernels.resumed(options) == rows[:1]
    assert kernels.resumed(argparse.Namespace(**vars(options) | {"dry_run": True})) == []
    assert kernels.resumed(argparse.Namespace(**vars(options) | {"again": True})) == []


def test_all_files_of_gpu_tests_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    files = module("gpu_day_numerics", monkeypatch).files()
    assert files[0] == "tests/gpu/test_numerics.py" and "tests/compile/test_cudagraph.py" in files
    assert {f"tests/gpu/{path.name}" for path in (ROOT / "tests" / "gpu").glob("test_*.py")} <= set(files)


def test_wheels_are_the_pinned_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every dependency travels, or comes with torch, triton and transformers; never these themselves."""
    import tomllib

    setup = module("gpu_day_setup", monkeypatch)
    names = {name.lower().replace("_", "-") for group in setup.GROUPS for name in group}
    assert all(name.lower() in setup.pins() for group in setup.GROUPS for name in group)
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    asked = {re.split(r"[^\w-]", text, maxsplit=1)[0].lower() for text in wanted}
    # `onnx` is for exports; torch brings sympy, transformers numpy.
    assert asked - names == {"torch", "transformers", "triton", "numpy", "onnx", "sympy"}
    assert not names & {"torch", "transformers", "triton", "numpy"}


def test_a_copy_of_a_package_is_as_good_as_an_installed_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It may have come without what says its version."""
    setup = module("gpu_day_setup", monkeypatch)
    monkeypatch.setattr(setup.sys, "path", [str(tmp_path)])
    assert setup.installed("z3-solver") is None
    (tmp_path / "z3").mkdir()
    (tmp_path / "z3" / "__init__.py").touch()
    assert setup.installed("z3-solver") == "?"


def test_a_bare_checkout_becomes_one_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module("gpu_day_setup", monkeypatch).link(tmp_path)
    own = tmp_path / "kvcompile"
    for part in (
        "__init__.py",
        "cli/app.py",
        "passes/capture/capture.py",
        "kernels/ops/cached_attention.py",
        "recipes/int8.yaml",
    ):
        assert (own / part).is_file()
