"""Kernels as objects that are linked into another library: an AOTInductor package, which runs where kvcompile is not.

The package calls an op as a C function, `aoti_torch_cpu_<op>`; `include/packaged.cpp` has them, and finds a kernel
by its name, which stands in the graph where a spec did.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch._ops import OpOverload

from kvcompile.kernels.cpp.host import ops
from kvcompile.kernels.cpp.host.compiler import INCLUDE, OBJECT, built
from kvcompile.kernels.cpp.host.source import ENTRY, KernelText
from kvcompile.kernels.cpp.isa import Isa

_TENSOR, _TENSORS, _MAYBE = (
    "AtenTensorHandle",
    "const AtenTensorHandle*, int64_t",
    "AtenTensorHandle*",
)


def _declared(name: str, *given: str) -> list[str]:
    return [f"AOTITorchError aoti_torch_cpu_{name}({', '.join(given)}, const char*, AtenTensorHandle*)"]


# What AOTInductor writes above a graph's code, by op; as `include/packaged.cpp` has them.
SHIMS: dict[OpOverload, list[str]] = {
    ops.cpp_attend: _declared(
        "cpp_attend", *[_TENSOR] * 3, _TENSORS, _TENSOR, _TENSORS, *[_MAYBE] * 4, _TENSORS, "int64_t"
    ),
    ops.cpp_attend_many: _declared("cpp_attend_many", *[_TENSOR] * 5, *[_MAYBE] * 4, _TENSORS),
    ops.cpp_attend_columns: _declared("cpp_attend_columns", *[_TENSOR] * 5, *[_MAYBE] * 4, _TENSOR, _TENSORS),
    ops.cpp_linear: _declared("cpp_linear", _TENSOR, _TENSOR, _MAYBE),
    ops.cpp_linears: _declared("cpp_linears", _TENSOR, _TENSORS, _TENSORS),
}


def table_of(texts: Sequence[KernelText]) -> str:
    """The source that has the C functions of the ops, and these kernels by their names."""
    names = " ".join(f"X({text.name})" for text in texts)
    return f"#define KV_KERNELS {names}\n{(INCLUDE / 'packaged.cpp').read_text('utf-8')}"


def objects(texts: Sequence[KernelText], own: Isa) -> tuple[Path, ...]:
    """The objects of kernels for an instruction set, and of the C functions that call them.

    Raises:
        KernelError: the compiler fails, or the folder cannot be written.
    """
    found = [
        built(
            f"{text.name}_{own.name}",
            text.text,
            (*text.flags(own, OBJECT), f"-D{ENTRY}={prefixed(text)}"),
            ".o",
        )
        for text in texts
    ]
    return (*found, built("packaged", table_of(texts), (*OBJECT, *ops.torch_flags()), ".o"))


def prefixed(text: KernelText) -> str:
    """The name of a kernel's function where several are in one library."""
    return f"kvcompile_{text.name}"
