"""Whether C++ kernels can run: on a CPU, where the compiler that Inductor uses is there and compiles the launcher."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch

from kvcompile.errors import KernelError
from kvcompile.kernels.cpp.host.ops import launcher
from kvcompile.kernels.cpp.isa import isa, widens

_COMPILED = ContextVar("compiled", default=False)


def problem(device: torch.device) -> str | None:
    """Why kernels cannot run on tensors of `device`, and what to do; None where they can."""
    if device.type != "cpu":
        return f"C++ kernels are for CPUs, and this model is on {device}"
    return None if _COMPILED.get() else _no_compiler()


@contextmanager
def compiled() -> Iterator[None]:
    """What is planned within has its kernels already, in an artifact: this machine needs no compiler for them."""
    token = _COMPILED.set(True)
    try:
        yield
    finally:
        _COMPILED.reset(token)


def described(dtype: torch.dtype) -> str:
    """The instruction set that kernels are compiled for here, and whether numbers of a model's `dtype` are widened."""
    return isa().name + (", multiplied in float32, which is faster here" if widens(dtype) else "")


@cache
def _no_compiler() -> str | None:
    if sys.platform == "win32":
        return "C++ kernels are compiled by g++ or clang++, and this is Windows"
    try:
        launcher()
    except KernelError as error:
        return str(error)
    return None
