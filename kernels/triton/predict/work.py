"""Which turns each program of a launch makes, by its role.

| role | a program | its turns |
|---|---|---|
| decode | a share of the tiles of a sequence and KV head, or (option listed) of all of these | its tiles |
| prefill | a tile of queries, of one KV head | tiles of keys up to its last query |
| decoded_rows | a tile of slots, of one KV head | one |
| columns | a tile of keys | tiles of queries |
| combine | a query head of a sequence | shares, some at once |
| append that finds a slot | a head's notes, its key and its value; some queries | one, half of one |
| linear | rows of a layer's weight, or of two | what its loop has, or one |
| others | a tile | one |

The tiles at the ends of a sequence, which have masks, count as the others do. With option cascade, tiles in common are
one program's for all sequences of a bundle.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

from kvcompile.kernels.triton.append.slots import evicts
from kvcompile.kernels.triton.attend import cascade
from kvcompile.kernels.triton.attend.decoded_rows import ALL
from kvcompile.kernels.triton.linear.linear import loop, numbers
from kvcompile.kernels.triton.predict import memory
from kvcompile.kernels.triton.predict.recorded import Made, Shape
from kvcompile.kernels.triton.retention.score import SCORED

# Shares that a program of role combine reads at once, of so many numbers (`templates/combine.py.jinja`).
_SHARES, _NUMBERS, _FEW = 64, 8192, 16
_LISTED = "listed"  # the option of a decode kernel whose programs share a line of all tiles
# Loads that wait for each other, before the first turn of a role that attends: positions, then the first tile.
_BEFORE = 2
# The same in a turn of a role whose loop has no pipeline: positions, then what stands there, and so on. Programs of
# `score`, and those of append that find a slot, execute all of their text: machine code says it of them.
_WAITS = {"combine": 2, "append": 2, "group": 2, "score": None, "page_bounds": 2}
_WAITS |= {"page_copy": 2, "decoded_rows": 2}


@dataclass(frozen=True)
class Work:
    """programs: turns of each, in the order of the grid; bytes, near: of a turn, from memory, and from the L2 cache

    before: loads that wait for each other until a program's first turn
    waits:   those in a turn that has no pipeline; None: as many as machine code says
    written: whether what is read was written by the launch before, so that the L2 cache has it
    part:    of the instructions that facts have of a turn, what a program executes
    tiles:   turns of its loop, where it has one, in what counts as a turn here
    """

    programs: tuple[float, ...]
    bytes: float
    near: float
    before: int
    waits: int | None
    written: bool = False
    part: float = 1.0
    tiles: int = 1


def work(made: Made, shape: Shape) -> Work:
    """What a launch's programs do."""
    return _ROLES.get(made.spec.role, _flat)(made, shape)


def _decode(made: Made, shape: Shape) -> Work:
    spec = made.spec
    row_tiles = -(-spec.group // spec.block_m)
    tiles = [-(-memory.seen(shape, length) // spec.block_n) for length in shape.lengths]
    heads = shape.heads[1] * row_tiles
    common = memory.common_slots(shape) // spec.block_n
    if _LISTED in spec.options:
        bundle = cascade.most(spec) if cascade.CASCADE in spec.options else 1
        programs = _listed(_segments(tiles, heads, common, bundle), made.grid[0])
    else:
        programs = _split(tiles, heads, made.grid[0])
    near, tiled = spec.block_n * memory.slot_bytes(shape), sum(programs)
    if SCORED in spec.options:
        programs = _with_shares(programs, made, near)
    turns = sum(programs)
    others = memory.other_bytes(made, shape) * _filled(programs) / turns
    own = near / row_tiles * tiled / turns  # turns of shares read no slots
    if shape.kept:
        own = near * shape.heads[1] * (sum(tiles) - common * (len(tiles) - 1)) / turns
    lookups = (shape.site.layout.placement.kind == "paged") + shape.site.layout.selection.selects
    return Work(tuple(programs), own + others, near + others, _BEFORE + lookups, 0)


def _with_shares(programs: list[float], made: Made, near: float) -> list[float]:
    """Turns with those of shares: who ends a head adds them to scores, as many tiles as they have bytes."""
    read = sum(made.bytes[name] for name in ("logits", "levels", "score")) + made.bytes["score"]
    ends = made.bytes["arrivals"] // 4 // made.spec.group
    each = -(-read / ends // near)
    all_end, more = divmod(ends, len(programs))
    return [turns + each * (all_end + (place < more)) for place, turns in enumerate(programs)]


def _segments(tiles: list[int], heads: int, common: int, bundle: int) -> list[int]:
    """The line of all tiles, sequence by sequence and head by head: how many follow each other of one kind.

    tiles: of each sequence; common: those that all begin with; bundle: sequences for which these are read at once
    """
    found = []
    for row, count in enumerate(tiles):
        several = bundle > 1 and len(tiles) - row // bundle * bundle > 1 and common > 0
        first = [common] if several and row % bundle == 0 else []
        found += [*first, count - common if several else count] * heads
    return found


def _split(tiles: list[int], heads: int, splits: int) -> list[float]:
    """Turns where each head of each sequence is cut into as many shares; tiles: of each sequence."""
    programs: list[float] = []
    for count in tiles:
        share = -(-count // splits)
        programs += [float(max(0, min(share, count - split * share))) for split in range(splits)] * heads
    return programs


def _listed(segments: list[int], programs: int) -> list[float]:
    """Turns where each program takes the same length of the line of all tiles.

    One that goes on with another segment starts anew there, which counts as a turn.
    """
    ends = list(accumulate(segments))
    share = -(-ends[-1] // programs)
    found = []
    for program in range(programs):
        first, last = program * share, min((program + 1) * share, ends[-1])
        further = bisect_left(ends, last) - bisect_right(ends, first) if first < last else 0
        found.append(float(max(0, last - first) + further))
    return found


def _filled(programs: list[float]) -> float:
    """The part of programs that have any tiles: the others write nothing."""
    return sum(turns > 0 for turns in programs) / len(programs)


def _prefill(made: Made, shape: Shape) -> Work:
    """Of a prompt over codes, a launch has the tokens before the new ones or these alone (`host/decoded_once.py`), the
    former as they stand, or as the numbers that rows hold: its own site says which.
    """
    tiles, heads, _ = made.grid
    spec, group = made.spec, made.spec.group
    older, new = ("older" in spec.options), ("continued" in spec.options)
    programs: list[float] = []
    every = 0.0
    for length in shape.lengths:
        before = length - shape.tokens
        own = []
        for tile in reversed(range(tiles)):  # as programs take them (`attend.below`)
            last = min(((tile + 1) * spec.block_m - 1) // group, shape.tokens - 1)
            first = tile * spec.block_m // group
            keys = min(before + last + 1, memory.seen(shape, length) + last - first)
            newest = min(keys, last + 1)
            every += keys
            keys = keys - newest if older else newest if new else keys
            own.append(float(-(-keys // spec.block_n)))
        programs += own * heads
    if not any(programs):
        return Work((0.0,) * len(programs), 0.0, 0.0, _BEFORE, 0)
    slot = memory.slot_bytes(replace(shape, site=replace(spec.site, layout=spec.as_read)))
    near = spec.block_n * slot
    share = sum(programs) * spec.block_n / (every * heads)
    total = share * memory.cache_bytes(shape) * slot / memory.slot_bytes(shape)
    total += memory.other_bytes(made, shape)
    if new and max(shape.lengths) == shape.tokens:  # nothing was found before, nor is it read
        total -= made.bytes["older"] + made.bytes["older_lse"]
    return Work(tuple(programs), total / sum(programs), max(near, total / sum(programs)), _BEFORE, 0)


def _decoded_rows(made: Made, shape: Shape) -> Work:
    """A program has a tile of slots, both sides, if tokens stand there."""
    tiles, heads, _ = made.grid
    new = 0 if ALL in made.spec.options else shape.tokens
    size = made.spec.block_n
    programs: list[float] = []
    for length in shape.lengths:
        whole = -(-(length - new) // size)
        programs += ([1.0] * whole + [0.0] * (tiles - whole)) * heads
    row = float(sum(shape.dims) * shape.dtype.itemsize)
    each = size * (memory.slot_bytes(shape) + row)
    return Work(tuple(programs), each, each, 0, _WAITS["decoded_rows"])


def _columns(made: Made, shape: Shape) -> Work:
    spec = made.spec
    turns = float(-(-shape.tokens * spec.group // spec.block_m))
    near = float(spec.block_m * spec.head_dim * shape.dtype.itemsize)
    total = memory.cache_bytes(shape) / 2 + memory.other_bytes(made, shape)
    each = total / (made.programs * turns)
    return Work((turns,) * made.programs, each, max(near, each), _BEFORE, 0)


def _combine(made: Made, shape: Shape) -> Work:
    splits = int(made.sizes.get("splits", 0)) or _parts(made, shape)
    width = 1 << (made.spec.v_head_dim - 1).bit_length()
    most = max(_FEW, min(_SHARES, _NUMBERS // width))
    at_once = _FEW if splits <= _FEW else most
    turns = float(-(-splits // at_once))
    each = memory.other_bytes(made, shape) / (made.programs * turns)
    # Its loop over many shares at once is the one that facts are of.
    return Work((turns,) * made.programs, each, each, 0, _WAITS["combine"], True, at_once / most)


def _parts(made: Made, shape: Shape) -> int:
    """Parts of a head, where decode shared out a line of tiles: those that there is room for, over all heads."""
    part = 4 * made.spec.v_head_dim * made.spec.block_m
    return max(1, made.bytes["partial"] // part // (len(shape.lengths) * shape.heads[1]))


def _append(made: Made, shape: Shape) -> Work:
    """Where scores say which slot a token gets, programs that look for it have most of the text, and read all notes."""
    if not evicts(made.spec):
        return _flat(made, shape)
    sequences, searching = len(shape.lengths), made.spec.score_heads
    others = made.programs // sequences - searching
    programs = ((1.0,) * searching + (_QUERIES,) * others) * sequences
    each = memory.other_bytes(made, shape) / sum(programs)
    tiles = -(-made.spec.layout.slots(None) // made.spec.block_m)
    return Work(programs, each, each, 0, None, tiles=tiles)


def linear(made: Made) -> Work:
    """A program reads its rows of the weights once, and the token and its norm from the L2 cache.

    How often it waits for loads, its machine code says, as the compiler does not ask for all of them at once.

    Without a loop all of it is one turn. Else columns behind the last whole turn are counted as a part of one.
    """
    columns, _ = numbers(made.spec)
    turn, turns = loop(made.spec)
    each = columns / turn if turns else 1.0
    total = float(sum(made.bytes.values()))
    own = total / (made.programs * each)
    near = made.bytes["x"] + made.bytes.get("norm", 0) + made.bytes.get("shift", 0)
    return Work((each,) * made.programs, own, own + near / each, 0, None)


def _flat(made: Made, shape: Shape) -> Work:
    each = memory.other_bytes(made, shape) / made.programs
    # A program of append writes a query, a key or a value, and its text has all of these.
    branches = (
        2 + ("q_out" in made.spec.options) - made.spec.layout.in_keys if made.spec.role == "append" else 1
    )
    return Work((1.0,) * made.programs, each, each, 0, _WAITS[made.spec.role], part=1 / branches)


_QUERIES = 0.5  # of a turn that a search takes, what one takes that only turns queries

_ROLES: dict[str, Callable[[Made, Shape], Work]] = {
    "append": _append,
    "decode": _decode,
    "prefill": _prefill,
    "decoded_rows": _decoded_rows,
    "columns": _columns,
    "combine": _combine,
    "linear": lambda made, shape: linear(made),
}
