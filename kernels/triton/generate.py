"""From a KernelSpec to its source: which module generates which role."""

from __future__ import annotations

from importlib import import_module

from kvcompile.kernels.triton.params import KernelSource
from kvcompile.kernels.triton.spec import KernelSpec, Role

# Each has `generate(spec: KernelSpec) -> KernelSource`. They are imported when first asked for.
_MODULES: dict[Role, str] = {
    "append": "kvcompile.kernels.triton.append",
    "group": "kvcompile.kernels.triton.group",
    "decode": "kvcompile.kernels.triton.attend",
    "combine": "kvcompile.kernels.triton.combine",
    "prefill": "kvcompile.kernels.triton.attend",
    "columns": "kvcompile.kernels.triton.columns",
    "score": "kvcompile.kernels.triton.score",
    "evict": "kvcompile.kernels.triton.evict",
    "page_copy": "kvcompile.kernels.triton.page_copy",
}


def generate(spec: KernelSpec) -> KernelSource:
    """The kernel's text and arguments; equal specs give equal ones."""
    module = import_module(_MODULES[spec.role])
    source: KernelSource = module.generate(spec)
    return source
