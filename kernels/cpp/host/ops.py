"""`kvcompile::cpp_attend` and its kin, `cpp_linear(s)`: calls of C++ kernels. `launch.h` has their bodies.

The launcher finds the kernel by the text of its spec, and asks for those that it does not know: they are compiled then.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcompile.errors import KernelError
from kvcompile.kernels.cpp.host import source
from kvcompile.kernels.cpp.host.compiler import INCLUDE, SHARED, built

_LIB = torch.library.Library("kvcompile", "FRAGMENT")
_LIB.define(
    "cpp_attend(Tensor q, Tensor k, Tensor v, Tensor(a!)[] buffers, Tensor positions, Tensor[] rope, Tensor? sinks, "
    "Tensor? bias, Tensor? page_table, Tensor? chosen, Tensor[] leaves, int v_dim, str spec) -> Tensor"
)
_LIB.define(
    "cpp_attend_many(Tensor q, Tensor k, Tensor v, Tensor tokens, Tensor positions, Tensor? sinks, Tensor? bias, "
    "Tensor? allowed, Tensor? near, Tensor[] leaves, str spec) -> Tensor",
    # Vectors keep their channels side by side, and sizes stay free.
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_LIB.define(
    "cpp_attend_columns(Tensor q, Tensor k, Tensor v, Tensor tokens, Tensor positions, Tensor? sinks, Tensor? bias, "
    "Tensor? query_places, Tensor? key_places, Tensor(a!) columns, Tensor[] leaves, str spec) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_LIB.define(
    "cpp_linear(Tensor x, Tensor weight, Tensor? bias, str spec) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_LIB.define(
    "cpp_linears(Tensor x, Tensor[] weights, Tensor[] biases, str spec) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_Loader = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64)


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    buffers: list[Tensor],
    positions: Tensor,
    rope: list[Tensor],
    sinks: Tensor | None,
    bias: Tensor | None,
    page_table: Tensor | None,
    chosen: Tensor | None,
    leaves: list[Tensor],
    v_dim: int,
    spec: str,
) -> Tensor:
    return q.new_empty((*q.shape[:-1], v_dim))


def _fake_many(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    batch, heads, queries = q.shape[:3]
    return q.new_empty((batch, queries, heads, v.shape[3])).transpose(1, 2)


torch.library.register_fake("kvcompile::cpp_attend", _fake, lib=_LIB)
torch.library.register_fake("kvcompile::cpp_attend_many", _fake_many, lib=_LIB)
torch.library.register_fake("kvcompile::cpp_attend_columns", _fake_many, lib=_LIB)
torch.library.register_fake(
    "kvcompile::cpp_linear",
    lambda x, weight, bias, spec: x.new_empty((*x.shape[:-1], weight.shape[0])),
    lib=_LIB,
)
torch.library.register_fake(
    "kvcompile::cpp_linears",
    lambda x, weights, biases, spec: x.new_empty((*x.shape[:-1], sum(own.shape[0] for own in weights))),
    lib=_LIB,
)
cpp_attend = torch.ops.kvcompile.cpp_attend.default
cpp_attend_many = torch.ops.kvcompile.cpp_attend_many.default
cpp_attend_columns = torch.ops.kvcompile.cpp_attend_columns.default
cpp_linear = torch.ops.kvcompile.cpp_linear.default
cpp_linears = torch.ops.kvcompile.cpp_linears.default


def _load(spec: bytes, message: int, size: int) -> int | None:
    """The address of a spec's kernel; where there is none, `message` says why."""
    try:
        return source.address_of(spec.decode())
    except Exception as error:
        said = f"{type(error).__name__}: {error}".encode()[: size - 1]
        ctypes.memmove(message, said + b"\0", len(said) + 1)
        return None


_LOADER = _Loader(_load)  # the launcher has its address: it must stay


@cache
def ready() -> ctypes.CDLL:
    """Load the launcher, which gives the ops their bodies; once in a process, which has one body for an op.

    Raises:
        KernelError: it cannot be compiled, written or loaded.
    """
    path = launcher()
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelError(f"{path}: the compiled launcher of kernels cannot be loaded: {error}") from error
    loaded.kvcompile_set_loader(ctypes.cast(_LOADER, ctypes.c_void_p))
    return loaded


_FORGOTTEN = count()
_forgotten = next(_FORGOTTEN)


def forgotten() -> int:
    """A number that is another once `forget` was called: kernels that were found before are not to be called."""
    return _forgotten


def forget() -> None:
    """Have the launcher ask for every kernel again: another instruction set may be wanted."""
    global _forgotten
    _forgotten = next(_FORGOTTEN)
    if ready.cache_info().currsize:
        ready().kvcompile_set_loader(ctypes.cast(_LOADER, ctypes.c_void_p))


def _first_attend(*args: Any) -> Tensor:
    """The op before the launcher gave it a body for CPUs: compiled code that was saved is the first to call it."""
    ready()
    return cpp_attend(*args)  # type: ignore[no-any-return]


def _first_attend_many(*args: Any) -> Tensor:
    ready()
    return cpp_attend_many(*args)  # type: ignore[no-any-return]


def _first_attend_columns(*args: Any) -> Tensor:
    ready()
    return cpp_attend_columns(*args)  # type: ignore[no-any-return]


def _first_linear(*args: Any) -> Tensor:
    ready()
    return cpp_linear(*args)  # type: ignore[no-any-return]


def _first_linears(*args: Any) -> Tensor:
    ready()
    return cpp_linears(*args)  # type: ignore[no-any-return]


# Behind what the launcher registers for CPUs, in the dispatcher's order.
_LIB.impl("cpp_attend", _first_attend, "CompositeExplicitAutograd")
_LIB.impl("cpp_attend_many", _first_attend_many, "CompositeExplicitAutograd")
_LIB.impl("cpp_attend_columns", _first_attend_columns, "CompositeExplicitAutograd")
_LIB.impl("cpp_linear", _first_linear, "CompositeExplicitAutograd")
_LIB.impl("cpp_linears", _first_linears, "CompositeExplicitAutograd")


def launcher() -> Path:
    """The launcher's library, for this version of PyTorch; raises as `built`."""
    flags = (
        *SHARED,
        *torch_flags(),
        "-O1",  # it only hands over: a first start waits for it, and -O2 takes a fifth more
        f"-L{Path(torch.__file__).parent / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
        # PyTorch is loaded already.
        *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()),
    )
    return built("launcher", (INCLUDE / "launcher.cpp").read_text("utf-8"), flags)


def torch_flags() -> tuple[str, ...]:
    """The flags of what includes `launch.h`, for this version of PyTorch."""
    return (
        "-std=c++17",
        "-O2",
        "-w",
        f"-DKVCOMPILE_TORCH={torch.__version__}",
        f"-I{INCLUDE}",
    )
