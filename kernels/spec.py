"""SiteSpec: all that an attention site's kernels are specialised for, as a text that a graph node carries."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Literal

from kvcompile.expression import ScoreMod
from kvcompile.layouts import CacheLayout
from kvcompile.specs import BiasSpec, MaskSpec, RotaryForm, ScoreSpec

Share = Literal["none", "first", "middle", "last"]
Kernels = Literal["reference", "triton", "cpp"]


@dataclass(frozen=True)
class SiteSpec:
    """One site's constants.

    layout:   where and how its keys and values are kept
    sm_scale: factor of the scores before the softmax
    mask:     what the model itself shows of the keys
    score:    softcap, bias and sink logits; the tensors of the last two are arguments of the op
    rotary:   how its keys rotate, where the op does it: when they are read (`layout.rotates_on_read`), or else, with
              the queries, before they are appended
    share:    its place among the sites that read one cache: what comes before attention is done by the first of
              them, what comes after by the last
    kernels:  what runs it: PyTorch that Inductor compiles, or generated kernels
    """

    layout: CacheLayout
    sm_scale: float
    mask: MaskSpec = MaskSpec("causal")
    score: ScoreSpec = ScoreSpec()
    rotary: RotaryForm | None = None
    share: Share = "none"
    kernels: Kernels = "reference"

    @property
    def rotates_on_append(self) -> bool:
        """Whether the op turns new queries and keys before anything else, so that the cache has keys after RoPE."""
        return self.rotary is not None and not self.layout.rotates_on_read

    def to_json(self) -> str:
        data = {"layout": self.layout.to_dict(), "sm_scale": self.sm_scale, "mask": asdict(self.mask)}
        if not self.score.plain:
            score = asdict(replace(self.score, mod=None))
            del score["mod"]
            data |= {"score": score if self.score.mod is None else score | {"mod": self.score.mod.to_dict()}}
        data |= {} if self.rotary is None else {"rotary": asdict(self.rotary)}
        data |= {} if self.share == "none" else {"share": self.share}
        data |= {} if self.kernels == "reference" else {"kernels": self.kernels}
        return json.dumps(data, sort_keys=True)

    @staticmethod
    @lru_cache(maxsize=1024)
    def from_json(text: str) -> SiteSpec:
        data = json.loads(text)
        score = data.get("score", {})
        if score.get("bias") is not None:
            score = score | {"bias": BiasSpec(**score["bias"])}
        if score.get("mod") is not None:
            score = score | {"mod": ScoreMod.from_dict(score["mod"])}
        layout = CacheLayout.from_json(json.dumps(data["layout"]))
        rotary = RotaryForm(**data["rotary"]) if "rotary" in data else None
        return SiteSpec(
            layout,
            data["sm_scale"],
            MaskSpec(**data["mask"]),
            ScoreSpec(**score),
            rotary,
            data.get("share", "none"),
            data.get("kernels", "reference"),
        )
