"""The device that kernels are made for, as far as they depend on it: a GPU, or Triton's interpreter.

| arch | device | fp8 numbers |
|---|---|---|
| 0 (`INTERPRETER`) | Triton's interpreter, one program at a time; CPU tensors have no other | as bits |
| 80 to 88 | Ampere | as bits |
| 89 on | Ada, Hopper, Blackwell | by instructions (PTX ISA, `cvt` with `.e4m3x2`, `.e5m2x2`: sm_89 on) |
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

# Whether fp8 numbers are converted by the hardware, or as bits.
Fp8Form = Literal["native", "bits"]
INTERPRETER = 0  # the arch that stands for Triton's interpreter
_NATIVE_FP8 = 89  # the first architecture that converts fp8 itself
_SHARED = {
    80: 163,
    86: 99,
    87: 163,
    89: 99,
    90: 227,
    100: 227,
    103: 227,
    120: 99,
    121: 99,
}  # KiB of a program
_ACTS_AS: ContextVar[Device | None] = ContextVar("the device that all are", default=None)


@dataclass(frozen=True)
class Device:
    """A GPU, as far as kernels depend on it. arch: 90 for sm_90, or INTERPRETER"""

    name: str
    arch: int
    multiprocessors: int

    @property
    def shared(self) -> int:
        """Bytes of shared memory that a program can have."""
        return _SHARED.get(self.arch, 99) * 1024

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


def fp8_of(arch: int) -> Fp8Form:
    """Whether kernels for `arch` convert fp8 by its own instructions, or take the bytes apart themselves."""
    return "native" if arch >= _NATIVE_FP8 else "bits"


def device_of(device: torch.device) -> Device:
    """A device as kernels see it; a CPU runs them in the interpreter, one program at a time."""
    return _ACTS_AS.get() or _device_of(device)


@contextmanager
def acting_as(device: Device) -> Iterator[None]:
    """Within it every device is that one: to see what would be launched on it."""
    token = _ACTS_AS.set(device)
    try:
        yield
    finally:
        _ACTS_AS.reset(token)


def interpreted() -> bool:
    """Whether Triton interprets kernels instead of compiling them; it must be importable."""
    # What decides is how Triton was imported, not what the environment says now: its own functions are of one kind.
    standard = importlib.import_module("triton.language.standard")
    return type(standard.cdiv).__name__ == "InterpretedFunction"


@cache
def _device_of(device: torch.device) -> Device:
    if device.type != "cuda" or interpreted():
        return Device("Triton's interpreter", INTERPRETER, 1)
    found = torch.cuda.get_device_properties(device)
    return Device(found.name, 10 * found.major + found.minor, found.multi_processor_count)
