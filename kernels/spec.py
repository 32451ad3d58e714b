"""SiteSpec: all that an attention site's kernels are specialised for, as a text that a graph node carries."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache

from kvcompile.layouts import CacheLayout


@dataclass(frozen=True)
class SiteSpec:
    """One site's constants.

    layout:      where and how its keys and values are kept
    sm_scale:    factor of the scores before the softmax
    mask_window: tokens that the model's own sliding mask shows; None for a causal mask
    """

    layout: CacheLayout
    sm_scale: float
    mask_window: int | None = None

    def to_json(self) -> str:
        data = {"layout": self.layout.to_dict(), "sm_scale": self.sm_scale, "mask_window": self.mask_window}
        return json.dumps(data, sort_keys=True)

    @staticmethod
    @lru_cache(maxsize=1024)
    def from_json(text: str) -> SiteSpec:
        data = json.loads(text)
        return SiteSpec(
            CacheLayout.from_json(json.dumps(data["layout"])), data["sm_scale"], data["mask_window"]
        )
