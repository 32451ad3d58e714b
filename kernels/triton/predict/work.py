"""Which turns each program of a launch makes, by its role.

| role | a program | its turns |
|---|---|---|
| decode | a share of a sequence's tiles, of one KV head | its tiles |
| prefill | a tile of queries, of one KV head | tiles of keys up to its last query |
| columns | a tile of keys | tiles of queries |
| combine | a query head of a sequence | shares, some at once |
| others | a tile | one |

The tiles at the ends of a sequence, which have masks, count as the others do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvcompile.kernels.triton.predict import memory
from kvcompile.kernels.triton.predict.recorded import Made, Shape

# Shares that a program of role combine reads at once, of so many numbers (`templates/combine.py.jinja`).
_SHARES, _NUMBERS, _FEW = 64, 8192, 16
# Loads that wait for each other, before the first turn of a role that attends: positions, then the first tile.
_BEFORE = 2
# The same in a turn of a role whose loop has no pipeline: positions, then what stands there, and so on.
_WAITS = {"combine": 2, "append": 2, "group": 2, "evict": 2, "score": 2, "page_bounds": 2, "page_copy": 2}


@dataclass(frozen=True)
class Work:
    """programs: turns of each, in the order of the grid; bytes, near: of a turn, from memory, and from the L2 cache

    before: loads that wait for each other until a program's first turn; waits: those in a turn that has no pipeline
    written: whether what is read was written by the launch before, so that the L2 cache has it
    part:    of the instructions that facts have of a turn, what a program executes
    """

    programs: tuple[float, ...]
    bytes: float
    near: float
    before: int
    waits: int
    written: bool = False
    part: float = 1.0


def work(made: Made, shape: Shape) -> Work:
    """What a launch's programs do."""
    return _ROLES.get(made.spec.role, _flat)(made, shape)


def _decode(made: Made, shape: Shape) -> Work:
    splits, rows, _ = made.grid
    row_tiles = max(1, rows // shape.heads[1])
    block = made.spec.block_n
    programs: list[float] = []
    for length in shape.lengths:
        tiles = -(-memory.seen(shape, length) // block)
        share = -(-tiles // splits)
        own = [float(max(0, min(share, tiles - split * share))) for split in range(splits)]
        programs += own * rows
    near = block * memory.slot_bytes(shape)
    total = sum(programs)
    others = memory.other_bytes(made, shape) * _filled(programs)
    lookups = (shape.site.layout.placement.kind == "paged") + shape.site.layout.selection.selects
    return Work(
        tuple(programs), near / row_tiles + others / total, near + others / total, _BEFORE + lookups, 0
    )


def _filled(programs: list[float]) -> float:
    """The part of programs that have any tiles: the others write nothing."""
    return sum(turns > 0 for turns in programs) / len(programs)


def _prefill(made: Made, shape: Shape) -> Work:
    tiles, heads, _ = made.grid
    spec, group = made.spec, made.spec.group
    programs: list[float] = []
    for length in shape.lengths:
        before = length - shape.tokens
        own = []
        for tile in range(tiles):
            last = min(((tile + 1) * spec.block_m - 1) // group, shape.tokens - 1)
            first = tile * spec.block_m // group
            keys = min(before + last + 1, memory.seen(shape, length) + last - first)
            own.append(float(-(-keys // spec.block_n)))
        programs += own * heads
    near = spec.block_n * memory.slot_bytes(shape)
    total = memory.cache_bytes(shape) + memory.other_bytes(made, shape)
    return Work(tuple(programs), total / sum(programs), max(near, total / sum(programs)), _BEFORE, 0)


def _columns(made: Made, shape: Shape) -> Work:
    spec = made.spec
    turns = float(-(-shape.tokens * spec.group // spec.block_m))
    near = float(spec.block_m * spec.head_dim * shape.dtype.itemsize)
    total = memory.cache_bytes(shape) / 2 + memory.other_bytes(made, shape)
    each = total / (made.programs * turns)
    return Work((turns,) * made.programs, each, max(near, each), _BEFORE, 0)


def _combine(made: Made, shape: Shape) -> Work:
    splits = int(made.sizes.get("splits", 1))
    width = 1 << (made.spec.v_head_dim - 1).bit_length()
    most = max(_FEW, min(_SHARES, _NUMBERS // width))
    at_once = _FEW if splits <= _FEW else most
    turns = float(-(-splits // at_once))
    each = memory.other_bytes(made, shape) / (made.programs * turns)
    # Its loop over many shares at once is the one that facts are of.
    return Work((turns,) * made.programs, each, each, 0, _WAITS["combine"], True, at_once / most)


def _flat(made: Made, shape: Shape) -> Work:
    each = memory.other_bytes(made, shape) / made.programs
    # A program of append writes a query, a key or a value, and its text has all of these.
    branches = (
        2 + ("q_out" in made.spec.options) - made.spec.layout.in_keys if made.spec.role == "append" else 1
    )
    return Work((1.0,) * made.programs, each, each, 0, _WAITS[made.spec.role], part=1 / branches)


_ROLES: dict[str, Callable[[Made, Shape], Work]] = {
    "decode": _decode,
    "prefill": _prefill,
    "columns": _columns,
    "combine": _combine,
}
