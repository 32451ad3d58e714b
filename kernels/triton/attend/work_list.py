"""How a decode step's tiles are shared out over programs: equal splits of each sequence, or one list of all tiles.

    splits   each (sequence, head) is cut into as many shares as the grid has: right where all sequences are as long
    listed   the tiles of all of them stand in one line, sequence by sequence and head by head, and each of a fixed
             number of programs takes the same length of it: a program may end one head and begin the next (stream-K,
             Osama et al. 2023)

The list is in no memory. A program reads the positions of all sequences, sums up how many tiles they have, and finds
its own: the grid depends on shapes alone, lengths stay on the device, and a CUDA graph of a step stays right. With
`work` tiles, P programs and R heads a sequence (of queries, where a group of these is several tiles of rows):

    share = ceil(work / P)      program p takes tiles p * share .. min((p + 1) * share, work) - 1
    part of head r of all heads that program p has tiles of:  p + r

Along the line either p or r rises from a part to the next, so no two parts are the same, there are fewer than
P + B * R, and those of a head follow each other: `spans` [B, R, 2] says which is the first, and how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.kernels.triton.dead_lines import tidy
from kvcompile.kernels.triton.spec import KernelSpec

LISTED = "listed"
# What a plan says of it.
SAID = "each program of a decode step takes as many tiles as the others, whatever lengths sequences have"
AT_ONCE = 128  # sequences whose tiles a program counts in one turn


@dataclass(frozen=True)
class Sharing:
    """How a step's tiles are shared out, and why."""

    listed: bool
    because: str

    @property
    def options(self) -> tuple[str, ...]:
        """Those of decode and combine that say so."""
        return (LISTED,) if self.listed else ()


def sharing(batch: Any) -> Sharing:
    """How the tiles of a step of `batch` sequences are shared out; a number, or a symbol that stands for any."""
    if statically_known_true(batch == 1):
        return Sharing(False, "of one sequence, equal splits are equal shares")
    return Sharing(True, SAID)


def row_tiles(spec: KernelSpec) -> int:
    """Into how many tiles of rows decode cuts the query heads of a group."""
    return -(-spec.group // spec.block_m)


def members(spec: KernelSpec) -> int:
    """Query heads of a part."""
    return min(spec.group, spec.block_m)


def heads(spec: KernelSpec) -> int:
    """What a sequence has its tiles in: KV heads, each once for every tile of rows."""
    return spec.num_kv_heads * row_tiles(spec)


def tiles_of(lines: tuple[str, ...]) -> str:
    """The function of a kernel's file that says how many tiles a position reads; lines: of `block_bounds`."""
    text = [
        "@triton.jit",
        "def tiles_of(position):",
        '    """How many tiles a query at `position` reads: a number, or a block of them."""',
        *(f"    {line}" for line in ("length = position + 1", "near = position", "far = position", *lines)),
        "    return tiles",
    ]
    return tidy("\n".join(text)).rstrip()
