"""Writes an optimized module to a folder."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils import _pytree as pytree

from kvcompile.compile import program_files
from kvcompile.compile.regions import Regions
from kvcompile.errors import ExportError
from kvcompile.original.digest import of_weights
from kvcompile.original.outputs import Outputs
from kvcompile.runtime.program import Program
from kvcompile.runtime.saved_module.graphs import Unwritable, graph_to_json
from kvcompile.runtime.saved_module.record import CODE, CONSTANTS, GRAPH, WEIGHTS, Record
from kvcompile.runtime.saved_module.tensors import packed
from kvcompile.runtime.saved_module.values import to_json
from kvcompile.runtime.saved_module.weights import SavedWeights
from kvcompile.targets import folder as files
from kvcompile.targets import machine
from kvcompile.targets.manifest import FILE
from kvcompile.util.whole_file import write_tensors

if TYPE_CHECKING:
    from kvcompile.runtime.module import CachedModel

# Of the graph's interface: what is no tensor and no Python.
PLAIN = (
    "caches",
    "states",
    "logits",
    "takes_position_ids",
    "takes_logits_to_keep",
    "takes_past_length",
    "ragged",
    "device",
    "ids",
    "last",
)


def save(module: CachedModel, folder: str | Path, *, weights: bool = True) -> None:
    """Write `module` to `folder`, as a whole or not at all; see `CachedModel.save`."""
    _check(module)
    regions, program = module.executor.regions, module.program
    standing = weights_of(module)
    views, bases = packed(
        {**standing.named(), **_prefixed("graph", regions.weights)} | _prefixed("constant", program.constants)
    )
    own = {name: bases[name] for name in standing.named() if name in bases}
    others = {name: tensor for name, tensor in bases.items() if name not in own}
    graph = {
        "regions": _regions(regions),
        "calls": to_json(regions.calls),
        "placeholders": list(regions.placeholders),
        "outputs": list(regions.outputs),
        "weights": {name: to_json(views[f"graph:{name}"]) for name in regions.weights},
        "constants": {name: to_json(views[f"constant:{name}"]) for name in program.constants},
        "parameters": {name: to_json(views[name]) for name, _ in standing.named_parameters()},
        "buffers": {name: to_json(views[name]) for name, _ in standing.named_buffers()},
        # Of a model over several devices: where what is not on the first one stands.
        "places": {name: str(base.device) for name, base in bases.items() if base.device != program.device},
    }
    record = Record(
        versions=versions(),
        kind="huggingface" if _is_hugging_face(module) else "plain",
        architecture=getattr(module.model, "architecture", type(module.model).__name__),
        weights=of_weights(standing),
        model=module.weights_digest(),
        inside=weights,
        recipe=module.recipe.model_dump(mode="json", exclude_unset=True) if module.recipe else {},
        plan=to_json(module.plan),
        program={name: to_json(getattr(program, name)) for name in PLAIN},
        outputs=_outputs(program),
        programs=[],
        machine=machine.needs(module.device, machine.has()),
        threads=program_files.threads(module.executor.programs) if module.device.type == "cpu" else None,
        report=json.loads(json.dumps(module.report.to_dict(), default=str)),
        analysis=_analysis(module),
        config=_config(module, "config"),
        generation=_config(module, "generation_config"),
    )
    with files.writing(folder) as made:
        (made / CODE).mkdir()
        programs = program_files.write(module.executor.programs, made / CODE)
        (made / GRAPH).write_text(json.dumps(graph), encoding="utf-8")
        if weights:
            write_tensors(_on_cpu(own), made / WEIGHTS)
        write_tensors(_on_cpu(others), made / CONSTANTS)
        vectors = program_files.instruction_sets(module.executor.programs) if programs else {}
        record = record.model_copy(
            update={"programs": to_json(programs), "vectors": vectors, "files": files.infos(made)}
        )
        (made / FILE).write_text(record.to_json(), encoding="utf-8")


def versions() -> dict[str, str]:
    """Of what compiled code and graphs are made for."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{name: importlib.metadata.version(name) for name in ("kvcompile", "torch")},
    }


def weights_of(module: CachedModel) -> SavedWeights:
    """The original's plain weights as `load` will have them, sharing their memory."""
    model = module.model
    if isinstance(model, SavedWeights):
        return model
    saved = model.state_dict(keep_vars=True).keys()
    parameters = {n: p.detach() for n, p in model.named_parameters() if type(p.data) is Tensor}
    buffers = {n: b.detach() for n, b in model.named_buffers() if n in saved and type(b) is Tensor}
    return SavedWeights(type(model).__name__, parameters, buffers)


def _check(module: CachedModel) -> None:
    """Raises ExportError where a module is more than its graph."""
    python = sorted({opaque.path for opaque in module.program.opaques})
    if python:
        raise ExportError(
            f"a module that runs Python cannot be saved ({', '.join(python[:5])}); save the original and the recipe, "
            "and optimize again"
        )
    if module.plan.backend != "inductor":
        raise ExportError(
            f"compile.backend {module.plan.backend}: what it compiles cannot be saved with a module; use "
            "kvcompile.export"
        )


def _regions(regions: Regions) -> list[Any]:
    try:
        return [graph_to_json(module) for module in regions.modules]
    except Unwritable as what:
        raise ExportError(
            f"the graph has {what}, which cannot be written; save the original and the recipe, and optimize again"
        ) from what


def _outputs(program: Program) -> dict[str, Any]:
    rebuild = program.rebuild
    assert isinstance(rebuild, Outputs)
    try:
        return {
            "spec": pytree.treespec_dumps(rebuild.spec),
            "constants": [[index, to_json(value)] for index, value in rebuild.constants],
            "flat": rebuild.flat,
        }
    except (NotImplementedError, TypeError) as error:
        raise ExportError(f"the model's output cannot be written: {error}") from error


def _analysis(module: CachedModel) -> dict[str, Any] | None:
    found = module.analysis
    if found is None:
        return None
    return {of.name: to_json(getattr(found, of.name)) for of in fields(found) if of.name != "plan"}


def _is_hugging_face(module: CachedModel) -> bool:
    return hasattr(module, "generation_config")


def _config(module: CachedModel, name: str) -> dict[str, Any] | None:
    config: Any = getattr(module, name, None)
    return json.loads(json.dumps(config.to_dict(), default=str)) if hasattr(config, "to_dict") else None


def _prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}:{name}": tensor for name, tensor in tensors.items()}


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
