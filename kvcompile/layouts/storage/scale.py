"""Scale: what shares a scale, how it is kept, and whether a minimum is kept beside it.

| per | numbers of a layer's K or V | source |
|---|---|---|
| none | none: elements are kept as they are, and saturate | - |
| vector | one per token and KV head | LMDeploy, vLLM int8 |
| group | one per `size` channels of a token and KV head; size 0: all its channels | KIVI values, QLoRA, OCP MX |
| channel | one per channel and `size` consecutive tokens | KIVI keys (Liu et al. 2024, section 3) |
| head, tensor | one per KV head, or for all: known beforehand (`kvcompile/calibrate.py`), in float32 | vLLM |

A scale per tensor, or per head, has to be known before the first token: from the first chunk, the result would
depend on how a prompt is cut. So it is measured on a text, and what lies beyond what that text had saturates. It is a
tensor of the cache, not a constant of the code: layers with other scales stay alike.

e8m0 is a power of two in a byte, 2^(byte - 127), and 255 is not a number (OCP Microscaling Formats 1.0, section 5.4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Per = Literal["none", "vector", "group", "channel", "head", "tensor"]
# What shares a scale, and whether a minimum is kept beside it.
Scales = tuple[tuple[Per, bool], ...]
# What one scale that is known beforehand is for.
Calibration = Literal["tensor", "head"]
ScaleDtype = Literal["float16", "float32", "e8m0"]
_DTYPES: dict[ScaleDtype, torch.dtype] = {
    "float16": torch.float16,
    "float32": torch.float32,
    "e8m0": torch.uint8,
}


@dataclass(frozen=True)
class Scale:
    """per, size: see the module; dtype: what it is kept in; minimum: x ~ q * scale + minimum, else x ~ q * scale."""

    per: Per = "none"
    size: int = 0
    dtype: ScaleDtype = "float16"
    minimum: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the tensor that holds scales: bytes, where they are e8m0."""
        return _DTYPES[self.dtype]

    @property
    def calibration(self) -> Calibration | None:
        """What has a scale that was measured beforehand, which the part "scale" holds from the start."""
        return self.per if self.per in ("tensor", "head") else None

    @property
    def numbers(self) -> tuple[str, ...]:
        """The parts that hold what vectors are scaled by."""
        if self.per == "none":
            return ()
        return ("scale", "minimum") if self.minimum else ("scale",)
