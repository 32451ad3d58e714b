"""From a KernelSpec to its source: the module of its role generates it."""

from __future__ import annotations

from importlib import import_module

from kvcompile.kernels.triton.params import KernelSource
from kvcompile.kernels.triton.roles import ROLES
from kvcompile.kernels.triton.spec import KernelSpec


def generate(spec: KernelSpec) -> KernelSource:
    """The kernel's text and arguments; equal specs give equal ones."""
    module = import_module(ROLES[spec.role].module)
    source: KernelSource = module.generate(spec)
    return source
