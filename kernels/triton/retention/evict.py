"""Role evict: the slot of one new token, where scores say which tokens stay (`layouts/retention/scored.py`).

    slot = pos while slots are free, else that of the lowest score among tokens with sinks <= token <= pos - recent
    score: as it is, or score / (pos - token) for "mean_age"; of equal ones the oldest goes

Notes the token in its slot and sets its score to 0. A program has a head's slots, in tiles: it keeps the lowest of each
lane, and compares the lanes once at the end. Padding (a negative position) gets slot -1, and nothing is noted.

Options: interpreted. spec.block_n: slots of a tile.
Launch: grid(spec, batch). positions int64 [B, 1]; token int32 and score float32 [B, Hkv or 1, slots]; slots int32
[B, Hkv or 1, 1], written.
"""

from __future__ import annotations

import torch

from kvcompile.kernels.triton.append.encode.tile import power_of_two, quotient
from kvcompile.kernels.triton.helpers import module
from kvcompile.kernels.triton.params import KernelSource, Param, TensorParam
from kvcompile.kernels.triton.render import rendered
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.kernels.triton.tile.symbolic import printed
from kvcompile.layouts import Scored
from kvcompile.layouts import symbols as sy

OPTIONS = {"interpreted"}
_LARGEST_TILE = 4096
PARAMS: tuple[Param, ...] = (
    TensorParam("token", torch.int32, 3),
    TensorParam("score", torch.float32, 3),
    TensorParam("positions", torch.int64, 2),
    TensorParam("slots", torch.int32, 3),
)


def generate(spec: KernelSpec) -> KernelSource:
    """The kernel of a spec of role evict.

    Raises:
        ValueError: the layout's retention does not go by scores, or an option is unknown.
    """
    retention = retention_of(spec, OPTIONS)
    value = "score"
    if retention.score == "mean_age":
        value = quotient("score", "tl.maximum(pos - token, 1).to(tl.float32)")
    text = rendered(
        "evict.py.jinja",
        params=PARAMS,
        retention=retention,
        block=spec.block_n,
        value=value,
        address=printed(spec.layout.address, {sy.pos: "pos", sy.given_up: "given_up"}),
    )
    return KernelSource("evict", PARAMS, module(text))


def grid(spec: KernelSpec, batch: int) -> tuple[int, int]:
    return spec.score_heads, batch


def block_n(slots: int) -> int:
    """Slots of a tile: all, where they are not too many."""
    return min(power_of_two(slots), _LARGEST_TILE)


def retention_of(spec: KernelSpec, options: set[str]) -> Scored:
    """The retention of a role that only layouts with scores have; raises as `generate`."""
    if unknown := set(spec.options) - options:
        raise ValueError(f"{spec.role} knows no options {sorted(unknown)}")
    if not isinstance(spec.layout.retention, Scored):
        raise ValueError(f"{spec.role} is for retention by scores, not for {spec.layout}")
    return spec.layout.retention
