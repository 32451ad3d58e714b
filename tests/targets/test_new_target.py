"""An export target that is added by its module and its line has everything: export, load, verify, command line, help.

It does what the section "Add an export target" of CONTRIBUTING.md says, and nothing else.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import kvcompile
from kvcompile.cli.app import app
from kvcompile.errors import ArtifactError, ExportError, VerificationError
from kvcompile.models import load_model
from kvcompile.targets.manifest import Manifest
from kvcompile.targets.registry import TARGETS, ExportTarget, SessionKind
from kvcompile.targets.source import Source
from kvcompile.targets.verify import verify_artifact
from tests.support import dummy_target
from tests.support.exports import small, tiny

MODULE = "tests.support.dummy_target"
DUMMY = ExportTarget(MODULE, (SessionKind("dummy", MODULE, "Programs"),))
ROOT = Path(__file__).parents[2]


@pytest.fixture
def dummy(monkeypatch: pytest.MonkeyPatch) -> str:
    """Its line in the registry."""
    monkeypatch.setitem(TARGETS, "dummy", DUMMY)
    return "dummy"


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model as the command line names it."""
    config = tmp_path_factory.mktemp("model") / "config.json"
    config.write_text(tiny(layers=1).config.to_json_string())  # type: ignore[operator, union-attr]
    return f"random:{config}"


@pytest.fixture(scope="module")
def model(named: str) -> nn.Module:
    return load_model(named).model


@pytest.fixture(scope="module")
def artifact(named: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of it, which tests only read; the command line wrote it."""
    out = tmp_path_factory.mktemp("dummy") / "artifact"
    settings = ["--set", "runtime.max_tokens=64", "--set", "runtime.max_batch=4", "--set", "verify=quick"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TARGETS, "dummy", DUMMY)
        asked = ["export", str(out), "--target", "dummy", "--recipe", "int8", "--model", named, *settings]
        made = CliRunner().invoke(app, asked)
    assert made.exit_code == 0, made.output
    return out


def test_a_new_target_needs_its_module_and_its_line(dummy: str, artifact: Path, model: nn.Module) -> None:
    out = artifact
    manifest = Manifest.read(out)
    assert manifest.target == dummy and {"prefill.pt2", "decode.pt2"} == set(manifest.files)
    assert [check.session for check in manifest.checks] == ["torch.export"]  # it was run when it was written
    session = kvcompile.load(out)
    assert isinstance(session, dummy_target.Programs)
    ids = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(0))
    cached = torch.cat(
        [session.prefill(ids[:, :9], keep=None), *(session.decode(ids[:, i : i + 1]) for i in (9, 10))], 1
    )
    fast = kvcompile.optimize(model, small("int8", max_tokens=64), compile={"mode": "none"})
    torch.testing.assert_close(cached, fast(ids[:, :11]).logits, rtol=1e-4, atol=1e-4)
    (outcome,) = verify_artifact(out, model)
    assert (
        outcome.session == dummy
        and outcome.check is not None
        and 0 < outcome.check.error < outcome.check.budget
    )


def test_what_it_gives_is_compared(
    dummy: str, artifact: Path, model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = dummy_target.Programs._run

    def copied(source: Source, folder: Path, *_: Any) -> Manifest:
        for phase in dummy_target.PHASES:
            shutil.copy(artifact / f"{phase}.pt2", folder)
        return Manifest.read(artifact).model_copy(update={"files": {}, "checks": ()})

    def doubled(self: dummy_target.Programs, graph, inputs, outputs) -> None:  # type: ignore[no-untyped-def]
        run(self, graph, inputs, outputs)
        outputs["logits"].mul_(2)

    monkeypatch.setattr(dummy_target, "write", copied)
    recipe = small("int8", verify="quick", max_tokens=64)
    monkeypatch.setattr(dummy_target.Programs, "_run", doubled)
    with pytest.raises(VerificationError, match=r"torch\.export"):
        kvcompile.export(model, tmp_path / "artifact", dummy, recipe=recipe)
    assert not (tmp_path / "artifact").exists()


def test_the_command_line_writes_and_verifies_it(dummy: str, artifact: Path, named: str) -> None:
    checked = CliRunner().invoke(app, ["verify", str(artifact), "--model", named])
    assert checked.exit_code == 0 and "torch.export" in checked.output, checked.output


def test_the_help_and_the_errors_name_it(dummy: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="expected one of onnx, tensorrt, aoti, dummy"):
        kvcompile.export(tiny(layers=1), tmp_path / "a", "other")
    # A help is made where its module is imported, so the line has to be there before.
    script = (
        "from kvcompile.targets.registry import TARGETS, ExportTarget\n"
        f"TARGETS['dummy'] = ExportTarget({MODULE!r}, ())\n"
        "from kvcompile.cli.app import main\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "export", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "onnx|tensorrt|aoti|dummy" in done.stdout


def test_an_artifact_of_a_target_that_is_not_there_is_refused(
    dummy: str, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(TARGETS, dummy)
    with pytest.raises(ArtifactError, match="target is 'dummy'"):
        Manifest.read(artifact)
