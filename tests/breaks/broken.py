"""What one break is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Break:
    """In `file`, the text `old`, which must be there once, becomes `new`; then one of `tests` must fail.

    tests: files, or node ids of pytest, of quick tests; `old` is as short as it can be, so that it survives edits
    beside it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def broken(name: str, file: str, old: str, new: str, *tests: str) -> Break:
    """A break; tests: file names under tests/ without `test_` and `.py`, or whole paths and node ids."""
    return Break(name, file, old, new, tuple(_path(test) for test in tests))


def _path(test: str) -> str:
    if ".py" in test:
        return test
    folder, _, name = test.rpartition("/")
    return "/".join(part for part in ("tests", folder, f"test_{name}.py") if part)
