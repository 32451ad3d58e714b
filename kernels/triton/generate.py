"""From a KernelSpec to its source: which module generates which role."""

from __future__ import annotations

from importlib import import_module

from kvcompile.kernels.triton.params import KernelSource
from kvcompile.kernels.triton.spec import KernelSpec, Role

# Each has `generate(spec: KernelSpec) -> KernelSource`. They are imported when first asked for.
_MODULES: dict[Role, str] = {
    "append": "append",
    "group": "group",
    "decode": "attend",
    "combine": "combine",
    "prefill": "attend",
    "columns": "columns",
    "score": "score",
    "evict": "evict",
    "page_bounds": "page_bounds",
    "page_copy": "page_copy",
}


def generate(spec: KernelSpec) -> KernelSource:
    """The kernel's text and arguments; equal specs give equal ones."""
    module = import_module(f"{__package__}.{_MODULES[spec.role]}")
    source: KernelSource = module.generate(spec)
    return source
