"""The four axes of a KV cache: storage x placement x retention x selection, and their symbolic address and bytes."""

from kvcompile.layouts.buffer import BufferSpec
from kvcompile.layouts.layout import CacheLayout
from kvcompile.layouts.pages import PageGroup
from kvcompile.layouts.placement import Contiguous, Paged, Placement, Ring, Slots
from kvcompile.layouts.retention import Full, Retention, Scored, SinkWindow, Window
from kvcompile.layouts.selection import AllTokens, Selection, TopPages
from kvcompile.layouts.storage import (
    CODES,
    Code,
    InKeys,
    Scale,
    Storage,
    float_dtype,
    fp8,
    int8,
    model_dtype,
    mxfp4,
    nf4,
    per_channel,
    uint,
    with_hadamard,
    with_residual,
)

__all__ = [
    "CODES",
    "AllTokens",
    "BufferSpec",
    "CacheLayout",
    "Code",
    "Contiguous",
    "Full",
    "InKeys",
    "PageGroup",
    "Paged",
    "Placement",
    "Retention",
    "Ring",
    "Scale",
    "Scored",
    "Selection",
    "SinkWindow",
    "Slots",
    "Storage",
    "TopPages",
    "Window",
    "float_dtype",
    "fp8",
    "int8",
    "model_dtype",
    "mxfp4",
    "nf4",
    "per_channel",
    "uint",
    "with_hadamard",
    "with_residual",
]
