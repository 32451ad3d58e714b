"""The table of deliberate breaks follows the code, and a break that no test notices is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.breaks.__main__ import ALL, main, problem, run
from tests.breaks.broken import Break

ITEM = Break("twice", "half.py", "x / 2", "x / 3", ("test_half.py",))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A file, a test that looks at it, and one that does not."""
    (tmp_path / "half.py").write_text("def half(x):\n    return x / 2\n")
    (tmp_path / "test_half.py").write_text(
        "from half import half\n\n\ndef test_it():\n    assert half(4) == 2\n"
    )
    (tmp_path / "test_nothing.py").write_text("def test_it():\n    pass\n")
    return tmp_path


def test_names_are_there_once() -> None:
    names = [item.name for item in ALL]
    assert len(names) == len(set(names)) > 50
    assert all(item.old != item.new for item in ALL)


@pytest.mark.parametrize("item", ALL, ids=lambda item: item.name)
def test_every_text_is_there_once_and_its_tests_exist(item: Break) -> None:
    assert problem(item) == ""


def test_what_cannot_be_made_is_told(tree: Path) -> None:
    assert problem(ITEM, tree) == ""
    assert "expected this text once in half.py, found it 0 times" in problem(replace(ITEM, old="x / 4"), tree)
    assert "found it 2 times" in problem(replace(ITEM, old="x"), tree)
    assert "whole.py does not exist" in problem(replace(ITEM, file="whole.py"), tree)
    assert "no such tests: test_whole.py" in problem(replace(ITEM, tests=("test_whole.py",)), tree)


def test_a_break_is_caught_or_told_and_the_file_is_as_it_was(tree: Path) -> None:
    before = (tree / "half.py").read_text()
    assert run(ITEM, tree) == (True, "FAILED test_half.py::test_it")
    caught, told = run(replace(ITEM, tests=("test_nothing.py",)), tree)
    assert not caught and "1 passed" in told
    caught, told = run(replace(ITEM, tests=("test_half.py::test_other",)), tree)
    assert not caught and "no test ran" in told
    assert (tree / "half.py").read_text() == before


def test_the_check_alone_breaks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0
    assert capsys.readouterr().out == ""
