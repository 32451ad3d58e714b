"""Facts of kernels that are not assembled, for tests of the model of a machine."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.predict.facts import Facts
from kvcompile.kernels.triton.predict.launch import Predicted, predicted
from kvcompile.kernels.triton.predict.model import Model
from kvcompile.kernels.triton.predict.recorded import Made, Shape, recorded
from kvcompile.kernels.triton.tools.assemble import Assembled
from kvcompile.kernels.triton.tools.ttgir import Pipeline
from kvcompile.layouts import CacheLayout
from kvcompile.util.machines import MACHINES

H200 = Model(MACHINES["h200"])


def shape(
    layout: CacheLayout, lengths: tuple[int, ...], heads: tuple[int, int] = (32, 8), tokens: int = 1
) -> Shape:
    """Attention alone, of 128 channels in bfloat16."""
    site = SiteSpec(layout, 128**-0.5, share="middle")
    return Shape(site, heads, (128, 128), torch.bfloat16, lengths, tokens)


def fact(
    registers: int = 128,
    shared: int = 40_000,
    instructions: int = 300,
    pipeline: Pipeline | None = None,
    barriers: int = 5,
) -> Assembled:
    """A kernel with so many instructions in its loop, of the mix that decode loops have."""
    mix = {"LOP3.LUT": 0.35, "FFMA": 0.2, "IMAD": 0.05, "LDSM.16.M88.4": 0.1, "MUFU.EX2": 0.03}
    mix |= {"HMMA.16816.F32.BF16": 0.1, "BRA": 0.17}
    opcodes = {name: max(1, round(part * instructions)) for name, part in mix.items()}
    return Assembled(
        role="",
        key="",
        arch=90,
        registers=registers,
        stack=0,
        spills=0,
        loop_spills=0,
        shared=shared,
        instructions=instructions,
        per_element=None,
        products=0,
        loads={},
        barriers=barriers,
        pipeline=pipeline,
        opcodes=opcodes,
        outside=800,
    )


def step(of: Shape, decode: Assembled, model: Model = H200) -> tuple[Predicted, ...]:
    """A decode step whose kernel has these facts; combine has those of a small one."""
    made = recorded(of, model.machine)
    joins = replace(fact(instructions=470, registers=120, shared=2048), outside=145)
    facts: Facts = {one.request: decode if one.spec.role == "decode" else joins for one in made}
    return predicted(made, of, facts, model)


def decode_of(of: Shape, decode: Assembled, model: Model = H200) -> Predicted:
    return next(one for one in step(of, decode, model) if one.role == "decode")


def with_instructions(made: Made, per_element: float) -> int:
    """Instructions of a thread in a turn, from those of all threads per element of the cache."""
    return round(per_element * made.spec.block_n * 256 / (32 * made.request.num_warps))
