"""Types of C++ by dtype."""

from __future__ import annotations

import torch

MODELS = {torch.float32: "float", torch.float16: "f16", torch.bfloat16: "bf16"}
DATA = {
    **MODELS,
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
}
SCALES = {"float16": "f16", "float32": "float", "e8m0": "e8m0"}
