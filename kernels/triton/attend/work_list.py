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

Who joins the parts of a head: the last program that has one, where they are small; else a launch of `combine`. The
programs of a head count themselves, in `arrivals` int32 [B, Hq], zeros before:

    every thread of a program    stores its numbers of the part
    all of them                  a barrier of the program
    one of them                  arrived = atomic add of 1, acquire and release, for the whole GPU
    all of them                  a barrier of the program, behind which they know `arrived`
    if arrived + 1 is all        load the parts of the head, and store its result

No program waits for another, so none can wait forever. That the last one sees all parts is the memory model of PTX: the
first barrier puts every store of the program before the release, releases and acquires of one counter follow each
other, and the second barrier puts the last acquire before every load. Nothing is left for the next step to find: it
brings counters of its own, which its append writes zeros to (a launch before it on the same stream).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.kernels.triton.attend.cascade import CASCADE
from kvcompile.kernels.triton.dead_lines import tidy
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.layouts import Paged, TopPages

LISTED, JOINED = "listed", "joined"
# What a plan says of it.
SAID = "each program of a decode step takes as many tiles as the others, whatever lengths sequences have"
AT_ONCE = 128  # sequences whose tiles a program counts in one turn
# Sequences among which it looks for its own, from the last one on: as many as a warp has threads, which wait for no
# other warps of the program then.
LOOKED_AT = 32
_apart: ContextVar[bool] = ContextVar("parts are joined by a launch of their own", default=False)

# Numbers of a part, up to which the program that is last joins a head: it alone reads all of its parts.
_SMALL = 1024
_TOGETHER = 2048  # numbers of parts that it reads at once: more take registers that the main loop has not


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


def joins(spec: KernelSpec, channels: int) -> bool:
    """Whether decode over a list joins the parts of a head as well; channels: of a part.

    Not where every slot of a tile has an address of its own, of small pages and of chosen ones: beside these, the join
    takes so many registers that a multiprocessor has room for two programs instead of three. Nor where tokens stand in
    full beside their slots: there all registers are taken, and the main loop would spill.
    """
    placement, selection = spec.layout.placement, spec.layout.selection
    pages = [placement.page_size] if isinstance(placement, Paged) else []
    pages += [selection.page_size] if isinstance(selection, TopPages) else []
    full = spec.layout.in_full or any(size % spec.block_n for size in pages)
    return not (full or _apart.get()) and power_above(joined_heads(spec)) * power_above(channels) <= _SMALL


@contextmanager
def joined_apart() -> Iterator[None]:
    """Parts are joined by a launch of `combine`, whatever they are: for who may not write what a launch is given."""
    before = _apart.set(True)
    try:
        yield
    finally:
        _apart.reset(before)


def together(spec: KernelSpec, channels: int) -> int:
    """Parts that are read at once."""
    return min(16, _TOGETHER // (power_above(joined_heads(spec)) * power_above(channels)))


def power_above(number: int) -> int:
    return 1 << (number - 1).bit_length()


def row_tiles(spec: KernelSpec) -> int:
    """Into how many tiles of rows decode cuts the query heads of a group."""
    return -(-spec.group // spec.block_m)


def joined_heads(spec: KernelSpec) -> int:
    """Query heads of a sequence in a part."""
    return min(spec.group, spec.block_m)


def members(spec: KernelSpec) -> int:
    """Rows of a part: the query heads of a sequence, or of as many sequences as a bundle may have."""
    return spec.block_m if CASCADE in spec.options else joined_heads(spec)


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
