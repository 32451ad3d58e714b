"""C++ kernels are compiled to what they always are, once in a session of tests, and quicker.

More than half of what the compiler takes for a kernel, it takes to read the processor's instructions and the standard
library: here it reads them once for all kernels of the same flags, and the machine code is the same, byte for byte
(`tests/support/test_compiled_once.py`). Only what every kernel includes anyway is read before: an `#include` that is
missing in one is missed here, too. What tests compile into caches of their own, they get from the session's folder
where it was compiled before, by this worker or by another; so they do what Inductor compiles.

Most of the rest, the compiler takes to optimize. Nothing in its flags lets it change a result, so tests have it do so
with `-O1`; those that are marked `optimized` have kernels as users have them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch._inductor import codecache

from kvcompile.compile import ahead
from kvcompile.kernels.cpp.host import compiler, source

# What is included by the headers that each kernel begins with.
BEGIN = ("#include KV_VECTORS", '#include "call.h"', '#include "codes.h"')
HEADERS = ("vec_portable.h", "types.h", "exp2.h", "call.h", "codes.h")
PLAIN = compiler._compile
PLAIN_OF_INDUCTOR: Any = codecache._worker_compile_cpp
FLAGS = compiler.FLAGS  # of users
LESS = tuple("-O1" if flag == "-O3" else flag for flag in FLAGS)
AGAIN = 2  # kernels of the same flags are compiled as users compile them, before reading ahead pays


def text_ahead() -> str:
    """Standard headers of the headers that every kernel includes, as those include them."""
    lines = [line for name in HEADERS for line in (compiler.INCLUDE / name).read_text("utf-8").splitlines()]
    plain = sorted({line for line in lines if re.fullmatch(r"#include <(?!immintrin)\w+>", line)})
    return "\n".join([*plain, "#if defined(__F16C__)", "#include <immintrin.h>", "#endif", ""])


class CompiledOnce:
    """Takes the place of compiling; folder: of the session, which several processes may share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: Counter[tuple[str, ...]] = Counter()

    def compile(self, source: Path, library: Path, flags: Sequence[str]) -> None:
        known = self.folder / library.name  # the hash in its name is of all that it depends on
        if known.exists():
            compiler._check_unchanged()
            self._put(known, library)
            return
        PLAIN(source, library, (*flags, *self.ahead(source.read_text("utf-8"), flags)))
        self._put(library, known)

    def compile_of_inductor(self, lock: str, builders: Sequence[Any]) -> None:
        """The hash in a library's name is of its text and of its flags."""
        targets = [Path(builder.get_target_file_path()) for builder in builders]
        libraries = {self.folder / path.name: path for path in targets if path.name.endswith(".main.so")}
        for known, library in libraries.items():
            if known.exists() and not library.exists():
                self._put(known, library)
        PLAIN_OF_INDUCTOR(lock, builders)
        for known, library in libraries.items():
            if not known.exists():
                self._put(library, known)

    def ahead(self, text: str, flags: Sequence[str]) -> tuple[str, ...]:
        """Flags with which the compiler takes what it has read before."""
        if not all(f"{line}\n" in text for line in BEGIN) or "clang" in compiler.version():
            return ()
        same = tuple(flag for flag in flags if flag != "-shared" and not flag.startswith(("-D", "-I")))
        self.asked[same] += 1
        name = sha256("\0".join((compiler.version(), *same)).encode()).hexdigest()[:12]
        header = self.folder / f"ahead_{name}.h"
        if not header.exists():
            if self.asked[same] <= AGAIN:
                return ()
            self._read_ahead(header, same)
        return ("-include", str(header))

    def _read_ahead(self, header: Path, flags: Sequence[str]) -> None:
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            own = Path(folder) / header.name
            own.write_text(text_ahead(), "utf-8")
            command = [compiler.compiler(), "-x", "c++-header", str(own), "-o", f"{own}.gch", *flags]
            subprocess.run(command, check=True, timeout=300)
            os.replace(f"{own}.gch", f"{header}.gch")
            os.replace(own, header)

    @staticmethod
    def _put(one: Path, other: Path) -> None:
        """A copy appears whole or not at all."""
        handle, temporary = tempfile.mkstemp(dir=other.parent, prefix=".", suffix=".tmp")
        os.close(handle)
        shutil.copy(one, temporary)
        os.replace(temporary, other)


def optimize(on: bool) -> None:
    """Kernels as users have them from here on, or such as take the compiler less; the others have other names."""
    flags = FLAGS if on else LESS
    if flags != compiler.FLAGS:
        compiler.FLAGS = flags
        source._kernel.cache_clear()
        source._linear.cache_clear()


def install(folder: Path) -> None:
    """For this process, and all that it forks."""
    folder.mkdir(exist_ok=True)
    once = CompiledOnce(folder)
    compiler._compile = once.compile
    codecache._worker_compile_cpp = once.compile_of_inductor
    # Most tests run a few of a plan's kernels, and wait for those alone.
    ahead.begin_kernels = lambda plan: None
