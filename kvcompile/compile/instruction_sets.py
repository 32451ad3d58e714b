"""Inductor's look at the instruction sets that its kernels may use, without what it takes for those it will not choose.

For each set that an x86-64 processor has, it compiles PyTorch's vectors and loads them in a process that imports
PyTorch: seconds each. It takes the first, which is the best. Here the best is tried by what Inductor compiles anyway,
the header of its kernels and a kernel that includes it; where these compile and load, so do those for the sets that it
contains. That they do is kept, for this compiler, PyTorch and processor, in a file of the user's cache that has nothing
in it.

    <cache>/instruction_sets/<set>_<hash>
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest import mock

import torch._inductor.config

from kvcompile.errors import KernelError
from kvcompile.kernels.cpp.host.compiler import compiler, version
from kvcompile.util.cache_dir import code_folder, keeps

FOLDER = "instruction_sets"
log = logging.getLogger(__name__)


def look() -> None:
    """Have Inductor know its sets: the best is tried here; all by Inductor where that fails or is not asked for."""
    from torch._inductor import cpu_vec_isa

    best = _best() if _takes_the_first() else None
    if best is not None and _works(best):
        # Inductor asks each set whether it works, and keeps the answer; for the best it asks again while it compiles.
        with mock.patch.object(type(best), "check_build", lambda self, code: True):
            bool(best)
        with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
            cpu_vec_isa.valid_vec_isa_list()
    else:
        cpu_vec_isa.valid_vec_isa_list()


def precompile_header() -> Callable[[], object]:
    """Have Inductor precompile what kernels include, as it does for every one.

    Returns what compiles and loads a kernel that includes it; either raises whatever Inductor does where that fails.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    text = 'extern "C" void kernel(float* out) {}'
    load: Callable[[], object] = CppPythonBindingsCodeCache.load_pybinding_async(["float*"], text)
    return load


def _works(best: object) -> bool:
    """Whether kernels for `best` compile and load."""
    known = _kept(best)
    if known is not None and known.exists():
        return True
    if not _tried():
        return False
    if known is not None:
        with suppress(OSError):
            known.touch()
    return True


def _tried() -> bool:
    from torch._inductor import cpu_vec_isa

    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    try:
        with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):  # take it for the time being
            precompile_header()()
    except Exception as error:  # whatever Inductor raises
        log.debug("kernels for the best instruction set cannot be compiled: %s", error)
        return False
    finally:
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
    return True


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
