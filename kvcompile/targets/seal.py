"""The seal of a manifest.json: a digest of all else in it.

A number that was edited by hand (more tokens, another page) still is a number: nothing else would tell that the graphs
were not made for it, and they would compute something. It is no signature: who wants to can seal again.

    sha256 = SHA-256 of the rest as JSON in UTF-8, keys sorted, no blanks, characters beyond ASCII as \\uXXXX
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

KEY = "sha256"


def sealed(data: dict[str, Any]) -> dict[str, Any]:
    """The same with its seal, in the place of one that it has."""
    rest = unsealed(data)
    return {**rest, KEY: _digest(rest)}


def unsealed(data: dict[str, Any]) -> dict[str, Any]:
    """The same without its seal."""
    return {key: value for key, value in data.items() if key != KEY}


def holds(data: dict[str, Any]) -> bool:
    """Whether it is what was sealed."""
    return data.get(KEY) == _digest(unsealed(data))


def _digest(rest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
