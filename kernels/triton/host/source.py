"""Keeps generated kernels as files: written once to the user's cache, imported, kept for the life of the process.

    <cache>/kernels/<role>_<key of the spec>_<hash of the text>.py

The name says all that the content depends on, so processes may write it at once and none ever reads another's half.
A file that does not read as it should is written again; what is run is the text that was generated, never what was
found. The folder is the user's alone (`kvcompile/util/cache_dir.py`).
"""

from __future__ import annotations

import hashlib
import linecache
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from kvcompile.errors import KernelError
from kvcompile.kernels.triton.generate import generate
from kvcompile.kernels.triton.params import KernelSource
from kvcompile.kernels.triton.render import header
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.util.cache_dir import code_folder, write_atomically

FOLDER = "kernels"
_HASH = 12


@dataclass(frozen=True)
class Kernel:
    """A kernel that can be launched (`launch.py`).

    path:     of its source
    function: what `@triton.jit` made of it: a JITFunction, or an InterpretedFunction
    """

    spec: KernelSpec
    source: KernelSource
    path: Path
    function: Any


@cache
def kernel(spec: KernelSpec) -> Kernel:
    """The spec's kernel, generated, written and imported when it is first asked for.

    Raises:
        KernelError: Triton is missing, or the folder for code cannot be used.
    """
    source = generate(spec)
    path, text = stored(spec, source)
    return Kernel(spec, source, path, function_of(source, path, text))


@cache
def kernel_of(text: str) -> Kernel:
    """`kernel` of a spec as JSON, which is how ops carry it; raises as `kernel`."""
    return kernel(KernelSpec.from_json(text))


def stored(spec: KernelSpec, source: KernelSource) -> tuple[Path, str]:
    """The file of a kernel, which holds the text that is given beside it.

    Raises:
        KernelError: the folder for code cannot be used.
    """
    text = f"{header(spec)}\n{source.text}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:_HASH]
    path = code_folder(FOLDER) / f"{spec.role}_{spec.key}_{digest}.py"
    try:
        if not _reads(path, text):
            write_atomically(path, text)
    except OSError as error:
        raise KernelError(
            f"{path}: the generated kernel cannot be written ({error.strerror or error}): set KVCOMPILE_CACHE_DIR to "
            "a folder that you can write to"
        ) from error
    return path, text


def function_of(source: KernelSource, path: Path, text: str) -> Callable[..., Any]:
    """What the module `text`, which stands at `path`, defines as the kernel.

    Raises:
        KernelError: Triton is missing.
    """
    _need_triton()
    module = ModuleType(f"kvcompile_kernels.{path.stem}")
    module.__file__ = str(path)
    # Not by an importer: that would run the file, or a .pyc beside it, whatever is in them by now.
    linecache.checkcache(str(path))
    exec(compile(text, str(path), "exec"), module.__dict__)
    sys.modules[module.__name__] = module  # pickle and inspect look there
    function: Callable[..., Any] = getattr(module, source.name)
    return function


def _reads(path: Path, text: str) -> bool:
    try:
        return path.read_text("utf-8") == text
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def _need_triton() -> None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise KernelError(
            "Triton is not installed, which the generated kernels need: pip install triton (on Windows "
            "triton-windows), or compile: {kernels: reference}"
        ) from error
