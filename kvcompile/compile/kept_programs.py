"""Compiled programs are kept: a process that runs the same step again neither traces it nor asks Inductor.

Inductor has caches of its own, which know a graph once it is traced; tracing, and finding the name of a graph in them,
is most of what a step takes that was compiled before. Here its programs lie under a name that follows from the text of
the regions, from what comes in, and from all that compilation depends on besides.

    <cache>/programs/<hash>/        the files of `compile/program_files.py`, and which call has which

A folder appears whole or not at all. Programs for GPUs are not kept, nor are steps with modules that run as Python.
Nobody else may write there (`util/cache_dir.py`): it is code. KVCOMPILE_KEEP=off neither reads nor keeps any.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcompile.compile import program_files
from kvcompile.compile.inductor import Compiled, ShapeClass, describe
from kvcompile.compile.program_files import Programs
from kvcompile.compile.regions import Regions
from kvcompile.compile.sizes import Number, Symbolic
from kvcompile.errors import KernelError
from kvcompile.kernels.cpp.host.compiler import compiler, version
from kvcompile.kernels.cpp.isa import isa
from kvcompile.passes.table import VARIABLE as DISABLED
from kvcompile.util.cache_dir import code_folder, keeps
from kvcompile.util.code_digest import code_digest

log = logging.getLogger(__name__)
FOLDER = "programs"
_CALLS = "calls.json"
_CANNOT = (RuntimeError, AssertionError, OSError, ValueError, KeyError, AttributeError, TypeError, EOFError)


class KeptPrograms:
    """Where the programs of one class of shapes are kept, or would be."""

    def __init__(self, folder: Path, calls: int):
        """calls: of regions, each of which has a program"""
        self.folder, self.calls = folder, calls

    @staticmethod
    def of(regions: Regions, mode: str, shapes: ShapeClass, inputs: Mapping[str, Any]) -> KeptPrograms | None:
        """None: they are not kept; mode: the recipe's; inputs: what `Executor.prepare` takes."""
        parts = list(_parts(regions, mode, shapes, inputs)) if keeps() else []
        if not parts or None in parts:
            return None
        try:
            folder = code_folder(FOLDER)
        except KernelError as error:
            log.info("programs are not kept: %s", error)
            return None
        text = "\0".join(map(str, parts))
        return KeptPrograms(folder / hashlib.sha256(text.encode()).hexdigest()[:32], len(regions.calls))

    def read(self, shapes: ShapeClass) -> list[Compiled] | None:
        """The program of each call; None: none are kept, or they cannot be read."""
        if not self.folder.exists():
            return None
        try:
            data = json.loads((self.folder / _CALLS).read_bytes())
            written = Programs(shapes, tuple(map(str, data["files"])))
            if len(written.files) != self.calls:
                raise ValueError(f"{len(written.files)} programs for {self.calls} calls")
            found = program_files.read([written], self.folder, dict(data["vectors"]), data["threads"])
        except _CANNOT as error:
            log.info("%s cannot be used: %s", self.folder, error)
            shutil.rmtree(self.folder, ignore_errors=True)
            return None
        return found[shapes]

    def keep(self, shapes: ShapeClass, programs: Sequence[Compiled]) -> None:
        """Write them; where that fails, they are compiled again the next time."""
        beside: Path | None = None
        try:
            beside = Path(tempfile.mkdtemp(dir=self.folder.parent, prefix=f".{self.folder.name}."))
            (written,) = program_files.write({shapes: programs}, beside, logging.DEBUG) or (None,)
            if written is not None:
                vectors = program_files.instruction_sets({shapes: programs})
                data = {"files": written.files, "vectors": vectors, "threads": torch.get_num_threads()}
                (beside / _CALLS).write_text(json.dumps(data), "utf-8")
                os.replace(beside, self.folder)  # fails where another process was quicker
        except _CANNOT as error:
            log.debug("programs are not kept: %s", error)
        finally:
            if beside is not None:
                shutil.rmtree(beside, ignore_errors=True)


def _parts(
    regions: Regions, mode: str, shapes: ShapeClass, inputs: Mapping[str, Any]
) -> Iterator[object | None]:
    """All that programs depend on; None among it: it cannot be told."""
    # `str` of a class of shapes is for people: it does not tell how many logits are kept, or the span.
    yield from (code_digest(), torch.__version__, torch.backends.cpu.get_cpu_capability(), mode, repr(shapes))
    yield from (torch.get_num_threads(), os.environ.get(DISABLED, ""), _config())
    with suppress(KernelError, ValueError):  # no compiler, and Inductor will say so
        yield from (compiler(), version(), isa().name)
    for module in regions.modules:
        own = any(node.op in ("get_attr", "call_module") for node in module.graph.nodes)
        yield None if own else module.code
    yield from regions.calls
    yield from (regions.placeholders, regions.outputs)
    for name, value in (*inputs.items(), *regions.weights.items()):
        yield name
        yield _described(value)


def _described(value: Any) -> str | None:
    """An example's form; None: of a tensor that is not on the CPU, or of what is no tensor and no number."""
    match value:
        case Symbolic():
            return f"{value.shape} {value.dtype} cpu" if value.device.type == "cpu" else None
        case Number():
            return value.name
        case Tensor():
            return describe(value) if type(value.data) is Tensor and value.device.type == "cpu" else None
        case bool() | int() | float() | None:
            return repr(value)
    return None


def _config() -> str:
    """Inductor's settings, as its own caches read them."""
    from torch._inductor import config as inductor

    own = inductor.save_config_portable()
    own.pop("cpp.vec_isa_ok", None)  # another one while somebody looks, and programs say what they are for
    told = (own, torch.compiler.config.cache_key_tag)
    return hashlib.sha256(repr(told).encode()).hexdigest()
