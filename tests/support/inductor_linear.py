"""Prints what Inductor makes of a decoder layer's linear layers, on a machine without a GPU, as for one.

Run by `tests/kernels/triton/linear/test_in_inductor.py`, in a process where Triton compiles (`inductor_sm90.py`).
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch._inductor.graph
from torch.fx import Graph, GraphModule

from kvcompile.compile import linear_forms
from kvcompile.compile.inductor import ShapeClass, Tracer
from kvcompile.kernels.triton import available
from kvcompile.kernels.triton.device import Device, acting_as
from tests.support.inductor_sm90 import act_as_sm90, program_of

WIDTH, KV, INNER = 256, 64, 512
WEIGHTS = {
    "q": (WIDTH, WIDTH),
    "k": (KV, WIDTH),
    "v": (KV, WIDTH),
    "o": (WIDTH, WIDTH),
    "gate": (INNER, WIDTH),
    "up": (INNER, WIDTH),
    "down": (WIDTH, INNER),
    "norm": (WIDTH,),
    "next_norm": (WIDTH,),
}


def region() -> GraphModule:
    """From one attention to the next: its output, the MLP, and what the next begins with, summed up."""
    g, aten = Graph(), torch.ops.aten
    x = g.placeholder("x")
    weights = {name: g.placeholder(name) for name in WEIGHTS}

    def linear(name: str, of: Any) -> Any:
        return g.call_function(aten.linear.default, (of, weights[name]))

    def normed(name: str, of: Any) -> Any:
        wide = g.call_function(aten.to.dtype, (of, torch.float32))
        mean = g.call_function(
            aten.mean.dim, (g.call_function(aten.pow.Tensor_Scalar, (wide, 2)), [-1], True)
        )
        root = g.call_function(aten.rsqrt.default, (g.call_function(aten.add.Tensor, (mean, 1e-5)),))
        made = g.call_function(
            aten.to.dtype, (g.call_function(aten.mul.Tensor, (wide, root)), torch.bfloat16)
        )
        return g.call_function(aten.mul.Tensor, (weights[name], made))

    h = g.call_function(aten.add.Tensor, (x, linear("o", g.call_function(aten.relu.default, (x,)))))
    y = normed("norm", h)
    gate = g.call_function(aten.silu.default, (linear("gate", y),))
    opened = g.call_function(aten.mul.Tensor, (gate, linear("up", y)))
    h = g.call_function(aten.add.Tensor, (h, linear("down", opened)))
    y = normed("next_norm", h)
    q, k, v = (linear(name, y) for name in "qkv")
    g.output((h, g.call_function(aten.relu.default, (q,)), k, v))
    return GraphModule(torch.nn.Module(), g, "Region")


def printed_of(shapes: ShapeClass) -> dict[str, Any]:
    tracer, device = Tracer(shapes), torch.device("cpu")
    inputs = [
        tracer.empty((tracer.batch, tracer.tokens, WIDTH), torch.bfloat16, device),
        *(tracer.empty(shape, torch.bfloat16, device) for shape in WEIGHTS.values()),
    ]
    return program_of(region(), inputs, tracer)


def main() -> None:
    act_as_sm90()
    linear_forms.on_gpu = lambda device: True
    available.problem = lambda device: None
    # It asks of GPUs' tensors alone whether they begin at multiples of 16 bytes, as these do.
    torch._inductor.graph.should_assume_input_aligned = lambda example: True
    classes = (ShapeClass(True, True, True), ShapeClass(False, True, True), ShapeClass(True, False, True))
    with acting_as(Device("NVIDIA H200", 90, 132)):
        print(json.dumps([printed_of(shapes) for shapes in classes]))


if __name__ == "__main__":
    sys.exit(main())
