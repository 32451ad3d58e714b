"""Marks that many tests set in the same way."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def cases(names: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Parameters of a test: those that are not quick have nothing that a quick one has not, and are slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]
