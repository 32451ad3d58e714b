"""Retention: which tokens stay, and so which token is forgotten when a new one comes.

| retention | a query at position i sees key j <= i when | source | file |
|---|---|---|---|
| Full | always | - | `full.py` |
| Window(size) | j > i - size (the query's own token counts) | Mistral | `window.py` |
| SinkWindow(sinks, window) | j < sinks, or j > i - window | StreamingLLM, Xiao et al. 2023 | `sink_window.py` |
| Scored(sinks, heavy, recent) | j is kept | H2O, TOVA, SnapKV | `scored.py` |

All but the last depend on positions alone, so the slot of a token is an expression of its position. The site's own
mask holds as well: what a model never sees, a retention cannot show it. What a retention is asked is in `hooks.py`.
"""

from __future__ import annotations

from typing import Any

from kvcompile.layouts.retention.full import Full
from kvcompile.layouts.retention.hooks import Hooks
from kvcompile.layouts.retention.scored import Scored
from kvcompile.layouts.retention.sink_window import SinkWindow
from kvcompile.layouts.retention.window import Window

Retention = Hooks
# A retention's class, by its `kind`.
RETENTIONS: list[type[Retention]] = [Full, Window, SinkWindow, Scored]


def retention_from(data: dict[str, Any]) -> Retention:
    """Rebuild a retention from `dataclasses.asdict`."""
    return next(cls for cls in RETENTIONS if cls.kind == data["kind"])(**data)


__all__ = ["RETENTIONS", "Full", "Retention", "Scored", "SinkWindow", "Window", "retention_from"]
