"""The roles, listed once: the module that generates each kernel, and what the kernel does."""

from __future__ import annotations

from dataclasses import dataclass

_CPP = "kvcompile.kernels.cpp"


@dataclass(frozen=True)
class KernelRole:
    """One role. module: has `generate(spec: CppSpec) -> str`; does: a line for the header of its kernels' files."""

    module: str
    does: str


ROLES: dict[str, KernelRole] = {
    "decode": KernelRole(
        f"{_CPP}.attend.decode",
        "the new token of each sequence to its slot, and its queries against the slots",
    ),
    "prefill": KernelRole(
        f"{_CPP}.attend.prefill",
        "many queries of each sequence against decoded keys and values",
    ),
}
