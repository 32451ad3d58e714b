"""Proofs are kept: what passed `quick` verification once need not be compared again, while nothing has changed.

A comparison depends on the model, its graph, the plan, kvcompile's own code, PyTorch and the processor; all of that
is in the name of a file in the user's cache, every byte of the weights too, and reading these is many times quicker
than comparing. The model is captured anew each time, and what is captured is compared with the model's own forward.
Whatever cannot be told (a module whose source is in no file, state that is no number, a forward of its own) is
verified each time; so are `thorough` verification, ranks and stages.

    <cache>/proofs/<hash>.json      when it was proved, and the checks as they were measured

Nobody else may write there (`util/cache_dir.py`): such a file is a promise. KVCOMPILE_KEEP=off neither reads nor keeps
any.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from kvcompile.errors import KernelError, KVCompileError
from kvcompile.kernels.cpp.host.compiler import compiler, version
from kvcompile.kernels.cpp.isa import isa
from kvcompile.layouts import CODES
from kvcompile.original.identity import Untold, identity_of
from kvcompile.passes.graph_digest import graph_digest, names_of
from kvcompile.passes.table import VARIABLE as DISABLED
from kvcompile.pipeline import Front
from kvcompile.plan import Plan
from kvcompile.recipe.schema import VerifyMode
from kvcompile.util.cache_dir import code_folder, keeps, write_atomically
from kvcompile.util.code_digest import code_digest
from kvcompile.verify.compare import Check

log = logging.getLogger(__name__)
FOLDER = "proofs"
_FORMAT = 1


@dataclass(frozen=True)
class Known:
    """What a file says. made: UTC, ISO 8601."""

    format: int
    made: str
    checks: tuple[Check, ...]


_KNOWN = TypeAdapter(Known)


@dataclass(frozen=True)
class Proof:
    """Where one is kept, or would be."""

    path: Path

    @staticmethod
    def kept(verify: VerifyMode, ranks: int) -> bool:
        """Whether proofs of such a verification are kept; ranks: that a model is divided over."""
        return verify == "quick" and ranks == 1 and keeps()

    @staticmethod
    def of(model: nn.Module, front: Front, plan: Plan, recipe: str) -> Proof | None:
        """None: it cannot be kept; recipe: its digest."""
        try:
            parts = list(_parts(model, front, plan, recipe))
            folder = code_folder(FOLDER)
        except (Untold, KVCompileError) as error:
            log.info("verified each time: %s", error)
            return None
        name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
        return Proof(folder / f"{name}.json")

    def read(self) -> Known | None:
        """None: it was not proved, or the file is none of ours."""
        try:
            known = _KNOWN.validate_json(self.path.read_bytes())
        except (OSError, ValidationError):
            return None
        passed = all(math.isfinite(check.error) and check.error <= check.budget for check in known.checks)
        if known.format != _FORMAT or not known.checks or not passed:
            return None
        log.info("verified before, on %s, with the same model, weights, plan and code", known.made)
        return known

    def keep(self, checks: tuple[Check, ...]) -> None:
        """Write it; where that fails, it is proved again the next time."""
        known = Known(_FORMAT, datetime.now(UTC).isoformat(timespec="seconds"), checks)
        with suppress(OSError):
            write_atomically(self.path, _KNOWN.dump_json(known, indent=1).decode())


def _parts(model: nn.Module, front: Front, plan: Plan, recipe: str) -> Iterator[str]:
    """All that a comparison depends on.

    Raises:
        Untold: something of it cannot be told.
    """
    captured = front.captured
    if captured.opaques:
        raise Untold(f"{captured.opaques[0].path} runs as Python")
    if _get_current_dispatch_mode_stack():
        raise Untold("a dispatch mode is active")
    yield code_digest()
    yield from (torch.__version__, torch.backends.cpu.get_cpu_capability(), str(front.device))
    if front.device.type == "cuda":
        yield torch.cuda.get_device_name(front.device)
    with suppress(KernelError, ValueError):  # without a compiler there is nothing of it
        yield from (compiler(), version(), isa().name)
    yield os.environ.get(DISABLED, "")
    yield from map(str, _settings())
    yield from (recipe, plan.digest(), repr(sorted(CODES.items())))
    for decision in plan.decisions:
        _ours(decision.layout)
    yield repr(
        (captured.inputs, captured.logits_index, captured.constants, captured.max_seq_len, captured.last)
    )
    yield str((captured.out_spec, front.max_tokens))
    yield graph_digest(captured.graph_module, names_of(model), {})
    yield identity_of(model)


def _ours(part: object) -> None:
    """A layout is made of kinds whose code is among kvcompile's files.

    Raises:
        Untold: one of them is not.
    """
    if is_dataclass(part):
        if not type(part).__module__.startswith("kvcompile."):
            raise Untold(f"{type(part).__qualname__} is none of kvcompile's own")
        for field in fields(part):
            _ours(getattr(part, field.name))


def _settings() -> Iterator[object]:
    """PyTorch's, which change what is computed."""
    yield torch.get_default_dtype()
    yield torch.get_float32_matmul_precision()
    yield torch.are_deterministic_algorithms_enabled()
    yield torch.backends.mkldnn.enabled
    yield torch.backends.cuda.matmul.allow_tf32
    yield torch.backends.cudnn.allow_tf32
