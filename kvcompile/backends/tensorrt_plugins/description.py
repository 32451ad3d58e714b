"""A launch of a generated kernel as a plugin: what goes in, what comes out, and what the kernel is told besides.

TensorRT launches an ahead-of-time kernel with (inputs ..., scalars ..., outputs ...): addresses, then int32 numbers
that it computes from the sizes of the inputs, then addresses (`tensorrt.plugin.aot_impl`). Tensors are dense, so
strides are products of sizes: those that are known stand in the kernel as constants, the others are scalars.

A part of the cache that the kernel writes is an input and an output that is aliased to it: TensorRT gives both one
address, and the kernel writes through the output's.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

import sympy
import torch

from kvcompile.backends.tensorrt_plugins.launched import Launched, Shape
from kvcompile.errors import KernelError
from kvcompile.kernels.triton.generate import generate
from kvcompile.kernels.triton.params import KernelSource, ScalarParam, TensorParam
from kvcompile.kernels.triton.spec import KernelSpec

NAMESPACE = "kvcompile"
# What a role makes new; of the rest it writes, append writes the parts of the cache, and the others nothing.
_NEW = {
    "append": ("q_out", "k_out", "v_out"),
    "decode": ("partial", "sums", "spans", "logits", "levels"),
    "combine": ("out", "lse"),
    "prefill": ("out", "lse"),
}
_DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int8, torch.int32, torch.int64),
)


@dataclass(frozen=True)
class PluginTensor:
    """An input or an output. aliases: of an output, the input whose memory it is"""

    name: str
    dtype: torch.dtype
    shape: Shape
    aliases: str | None = None


@dataclass(frozen=True)
class Plugin:
    """One kernel as a plugin.

    scalars:   what the kernel is told at run time, int32, by the name in its signature
    constants: what stands in its text: strides and sizes that no input changes
    grid:      programs in x, y, z; threads of a program are `32 * num_warps`
    """

    spec: KernelSpec
    inputs: tuple[PluginTensor, ...]
    outputs: tuple[PluginTensor, ...]
    scalars: tuple[tuple[str, sympy.Expr], ...]
    constants: tuple[tuple[str, int | float], ...]
    grid: Shape
    num_warps: int
    num_stages: int

    @cached_property
    def name(self) -> str:
        """The role, and a hash of all that the plugin is."""
        return f"{self.spec.role}_{hashlib.sha256(self._text.encode()).hexdigest()[:16]}"

    @property
    def id(self) -> str:
        return f"{NAMESPACE}::{self.name}"

    @property
    def source(self) -> KernelSource:
        return generate(self.spec)

    @property
    def aliases(self) -> dict[str, str]:
        """Output -> input, where both are the same memory."""
        return {tensor.name: tensor.aliases for tensor in self.outputs if tensor.aliases}

    def to_json(self) -> dict[str, object]:
        """For the manifest of an engine that has the plugin in it."""

        def told(tensors: tuple[PluginTensor, ...]) -> list[dict[str, object]]:
            return [
                {
                    "name": tensor.name,
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "shape": [*map(str, tensor.shape)],
                    **({"aliases": tensor.aliases} if tensor.aliases else {}),
                }
                for tensor in tensors
            ]

        return {
            "id": self.id,
            "spec": json.loads(self.spec.to_json()),
            "inputs": told(self.inputs),
            "outputs": told(self.outputs),
            "scalars": {name: str(value) for name, value in self.scalars},
            "grid": [*map(str, self.grid)],
            "warps": self.num_warps,
            "stages": self.num_stages,
        }

    @property
    def _text(self) -> str:
        own = [self.spec.to_json(), *map(str, (*self.inputs, *self.outputs, *self.scalars, *self.constants))]
        return "\n".join((*own, str(self.grid), str(self.num_warps), str(self.num_stages)))


def plugin_of(launch: Launched) -> Plugin:
    """The plugin of a launch.

    Raises:
        KernelError: the role has no form as a plugin, or an argument has a type that TensorRT's plugins do not take.
    """
    spec = launch.spec
    if spec.role not in _NEW:
        raise KernelError(
            f"kernels of role {spec.role} have no form as TensorRT plugins: {', '.join(_NEW)} have; export the graph "
            "without plugins, which has all roles"
        )
    inputs, outputs = [], []
    scalars: list[tuple[str, sympy.Expr]] = []
    constants: list[tuple[str, int | float]] = []
    for param in generate(spec).params:
        if isinstance(param, ScalarParam):
            _number(spec, param.name, param.type, launch.sizes[param.name], scalars, constants)
            continue
        shape = launch.tensors[param.name]
        _check(spec, param, shape)
        own = PluginTensor(param.name, param.dtype, shape)
        if param.name in _NEW[spec.role]:
            outputs.append(own)
        else:
            inputs.append(own)
            if _written(spec, param.name):
                outputs.append(PluginTensor(f"{param.name}_kept", param.dtype, shape, param.name))
        for stride, name in zip(_strides(shape), param.names[1:], strict=False):
            _number(spec, name, "i32", stride, scalars, constants)
    return Plugin(
        spec,
        tuple(inputs),
        tuple(outputs),
        tuple(scalars),
        tuple(constants),
        launch.grid,
        launch.num_warps,
        launch.num_stages,
    )


def _written(spec: KernelSpec, name: str) -> bool:
    """Whether the kernel writes an input in place: of append, the parts of the cache but calibrated scales."""
    if spec.role != "append":
        return False
    fixed = set()
    for side, storage, dim in (
        ("keys", spec.layout.keys, spec.head_dim),
        ("values", spec.layout.values, spec.v_head_dim),
    ):
        fixed |= {f"{side}_{part.name}" for part in storage.parts(dim, spec.torch_dtype) if part.fixed}
    return name.startswith(("keys_", "values_")) and name not in fixed


def _strides(shape: Shape) -> list[sympy.Expr]:
    """Of a dense tensor, in elements, of all dimensions but the last."""
    found: list[sympy.Expr] = []
    step: sympy.Expr = sympy.Integer(1)
    for size in reversed(shape[1:]):
        step = step * size
        found.append(step)
    return found[::-1]


def _number(
    spec: KernelSpec,
    name: str,
    kind: str,
    value: sympy.Expr,
    scalars: list[tuple[str, sympy.Expr]],
    constants: list[tuple[str, int | float]],
) -> None:
    if value.is_number:
        constants.append((name, int(value) if value.is_integer else float(value)))
    elif kind == "i32":
        scalars.append((name, value))
    else:
        raise KernelError(
            f"{spec.role} kernel: {name} is {kind} and known at run time only; TensorRT computes int32 numbers alone"
        )


def _check(spec: KernelSpec, param: TensorParam, shape: Shape) -> None:
    if param.dtype not in _DTYPES and param.name.startswith("leaf"):
        what = " (truth values or bytes)" if param.dtype == torch.uint8 else ""
        raise KernelError(
            f"{spec.role} kernel: {param.name} is {param.dtype}{what}, which TensorRT's plugins do not take; what "
            "scores read has a plugin in int8, int32, int64, float16, bfloat16 and float32"
        )
    if param.dtype not in _DTYPES:
        raise KernelError(
            f"{spec.role} kernel: {param.name} is {param.dtype}, which TensorRT's plugins do not take; int8, float16, "
            "bfloat16 and float32 caches have plugins"
        )
    if param.rank and len(shape) != param.rank:
        raise KernelError(
            f"{spec.role} kernel: {param.name} has {len(shape)} dimensions, expected {param.rank}"
        )
