"""ONNX file -> engine file: check, parse, profiles, targets, build.

Networks are strongly typed: the dtypes are those of the ONNX graph, and no precision is chosen here. Engines of one
graph are not equal byte for byte from build to build; their sha256 tells whether a file is whole, and nothing more.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from kvcompile.errors import ExportError
from kvcompile.targets.manifest import Alias, Graph, Profile
from kvcompile.targets.tensorrt import capabilities, network, watch
from kvcompile.targets.tensorrt.adapter import TensorRT
from kvcompile.targets.tensorrt.network import Network
from kvcompile.targets.tensorrt.options import Options
from kvcompile.targets.tensorrt.profiles import Sizes, profiles

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """An engine file and the part of the manifest that tells of it."""

    graph: Graph
    seconds: float
    bytes: int


def build(trt: TensorRT, file: Path, graph: Graph, sizes: Sizes, options: Options) -> Built:
    """Build the engine of an ONNX file, as `{phase}.engine` beside it.

    Args:
        graph: what the manifest says of the file.

    Raises:
        ExportError: options that this TensorRT does not have, or a graph that it cannot hold; no file is left.
        OSError: the engine cannot be written.
    """
    options.check(trt)
    model = ir.load(file)
    capabilities.check(model, options.compute_capabilities, graph.file)
    parsed = network.parse(trt, file, model)
    found = profiles(graph, sizes)
    started = time.perf_counter()
    serialized = parsed.builder.build_serialized_network(
        parsed.definition, _config(trt, parsed, found, options)
    )
    if serialized is None:
        reasons = "\n".join(f"  - {' '.join(line.split())}" for line in parsed.errors[:5])
        raise ExportError(f"{trt.package} {trt.version} cannot build {graph.file}:\n{reasons}")
    seconds = time.perf_counter() - started
    target = file.with_suffix(".engine")
    with target.open("wb") as out:
        out.write(memoryview(serialized))
    log.info("%s: %.1f MiB in %.1f s", target.name, serialized.nbytes / 2**20, seconds)
    aliases = tuple(
        Alias(input=a.input, output=a.output, in_place=(a.input, a.output) in parsed.in_place)
        for a in graph.aliases
    )
    told = graph.model_copy(update={"file": target.name, "aliases": aliases, "profiles": found})
    return Built(told, seconds, int(serialized.nbytes))


def _config(trt: TensorRT, parsed: Network, found: tuple[Profile, ...], options: Options) -> Any:
    config = parsed.builder.create_builder_config()
    if options.compute_capabilities:
        config.num_compute_capabilities = len(options.compute_capabilities)
        for place, name in enumerate(options.compute_capabilities):
            config.set_compute_capability(trt.module.ComputeCapability.__members__[name], place)
    if options.workspace_bytes is not None:
        config.set_memory_pool_limit(trt.module.MemoryPoolType.WORKSPACE, options.workspace_bytes)
    progress = watch.monitor(trt)
    if progress is not None:
        config.progress_monitor = progress
    for profile in found:
        made = parsed.builder.create_optimization_profile()
        for name, span in profile.shapes.items():
            made.set_shape(name, span.min, span.opt, span.max)
        if config.add_optimization_profile(made) < 0:
            raise ExportError(
                f"TensorRT refuses the profile {profile.name}: {' '.join(parsed.errors[-1:]) or 'no reason given'}"
            )
    return config
