"""fp8: round to nearest even, never infinite (Micikevicius et al. 2022, "FP8 formats for deep learning").

A scaled vector reaches to 448, the largest e4m3. e5m2 could go to 57,344, but then a float16 scale of small vectors
would have no bits left; its range below 448 is wide enough (2^-16). Without a scale, the format's largest number is
the limit.
"""

from __future__ import annotations

import torch

from kvcompile.layouts.storage.code import Code
from kvcompile.layouts.storage.scale import Scales

FP8_RANGE = 448.0  # what a scaled element is at most
_SCALES: Scales = (("vector", False), ("tensor", False), ("head", False), ("none", False))

CODES = (
    Code("e4m3", "fp8", 8, torch.float8_e4m3fn, FP8_RANGE, _SCALES, "fp8_e4m3"),
    Code("e5m2", "fp8", 8, torch.float8_e5m2, FP8_RANGE, _SCALES, "fp8_e5m2"),
)
