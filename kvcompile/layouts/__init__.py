"""The three axes of a KV cache: storage x placement x retention, and their symbolic address and bytes."""

from kvcompile.layouts.layout import BufferSpec, CacheLayout
from kvcompile.layouts.pages import PageGroup
from kvcompile.layouts.placement import Contiguous, Paged, Placement, Ring, Slots
from kvcompile.layouts.retention import Full, Retention, SinkWindow, Window
from kvcompile.layouts.scored import Scored
from kvcompile.layouts.storage import (
    Affine,
    Float,
    Fp8,
    InKeys,
    Int8,
    ModelDtype,
    PerChannel,
    Recent,
    Rotated,
    Storage,
)

__all__ = [
    "Affine",
    "BufferSpec",
    "CacheLayout",
    "Contiguous",
    "Float",
    "Fp8",
    "Full",
    "InKeys",
    "Int8",
    "ModelDtype",
    "PageGroup",
    "Paged",
    "PerChannel",
    "Placement",
    "Recent",
    "Retention",
    "Ring",
    "Rotated",
    "Scored",
    "SinkWindow",
    "Slots",
    "Storage",
    "Window",
]
