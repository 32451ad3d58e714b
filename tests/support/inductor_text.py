"""Prints what Inductor makes of a region with a Triton kernel in its attention, on a machine without a GPU.

Run by `tests/kernels/triton/host/test_in_inductor.py` in a process of its own, where Triton compiles
(TRITON_INTERPRET=0). The kernels of `kvcompile.kernels.triton.host.attention` are stood in for by one that appends
(`inductor_sm90.py` does so for the GPU).
"""

from __future__ import annotations

import json
import sys
from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.library import triton_op, wrap_triton

from kvcompile.compile.inductor import ShapeClass, Tracer
from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.ops import cached_attention as ops
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import CacheLayout
from tests.support.inductor_sm90 import act_as_sm90, program_of

HEADS, DIM, SLOTS = 2, 16, 100


@triton.jit
def append_kernel(x_ptr, x_s0, x_s1, x_s2, positions_ptr, out_ptr, out_s0, out_s1, tokens, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    token, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions_ptr + row * tokens + token)
    channel = tl.arange(0, DIM)
    x = tl.load(x_ptr + row.to(tl.int64) * x_s0 + head * x_s1 + token * x_s2 + channel)
    tl.store(
        out_ptr + row.to(tl.int64) * out_s0 + head * out_s1 + position * DIM + channel, x, mask=position >= 0
    )


@triton_op("kvcompile_test::append", mutates_args={"buffers"})
def append(k: Tensor, v: Tensor, positions: Tensor, buffers: list[Tensor], spec: str) -> None:
    batch, heads, tokens, dim = k.shape
    for x, buffer in zip((k, v), buffers, strict=True):
        wrap_triton(append_kernel)[(tokens, heads, batch)](
            x, *x.stride()[:3], positions, buffer, *buffer.stride()[:2], tokens, DIM=dim
        )


def cached_attention(x: AttendInputs) -> Tensor:
    append(x.k, x.v, x.positions, x.buffers, "spec")
    return x.q + x.buffers[0].sum((1, 2, 3), keepdim=True)


def region() -> GraphModule:
    """Projections, the op, and something after it: x [B, S, width] and the cache's tensors in."""
    g, aten = Graph(), torch.ops.aten
    x, weight, *buffers = (g.placeholder(name) for name in ("x", "weight", "keys", "values"))
    positions, seq_lens, span = (g.placeholder(name) for name in ("positions", "seq_lens", "span"))
    sides = []
    for part in range(3):
        rows = g.call_function(aten.slice.Tensor, (weight, 0, part * HEADS * DIM, (part + 1) * HEADS * DIM))
        made = g.call_function(aten.linear.default, (x, rows))
        heads = g.call_function(aten.unflatten.int, (made, 2, [HEADS, DIM]))
        sides.append(g.call_function(aten.transpose.int, (heads, 1, 2)))
    spec = SiteSpec(CacheLayout(), 0.25, kernels="triton").to_json()
    out = g.call_function(ops.cached_attention, (*sides, buffers, positions, seq_lens, [], span, spec))
    g.output((g.call_function(aten.relu.default, (out,)),))
    return GraphModule(torch.nn.Module(), g, "Region")


def main() -> None:
    stand_in = ModuleType("kvcompile.kernels.triton.host.attention")
    stand_in.cached_attention = cached_attention  # type: ignore[attr-defined]
    sys.modules[stand_in.__name__] = stand_in
    act_as_sm90()
    programs = []
    for shapes in (ShapeClass(False, False, False), ShapeClass(True, True, True)):
        tracer = Tracer(shapes)
        device = torch.device("cpu")
        width = HEADS * DIM
        inputs = [
            tracer.empty((tracer.batch, tracer.tokens, width), torch.float32, device),
            tracer.empty((3 * width, width), torch.float32, device),
            *(tracer.empty((tracer.batch, HEADS, SLOTS, DIM), torch.float32, device) for _ in range(2)),
            tracer.empty((tracer.batch, tracer.tokens), torch.int64, device),
            tracer.empty((tracer.batch,), torch.int64, device),
            tracer.span,
        ]
        found = program_of(region(), inputs, tracer)
        programs.append(found | {"fixed": str(found["fixed"])})
    print(json.dumps(programs))


if __name__ == "__main__":
    main()
