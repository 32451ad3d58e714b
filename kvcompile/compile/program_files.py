"""What Inductor compiled, as files: each distinct program once, and the libraries that its C++ was compiled to.

Inductor looks for a library at a place that follows from the code and from the compiler's command line. Where those
are the same as when the module was saved (the same versions at the same places), nothing is compiled; elsewhere the C++
is compiled again, which takes some seconds.
"""

from __future__ import annotations

import logging
import os
import shutil
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._inductor import cpu_vec_isa
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.standalone_compile import CompiledArtifact

from kvcompile.compile import ahead
from kvcompile.compile.generated import function_of
from kvcompile.compile.inductor import Compiled, ShapeClass
from kvcompile.compile.instruction_sets import COMPILING
from kvcompile.util.libraries import is_whole

log = logging.getLogger(__name__)

_LIBRARIES = "libraries"


@dataclass(frozen=True)
class Programs:
    """The compiled code of a class of shapes: the file of each call of a region, in order."""

    shapes: ShapeClass
    files: tuple[str, ...]


@dataclass(frozen=True)
class Loaded:
    """A program from a file, whose bytes are kept so that it can be saved again; vectors, threads: `read` has them."""

    run: Compiled
    data: bytes
    vectors: Mapping[str, str]
    threads: int | None

    def __call__(self, *args: Any) -> Sequence[Any]:
        return self.run(*args)

    def save(self, *, path: str) -> None:
        Path(path).write_bytes(self.data)


def write(
    programs: Mapping[ShapeClass, Sequence[Compiled]], folder: Path, told: int = logging.WARNING
) -> tuple[Programs, ...]:
    """The programs as files in `folder`; of those that Inductor cannot save, nothing.

    told: the level of logging at which that is said.
    """
    names: dict[int, str] = {}
    written: list[Programs] = []
    libraries: set[Path] = set()
    for shapes, calls in programs.items():
        try:
            for program in calls:
                if id(program) not in names:
                    names[id(program)] = f"{len(names)}.bin"
                    program.save(path=str(folder / names[id(program)]))  # type: ignore[attr-defined]
                    libraries |= set(_libraries(getattr(program, "run", program)))
        except (RuntimeError, AttributeError, AssertionError) as error:
            log.log(told, "compiled code (%s) cannot be saved: %s", shapes, error)
            continue
        written.append(Programs(shapes, tuple(names[id(program)] for program in calls)))
    for path in libraries:
        place = folder / _LIBRARIES / path.relative_to(cache_dir())
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)
    return tuple(written)


def read(
    written: Sequence[Programs], folder: Path, vectors: Mapping[str, str], threads: int | None
) -> dict[ShapeClass, list[Compiled]]:
    """The inverse of `write`; vectors (as `instruction_sets` has them), threads: that it was compiled for.

    Raises RuntimeError, AssertionError or OSError where torch cannot read a file.
    """
    ahead.wait()
    _install(folder / _LIBRARIES)
    loaded: dict[str, Compiled] = {}
    with COMPILING, _instruction_sets(vectors):
        for programs in written:
            for name in programs.files:
                if name not in loaded:
                    run = CompiledArtifact.load(path=str(folder / name))
                    loaded[name] = Loaded(run, (folder / name).read_bytes(), vectors, threads)
    return {programs.shapes: [loaded[name] for name in programs.files] for programs in written}


def instruction_sets(programs: Mapping[ShapeClass, Sequence[Compiled]]) -> dict[str, str]:
    """Those that Inductor compiled their C++ for, and what it told the compiler of each."""
    known = [
        program.vectors for calls in programs.values() for program in calls if isinstance(program, Loaded)
    ]
    if len(known) == sum(map(len, programs.values())) and all(own == known[0] for own in known):
        return dict(known[0]) if known else {}
    # It looks, by compiling, for what the compiler knows; once in a process, so that it has done so already.
    return {str(isa): isa.build_arch_flags() for isa in cpu_vec_isa.valid_vec_isa_list()}


def threads(programs: Mapping[ShapeClass, Sequence[Compiled]]) -> int:
    """How many of the CPU they use: as many as torch had when they were compiled, be it in another process."""
    loaded = (program for calls in programs.values() for program in calls if isinstance(program, Loaded))
    return next((p.threads for p in loaded if p.threads), torch.get_num_threads())


@contextmanager
def _instruction_sets(flags: Mapping[str, str]) -> Iterator[None]:
    """Inductor takes these without looking: nothing shall be compiled, and the machine was seen to have them.

    What it tells the compiler of a set depends on what else it saw there when it looked (bfloat16, beside AMX), and the
    names of libraries on that.
    """
    wanted = [isa for isa in cpu_vec_isa.supported_vec_isa_list if str(isa) in flags]
    if {str(isa) for isa in wanted} != set(flags):  # no x86: there it does not look
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", lambda: wanted))
        for isa in wanted:
            own = flags[str(isa)]
            stack.enter_context(mock.patch.object(isa, "build_arch_flags", lambda own=own: own))
        yield


def _install(folder: Path) -> None:
    """Put libraries where Inductor looks for them."""
    for path in sorted(folder.rglob("*.so")):
        place = Path(cache_dir()) / path.relative_to(folder)
        if not is_whole(path):
            raise OSError(f"{path} is damaged")
        if not is_whole(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            beside = place.with_name(f".{place.name}.{os.getpid()}")
            shutil.copyfile(path, beside)
            beside.replace(place)  # another process may look for it just now


def _libraries(program: Any) -> Iterator[Path]:
    """The libraries that a compiled program has loaded."""
    runner = function_of(program)
    for function in getattr(runner, "__globals__", {}).values():
        path = getattr(getattr(function, "__self__", None), "__file__", None)
        if (
            isinstance(function, types.BuiltinFunctionType)
            and path
            and Path(path).is_relative_to(cache_dir())
        ):
            yield Path(path)
