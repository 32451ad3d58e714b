"""Inductor's look at the instruction sets that its kernels may use, without what it takes for those it will not choose.

For each set that an x86-64 processor has, it compiles PyTorch's vectors and loads them in a process that imports
PyTorch: seconds each. It takes the first, which is the best. Here it takes the best at once (`take`), and that is
tried beside whatever it does then (`confirm`), by what it compiles anyway, the header of its kernels and a kernel that
includes it; where these compile and load, so do those for the sets that it contains. Where they do not, no kernel for
that set does: Inductor looks for itself, and who compiled meanwhile asks it again. That a set works is kept, for this
compiler, PyTorch and processor, in a file of the user's cache that has nothing in it.

    <cache>/instruction_sets/<set>_<hash>
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest import mock

import torch._inductor.config

from kvcompile.errors import KernelError
from kvcompile.kernels.cpp.host.compiler import compiler, version
from kvcompile.util.cache_dir import code_folder, keeps

FOLDER = "instruction_sets"
# Whoever has Inductor compile, or look: while it tries a set, all compile for that.
COMPILING = threading.Lock()
log = logging.getLogger(__name__)


def look() -> None:
    """Have Inductor know its sets, each of which it tries."""
    from torch._inductor import cpu_vec_isa

    with COMPILING:
        cpu_vec_isa.valid_vec_isa_list()


def take() -> object | None:
    """Have Inductor take the best set of this processor, tried or not. None: it must look for itself."""
    from torch._inductor import cpu_vec_isa

    best = _best() if _takes_the_first() else None
    if best is None:
        return None
    # Inductor asks each set whether it works, and keeps the answer; for the best it asks again while it compiles. Some
    # ask for more that they might have; of those that it will not choose, that is not tried.
    with mock.patch.object(cpu_vec_isa.VecISA, "check_build", lambda self, code: self is best):
        bool(best)
        with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
            cpu_vec_isa.valid_vec_isa_list()
    return best


def confirmed(best: object) -> bool:
    """Whether it is kept that kernels for a set compile and load."""
    known = _kept(best)
    return known is not None and known.exists()


def confirm(best: object) -> bool:
    """Try what was taken. False: it does not work, and Inductor has looked for itself."""
    try:
        precompile_header()()
    except Exception as error:  # whatever Inductor raises
        log.debug("kernels for the best instruction set cannot be compiled: %s", error)
        with COMPILING:
            _forget(best)
        look()
        return False
    known = _kept(best)
    if known is not None:
        with suppress(OSError):
            known.touch()
    return True


def _forget(best: object) -> None:
    """Have Inductor ask again whether a set works, and which do."""
    from torch._inductor import cpu_vec_isa

    asked = getattr(type(best), "_VecISA__bool__impl", None)
    if asked is not None:
        asked.cache_clear()
    cpu_vec_isa.valid_vec_isa_list.cache_clear()


def precompile_header() -> Callable[[], object]:
    """Have Inductor precompile what kernels include, as it does for every one.

    Returns what compiles and loads a kernel that includes it; either raises whatever Inductor does where that fails.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    text = 'extern "C" void kernel(float* out) {}'
    load: Callable[[], object] = CppPythonBindingsCodeCache.load_pybinding_async(["float*"], text)
    return load


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
