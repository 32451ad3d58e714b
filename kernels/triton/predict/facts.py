"""What the machine code of kernels says, kept in the user's cache: a kernel takes seconds to assemble.

A file is looked up by all that its content follows from: the kernel's text and how it is compiled, the release of
Triton, and the code that reads what comes out.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from pathlib import Path

from kvcompile.errors import KernelError
from kvcompile.kernels.triton.generate import generate
from kvcompile.kernels.triton.tools import assemble, sass, ttgir
from kvcompile.kernels.triton.tools.assemble import Assembled, Request
from kvcompile.util.cache_dir import cache_dir, make_cache_dir, write_atomically

Facts = Mapping[Request, Assembled | str]
Progress = Callable[[str, int, int], None]
_TOGETHER = 6  # kernels that one process assembles: it takes seconds to start


def facts(requests: Iterable[Request], progress: Progress | None = None) -> Facts:
    """Of each kernel, what its machine code says; of one that does not assemble, why.

    Raises:
        KernelError: the cache cannot be written, or no kernel can be assembled here.
    """
    asked = tuple(dict.fromkeys(requests))
    found: dict[Request, Assembled | str] = {}
    for one in asked:
        if (kept := _kept(one)) is not None:
            found[one] = kept
    missing = [one for one in asked if one not in found]
    parts = [missing[at : at + _TOGETHER] for at in range(0, len(missing), _TOGETHER)]
    tell = progress or (lambda stage, done, total: None)
    done = 0
    tell("assembling kernels", 0, len(missing))
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as workers:
        for part, made in zip(parts, workers.map(assemble.attempted, parts), strict=True):
            for one, fact in zip(part, made, strict=True):
                _keep(one, fact)
                found[one] = fact
            done += len(part)
            tell("assembling kernels", done, len(missing))
    return found


def assembled(found: Facts, request: Request) -> Assembled:
    """The facts of a kernel.

    Raises:
        KernelError: it does not assemble; says which, and the compiler's words.
    """
    fact = found[request]
    if isinstance(fact, str):
        raise KernelError(f"a kernel does not assemble:\n{fact[-4000:]}")
    return fact


def _path(request: Request) -> Path:
    text = json.dumps([request.to_json(), generate(request.spec).text, version("triton"), _readers()])
    return cache_dir() / "assembled" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


@cache
def _readers() -> str:
    """A digest of the code that makes facts of machine code."""
    files = (str(module.__file__) for module in (assemble, sass, ttgir))
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()


def _kept(request: Request) -> Assembled | str | None:
    try:
        data = json.loads(_path(request).read_text("utf-8"))
        return data if isinstance(data, str) else Assembled.from_json(data)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # broken: made again
        return None


def _keep(request: Request, fact: Assembled | str) -> None:
    path = _path(request)
    try:
        make_cache_dir()
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, json.dumps(fact if isinstance(fact, str) else fact.to_json()))
    except OSError as error:
        raise KernelError(
            f"{path}: what a kernel's machine code says cannot be kept ({error.strerror or error}): set "
            "KVCOMPILE_CACHE_DIR to a folder that you can write to"
        ) from error
