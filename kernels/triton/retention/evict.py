"""Part of append: the slot of one new token, where scores say which tokens stay (`layouts/retention/scored.py`).

    slot = pos while slots are free, else that of the lowest score among tokens with sinks <= token <= pos - recent
    score: as it is, or score / (pos - token) for "mean_age"; of equal ones the oldest goes

The function notes the token in its slot and sets its score to 0. It goes over a head's slots in tiles, which are copied
to shared memory ahead of it: it keeps the slot of each lane that is given up soonest, and one reduction compares the
lanes. Scores are sums of probabilities: their bits, as whole numbers, are in their order. Of padding (a negative
position) the slot is -1, and nothing is noted.

Order: what a program reads here, itself writes behind the reduction over all that it has read, so that no thread reads
a slot after another has noted the token there. One program of a launch has the notes of a score head of a sequence: no
other reads or writes them. Attention, which may ask which token a slot holds, is a later launch on the same stream.

Slots that are looked at at once: spec.block_m. Tensors: slots_token int32 and slots_score float32 [B, Hkv or 1, slots].
"""

from __future__ import annotations

import torch

from kvcompile.kernels.triton.append.encode.tile import power_of_two, quotient
from kvcompile.kernels.triton.params import Param, TensorParam
from kvcompile.kernels.triton.render import rendered
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.kernels.triton.tile.symbolic import printed
from kvcompile.layouts import Scored
from kvcompile.layouts import symbols as sy

# Slots. A thread of eight warps takes eight of a tile, and a multiprocessor has room for copies of four tiles.
_LARGEST_TILE, _TILES = 2048, 4
PARAMS: tuple[Param, ...] = (
    TensorParam("slots_token", torch.int32, 3),
    TensorParam("slots_score", torch.float32, 3),
)


def function(spec: KernelSpec) -> str:
    """The function of a kernel's file that finds a slot, and notes the token."""
    retention = spec.layout.retention
    assert isinstance(retention, Scored)
    value = "score"
    if retention.score == "mean_age":
        value = quotient("score", "tl.maximum(pos - token, 1).to(tl.float32)")
    return rendered(
        "evict.jinja",
        retention=retention,
        block=spec.block_m,
        stages=min(-(-int(retention.tokens) // spec.block_m), _TILES) + 1,
        value=value,
        address=printed(spec.layout.address, {sy.pos: "pos", sy.given_up: "given_up"}),
    ).rstrip()


def call(spec: KernelSpec) -> tuple[str, ...]:
    """Lines that define `given`, the slot of the new token of the heads `head`."""
    own = " + head * {name}_s1" if spec.score_heads > 1 else ""
    token, score = (
        f"{name}_ptr + batch * {name}_s0{own.format(name=name)}" for name in ("slots_token", "slots_score")
    )
    return (f"given = evicted({token}, {score}, pos)",)


def block(slots: int) -> int:
    """Slots of a tile: all, where they are not too many."""
    return min(power_of_two(slots), _LARGEST_TILE)
