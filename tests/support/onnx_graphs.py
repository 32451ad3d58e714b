"""Small ONNX graphs, node by node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import TensorProto, helper

F32, F16, BF16 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16
I8, I32, I64, U8, FP8 = (
    TensorProto.INT8,
    TensorProto.INT32,
    TensorProto.INT64,
    TensorProto.UINT8,
    TensorProto.FLOAT8E4M3FN,
)
Shape = Sequence[int | str]


def graph(
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, tuple[int, Shape]],
    outputs: dict[str, tuple[int, Shape]],
    constants: dict[str, tuple[int, list[int]]] | None = None,
    inner: dict[str, int] | None = None,
) -> onnx.ModelProto:
    """A model of a few nodes; constants are 1-D integers; inner: dtypes of values in between."""
    made = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(name, dtype, shape) for name, (dtype, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, dtype, shape) for name, (dtype, shape) in outputs.items()],
        [helper.make_tensor(n, dtype, [len(v)], v) for n, (dtype, v) in (constants or {}).items()],
        value_info=[helper.make_tensor_value_info(n, dtype, None) for n, dtype in (inner or {}).items()],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), outputs.split(), name=f"the_{op}", **attributes)


def binary(op: str, dtype: int, **attributes: Any) -> onnx.ModelProto:
    ends = (dtype, ["b", 8])
    return graph([node(op, "x y", "z", **attributes)], {"x": ends, "y": ends}, {"z": ends})


def through(dtype: int) -> onnx.ModelProto:
    """fp32 -> dtype -> fp32."""
    nodes = [node("Cast", "x", "y", to=dtype), helper.make_node("Cast", ["y"], ["z"], to=F32, name="back")]
    return graph(nodes, {"x": (F32, ["b", 8])}, {"z": (F32, ["b", 8])}, inner={"y": dtype})


def scatter(dtype: int, **attributes: Any) -> onnx.ModelProto:
    inputs: dict[str, tuple[int, Shape]] = {
        "cache": (dtype, ["b", 32]),
        "at": (I64, ["b", 2, 2]),
        "rows": (dtype, ["b", 2]),
    }
    return graph(
        [node("ScatterND", "cache at rows", "out", **attributes)], inputs, {"out": (dtype, ["b", 32])}
    )


def topk(k: int) -> onnx.ModelProto:
    return graph(
        [node("TopK", "x k", "v i")],
        {"x": (F32, ["b", 5000])},
        {"v": (F32, ["b", k]), "i": (I64, ["b", k])},
        {"k": (I64, [k])},
    )


def attention(outputs: str = "o", dtype: int = F16, dim: int = 64, **attributes: Any) -> onnx.ModelProto:
    """Attention; outputs: "o", or that and names of present keys and values."""
    old, new = (dtype, ["b", 2, "t", dim]), (dtype, ["b", 2, "s", dim])
    ends: dict[str, tuple[int, Shape]] = {"q": new, "k": new, "v": new}
    if outputs == "o":
        return graph([node("Attention", "q k v", outputs, **attributes)], ends, {"o": new})
    made = helper.make_node("Attention", ["q", "k", "v", "", "pk", "pv"], outputs.split(), name="a")
    results = dict.fromkeys(outputs.split()[1:], (dtype, ["b", 2, "u", dim]))
    return graph([made], ends | {"pk": old, "pv": old}, {"o": new} | results)


def update(
    dtype: int = F16, mode: str = "linear", slots: int | str = 32, before: bool = False, after: bool = False
) -> onnx.ModelProto:
    """TensorScatter; before, after: with an operator between it and the graph's input, or output."""
    cache, new = (dtype, ["b", 2, slots, 8]), (dtype, ["b", 2, 3, 8])
    middle = [node("TensorScatter", f"{'n' if before else 'cache'} new at", "m", axis=-2, mode=mode)]
    nodes = [*([node("Neg", "cache", "n")] if before else []), *middle]
    out = "m"
    if after:
        nodes.append(helper.make_node("Neg", ["m"], ["o"], name="behind"))
        out = "o"
    return graph(
        nodes, {"cache": cache, "new": new, "at": (I64, ["b"])}, {out: cache}, inner={"n": dtype, "m": dtype}
    )


def flat_update() -> onnx.ModelProto:
    inputs: dict[str, tuple[int, Shape]] = {
        "cache": (F16, ["b", 2, 32]),
        "new": (F16, ["b", 2, 3]),
        "at": (I64, ["b"]),
    }
    return graph([node("TensorScatter", "cache new at", "o", axis=-1)], inputs, {"o": (F16, ["b", 2, 32])})


def matmul(dtype: int) -> onnx.ModelProto:
    return graph(
        [node("MatMul", "x y", "z")],
        {"x": (dtype, ["b", 64]), "y": (dtype, [64, 64])},
        {"z": (dtype, ["b", 64])},
    )
