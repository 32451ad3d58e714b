"""The three axes of a KV cache: storage x placement x retention, and their symbolic address and bytes."""

from kvcompile.layouts.layout import BufferSpec, CacheLayout
from kvcompile.layouts.placement import Contiguous, Placement, Ring
from kvcompile.layouts.retention import Full, Retention, SinkWindow, Window
from kvcompile.layouts.storage import InKeys, Int4, Int8, ModelDtype, Storage

__all__ = [
    "BufferSpec",
    "CacheLayout",
    "Contiguous",
    "Full",
    "InKeys",
    "Int4",
    "Int8",
    "ModelDtype",
    "Placement",
    "Retention",
    "Ring",
    "SinkWindow",
    "Storage",
    "Window",
]
