"""Plugins registered with TensorRT: `tensorrt.plugin`, the frontend of quick-deployable plugins, of TensorRT 10.8 on.

    register   names the inputs, and says shapes and types of the outputs and which of them are inputs in place
    aot_impl   hands over the PTX, the grid, and the numbers that the kernel is told

There is no autotune function: without one TensorRT takes the types as they are registered and dense tensors, which is
all that a kernel was compiled for. There is no impl either, which would need Python where the engine runs.

A network takes one by `add`; aliased outputs need the builder's preview feature ALIASED_PLUGIN_IO_10_03 (`configure`).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from types import GenericAlias
from typing import Any

import torch

from kvcompile.backends.tensorrt_plugins.description import NAMESPACE, Plugin
from kvcompile.backends.tensorrt_plugins.expressions import sizes_of, symbolic
from kvcompile.backends.tensorrt_plugins.ptx import Ptx
from kvcompile.errors import KernelError

_TYPES = {
    torch.float32: "FLOAT",
    torch.float16: "HALF",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "FP8",
    torch.int8: "INT8",
    torch.int32: "INT32",
    torch.int64: "INT64",
}


def unavailable(trt: Any) -> str | None:
    """Why a TensorRT module has no place for plugins, and what to do instead; None: it has."""
    name, version = trt.__name__, getattr(trt, "__version__", "?")
    instead = (
        "use the enterprise TensorRT, 10.8 or newer (pip install tensorrt, from https://pypi.nvidia.com), or export "
        "without plugins"
    )
    if not hasattr(trt, "INetworkDefinition") or not hasattr(trt.INetworkDefinition, "add_plugin"):
        # TensorRT-RTX 1.7.1: its ONNX parser even ends the process at a plugin.
        return f"{name} {version} has networks without plugin layers: {instead}"
    if not hasattr(trt, "IPluginV3QuickAOTBuild"):
        return f"{name} {version} has no plugins that are compiled ahead of time: {instead}"
    return None


def frontend(trt: Any) -> Any:
    """`plugin` of a TensorRT module.

    Raises:
        KernelError: it has none; says why.
    """
    problem = unavailable(trt)
    if problem is None:
        try:
            return importlib.import_module(f"{trt.__name__}.plugin")
        except ImportError as error:
            problem = f"{trt.__name__}.plugin does not import: {error}"
    raise KernelError(problem)


def name_of(plugin: Plugin, made: Ptx) -> str:
    """What a plugin is registered as: the same kernel for another architecture is another plugin."""
    return f"{plugin.name}_sm{made.arch}"


def register(plugin: Plugin, made: Ptx, trt: Any) -> Any:
    """Register a plugin with `trt` (once in a process and architecture), and return its definition, which `add` takes.

    Raises:
        KernelError: this TensorRT takes no such plugins.
    """
    qdp = frontend(trt)
    space = getattr(qdp.op, NAMESPACE, None)
    name = name_of(plugin, made)
    if space is not None and hasattr(space, name):
        return getattr(space, name)
    count = len(plugin.inputs)

    def expressions(descs: Sequence[Any]) -> Any:
        sizes = sizes_of([t.shape for t in plugin.inputs], [tuple(d.shape_expr) for d in descs])
        return lambda value: symbolic(value, sizes, qdp.cdiv, qdp.min, qdp.max)

    def describe(*descs: Any) -> Any:
        _check(plugin, descs)
        of = expressions(descs)
        known = {tensor.name: desc for tensor, desc in zip(plugin.inputs, descs, strict=True)}
        return tuple(
            known[tensor.aliases].aliased()
            if tensor.aliases
            else qdp.from_shape_expr(tuple(map(of, tensor.shape)), _dtype(trt, tensor.dtype))
            for tensor in plugin.outputs
        )

    def compiled(*given: Any) -> Any:
        of = expressions(given[:count])
        launch = qdp.KernelLaunchParams()
        launch.grid_x, launch.grid_y, launch.grid_z = map(of, plugin.grid)
        launch.block_x = made.threads
        launch.shared_mem = made.shared
        numbers = qdp.SymIntExprs(len(plugin.scalars))
        for place, (_, value) in enumerate(plugin.scalars):
            numbers[place] = qdp.SymInt32(of(value))
        return made.name, made.code, launch, numbers

    names = [tensor.name for tensor in plugin.inputs]
    outputs = GenericAlias(tuple, (qdp.TensorDesc,) * len(plugin.outputs))
    _sign(describe, dict.fromkeys(names, qdp.TensorDesc), outputs)
    wanted = {**dict.fromkeys(names, qdp.TensorDesc), "outputs": outputs, "tactic": int}
    _sign(compiled, wanted, GenericAlias(tuple, (str, str, qdp.KernelLaunchParams, qdp.SymIntExprs)))
    qdp.register(f"{NAMESPACE}::{name}")(describe)
    qdp.aot_impl(f"{NAMESPACE}::{name}")(compiled)
    return getattr(getattr(qdp.op, NAMESPACE), name)


def add(network: Any, plugin: Plugin, definition: Any, tensors: Sequence[Any]) -> Any:
    """The plugin's layer in a network, on `tensors` in the order of its inputs."""
    layer = network.add_plugin(definition(*tensors), aot=True)
    if layer is None:
        raise KernelError(f"TensorRT did not take {plugin.id} into the network: its log says why")
    return layer


def configure(config: Any, trt: Any) -> None:
    """Lets outputs of plugins be inputs in place."""
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)


def _check(plugin: Plugin, descs: Sequence[Any]) -> None:
    """Sizes that stand in the kernel as constants must be those of the network."""
    for tensor, desc in zip(plugin.inputs, descs, strict=True):
        for dim, (size, found) in enumerate(zip(tensor.shape, tuple(desc.shape_expr), strict=True)):
            if not size.is_number or found.is_fake:
                continue
            if not found.is_constant or found.constant_value() != int(size):
                raise KernelError(
                    f"{plugin.id}: dimension {dim} of {tensor.name} is {found!r} in the network, and its kernel was "
                    f"compiled for {size}: make the plugin of this network's sizes"
                )


def _dtype(trt: Any, dtype: torch.dtype) -> Any:
    return getattr(trt.DataType, _TYPES[dtype])


def _sign(function: Any, parameters: dict[str, Any], returns: Any) -> None:
    """Gives a function the signature by which `tensorrt.plugin` tells what it takes."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature(
        [inspect.Parameter(name, kind, annotation=hint) for name, hint in parameters.items()],
        return_annotation=returns,
    )
