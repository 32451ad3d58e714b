"""Target tensorrt: step.engine (or prefill.engine and decode.engine) beside the ONNX graphs they were built from.

One graph serves prefill and decode with an optimization profile for each, so that the weights are there once. Only
retention by scores has a graph for each phase: one token takes its slot before it attends, many attend before the
slots are chosen, and neither is a case of the other.

Options:
    package               "tensorrt", "tensorrt_rtx" or "tensorrt_rtx_bindings"; None: the first that is installed
    compute_capabilities  GPUs to build for, as in ["SM89"] (TensorRT for RTX only); None: see `Options`
    workspace_bytes       the most that a tactic may take; None: TensorRT's own choice
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcompile.errors import ExportError
from kvcompile.kernels.shared.dialect import TENSORRT
from kvcompile.layouts.pages import SPARE_PAGES
from kvcompile.targets.functional import Functional, Phase, functional
from kvcompile.targets.manifest import Manifest
from kvcompile.targets.onnx.graph import emit
from kvcompile.targets.onnx.weights import WeightFile
from kvcompile.targets.onnx.write import WEIGHTS, checked
from kvcompile.targets.source import Source
from kvcompile.targets.tensorrt import adapter
from kvcompile.targets.tensorrt.build import build
from kvcompile.targets.tensorrt.options import Options
from kvcompile.targets.tensorrt.profiles import Sizes

_OPTIONS = ("compute_capabilities", "package", "workspace_bytes")


def write(
    source: Source, folder: Path, options: dict[str, Any], tell: Callable[[str, int, int], None]
) -> Manifest:
    """Write graphs and engines to `folder`; see `kvcompile.export`.

    Raises:
        ExportError: no TensorRT, an unknown option, or a graph that TensorRT cannot hold.
    """
    trt, chosen = ready(options)
    function = functional(source.front, source.plan, TENSORRT)
    phases = phases_of(function)
    sizes = sizes_of(function)
    emitted = []
    with WeightFile(folder / WEIGHTS) as weights:
        for number, phase in enumerate(phases):
            tell(f"export {phase}", number, len(phases))
            emitted.append(emit(function, phase, folder, weights, source.metadata()))
    built = []
    for number, each in enumerate(emitted):
        checked(folder / each.file)
        tell(f"build {each.phase}.engine", number, len(emitted))
        built.append(build(trt, folder / each.file, each, sizes, chosen))
    tell("build", len(built), len(built))
    return source.manifest(
        "tensorrt",
        function,
        tuple(b.graph for b in built),
        ("onnx", "onnxscript"),
        engine={
            "package": trt.package,
            "version": trt.version,
            "rtx": trt.rtx,
            "compute_capabilities": list(chosen.compute_capabilities),
        },
    )


def ready(options: dict[str, Any]) -> tuple[adapter.TensorRT, Options]:
    """The TensorRT to build with, and the options as it can have them.

    Raises:
        ExportError: see `write`.
    """
    unknown = options.keys() - set(_OPTIONS)
    if unknown:
        raise ExportError(
            f"options: {min(unknown)!r} is not one of target tensorrt; it has: {', '.join(_OPTIONS)}"
        )
    package = options.get("package")
    if package is not None and package not in adapter.PACKAGES:
        raise ExportError(f"package: expected one of {', '.join(adapter.PACKAGES)}, got {package!r}")
    targets = options.get("compute_capabilities") or ()
    if not isinstance(targets, (list, tuple)):  # one
        targets = (targets,)
    workspace = options.get("workspace_bytes")
    if workspace is not None and (not isinstance(workspace, int) or isinstance(workspace, bool)):
        raise ExportError(f"workspace_bytes: expected a number of bytes, got {workspace!r}")
    trt = adapter.load(adapter.PACKAGES if package is None else (package,))
    chosen = Options(tuple(str(name) for name in targets), workspace)
    chosen.check(trt)
    return trt, chosen


def phases_of(function: Functional) -> tuple[Phase, ...]:
    """The graphs that a plan needs."""
    one_pass = all(decision.layout.chunk_invariant for decision in function.plan.decisions)
    return ("step",) if one_pass else ("prefill", "decode")


def sizes_of(function: Functional) -> Sizes:
    """The most of each size, from the plan's limits; the recipe's `runtime` keys set them."""
    plan, limits = function.plan, function.plan.limits
    chunk = limits.prefill_chunk
    if plan.whole_prompts:
        if limits.max_tokens is None:
            raise ExportError(
                "a retention that scores whole prompts takes each in one call, and a TensorRT profile needs to know "
                "the longest: set runtime.max_tokens, or prefill: bounded"
            )
        chunk = limits.max_tokens
    elif limits.max_tokens is not None:
        chunk = min(chunk, limits.max_tokens)
    pages = {}
    for number, pool in enumerate(function.shape.pools):
        own = pool.group.pages
        all_pages = limits.max_batch * pool.group.pages_per_sequence if own is None else own
        pages[f"pages_{number}"] = all_pages + SPARE_PAGES
    return Sizes(limits.max_batch, chunk, function.shape.span, pages)
