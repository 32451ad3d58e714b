"""Reads an optimized module from a folder."""

from __future__ import annotations

import json
import logging
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.utils import _pytree as pytree

from kvcompile.compile import program_files
from kvcompile.compile.cudagraph import CudaRecorder, StepGraphs
from kvcompile.compile.executor import Executor
from kvcompile.compile.inductor import Compiled, ShapeClass
from kvcompile.compile.regions import RegionCall, Regions
from kvcompile.errors import ArtifactError
from kvcompile.kernels.cpp.host import ops as cpp_ops  # noqa: F401  compiled code calls them by name
from kvcompile.kernels.ops import cached_attention as ops  # noqa: F401  the graph calls them by name
from kvcompile.original.digest import of_weights
from kvcompile.original.outputs import Outputs
from kvcompile.pipeline import Analysis
from kvcompile.plan import Plan
from kvcompile.recipe import Recipe
from kvcompile.runtime.module import CachedModel, PlainCachedModel
from kvcompile.runtime.program import Program
from kvcompile.runtime.report import Report
from kvcompile.runtime.saved_module.graphs import graph_of_json
from kvcompile.runtime.saved_module.record import CODE, CONSTANTS, GRAPH, WEIGHTS, Record
from kvcompile.runtime.saved_module.tensors import View
from kvcompile.runtime.saved_module.values import of_json
from kvcompile.runtime.saved_module.weights import SavedWeights, given, tensors_of
from kvcompile.runtime.saved_module.write import PLAIN, versions
from kvcompile.targets import folder as files
from kvcompile.targets import machine

log = logging.getLogger(__name__)

_DAMAGED = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    RuntimeError,
    AssertionError,
    ImportError,
)


def load(folder: str | Path, *, weights: Any = None, check: bool = True) -> CachedModel:
    """The module that `CachedModel.save` wrote to `folder`; see `kvcompile.load`."""
    path = Path(folder).expanduser()
    record = Record.read(path)
    files.check_files(path, record.files, contents=check)
    here = versions()
    if record.versions.get("kvcompile") != here["kvcompile"]:
        raise ArtifactError(
            f"{path} was saved by kvcompile {record.versions.get('kvcompile')}, and this is {here['kvcompile']}; "
            "optimize the model again"
        )
    bases = _weights(path, record, weights)
    try:
        bases |= tensors_of(path / CONSTANTS)
        with torch.no_grad():
            module = _module(path, record, bases, weights is not None)
    except (*_DAMAGED, OSError, SafetensorError, RecursionError) as error:
        if isinstance(error, ArtifactError):
            raise
        raise ArtifactError(f"{path}: damaged or edited by hand: {error}; save the module again") from error
    _take_code(module, path, record, here)
    return module


def _is_here(device: torch.device) -> bool:
    """Whether tensors can be on `device`."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):  # no such GPU; or torch was built without
        return False
    return True


def _weights(path: Path, record: Record, weights: Any) -> dict[str, Tensor]:
    if record.inside and weights is None:
        try:
            return tensors_of(path / WEIGHTS)
        except (OSError, SafetensorError) as error:
            raise ArtifactError(f"{path / WEIGHTS} cannot be read: {error}") from error
    if weights is None:
        raise ArtifactError(
            f"{path} was saved without its weights: pass weights=, the model of {record.architecture}, its state dict, "
            "or the safetensors of its checkpoint"
        )
    return given(weights)


def _module(path: Path, record: Record, bases: dict[str, Tensor], foreign: bool) -> CachedModel:
    """foreign: whether the weights are not those of the folder"""
    graph = json.loads((path / GRAPH).read_text(encoding="utf-8"))
    program: dict[str, Any] = {name: of_json(record.program[name]) for name in PLAIN}
    device: torch.device = program["device"]
    places = {str(name): torch.device(place) for name, place in graph.get("places", {}).items()}
    for other in (device, *places.values()):
        if not _is_here(other):
            raise ArtifactError(
                f"{path} was saved from {other}, and there is none here; optimize the model again"
            )

    def tensors(views: dict[str, Any]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, data in views.items():
            view: View = of_json(data)
            if view.base not in bases:
                raise ArtifactError(
                    f"{path}: its weights have {view.base}, and those that were given do not: they are of another "
                    "model, or go by other names"
                )
            place = places.get(view.base, device)
            base = bases[view.base] = bases[view.base].detach().to(place).contiguous()
            try:
                found[name] = view.of(base)
            except ValueError as error:
                if not foreign:
                    raise
                raise ArtifactError(
                    f"{path}: {view.base} of the weights that were given is {list(base.shape)}: {error}; they are of "
                    "another model"
                ) from error
        return found

    plan: Plan = of_json(record.plan)
    standing = SavedWeights(record.architecture, tensors(graph["parameters"]), tensors(graph["buffers"]))
    standing.saved_as = (record.weights, record.model)
    if foreign and of_weights(standing) != record.weights:
        raise ArtifactError(
            f"{path}: the weights that were given are not those that it was saved with: they are of another checkpoint "
            f"of {record.architecture}, or not in {plan.dtype}; optimize that one"
        )
    modules = tuple(graph_of_json(nodes, f"Region{number}") for number, nodes in enumerate(graph["regions"]))
    calls: tuple[RegionCall, ...] = of_json(graph["calls"])
    regions = Regions(
        modules,
        calls,
        tuple(graph["placeholders"]),
        tensors(graph["weights"]),
        tuple(graph["outputs"]),
    )
    recipe = Recipe.load(record.recipe)
    graphs = StepGraphs(CudaRecorder(device)) if plan.step == "cudagraph" else None
    executor = Executor(regions, recipe.compile.mode, graphs)
    interface = Program(constants=tensors(graph["constants"]), rebuild=_outputs(record), **program)
    kind: type[CachedModel] = PlainCachedModel
    if record.kind == "huggingface":
        from kvcompile.runtime.huggingface import HuggingFaceCachedModel

        kind = HuggingFaceCachedModel
        _give_configs(standing, record)
    module = kind(standing, interface, plan, executor)
    module.recipe = recipe
    if record.analysis is not None:
        module.analysis = Analysis(
            plan=plan, **{name: of_json(value) for name, value in record.analysis.items()}
        )
    module.report = Report(record.report)
    module.watch_original()
    return module


def _outputs(record: Record) -> Outputs:
    spec = str(record.outputs["spec"])
    _import_types(json.loads(spec))
    constants = tuple((int(index), of_json(value)) for index, value in record.outputs["constants"])
    return Outputs(pytree.treespec_loads(spec), constants, record.outputs["flat"])


def _import_types(data: Any) -> None:
    """Classes of outputs are known to pytree once the module is imported that defines them."""
    if isinstance(data, dict):
        name = data.get("type")
        if isinstance(name, str) and name.startswith("transformers."):
            import_module(name.rpartition(".")[0])
    for value in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        _import_types(value)


def _give_configs(standing: SavedWeights, record: Record) -> None:
    from transformers import GenerationConfig, PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = dict(record.config or {})
    kind = str(config.get("model_type"))
    known: Any = PretrainedConfig
    if kind in CONFIG_MAPPING:  # it has no `get` of its own
        known = CONFIG_MAPPING[kind]
    configs = known.from_dict(config), GenerationConfig.from_dict(dict(record.generation or {}))
    standing.config, standing.generation_config = configs
    standing.name_or_path = str(config.get("_name_or_path", ""))


def _take_code(module: CachedModel, path: Path, record: Record, here: dict[str, str]) -> None:
    """Compiled code where it is for this machine; a warning, and it is compiled when it is needed, where it is not."""
    other = next((name for name in here if here[name] != record.versions.get(name)), None)
    reason = (
        f"it is compiled by {other} {record.versions.get(other)}, and this is {here[other]}"
        if other
        else machine.problem(record.machine)
    )
    programs: dict[ShapeClass, list[Compiled]] = {}
    if reason is None and module.executor.compiled:
        try:
            programs = program_files.read(
                of_json(record.programs), path / CODE, record.vectors, record.threads
            )
        except (*_DAMAGED, OSError) as error:
            reason = f"{type(error).__name__}: {error}"
    if reason is not None and record.programs:
        warnings.warn(
            f"{path}: its compiled code is not used, and is made anew when it is first needed: {reason}",
            stacklevel=3,
        )
    if programs and record.threads not in (None, torch.get_num_threads()):
        log.warning(
            "%s: its code was compiled for %s threads, which it uses here, too, where torch has %s; for speed, "
            "optimize the model in a process with as many threads as this one, and save it from there",
            path,
            record.threads,
            torch.get_num_threads(),
        )
    for shapes, calls in programs.items():
        module.take(shapes, calls)
