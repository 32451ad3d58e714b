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

from kvcompile.compile import gemv
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
}


def region() -> GraphModule:
    """What stands for attention adds keys to queries; residuals are added, nothing is normed."""
    g, aten = Graph(), torch.ops.aten
    x = g.placeholder("x")
    weights = {name: g.placeholder(name) for name in WEIGHTS}

    def linear(name: str, of: Any) -> Any:
        return g.call_function(aten.linear.default, (of, weights[name]))

    q, k, v = (linear(name, x) for name in "qkv")
    both = g.call_function(aten.cat.default, ([k, v, k, v], -1))
    x = g.call_function(aten.add.Tensor, (x, linear("o", g.call_function(aten.add.Tensor, (q, both)))))
    gate = g.call_function(aten.silu.default, (linear("gate", x),))
    opened = g.call_function(aten.mul.Tensor, (gate, linear("up", x)))
    g.output((g.call_function(aten.add.Tensor, (x, linear("down", opened))),))
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
    gemv.on_gpu = lambda device: True
    available.problem = lambda device: None
    # It asks of GPUs' tensors alone whether they begin at multiples of 16 bytes, as these do.
    torch._inductor.graph.should_assume_input_aligned = lambda example: True
    classes = (ShapeClass(True, True, True), ShapeClass(False, True, True), ShapeClass(True, False, True))
    with acting_as(Device("NVIDIA H200", 90, 132)):
        print(json.dumps([printed_of(shapes) for shapes in classes]))


if __name__ == "__main__":
    sys.exit(main())
