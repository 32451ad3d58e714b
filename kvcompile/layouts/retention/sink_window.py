"""The first tokens and the newest stay (StreamingLLM, Xiao et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import sympy

from kvcompile.layouts.retention.hooks import Hooks


@dataclass(frozen=True)
class SinkWindow(Hooks):
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

    def small(self, sinks: int, window: int, heavy: int) -> SinkWindow:
        return replace(self, sinks=min(self.sinks, sinks), window=min(self.window, window))

    def __str__(self) -> str:
        return f"sinks {self.sinks} + window {self.window}" + (" in_cache" if self.in_cache else "")
