"""Integers, to nearest even.

int8 is symmetric: q = round(x / s), s = absmax / 127, a row of zeros gets scale 0 (LMDeploy, vLLM).
uintN is asymmetric: q = round((x - m) / s), m = min, s = (max - min) / (2^N - 1), q from 0 (LMDeploy, KIVI).
"""

from __future__ import annotations

import torch

from kvcompile.layouts.storage.code import Code
from kvcompile.layouts.storage.scale import Scales

_ASYMMETRIC: Scales = (("group", True), ("channel", True))

CODES = (
    Code("int8", "int", 8, torch.int8, 127.0, (("vector", False),), "int8"),
    Code("uint8", "uint", 8, torch.uint8, 255.0, _ASYMMETRIC, "int8"),
    Code("uint4", "uint", 4, torch.uint8, 15.0, _ASYMMETRIC, "int4"),
    Code("uint3", "uint", 3, torch.uint8, 7.0, _ASYMMETRIC, "int3"),
    Code("uint2", "uint", 2, torch.uint8, 3.0, _ASYMMETRIC, "int2"),
)
