"""Floating-point numbers: the model's dtype, or another; what float16 cannot hold becomes its largest number."""

from __future__ import annotations

import torch

from kvcompile.layouts.storage.code import Code
from kvcompile.layouts.storage.scale import Scales

_NO_SCALE: Scales = (("none", False),)

CODES = (
    Code("model", "float", 0, None, 1.0, _NO_SCALE),
    Code("float32", "float", 32, torch.float32, 1.0, _NO_SCALE),
    Code("float16", "float", 16, torch.float16, 1.0, _NO_SCALE),
    Code("bfloat16", "float", 16, torch.bfloat16, 1.0, _NO_SCALE),
)
