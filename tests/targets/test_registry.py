"""The registry of export targets: every name has its line, and every line leads to what it says."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import pytest
from typer.testing import CliRunner

from kvcompile.cli.app import app
from kvcompile.runtime.session import Session
from kvcompile.targets.registry import TARGETS, Target


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_has_its_writer_and_its_sessions(name: Target) -> None:
    assert callable(import_module(TARGETS[name].writer).write)
    assert TARGETS[name].sessions
    for kind in TARGETS[name].sessions:
        assert find_spec(kind.module), kind
        opened = kind.load()
        assert isinstance(opened, type) and issubclass(opened, Session) and name in opened.targets


def test_the_command_line_takes_the_targets_of_the_registry() -> None:
    said = CliRunner().invoke(app, ["export", "folder", "--target", "engine"])
    assert said.exit_code == 2 and all(f"'{name}'" in said.output for name in TARGETS), said.output
