"""AOTInductor: the rewritten graph as machine code, several graphs in one `.pt2`, their weights in one file beside it.

Which graphs: Inductor treats a size of one apart, and a step of one sequence is worth its own form (`compile/gemv.py`).

| entry | tokens | sequences |
|---|---|---|
| prefill | any number from 2 on | any number |
| decode | one each | one |
| batch_decode | one each | any number; where the limits admit more than one |

`any number` is traced with symbols of at least two, because torch.export takes 0 and 1 for cases of their own. Compiled
code reads its sizes from its inputs, and the strides that it computes from them hold for one as well: what tracing can
have decided by `>= 2` are broadcasts and branches, and the graphs have none on the batch or the number of kept logits
(torch's own name for this use is `aot_inductor.check_lowerbound`).

Weights are no part of the code: each graph names the constants that it needs, and shares them with the others.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from kvcompile.compile import ahead, gemv, linear_forms
from kvcompile.compile.rounding import rounding
from kvcompile.errors import ExportError
from kvcompile.kernels.cpp.host.source import KernelText
from kvcompile.kernels.cpp.isa import Isa
from kvcompile.targets.aoti import float8, kernels
from kvcompile.targets.aoti.int_arrays import kept_apart
from kvcompile.targets.functional import Functional, Phase, example, traced
from kvcompile.util.archive_file import archive_file
from kvcompile.util.tracing import quiet

# What compilers call the CPUs that a package may be for, and the width of their vectors in bits.
LEVELS: dict[str, tuple[str, int] | None] = {
    "native": None,
    "x86-64-v3": ("x86-64-v3", 256),
    "x86-64-v4": ("x86-64-v4", 512),
}
_AVX2 = {"avx", "avx2", "bmi", "bmi2", "f16c", "fma3", "lzcnt", "popcnt"}
_OF_LEVEL = {
    "x86-64-v3": _AVX2,
    "x86-64-v4": _AVX2 | {f"avx512_{part}" for part in ("f", "bw", "cd", "dq", "vl")},
}


@dataclass(frozen=True)
class Entry:
    """One graph of a package; one: a token of each sequence; alone: one sequence."""

    name: str
    phase: Phase
    one: bool
    alone: bool


@dataclass(frozen=True)
class Compiled:
    """What became of an entry: its files, the constants that they need, and the C++ kernels that they have."""

    entry: Entry
    files: tuple[str, ...]
    constants: dict[str, Tensor]
    kernels: dict[str, KernelText]


def entries(max_batch: int) -> tuple[Entry, ...]:
    """The graphs of a package for up to so many sequences; the first that takes a call is meant."""
    # No name begins another: PyTorch 2.11 loads of all entries that begin so the last.
    found = (
        Entry("prefill", "prefill", one=False, alone=max_batch == 1),
        Entry("decode", "decode", one=True, alone=True),
    )
    return found if max_batch == 1 else (*found, Entry("batch_decode", "decode", one=True, alone=False))


def instruction_sets(level: str, own: set[str]) -> set[str]:
    """What a CPU needs for code of `level`; own: what this one has.

    Raises:
        ExportError: this CPU is below the level, so that nothing can be compiled for it.
    """
    if level == "native":
        return own
    missing = sorted(_OF_LEVEL[level] - own)
    if missing:
        raise ExportError(
            f"cpu: {level} needs {', '.join(missing)}, which this CPU lacks; export on one that has them, or choose "
            "x86-64-v3 or native"
        )
    from torch._inductor import config, cpu_vec_isa

    _, width = LEVELS[level] or ("", 0)
    with config.patch({"cpp.simdlen": width}):
        picked = str(cpu_vec_isa.pick_vec_isa()).split()
    return _OF_LEVEL[level] | (set(picked) & own)


def compiled(function: Functional, entry: Entry, mode: str, level: str, folder: Path) -> Compiled:
    """Trace and compile one graph of a function that updates its caches in place.

    Args:
        mode: of the recipe's `compile`. level: one of LEVELS. folder: for the files of this graph, which stay there.

    Raises:
        ExportError: torch.export or Inductor refuses the graph.
    """
    program = traced(function, entry.one, entry.alone)
    module = program.module(check_guards=False)
    assert isinstance(module, GraphModule)
    _lay_out(module)
    named, isa = {}, kernels.isa_of(level)
    alone = entry.one and entry.alone
    if linear_forms.on_gpu(function.device):
        if alone and any(decision.kernels == "triton" for decision in function.plan.decisions):
            by_inductor = gemv.made_by_inductor(mode)
            module = gemv.give_gemv(module, gates=True, norms=True, made=not by_inductor)
    elif function.device.type == "cpu":
        if any(decision.kernels == "cpp" for decision in function.plan.decisions):
            kernels.give_linear(module, isa)
            named = kernels.name_kernels(module)
        if alone:
            module = gemv.give_gemv(module, kernels=False)
    given = example(function, entry.one, entry.alone)

    def make() -> Any:
        with torch.no_grad(), quiet("torch._inductor"), kept_apart(), float8.known(), rounding():
            return torch._inductor.aot_compile(
                module, given, options=_options(entry, mode, level, folder) | linked
            )

    try:
        linked = _linked(named, isa)
        made = ahead.compiling(make)
    except Exception as error:  # Inductor and the C++ compiler raise many kinds
        reason = " ".join(str(error).split())[:600]
        raise ExportError(
            f"AOTInductor could not compile {entry.name} of plan {function.plan.digest()}: "
            f"{type(error).__name__}: {reason}"
        ) from error
    files = tuple(file for file in made if isinstance(file, str))
    weights: dict[str, tuple[Tensor, Any]] = next(item for item in made if isinstance(item, dict))
    constants = {name: tensor for name, (tensor, _) in weights.items()}
    for name, tensor in constants.items():
        if not tensor.is_contiguous():
            raise ExportError(
                f"AOTInductor lays constant {name} of {entry.name} out with strides {list(tensor.stride())}, and "
                "weight files have rows; this is a defect of kvcompile"
            )
    return Compiled(entry, files, constants, named)


def _linked(named: dict[str, KernelText], isa: Isa) -> dict[str, Any]:
    """What a graph's code is linked with: the kernels that it calls, and C++'s library as PyTorch has it.

    A compiler that was moved has links that lead nowhere, and takes the static library instead. Its regular expressions
    break beside PyTorch's as soon as a package is loaded, which asks them for the device.
    """
    options = kernels.options(named, isa)
    if sys.platform == "linux":
        files = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
        standard = [file for file in files if Path(file).name.startswith("libstdc++.so")]
        # Libraries are all that it passes to the linker; -lm is one of them anyway, and a file follows it.
        libraries = [f"m {shlex.quote(file)}" for file in standard[:1]]
        options["aot_inductor.custom_op_libs"] = [*options.get("aot_inductor.custom_op_libs", []), *libraries]
    return options


def package(path: Path, made: tuple[Compiled, ...]) -> None:
    """Write compiled graphs to one `.pt2`.

    Raises:
        OSError: as files do.
    """
    from torch._inductor.package.package import package_aoti

    files: Any = {each.entry.name: list(each.files) for each in made}
    with quiet("torch._inductor"), archive_file(path) as file:
        package_aoti(file, files)


def _lay_out(module: nn.Module) -> None:
    """Give weights that stand transposed or in steps their rows: a weight file has no strides."""
    for owner in module.modules():
        for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is None or tensor.is_contiguous():
                continue
            rows = tensor.detach().contiguous()
            if name in owner._parameters:
                owner._parameters[name] = nn.Parameter(rows, requires_grad=False)
            else:
                owner._buffers[name] = rows


def _options(entry: Entry, mode: str, level: str, folder: Path) -> dict[str, Any]:
    options = dict(torch._inductor.list_mode_options(mode)) if mode == "max-autotune" else {}
    options |= {
        "triton.cudagraphs": False,
        # Otherwise kernels run on made-up inputs while they are compiled: one that writes to the slots of made-up
        # positions writes anywhere. So the program runs once on the example, which is valid, with clones of caches.
        "triton.autotune_at_compile_time": False,
        # A scale is rounded to what is stored before it divides; without this, the rounding is optimized away.
        "emulate_precision_casts": True,
        # As many threads as the process has that runs it, not the one that compiled it.
        "cpp.dynamic_threads": True,
        "aot_inductor.package": True,
        "aot_inductor.package_constants_in_so": False,
        # The files say which constants they need; what is written of them is decided by `weights`.
        "aot_inductor.package_constants_on_disk_format": "pickle_weights",
        "aot_inductor.check_lowerbound": False,
        "aot_inductor.model_name_for_generated_files": entry.name,
        # Else AOTInductor names the folder by the text of the graph, which says nothing of the sizes of weights or of
        # PyTorch's version, and takes C++ that lies there already for its own.
        "aot_inductor.output_path": str(folder.absolute() / entry.name),
        # What is linked in is among the flags, so no other graph has the same: headers would be compiled for this one.
        "aot_inductor.precompile_headers": False,
    }
    if (target := LEVELS[level]) is not None:
        options |= {"cpp.march": target[0], "cpp.simdlen": target[1]}
    return options
