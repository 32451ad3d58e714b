"""Inductor's look at the instruction sets that its kernels may use, without those that it will not choose.

It compiles PyTorch's vectors for each set that an x86-64 processor has, seconds each, and takes the first, which is the
best. Where the best compiles and loads, so do those that it contains. That it does is kept, for this compiler, PyTorch
and processor, in a file of the user's cache that has nothing in it: the look starts a process that imports PyTorch.

    <cache>/instruction_sets/<set>_<hash>
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

import torch._inductor.config

from kvcompile.errors import KernelError
from kvcompile.kernels.cpp.host.compiler import compiler, version
from kvcompile.util.cache_dir import code_folder, keeps

FOLDER = "instruction_sets"


def look() -> None:
    """Have Inductor know its sets: the best is tried, and all are where it fails or another is asked for."""
    from torch._inductor import cpu_vec_isa

    best = _best() if _takes_the_first() else None
    known = None if best is None else _kept(best)
    if best is not None and ((known is not None and known.exists()) or best):
        if known is not None:
            with suppress(OSError):
                known.touch()
        with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
            cpu_vec_isa.valid_vec_isa_list()
    else:
        cpu_vec_isa.valid_vec_isa_list()


def _kept(best: object) -> Path | None:
    """The file that says that kernels for `best` compile and load; None: it is not kept."""
    if not keeps():
        return None
    try:
        folder = code_folder(FOLDER)
        told = (torch.__version__, compiler(), version(), str(sorted(torch.cpu.get_capabilities().items())))
    except KernelError:
        return None
    text = "\0".join((type(best).__name__, str(best), *told))
    return folder / f"{str(best).replace(' ', '_')}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _takes_the_first() -> bool:
    """Whether nothing asks Inductor for another set than the best."""
    asked = torch._inductor.config.cpp
    return asked.simdlen is None and asked.vec_isa_ok is None and "ATEN_CPU_CAPABILITY" not in os.environ


def _best() -> object | None:
    """The first of Inductor's sets that this processor has; on others than x86-64, None."""
    from torch._inductor.cpu_vec_isa import supported_vec_isa_list, x86_isa_checker

    there = set(x86_isa_checker())
    return next((own for own in supported_vec_isa_list if there.issuperset(str(own).split())), None)
