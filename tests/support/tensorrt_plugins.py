"""What the tests of plugins share: plugins of sites, their kernels run in Triton's interpreter, and a TensorRT frontend
with plain integers for symbolic ones."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor

from kvcompile.backends.tensorrt_plugins import wrapper
from kvcompile.backends.tensorrt_plugins.description import Plugin, plugin_of
from kvcompile.backends.tensorrt_plugins.launched import launched
from kvcompile.kernels.triton.host.source import function_of
from kvcompile.kernels.triton.params import KernelSource
from kvcompile.layouts import CacheLayout
from kvcompile.specs import ScoreSpec
from tests.support.carried_scores import Carried
from tests.support.kernel_specs import DEVICES, Shape, cache

LIMIT = 64
ROUNDED = {"keys": {"dtype": "int8"}, "values": {"dtype": "int8"}}
PAGED = {"placement": {"kind": "paged", "page_size": 16}}
LAYOUTS: dict[str, CacheLayout] = {
    "contiguous": cache(),
    "contiguous int8": cache(**ROUNDED),
    "paged": cache(**PAGED),
    "paged int8": cache(**PAGED, **ROUNDED),
}


def shape(dtype: str) -> Shape:
    return Shape((4, 2), (16, 16), rotates=True, dtype=dtype)


def plugins(
    layout: str, one: bool, dtype: str = "bfloat16", limit: int = LIMIT, carried: Carried | None = None
) -> list[Plugin]:
    own = shape(dtype)
    site, leaves = own.site(LAYOUTS[layout]), []
    if carried is not None:
        site = replace(site, score=ScoreSpec(mod=carried.mod))
        leaves = [tuple(leaf.shape) for leaf in carried.leaves]
    found = launched(site, own.heads, own.dims, getattr(torch, dtype), DEVICES[90], limit, one, leaves)
    return [plugin_of(launch) for launch in found]


def sizes(plugin: Plugin, shapes: Sequence[Sequence[int]]) -> dict[sympy.Expr, int]:
    """Which number each size of the inputs is."""
    return {
        size: number
        for tensor, own in zip(plugin.inputs, shapes, strict=True)
        for size, number in zip(tensor.shape, own, strict=True)
        if not size.is_number
    }


def number(expression: sympy.Expr, known: Mapping[sympy.Expr, int]) -> int:
    symbols = {size: value for size, value in known.items() if size.is_Symbol}
    return known[expression] if expression in known else int(expression.xreplace(symbols).doit())


def run(plugin: Plugin, given: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The plugin's outputs, as TensorRT would call it: inputs, numbers, outputs.

    Aliased outputs are copies of their inputs here: what is written through an input is seen as a change of it.
    """
    inputs = [given[tensor.name] for tensor in plugin.inputs]
    for tensor, own in zip(plugin.inputs, inputs, strict=True):
        assert own.dtype == tensor.dtype and own.is_contiguous()
    known = sizes(plugin, [tuple(own.shape) for own in inputs])
    before = [own.clone() for own in inputs]
    outs = {}
    for tensor in plugin.outputs:
        size = [number(dim, known) for dim in tensor.shape]
        outs[tensor.name] = (
            given[tensor.aliases].clone() if tensor.aliases else torch.empty(size, dtype=tensor.dtype)
        )
    text = wrapper.text(plugin)
    path = folder / f"{plugin.name}.py"
    path.write_text(text, "utf-8")
    function: Any = function_of(KernelSource(plugin.name, (), text), path, text)
    numbers = [number(value, known) for _, value in plugin.scalars]
    grid = tuple(number(size, known) for size in plugin.grid)
    function[grid](*inputs, *numbers, *outs.values())
    for own, was in zip(inputs, before, strict=True):
        # Bytes: parts that no program writes are whatever was there.
        assert torch.equal(own.view(torch.uint8), was.view(torch.uint8)), "an input was written"
    return outs


# ---- a frontend


class Number:
    """A symbolic number, as TensorRT's: it has no reflected operators."""

    is_fake = False
    is_constant = True

    def __init__(self, value: Any = 0):
        self.value: int = value.value if isinstance(value, Number) else value

    def constant_value(self) -> int:
        return self.value

    def __add__(self, other: Any) -> Number:
        return Number(self.value + Number(other).value)

    def __sub__(self, other: Any) -> Number:
        return Number(self.value - Number(other).value)

    def __mul__(self, other: Any) -> Number:
        return Number(self.value * Number(other).value)

    def __floordiv__(self, other: Any) -> Number:
        return Number(self.value // Number(other).value)

    def __repr__(self) -> str:
        return f"ShapeExpr[{self.value}]"


@dataclass
class Desc:
    shape_expr: tuple[Any, ...]
    dtype: Any
    aliased_to: Desc | None = None

    def aliased(self) -> Desc:
        return Desc(self.shape_expr, self.dtype, self)


@dataclass
class Launch:
    grid_x: Any = 1
    grid_y: Any = 1
    grid_z: Any = 1
    block_x: Any = 1
    shared_mem: Any = 0


class Numbers(list):  # type: ignore[type-arg]
    def __init__(self, count: int):
        super().__init__([None] * count)


@dataclass
class Frontend:
    """`tensorrt.plugin`, as far as plugins are registered with it."""

    defined: dict[str, dict[str, Any]] = field(default_factory=dict)
    op: Any = field(default_factory=types.SimpleNamespace)
    TensorDesc: Any = Desc
    KernelLaunchParams: Any = Launch
    SymIntExprs: Any = Numbers
    SymInt32: Any = Number

    def register(self, name: str) -> Any:
        return self._define(name, "register")

    def aot_impl(self, name: str) -> Any:
        return self._define(name, "aot_impl")

    def _define(self, name: str, kind: str) -> Any:
        def taken(function: Any) -> Any:
            self.defined.setdefault(name, {})[kind] = function
            space, own = name.split("::")
            if not hasattr(self.op, space):
                setattr(self.op, space, types.SimpleNamespace())
            setattr(getattr(self.op, space), own, self.defined[name])
            return function

        return taken

    def cdiv(self, a: Any, b: Any) -> Number:
        return Number(-(-Number(a).value // Number(b).value))

    def min(self, a: Any, b: Any) -> Number:
        return Number(min(Number(a).value, Number(b).value))

    def max(self, a: Any, b: Any) -> Number:
        return Number(max(Number(a).value, Number(b).value))

    def from_shape_expr(self, shape: tuple[Any, ...], dtype: Any) -> Desc:
        return Desc(shape, dtype)


class Names:
    def __getattr__(self, name: str) -> str:
        return name


def tensorrt(**without: None) -> types.ModuleType:
    """A TensorRT module that has plugins."""
    module = types.ModuleType("tensorrt_of_tests")
    module.__version__ = "11.4"  # type: ignore[attr-defined]
    module.DataType = Names()  # type: ignore[attr-defined]
    module.IPluginV3QuickAOTBuild = object  # type: ignore[attr-defined]
    module.INetworkDefinition = type("INetworkDefinition", (), {"add_plugin": None})  # type: ignore[attr-defined]
    return module
