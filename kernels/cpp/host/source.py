"""Generated kernels as libraries: written once to the user's cache, compiled, loaded, kept for the process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from kvcompile.errors import KernelError
from kvcompile.kernels.cpp.attend.values import MODELS
from kvcompile.kernels.cpp.generate import generate
from kvcompile.kernels.cpp.host.compiler import INCLUDE, SHARED, built, flags_for
from kvcompile.kernels.cpp.isa import Isa, isa, lacks_products_of, multiplies_rows, multiplies_tiles, widens
from kvcompile.kernels.cpp.spec import CppSpec

ENTRY = "kvcompile_kernel"
_LINEAR = "linear"


@dataclass(frozen=True)
class CppKernel:
    """A kernel that is loaded. library: its file, beside which the source lies; address: of its function"""

    spec: CppSpec
    isa: Isa
    library: Path
    address: int


@dataclass(frozen=True)
class KernelText:
    """What is compiled to a kernel. name: of its file, without the end; defines: what the compiler is told besides."""

    name: str
    text: str
    defines: tuple[str, ...] = ()

    def flags(self, own: Isa, form: Sequence[str] = SHARED) -> tuple[str, ...]:
        """All of the compiler's flags, for an instruction set; form: SHARED or OBJECT."""
        return (*flags_for(own, form), *self.defines)


def text_of(spec: str) -> KernelText:
    """The kernel of a spec as ops carry it: a CppSpec as JSON, or what `linear_spec` gives."""
    if not spec.startswith(_LINEAR):
        own = CppSpec.from_json(spec)
        return KernelText(f"{own.role}_{own.key}", generate(own))
    name, model = spec.split()
    file = _LINEAR if name == _LINEAR else f"{_LINEAR}_rows"
    # What is taken in any number is multiplied as floats (`linear_spec`).
    floats = ("-DKV_FLOATS",) if name == f"{_LINEAR}_many" else ()
    text = (INCLUDE / f"{file}.cpp").read_text("utf-8")
    return KernelText(f"{name}_{model}", text, (f"-DKV_MODEL={model}", *floats))


def compiled(text: KernelText, own: Isa) -> Path:
    """The kernel's library for an instruction set.

    Raises:
        KernelError: it cannot be compiled or written.
    """
    return built(f"{text.name}_{own.name}", text.text, text.flags(own))


def library_of(spec: CppSpec, own: Isa) -> Path:
    """The same by the spec; raises as `compiled`."""
    return compiled(text_of(spec.to_json()), own)


def kernel(spec: CppSpec) -> CppKernel:
    """The spec's kernel for this machine, compiled and loaded when it is first asked for; raises as `compiled`."""
    return _kernel(spec, isa())


def address_of(spec: str) -> int:
    """The function of the kernel of a spec as ops carry it; raises as `compiled`."""
    if spec.startswith(_LINEAR):
        return _linear(spec, isa())
    return kernel(CppSpec.from_json(spec)).address


def linear_spec(dtype: torch.dtype, many: bool = False, own: Isa | None = None) -> str:
    """The spec of a linear layer of one token, or of many: its file and the type of its weights.

    Args:
        many: more than one token. Where the processor multiplies their dtype (and floats are not faster), but has no
            tiles of it, it is that of few, which leaves to PyTorch's library what that is faster at.
        own: the instruction set; None: this machine's.
    """
    if not many:
        return f"{_LINEAR} {MODELS[dtype]}"
    own = own or isa()
    if lacks_products_of(dtype, own) or widens(dtype, own):
        form = "many"
    else:
        form = "tiles" if multiplies_tiles(dtype, own) else "few"
    return f"{_LINEAR}_{form} {MODELS[dtype]}"


def linear_kernels(dtype: torch.dtype) -> tuple[Path, ...]:
    """The libraries of linear layers of a dtype for this machine, compiled where they are not: none without kernels.

    Raises:
        KernelError: as `compiled`.
    """
    if dtype not in MODELS:
        return ()
    several = (False, True) if multiplies_rows(dtype) else (False,)
    return tuple(compiled(text_of(linear_spec(dtype, many)), isa()) for many in several)


@cache
def _linear(spec: str, own: Isa) -> int:
    return _address(lambda: compiled(text_of(spec), own))


@cache
def _kernel(spec: CppSpec, own: Isa) -> CppKernel:
    text = text_of(spec.to_json())
    return CppKernel(spec, own, compiled(text, own), _address(lambda: compiled(text, own)))


def _address(made: Callable[[], Path]) -> int:
    """The function of a library, which `made` compiles once more where it is none.

    Raises:
        KernelError: it cannot be loaded.
    """
    path = made()
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError:
        path.unlink(missing_ok=True)
        path = made()
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelError(f"{path}: the compiled kernel cannot be loaded: {error}") from error
    address = ctypes.cast(getattr(loaded, ENTRY), ctypes.c_void_p).value
    assert address is not None
    return address
