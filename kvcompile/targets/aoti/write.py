"""Target aoti: model.pt2, machine code of all graphs made by AOTInductor, and weights.safetensors.

Options: cpu, the CPUs that the code is for: native (this machine's instruction sets, the fastest), x86-64-v3 (AVX2) or
x86-64-v4 (AVX-512). The recipe's `compile.kernels` are in it; of `compile.mode`, max-autotune.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from kvcompile.errors import ExportError
from kvcompile.kernels.shared.dialect import AOTI
from kvcompile.targets import machine
from kvcompile.targets.aoti import kernels
from kvcompile.targets.aoti.package import (
    LEVELS,
    Compiled,
    Entry,
    compiled,
    entries,
    instruction_sets,
    package,
)
from kvcompile.targets.functional import Functional, functional
from kvcompile.targets.manifest import Alias, Graph, Manifest, TensorInfo, dtype_name
from kvcompile.targets.source import Source
from kvcompile.util.whole_file import write_tensors

PACKAGE = "model.pt2"
WEIGHTS = "weights.safetensors"


def write(
    source: Source, folder: Path, options: dict[str, Any], tell: Callable[[str, int, int], None]
) -> Manifest:
    """Write the package and its weights to `folder`; see `kvcompile.export`.

    Raises:
        ExportError: an unknown option, no C++ compiler, or a graph that AOTInductor cannot compile.
    """
    unknown = options.keys() - {"cpu"}
    if unknown:
        raise ExportError(f"options: {min(unknown)!r} is not one of target aoti; it has: cpu")
    level = options.get("cpu", "native")
    if level not in LEVELS:
        raise ExportError(f"cpu: expected one of {', '.join(LEVELS)}, got {level!r}")
    check_compiler()
    needed = machine.needs(source.front.device, instruction_sets(level, machine.has()))
    function = functional(source.front, source.plan, AOTI, in_place=True)
    wanted, made = entries(source.plan.limits.max_batch), []
    with TemporaryDirectory(prefix="kvcompile-aoti-") as scratch:
        for number, entry in enumerate(wanted):
            tell(f"compile {entry.name}", number, len(wanted))
            made.append(compiled(function, entry, source.recipe.compile.mode, level, Path(scratch)))
        tell("write", len(wanted), len(wanted))
        package(folder / PACKAGE, tuple(made))
    write_tensors(weights(tuple(made)), folder / WEIGHTS)
    named = {name: text for each in made for name, text in each.kernels.items()}
    if named:
        needed["kernels"] = kernels.isa_of(level).name
        kernels.write_sources(named, kernels.isa_of(level), folder / kernels.FOLDER)
    vocab, dtype = logits_of(function)
    graphs = tuple(_graph(function, entry, vocab, dtype) for entry in wanted)
    return source.manifest("aoti", function, graphs, (), machine=needed)


def weights(made: tuple[Compiled, ...]) -> dict[str, torch.Tensor]:
    """The constants of all graphs by name; one whose value differs between graphs goes by `entry/name`."""
    found: dict[str, torch.Tensor] = {}
    for each in made:
        for name, tensor in each.constants.items():
            tensor = tensor.detach()
            known = found.setdefault(name, tensor)
            if known is not tensor and not _same(known, tensor):
                found[f"{each.entry.name}/{name}"] = tensor
    return {name: tensor.cpu() for name, tensor in found.items()}


def check_compiler() -> None:
    """Refuse early what would fail late.

    Raises:
        ExportError: there is no C++ compiler.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # Inductor's own kinds
        raise ExportError(
            "AOTInductor needs a C++ compiler, and there is none: install g++ or clang, or name one in CXX "
            f"({' '.join(str(error).split())[:200]})"
        ) from error


def logits_of(function: Functional) -> tuple[int, torch.dtype]:
    """How many logits a token has, and their dtype (some models give fp32 whatever theirs is): as the graph has it.

    Raises:
        ExportError: the graph does not say.
    """
    node = next(node for node in function.decoder.graph.nodes if node.op == "output")
    logits = node.args[0][function.logits_index]
    value = logits.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(value.shape[-1], int):
        raise ExportError("the graph's logits have no size that is known: this is a defect of kvcompile")
    return int(value.shape[-1]), value.dtype


def _graph(function: Functional, entry: Entry, vocab: int, dtype: torch.dtype) -> Graph:
    arguments = function.arguments(entry.one, entry.alone)
    logits = TensorInfo(
        name="logits",
        role="logits",
        dtype=dtype_name(dtype),
        shape=(arguments[0].shape[0], arguments[3].shape[0], vocab),
    )
    return Graph(
        phase=entry.phase,
        file=PACKAGE,
        entry=entry.name,
        inputs=tuple(
            TensorInfo(name=a.name, role=a.role, dtype=dtype_name(a.dtype), shape=a.shape) for a in arguments
        ),
        outputs=(logits,),
        aliases=tuple(Alias(input=name, output=name, in_place=True) for name in function.caches),
    )


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return a.data_ptr() == b.data_ptr() or torch.equal(a.view(torch.uint8), b.view(torch.uint8))
