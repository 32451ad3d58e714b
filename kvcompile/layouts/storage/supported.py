"""The one table of storages: which codes go with which scales.

Residual and sinks go with every code that rounds, and a Hadamard transform with every code.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcompile.layouts.storage.code import Code
from kvcompile.layouts.storage.codes import CODES
from kvcompile.layouts.storage.scale import Scale

_NAMES = {
    "none": "no scale",
    "vector": "a scale per vector",
    "group": "a scale per group of channels",
    "channel": "a scale per channel",
    "head": "a calibrated scale per KV head",
    "tensor": "a calibrated scale per layer",
}


def unsupported(code: Code, scale: Scale) -> str | None:
    """Why a code does not go with a scale, or None."""
    if (scale.per, scale.minimum) not in code.scales:
        has = " or ".join(_named(per, minimum) for per, minimum in code.scales)
        return f"{code.title} takes {has}, not {_named(scale.per, scale.minimum)}"
    if scale.per in ("vector", "group", "channel") and scale.dtype not in code.scale_dtypes:
        return f"{code.title} keeps its scales in {' or '.join(code.scale_dtypes)}, not in {scale.dtype}"
    return None


def table() -> Iterator[tuple[Code, tuple[str, ...]]]:
    """Every code, with what may share a scale, in words."""
    for code in CODES.values():
        yield code, tuple(_named(per, minimum) for per, minimum in code.scales)


def _named(per: str, minimum: bool) -> str:
    return _NAMES[per] + (" and a minimum" if minimum else "")
