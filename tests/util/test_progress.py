"""Progress without asking for it: a bar on a terminal after a while, the log elsewhere, one at a time."""

from __future__ import annotations

import io
import logging
import sys
import time
from typing import Any

import pytest

import kvcompile
from kvcompile.util import progress
from kvcompile.util.progress import taken, told
from tests.support.models import tiny_hf


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal for stderr; not in a fixture, as pytest puts its own stderr there before the test runs."""
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(progress, "PATIENCE", 0.1)
    return found


def wait(terminal: Terminal, text: str) -> None:
    for _ in range(200):
        if text in terminal.getvalue():
            return
        time.sleep(0.05)
    raise AssertionError(f"{text!r} is not shown: {terminal.getvalue()!r}")


def test_a_bar_appears_after_a_while_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = shown(monkeypatch)
    with told() as tell:
        tell("reading [all] of it", 0, 1)
        wait(terminal, "reading [all] of it")
        tell("writing", 1, 4)
        wait(terminal, "writing")
    assert terminal.getvalue().rstrip().endswith("\x1b[2K"), "the line is cleared"
    assert not progress._SHOWN.locked()


def test_what_is_quick_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = shown(monkeypatch)
    with told() as tell:
        tell("quick", 0, 1)
    time.sleep(0.3)
    assert "quick" not in terminal.getvalue()


def test_an_error_takes_the_bar_away(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = shown(monkeypatch)
    with pytest.raises(ValueError, match="no"), told() as tell:
        tell("failing", 0, 1)
        wait(terminal, "failing")
        raise ValueError("no")
    assert not progress._SHOWN.locked()


def test_there_is_one_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = shown(monkeypatch)
    with taken(), told() as tell:
        tell("inner", 0, 1)
        time.sleep(0.3)
    with told() as outer, told() as tell:
        outer("outer", 0, 1)
        tell("second", 0, 1)
        wait(terminal, "outer")
    assert "inner" not in terminal.getvalue() and "second" not in terminal.getvalue()


def test_the_caller_s_own_is_called_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = shown(monkeypatch)
    seen: list[Any] = []
    with told(lambda *given: seen.append(given)) as tell:
        tell("stage", 1, 2)
        time.sleep(0.3)
    assert seen == [("stage", 1, 2)] and not terminal.getvalue()


def test_elsewhere_stages_are_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="kvcompile.util.progress"):
        fast: Any = kvcompile.optimize(tiny_hf("llama"), max_tokens=32, compile={"mode": "none"})
    assert [r.message for r in caplog.records if r.name == "kvcompile.util.progress"] == [
        "capture and detect",
        "verify (quick)",
    ]
    assert fast.report["checks"]
