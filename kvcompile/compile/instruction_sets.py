"""Inductor's look at the instruction sets that its kernels may use, without those that it will not choose.

It compiles PyTorch's vectors for each set that an x86-64 processor has, seconds each, and takes the first, which is the
best. Where the best compiles and loads, so do those that it contains.
"""

from __future__ import annotations

import os

import torch._inductor.config


def look() -> None:
    """Have Inductor know its sets: the best is tried, and all are where it fails or another is asked for."""
    from torch._inductor import cpu_vec_isa

    best = _best() if _takes_the_first() else None
    if best is not None and best:
        with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
            cpu_vec_isa.valid_vec_isa_list()
    else:
        cpu_vec_isa.valid_vec_isa_list()


def _takes_the_first() -> bool:
    """Whether nothing asks Inductor for another set than the best."""
    asked = torch._inductor.config.cpp
    return asked.simdlen is None and asked.vec_isa_ok is None and "ATEN_CPU_CAPABILITY" not in os.environ


def _best() -> object | None:
    """The first of Inductor's sets that this processor has; on others than x86-64, None."""
    from torch._inductor.cpu_vec_isa import supported_vec_isa_list, x86_isa_checker

    there = set(x86_isa_checker())
    return next((own for own in supported_vec_isa_list if there.issuperset(str(own).split())), None)
