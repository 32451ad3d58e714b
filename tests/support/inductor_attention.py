"""Prints what Inductor makes of a region with the generated kernels of a layout, on a machine without a GPU.

As `inductor_text.py`, but with the kernels of `kvcompile.kernels.triton.host.attention` themselves. Run by
`tests/kernels/triton/host/test_in_inductor.py` with the names of layouts, in a process where Triton compiles.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from kvcompile.compile.inductor import ShapeClass, Tracer
from kvcompile.kernels.ops import cached_attention as ops
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import (
    CacheLayout,
    Contiguous,
    Full,
    Paged,
    Ring,
    Scored,
    SinkWindow,
    Slots,
    int8,
    model_dtype,
    per_channel,
    uint,
    with_residual,
)
from kvcompile.specs import RotaryForm
from tests.support.inductor_sm90 import act_as_sm90, program_of

HEADS, KV_HEADS, DIM, SLOTS, PAGES = 8, 2, 64, 1088, 70
LAYOUTS = {
    "model": CacheLayout(),
    "int8": CacheLayout(int8(), int8()),
    "int8 of 16 bits": CacheLayout(int8(), int8()),
    "int4 in pages": CacheLayout(uint(4, 32), uint(4, 32), Paged(64), Full()),
    "KIVI": CacheLayout(per_channel(2, 32, 32), with_residual(uint(2, 32), 32), Contiguous(), Full()),
    "KIVI of 16 bits": CacheLayout(per_channel(2, 32, 32), with_residual(uint(2, 32), 32)),
    "streaming": CacheLayout(int8(), int8(), Ring(), SinkWindow(4, 508)),
    "H2O": CacheLayout(model_dtype(), model_dtype(), Slots(), Scored(4, 252, 256)),
}


DTYPES = {
    "int8 of 16 bits": torch.bfloat16,
    "KIVI of 16 bits": torch.bfloat16,
}  # of models; of others float32


def region(layout: CacheLayout, buffers: int) -> GraphModule:
    """Projections with their rotary embedding, the op, and something after it."""
    g, aten = Graph(), torch.ops.aten
    x, weight = (g.placeholder(name) for name in ("x", "weight"))
    cache = [g.placeholder(f"buffer_{i}") for i in range(buffers)]
    cos, sin, positions, seq_lens, span = (
        g.placeholder(name) for name in ("cos", "sin", "positions", "seq_lens", "span")
    )
    table = g.placeholder("page_table") if isinstance(layout.placement, Paged) else None
    sides, start = [], 0
    for heads in (HEADS, KV_HEADS, KV_HEADS):
        rows = g.call_function(aten.slice.Tensor, (weight, 0, start * DIM, (start + heads) * DIM))
        made = g.call_function(aten.linear.default, (x, rows))
        apart = g.call_function(aten.unflatten.int, (made, 2, [heads, DIM]))
        sides.append(g.call_function(aten.transpose.int, (apart, 1, 2)))
        start += heads
    spec = SiteSpec(layout, DIM**-0.5, rotary=RotaryForm("half", 0, DIM), kernels="triton").to_json()
    args = (*sides, cache, positions, seq_lens, [cos, sin], span, spec)
    out = g.call_function(ops.cached_attention, args, {"page_table": table} if table else {})
    g.output((g.call_function(aten.relu.default, (out,)),))
    return GraphModule(torch.nn.Module(), g, "Region")


def printed_of(name: str, shapes: ShapeClass) -> dict[str, Any]:
    """Graph and code of the region, sizes that were fixed, and names of the cache's inputs."""
    layout, dtype = LAYOUTS[name], DTYPES.get(name, torch.float32)
    tracer, device = Tracer(shapes), torch.device("cpu")
    paged = isinstance(layout.placement, Paged)
    buffers = [
        tracer.empty((PAGES if spec.paged else tracer.batch, *spec.shape), spec.dtype, device)
        for spec in layout.buffers(KV_HEADS, DIM, DIM, dtype, SLOTS)
    ]
    inputs = [
        tracer.empty((tracer.batch, tracer.tokens, HEADS * DIM), dtype, device),
        tracer.empty(((HEADS + 2 * KV_HEADS) * DIM, HEADS * DIM), dtype, device),
        *buffers,
        *(tracer.empty((SLOTS, DIM), torch.float32, device) for _ in range(2)),
        tracer.empty((tracer.batch, tracer.tokens), torch.int64, device),
        tracer.empty((tracer.batch,), torch.int64, device),
        tracer.span,
    ]
    if paged:
        inputs.append(tracer.empty((tracer.batch, SLOTS // 64), torch.int32, device))
    return program_of(region(layout, len(buffers)), inputs, tracer) | {"buffers": len(buffers)}


def main(names: list[str]) -> None:
    act_as_sm90()
    classes = (ShapeClass(False, False, False), ShapeClass(False, True, True), ShapeClass(True, True, True))
    print(json.dumps({name: [printed_of(name, shapes) for shapes in classes] for name in names}))


if __name__ == "__main__":
    main(sys.argv[1:] or list(LAYOUTS))
