"""From a CppSpec to its source: the module of its role generates it."""

from __future__ import annotations

from importlib import import_module

from kvcompile.kernels.cpp.roles import ROLES
from kvcompile.kernels.cpp.spec import CppSpec


def generate(spec: CppSpec) -> str:
    """The kernel's file: a header that says what it is for, and its text; equal specs give equal ones.

    What it includes as KV_VECTORS are the vectors of the instruction set that it is compiled for.
    """
    role = ROLES[spec.role]
    text: str = import_module(role.module).generate(spec)
    return f"// {role.does}.\n// {spec.to_json()}\n{text}"
