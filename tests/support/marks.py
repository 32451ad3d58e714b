"""Marks that many tests set in the same way."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def cases(names: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Parameters of a test: those that are not quick have nothing that a quick one has not, and are slow.

    names: a tuple is the values of several parameters; what `pytest.param` gave stays as it is
    """
    return [_case(name, name in quick) for name in names]


def _case(name: Any, quick: bool) -> Any:
    if quick or hasattr(name, "marks"):
        return name
    values = name if isinstance(name, tuple) else (name,)
    return pytest.param(*values, marks=pytest.mark.slow)
