"""Runs the C++ compiler: the one that Inductor needs anyway."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Lock

from kvcompile.errors import KernelError
from kvcompile.kernels.cpp.isa import Isa
from kvcompile.util.cache_dir import code_folder, write_atomically
from kvcompile.util.libraries import is_whole

INCLUDE = Path(__file__).parents[1] / "include"
TEMPLATES = INCLUDE.parent / "templates"
FOLDER = "cpp"
SHARED = ("-shared", "-fPIC")
OBJECT = ("-c", "-fPIC", "-fvisibility=hidden")  # of what is linked into another library
# No contraction: what is written to a cache is rounded as the reference rounds it.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wno-maybe-uninitialized",
)
# g++ tries to join up to four instructions to one: of vectors' it finds none more than by two, and takes a fifth of its
# time for it.
_GCC_FLAGS = ("--param=max-combine-insns=2",)
_HASH = 12
_SECONDS = 300
_LOCK = Lock()
_BUILDING: dict[Path, Lock] = {}


@cache
def compiler() -> str:
    """The compiler's command.

    Raises:
        KernelError: there is none.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return str(get_cpp_compiler())
    except Exception as error:
        raise KernelError(
            f"there is no C++ compiler ({error}): install g++ or clang++, or set CXX, or use compile: "
            "{kernels: reference}"
        ) from error


@cache
def _own_flags() -> tuple[str, ...]:
    """The flags that the compiler alone knows; none where there is no compiler, which others tell."""
    from torch._inductor.cpp_builder import _is_gcc

    try:
        return _GCC_FLAGS if _is_gcc(compiler()) else ()
    except KernelError:
        return ()


@cache
def version() -> str:
    """What the compiler says of itself."""
    said = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=False, timeout=60)
    return said.stdout.partition("\n")[0]


def flags_for(isa: Isa, form: Sequence[str] = SHARED) -> tuple[str, ...]:
    """The flags of a kernel for an instruction set; form: SHARED or OBJECT."""
    return (*form, *FLAGS, *_own_flags(), *isa.flags, f'-DKV_VECTORS="{isa.vectors}"', f"-I{INCLUDE}")


def _texts() -> dict[str, str]:
    """What kernels are made of beside Python, as it lies on disk, by name."""
    files = (*INCLUDE.iterdir(), *TEMPLATES.iterdir())
    return {path.name: path.read_text("utf-8") for path in sorted(files) if path.is_file()}


# Beside the Python that was imported then: the two must agree on what a call hands over.
_IMPORTED = _texts()


def headers() -> str:
    """The text of all that kernels include."""
    return "".join(text for name, text in _IMPORTED.items() if name.endswith(".h"))


def _check_unchanged() -> None:
    """Refuse to compile what this process does not know: it would be called wrongly, and stay in the cache.

    Raises:
        KernelError: files of kvcompile are others than when they were imported.
    """
    now = _texts()
    changed = sorted(name for name in now.keys() | _IMPORTED.keys() if now.get(name) != _IMPORTED.get(name))
    if changed:
        raise KernelError(
            f"{INCLUDE.parent}: kvcompile's own files have changed since this process imported them ({changed[0]}), "
            "as an update does: start the process again"
        )


def built(name: str, text: str, flags: Sequence[str], suffix: str = ".so") -> Path:
    """The library (or object) of a source text: it is compiled once, and then lies in the user's cache.

        <cache>/cpp/<name>_<hash>.cpp, .so (or .o)

    The hash is of all that the library depends on. It appears whole or not at all, whoever else makes it.

    Raises:
        KernelError: the folder cannot be used, the compiler fails, or kvcompile's own files have changed.
    """
    parts = (text, headers(), *flags, compiler(), version())
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_HASH]
    folder = code_folder(FOLDER)
    source, library = folder / f"{name}_{digest}.cpp", folder / f"{name}_{digest}{suffix}"
    try:
        with _building(library):
            if not is_whole(library):
                _check_unchanged()
                write_atomically(source, text)
                _compile(source, library, flags)
    except OSError as error:
        raise KernelError(
            f"{library}: the compiled kernel cannot be written ({error.strerror or error}): set KVCOMPILE_CACHE_DIR "
            "to a folder that you can write to"
        ) from error
    return library


@contextmanager
def _building(library: Path) -> Iterator[None]:
    """Of threads that want one library, the first makes it."""
    with _LOCK:
        lock = _BUILDING.setdefault(library, Lock())
    with lock:
        yield


def _compile(source: Path, library: Path, flags: Sequence[str]) -> None:
    handle, temporary = tempfile.mkstemp(dir=library.parent, prefix=f".{library.name}.", suffix=".tmp")
    os.close(handle)
    try:
        # Libraries come behind the source that asks for them.
        command = [compiler(), str(source), "-o", temporary, *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line.lower()] or [
                done.stderr[-2000:]
            ]
            raise KernelError(
                f"{source}: the compiler fails ({compiler()}, exit status {done.returncode}): {' '.join(errors[:5])}"
            )
        _check_unchanged()  # while it was compiled
        os.chmod(temporary, 0o700)
        os.replace(temporary, library)
    except subprocess.TimeoutExpired as error:
        raise KernelError(f"{source}: the compiler took more than {_SECONDS} s ({compiler()})") from error
    finally:
        with suppress(OSError):
            os.unlink(temporary)
