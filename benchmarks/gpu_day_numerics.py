"""The tests that need a GPU, with each result written down as it comes, so that a stopped run goes on.

Part of `gpu_day.sh`. pytest's plugins are used where they are there (xdist: at most 12 processes), and it is said where
they are not. This module is also the pytest plugin that writes results and leaves out the tests that passed before.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from gpu_day_record import read, update

ROOT = Path(__file__).resolve().parent.parent
PLUGINS = {"xdist": "pytest-xdist", "pytest_timeout": "pytest-timeout", "hypothesis": "hypothesis"}
REHEARSED = "tests/kernels/triton/tools/test_tune.py"  # a few seconds in Triton's interpreter
POISONS = ("illegal memory access", "misaligned address", "unspecified launch failure", "device-side assert")
LONGEST = 2000  # characters of a message; the log has the rest


def files() -> list[str]:
    """Test files that mark something gpu; the direct tests of the kernels first."""
    found = [
        path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")
    ]
    names = [str(path.relative_to(ROOT)) for path in found]
    first = ("tests/gpu/test_numerics.py", "tests/gpu/test_addresses.py", "tests/gpu/test_steps.py")
    return [*(name for name in first if name in names), *(name for name in names if name not in first)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--again", action="store_true", help="run what passed before, too")
    parser.add_argument(
        "--sanitize", action="store_true", help="only compute-sanitizer (10 minutes and more)"
    )
    options = parser.parse_args(arguments)
    piece = "sanitize" if options.sanitize else "numerics"
    missing = [package for module, package in PLUGINS.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(f"going on without {', '.join(missing)}")
    sanitizer = "tests/gpu/test_sanitizer.py"
    chosen = [sanitizer] if options.sanitize else [name for name in files() if name != sanitizer]
    if options.rehearse:
        chosen = ["tests/gpu/test_numerics.py", REHEARSED]
    before = (
        {}
        if options.again
        else {key: row for key, row in read(piece).get("tests", {}).items() if row["outcome"] == "passed"}
    )
    update(piece, missing=missing, files=chosen, tests=before)

    lines = Path(os.environ["OUT"]) / f"{piece}.lines"
    lines.write_text("")
    environment = {**os.environ, "GPU_DAY_LINES": str(lines), "GPU_DAY_PASSED": "\n".join(before)}
    command = [sys.executable, "-m", "pytest", "-p", "gpu_day_numerics", "-p", "no:cacheprovider", "-q"]
    # Of pyproject.toml all but what an older pytest, or one without its plugins, would refuse.
    command += ["-o", "addopts=", "-o", "minversion=0", "--import-mode=importlib", "--tb=short"]
    command += ["-m", "gpu or not gpu" if options.rehearse else "gpu"]
    if "pytest-xdist" not in missing and not options.rehearse and not options.sanitize:
        command += [
            "-n",
            str(max(1, min(int(os.environ.get("GPU_DAY_PROCESSES", "12")), (os.cpu_count() or 1) - 2))),
            "--dist",
            "worksteal",
        ]
    process = subprocess.Popen([*command, *chosen], cwd=ROOT, env=environment)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(8)
        except subprocess.TimeoutExpired:
            process.kill()
        code = 130
    rows = [json.loads(line) for line in lines.read_text("utf-8").splitlines()]
    lines.unlink()
    tests: dict[str, Any] = dict(before)
    for row in rows:
        name = row.pop("test")
        if tests.get(name, {}).get("outcome") not in (
            "failed",
            "error",
        ):  # a failure stands, whatever teardown says
            tests[name] = row
    counts = Counter(row["outcome"] for row in tests.values())
    update(piece, tests=tests, counts=dict(counts))
    print(f"{piece}: {', '.join(f'{count} {outcome}' for outcome, count in sorted(counts.items()))}")
    return code if code not in (0, 5) else int(bool(counts["failed"] or counts["error"]))


# ---- the plugin


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave out what passed before."""
    passed = set(os.environ.get("GPU_DAY_PASSED", "").splitlines())
    left_out = [item for item in items if item.nodeid in passed]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid not in passed]


_poisoned = False


def pytest_runtest_makereport(call: Any) -> None:
    """A process that has met an illegal address answers every later call with it: it gets no more tests."""
    global _poisoned
    _poisoned |= call.excinfo is not None and any(text in str(call.excinfo.value) for text in POISONS)


def pytest_runtest_setup() -> None:
    """xdist has a new process in its place; the test that stood next is told as failed, and the next call runs it."""
    if _poisoned and "PYTEST_XDIST_WORKER" in os.environ:
        os._exit(86)


def pytest_runtest_logreport(report: Any) -> None:
    """A line for each test: its call, or the setup or teardown that did not pass."""
    lines = os.environ.get("GPU_DAY_LINES")
    if lines is None or "PYTEST_XDIST_WORKER" in os.environ:  # the controller hears of all
        return
    if report.when != "call" and report.outcome == "passed":
        return
    outcome = "error" if report.when != "call" and report.outcome == "failed" else report.outcome
    row = {"test": report.nodeid, "outcome": outcome, "seconds": round(report.duration, 2)}
    if outcome == "skipped" and isinstance(report.longrepr, tuple):
        row["message"] = report.longrepr[2]
    elif outcome != "passed":
        row["message"] = _told(str(report.longrepr))
    with open(lines, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _told(text: str) -> str:
    """Where it failed, and the first lines of the error: C++ frames may be the last sixty."""
    lines = text.splitlines()
    errors = [place for place, line in enumerate(lines) if line.startswith("E ")]
    first = errors[0] if errors else max(0, len(lines) - 12)
    return "\n".join(lines[max(0, first - 6) : first + 10])[:LONGEST]


if __name__ == "__main__":
    sys.exit(main())
