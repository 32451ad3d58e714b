"""An export target of a test: the rewritten graphs as programs of torch.export, which PyTorch runs eagerly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcompile.errors import ExportError
from kvcompile.kernels.shared.dialect import AOTI
from kvcompile.runtime import session
from kvcompile.targets.functional import Functional, Phase, functional, traced
from kvcompile.targets.manifest import Alias, Graph, Manifest, TensorInfo, dtype_name
from kvcompile.targets.source import Source

PHASES: tuple[Phase, ...] = ("prefill", "decode")


def write(
    source: Source, folder: Path, options: dict[str, Any], tell: Callable[[str, int, int], None]
) -> Manifest:
    if options:
        raise ExportError(f"options: {min(options)!r} is not one of target dummy; it has none")
    function = functional(source.front, source.plan, AOTI, in_place=True)
    for number, phase in enumerate(PHASES):
        tell(f"export {phase}", number, len(PHASES))
        torch.export.save(traced(function, phase == "decode"), folder / f"{phase}.pt2")
    return source.manifest("dummy", function, tuple(_graph(function, phase) for phase in PHASES), ())


def _graph(function: Functional, phase: Phase) -> Graph:
    arguments = function.arguments(phase == "decode")
    output = next(node for node in function.decoder.graph.nodes if node.op == "output")
    value = output.args[0][function.logits_index].meta["val"]
    shape = (arguments[0].shape[0], arguments[3].shape[0], int(value.shape[-1]))
    return Graph(
        phase=phase,
        file=f"{phase}.pt2",
        inputs=tuple(
            TensorInfo(name=a.name, role=a.role, dtype=dtype_name(a.dtype), shape=a.shape) for a in arguments
        ),
        outputs=(TensorInfo(name="logits", role="logits", dtype=dtype_name(value.dtype), shape=shape),),
        aliases=tuple(Alias(input=name, output=name, in_place=True) for name in function.caches),
    )


class Programs(session.Session):
    """An artifact of target "dummy"."""

    name = "torch.export"
    targets = ("dummy",)

    def __init__(self, path: str | Path, *, check: bool = True):
        super().__init__(path, check=check)
        self._programs = {
            graph.phase: torch.export.load(self.path / graph.file).module(check_guards=False)
            for graph in self.manifest.graphs
        }

    def _run(self, graph: Graph, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        with torch.no_grad():
            (logits,) = self._programs[graph.phase](*[inputs[info.name] for info in graph.inputs])
        outputs["logits"].copy_(logits)
