"""Retention: which tokens stay, and so which token is forgotten when a new one comes.

| retention | a query at position i sees key j <= i when | source |
|---|---|---|
| Full | always | - |
| Window(size) | j > i - size (the query's own token counts) | Mistral |
| SinkWindow(sinks, window) | j < sinks, or j > i - window | StreamingLLM, Xiao et al. 2023 |
| Scored(sinks, heavy, recent) | j is kept: see `layouts/scored.py` | H2O, TOVA, SnapKV |

All but the last depend on positions alone, so the slot of a token is an expression of its position. The site's own
mask holds as well: what a model never sees, a retention cannot show it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import sympy

from kvcompile.layouts import symbols as sy
from kvcompile.layouts.scored import Scored


@dataclass(frozen=True)
class Full:
    """Every token, up to the limit of tokens."""

    kind: Literal["full"] = "full"

    @property
    def sinks(self) -> int:
        return 0

    @property
    def window(self) -> int | None:
        """Visible recent tokens; None is all of them."""
        return None

    @property
    def in_cache(self) -> bool:
        """Whether positions count from the start of the cache instead of the sequence."""
        return False

    def budget(self) -> sympy.Expr:
        """Live tokens at most."""
        return sy.T

    def __str__(self) -> str:
        return "full"


@dataclass(frozen=True)
class Window:
    """The last `size` tokens."""

    size: int
    kind: Literal["window"] = "window"

    @property
    def sinks(self) -> int:
        return 0

    @property
    def window(self) -> int:
        return self.size

    @property
    def in_cache(self) -> bool:
        return False

    def budget(self) -> sympy.Expr:
        return sympy.Integer(self.size)

    def __str__(self) -> str:
        return f"window {self.size}"


@dataclass(frozen=True)
class SinkWindow:
    """The first `sinks` tokens and the last `window` tokens.

    positions "original": RoPE at the token's own position.
    positions "in_cache": RoPE at the token's place in the cache, 0 .. sinks + window - 1, as StreamingLLM
    needs it beyond the length the model was trained on; keys are stored before RoPE.
    """

    sinks: int
    window: int
    positions: Literal["original", "in_cache"] = "original"
    kind: Literal["sink_window"] = "sink_window"

    @property
    def in_cache(self) -> bool:
        return self.positions == "in_cache"

    def budget(self) -> sympy.Expr:
        return sympy.Integer(self.sinks + self.window)

    def __str__(self) -> str:
        return f"sinks {self.sinks} + window {self.window}" + (" in_cache" if self.in_cache else "")


Retention = Full | Window | SinkWindow | Scored
RETENTIONS: tuple[type[Retention], ...] = (Full, Window, SinkWindow, Scored)


def retention_from(data: dict[str, Any]) -> Retention:
    """Rebuild a retention from `dataclasses.asdict`."""
    return next(cls for cls in RETENTIONS if cls.kind == data["kind"])(**data)
