"""From a KernelSpec to its source: which module generates which role."""

from __future__ import annotations

from importlib import import_module

from kvcompile.kernels.triton.params import KernelSource
from kvcompile.kernels.triton.spec import KernelSpec, Role

# Each has `generate(spec: KernelSpec) -> KernelSource`. They are imported when first asked for.
_MODULES: dict[Role, str] = {
    "append": "kvcompile.kernels.triton.append.append",
    "group": "kvcompile.kernels.triton.append.group",
    "decode": "kvcompile.kernels.triton.attend",
    "combine": "kvcompile.kernels.triton.attend.combine",
    "prefill": "kvcompile.kernels.triton.attend",
    "columns": "kvcompile.kernels.triton.retention.score_sums",
    "score": "kvcompile.kernels.triton.retention.score",
    "evict": "kvcompile.kernels.triton.retention.evict",
    "page_bounds": "kvcompile.kernels.triton.selection.page_bounds",
    "page_copy": "kvcompile.kernels.triton.append.page_copy",
}


def generate(spec: KernelSpec) -> KernelSource:
    """The kernel's text and arguments; equal specs give equal ones."""
    module = import_module(_MODULES[spec.role])
    source: KernelSource = module.generate(spec)
    return source
