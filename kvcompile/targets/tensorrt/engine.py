"""Loading an engine file: does it fit this TensorRT and this GPU, is it what the manifest says.

Everything here is found out before any memory of the GPU is taken for caches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcompile.errors import ArtifactError, ExportError
from kvcompile.targets.manifest import Graph, Manifest
from kvcompile.targets.tensorrt import adapter
from kvcompile.targets.tensorrt.adapter import TensorRT

_SAME = 3  # components of the version that must agree: an engine runs on the TensorRT that built it


def installed(manifest: Manifest, path: Path) -> TensorRT:
    """The TensorRT that can run an artifact's engines.

    Raises:
        ArtifactError: none is installed, or one of another kind or version.
    """
    told = manifest.engine or {}
    wanted = f"TensorRT{' for RTX' if told.get('rtx') else ''} {told.get('version', '?')}"
    reasons = []
    for name in adapter.PACKAGES:
        try:
            found = adapter.load((name,))
        except ExportError as error:
            reasons.append(str(error).splitlines()[1].removeprefix("  - "))
            continue
        problem = mismatch(manifest, found)
        if problem is None:
            return found
        reasons.append(f"{name}: {problem}")
    lines = "\n".join(f"  - {reason}" for reason in reasons)
    raise ArtifactError(
        f"{path} was built by {wanted}, and that is not installed:\n{lines}\nInstall {wanted}, or export again with "
        f"what is installed. TensorRT comes by {adapter.INSTALL}"
    )


def mismatch(manifest: Manifest, trt: TensorRT) -> str | None:
    """Why this TensorRT does not run the artifact's engines, or None."""
    told = manifest.engine or {}
    if bool(told.get("rtx")) != trt.rtx:
        kinds = {True: "TensorRT for RTX", False: "the enterprise TensorRT"}
        return f"{trt.version} is {kinds[trt.rtx]}, and the engine is of {kinds[not trt.rtx]}"
    if str(told.get("version")).split(".")[:_SAME] != trt.version.split(".")[:_SAME]:
        return f"{trt.version} is installed, and an engine runs on the version that built it only"
    return None


def check_gpu(manifest: Manifest, capability: str | None, trt: TensorRT, path: Path) -> None:
    """Refuse a GPU that the engine was not built for; capability: of the GPU, as in "SM89", None: there is none.

    Raises:
        ArtifactError: another GPU is needed.
    """
    built_for = tuple((manifest.engine or {}).get("compute_capabilities", ()))
    if capability is None:
        raise ArtifactError(
            f"{path}: a TensorRT engine needs an NVIDIA GPU and its driver, and PyTorch finds none; the graphs beside "
            "it run on ONNX Runtime (kvcompile.targets.onnx.session.Session)"
        )
    known = built_for or trt.targets
    if known and capability not in known:
        instead = (
            f"export again with compute_capabilities=[{capability!r}]"
            if capability in trt.targets
            else "TensorRT for RTX does not run on it: export with the enterprise `tensorrt`, or target='onnx'"
        )
        raise ArtifactError(
            f"{path}: the engine is for {', '.join(known)}, and this GPU is {capability}; {instead}"
        )


def deserialize(trt: TensorRT, runtime: Any, file: Path, errors: list[str]) -> Any:
    """The ICudaEngine of a file.

    Raises:
        ArtifactError: TensorRT does not take it: truncated, damaged, of another version or for another GPU.
    """
    errors.clear()
    engine = runtime.deserialize_cuda_engine(file.read_bytes())
    if engine is None:
        # The first is the cause, where there are several.
        reason = " ".join((errors or ["no reason given"])[0].split())
        raise ArtifactError(f"{file}: {trt.package} {trt.version} cannot load it: {reason}")
    return engine


def check_engine(engine: Any, graph: Graph, file: Path) -> None:
    """Refuse an engine that is not the one that the manifest tells of.

    Raises:
        ArtifactError: other inputs or outputs, other profiles, or other caches updated in place.
    """
    names = {engine.get_tensor_name(number) for number in range(engine.num_io_tensors)}
    told = {tensor.name for tensor in (*graph.inputs, *graph.outputs)}
    problem = None
    if names != told:
        odd = sorted(names ^ told)
        problem = f"inputs and outputs differ: {', '.join(odd[:4])}"
    elif engine.num_optimization_profiles != len(graph.profiles):
        problem = f"it has {engine.num_optimization_profiles} profiles, and the manifest tells of {len(graph.profiles)}"
    elif hasattr(engine, "get_aliased_input_tensor"):
        for alias in graph.aliases:
            found = engine.get_aliased_input_tensor(alias.output) or None
            if found != (alias.input if alias.in_place else None):
                problem = f"{alias.output} is {'one with ' + found if found else 'apart from every input'}"
                break
    if problem is not None:
        raise ArtifactError(
            f"{file}: not the engine of this manifest: {problem}; copy the whole artifact, or export again"
        )
