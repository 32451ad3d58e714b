"""The list of a decode step's tiles: every tile is taken once, by programs that take equally many; and what that gains.

That the results are right is shown beside those of splits (`test_attend.py`), and by every test of a batch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from functools import cache

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.attend import work_list
from kvcompile.kernels.triton.config import Config
from kvcompile.kernels.triton.device import acting_as
from kvcompile.kernels.triton.generate import generate
from kvcompile.kernels.triton.host import ops_attend
from kvcompile.kernels.triton.host.site_kernels import kernels_of
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.layouts import CacheLayout, SinkWindow
from kvcompile.specs import MaskSpec
from tests.support.generated import forgotten
from tests.support.kernel_specs import H200
from tests.support.kernel_specs import cache as cache_of
from tests.support.triton_write import kernels_folder  # noqa: F401  (a fixture)

TILE, MOST = 16, 8  # slots of a tile; tiles of a sequence, each of which has a channel of the values
CHANNELS = 16
SLOTS = TILE * MOST


@pytest.fixture(
    params=[(4, 2), (work_list.AT_ONCE, work_list.LOOKED_AT)], ids="{0[0]} sequences at once".format
)
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that count the tiles of few sequences in a turn, and so of a batch in several, or of all in one."""
    at_once, looked_at = request.param
    monkeypatch.setattr(work_list, "AT_ONCE", at_once)
    monkeypatch.setattr(work_list, "LOOKED_AT", looked_at)
    with forgotten():
        yield


@cache
def spec_of(heads: int, mask: MaskSpec, layout: CacheLayout) -> KernelSpec:
    made = kernels_of(
        SiteSpec(layout, 1.0, mask),
        (2 * heads, heads),
        (16, CHANNELS),
        torch.float32,
        torch.device("cpu"),
        False,
    )
    return made.spec("decode", ("listed",))


def counted(
    lengths: Sequence[int], heads: int, programs: int, spec: KernelSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens that each part has of each tile, [parts, tiles]; spans; and whether a part is any head's.

    All keys weigh alike, and the value of a token is the number of its tile.
    """
    batch = len(lengths)
    keys = torch.zeros(batch, heads, SLOTS, 16)
    tiles = torch.arange(SLOTS) // TILE
    values = (tiles[:, None] == torch.arange(CHANNELS)).float().expand(batch, heads, -1, -1).contiguous()
    q = torch.zeros(batch, 2 * heads, 1, 16)
    positions = torch.tensor(lengths)[:, None] - 1
    partial, sums, spans = ops_attend.decode(
        q,
        [keys, values],
        positions,
        None,
        [],
        [],
        None,
        None,
        None,
        None,
        None,
        None,
        None,
        programs,
        1,
        1,
        spec.to_json(),
    )
    assert partial.shape[:2] == sums.shape[:2] == (programs + batch * heads, 2)
    taken = torch.zeros(partial.shape[0], dtype=torch.bool)
    for row, length in enumerate(lengths):
        for first, count in spans[row].tolist() if length else []:
            assert count > 0 and not taken[first : first + count].any(), "a part of two heads"
            taken[first : first + count] = True
    alike = partial[taken]
    assert torch.equal(alike[:, 0], alike[:, 1]), "two query heads of a KV head"
    assert torch.equal(sums[taken][..., 1].double(), alike.double().sum(-1))
    return partial[:, 0, :MOST], spans, taken


LENGTHS = st.lists(st.sampled_from((0, 0, 1, 1, 2, 15, 16, 17, 48, 100, 127, 128)), min_size=1, max_size=7)
VISIBLE = (
    (MaskSpec("causal"), CacheLayout()),
    (MaskSpec("sliding", 40), CacheLayout()),
    (MaskSpec("chunked", 48), CacheLayout()),
    (MaskSpec("causal"), CacheLayout(retention=SinkWindow(18, 35))),
)


@settings(max_examples=8, deadline=None)
@given(LENGTHS, st.integers(1, 3), st.integers(1, 40), st.sampled_from(VISIBLE))
@example([128, 0, 1, 100, 17, 48], 2, 7, VISIBLE[0])  # 42 tiles: nothing is left over
def covers(lengths: list[int], heads: int, programs: int, visible: tuple[MaskSpec, CacheLayout]) -> None:
    spec = spec_of(heads, *visible)
    parts, spans, taken = counted(lengths, heads, programs, spec)
    rows = torch.arange(SLOTS)
    took = torch.zeros(programs)
    for row, length in enumerate(lengths):
        seen = rows < length
        mask, retention = spec.site.mask, spec.layout.retention
        if mask.kind == "sliding":
            seen = seen & (rows > length - 1 - 40)
        if mask.kind == "chunked":
            seen = seen & (rows >= (length - 1) // 48 * 48)
        if isinstance(retention, SinkWindow):
            seen = seen & ((rows > length - 1 - 35) | (rows < 18))
        expected = seen.view(MOST, TILE).sum(1).float()
        for head in range(heads if length else 0):
            first, count = spans[row, head].tolist()
            own = parts[first : first + count]
            assert torch.equal(own.sum(0), expected), "each tile once"
            for place, part in enumerate(own):
                took[first + place - row * heads - head] += (part > 0).sum()
    whole = int(took.sum())
    if visible == VISIBLE[0]:
        # All programs but the last ones take equally many.
        share = math.ceil(whole / programs)
        assert took.tolist() == [max(0, min(share, whole - share * program)) for program in range(programs)]
    assert taken.sum() <= programs + sum(heads for length in lengths if length)


def test_every_tile_is_taken_once_by_programs_that_take_equally_many(at_once: None) -> None:
    covers()


def test_a_batch_of_more_sequences_than_are_counted_in_one_turn() -> None:
    lengths = [(37 * row) % 61 * (row % 5 != 0) for row in range(work_list.AT_ONCE + 12)]
    parts, spans, _ = counted(lengths, 1, 7, spec_of(1, *VISIBLE[0]))
    for row, length in enumerate(lengths):
        first, count = spans[row, 0].tolist() if length else (0, 0)
        assert parts[first : first + count].sum() == length


def test_which_steps_have_a_list() -> None:
    """One sequence is cut into equal splits, which are equal shares; a batch of any number is not known to be one."""
    from torch.fx.experimental.proxy_tensor import make_fx

    assert not work_list.sharing(1).listed and "equal" in work_list.sharing(1).because
    assert work_list.sharing(2).options == ("listed",)
    found = []
    make_fx(lambda x: (found.append(work_list.sharing(x.shape[0]).listed), x)[1], tracing_mode="symbolic")(
        torch.empty(3)
    )
    assert found == [True]


def test_as_many_programs_as_fit_and_no_more_than_tiles() -> None:
    own = Config(waves=3.0)
    assert own.shares(H200, 100_000) == 396 and own.shares(H200, 12) == 12 and own.shares(H200, 0) == 1


# ---- who joins


Step = tuple[str, ...]


def steps_of(text: str) -> Step:
    """What a thread of a program does from its stores on, by the kernel's text; the barrier behind an atomic is the
    compiler's (`tools/ptx.py` looks for it)."""
    text = text[text.index("tl.store(sums_ptr") :]
    known = {
        "tl.store(partial_ptr": "store",
        "tl.debug_barrier()": "barrier",
        'tl.atomic_add(arrivals_ptr + batch * 4 + own, 1, sem="acq_rel", scope="gpu")': "count barrier",
        "joined(": "join",
    }
    places = {at: step for mark, step in known.items() if (at := text.find(mark)) >= 0}
    return tuple(step for at in sorted(places) for step in places[at].split())


def outcomes(steps: Step, programs: int, threads: int = 2) -> set[tuple[int, bool]]:
    """All that may come out: how many programs joined, and whether each thread of these saw every store.

    Every interleaving is tried. A thread sees its own stores, and what it must see by PTX's memory model: behind a
    barrier what any thread of its program saw, behind an atomic that acquires what was seen before those that released.
    """
    every = frozenset((p, t) for p in range(programs) for t in range(threads))
    start = (
        tuple(
            (0, frozenset[tuple[int, int]]()) for _ in every
        ),  # of each thread: its next step, what it sees
        (0, frozenset[tuple[int, int]]()),  # the counter, and what is seen behind it
        (0,) * programs,  # what each program's atomic gave
    )
    found: set[tuple[int, bool]] = set()
    todo, known = [start], {start}
    while todo:
        at, counter, gave = todo.pop()
        moves = []
        for program in range(programs):
            own = range(program * threads, (program + 1) * threads)
            for thread in own:
                next_step, sees = at[thread]
                if next_step == len(steps):
                    continue
                step, after, count, gives = steps[next_step], list(at), counter, gave
                if step == "store":
                    after[thread] = (next_step + 1, sees | {(program, thread - own[0])})
                elif step == "barrier":
                    if thread != own[0] or any(at[other][0] != next_step for other in own):
                        continue
                    both = frozenset().union(*(at[other][1] for other in own))
                    for other in own:
                        after[other] = (next_step + 1, both)
                elif step in ("count", "count relaxed"):
                    if thread == own[0]:  # one thread does it
                        seen = sees | counter[1] if step == "count" else sees
                        count = (counter[0] + 1, seen if step == "count" else counter[1])
                        after[thread] = (next_step + 1, seen)
                        gives = (*gave[:program], counter[0], *gave[program + 1 :])
                    else:
                        after[thread] = (next_step + 1, sees)
                else:
                    after[thread] = (next_step + 1, sees)
                moves.append((tuple(after), count, gives))
        if not moves:
            last = [program for program in range(programs) if gave[program] == programs - 1]
            sees_all = all(at[p * threads + t][1] == every for p in last for t in range(threads))
            found.add((len(last), sees_all))
        new = [move for move in moves if move not in known]
        known.update(new)
        todo += new
    return found


def joined_text() -> str:
    layout = cache_of(keys={"dtype": "int8"}, values={"dtype": "int8"})
    made = kernels_of(SiteSpec(layout, 1.0), (4, 2), (16, 16), torch.float32, torch.device("cpu"), False)
    return generate(made.spec("decode", ("listed", "joined"))).text


@pytest.mark.parametrize("programs", [1, 2, 3])
def test_one_program_joins_and_all_of_its_threads_see_all_parts(programs: int) -> None:
    steps = steps_of(joined_text())
    assert steps == ("store", "barrier", "count", "barrier", "join")
    assert outcomes(steps, programs) == {(1, True)}


@pytest.mark.parametrize(
    "steps",
    [
        ("store", "count", "barrier", "join"),
        ("store", "barrier", "count", "join"),
        ("store", "barrier", "count relaxed", "barrier", "join"),
        ("barrier", "count", "barrier", "store", "join"),
    ],
)
def test_the_model_sees_what_is_missing(steps: Step) -> None:
    assert (1, False) in outcomes(steps, 2)


def test_parts_are_joined_by_the_last_program_where_they_are_small() -> None:
    def joins(heads: tuple[int, int], dim: int, **settings: object) -> bool:
        made = kernels_of(
            SiteSpec(cache_of(**settings), 1.0), heads, (dim, dim), torch.bfloat16, torch.device("cpu"), False
        )
        with acting_as(H200):
            return work_list.joins(made.spec("decode"), dim)

    pages = {size: {"placement": {"kind": "paged", "page_size": size}} for size in (16, 64)}
    assert joins((32, 8), 128) and joins((8, 4), 256) and joins((32, 8), 128, **pages[64])
    assert not joins((16, 1), 512)  # a part is 8,192 numbers
    keys = {"dtype": "int4", "axis": "channel", "group": 32, "residual": 128}
    assert not joins((32, 8), 128, keys=keys)  # the main loop has no registers to spare
    assert joins((32, 8), 128, **pages[16])  # on an H200 a tile is one page
    assert not joins((32, 8), 256, **pages[16])  # each slot of a tile has an address of its own


# ---- what it gains: a model of a GPU as a fluid


TILE_KB = 64 * 128 * 2 * 2 / 1024  # of keys and values in bfloat16, in tiles of 64
MEMORY = 4300.0  # KB a microsecond: an H200
FASTEST = 60.0  # of one program alone


def bandwidth(work: Sequence[float], places: int) -> float:
    """The share of the memory's bandwidth that programs with so many KB each reach, started in this order.

    So many as there are places for run at once and share the memory evenly; none is faster than `FASTEST`. All that run
    have read as much since any moment: `read` counts it, and a program is done at where it began and its own KB.
    """
    waiting = list(reversed([kb for kb in work if kb > 0]))
    running: list[float] = []
    read = clock = 0.0
    while waiting or running:
        while waiting and len(running) < places:
            heapq.heappush(running, read + waiting.pop())
        done = heapq.heappop(running)
        rate = min(FASTEST, MEMORY / (len(running) + 1))
        clock += (done - read) / rate
        read = done
    return sum(work) / MEMORY / clock


def both(lengths: Sequence[int], heads: int = 8) -> tuple[float, float]:
    """Of splits, and of a list, as kernels for a graph of up to 64k tokens cut them."""
    own, places = Config(waves=3.0), 3 * H200.multiprocessors
    tiles = [math.ceil(length / 64) for length in lengths]
    splits = own.splits(H200, len(lengths) * heads, 1024)
    cut = []
    for count in tiles:
        share = math.ceil(count / splits)
        cut += [max(0, min(share, count - share * split)) for _ in range(heads) for split in range(splits)]
    work, programs = heads * sum(tiles), own.shares(H200, len(lengths) * heads * 1024)
    share = math.ceil(work / programs)
    listed = [max(0, min(share, work - share * program)) for program in range(programs)]
    assert sum(listed) == sum(cut) == work
    one, other = (bandwidth([TILE_KB * count for count in own], places) for own in (cut, listed))
    return one, other


def test_one_long_sequence_among_short_ones_takes_all_programs() -> None:
    splits, listed = both([65536, *[1024] * 63])
    assert 0.15 < splits < 0.25 and listed > 0.85


@pytest.mark.parametrize(
    "lengths",
    [
        [1024 + (65536 - 1024) * row // 63 for row in range(64)],
        [round(1024 * 64 ** (row / 63)) for row in range(64)],
        [4096] * 32,
        [65536] * 64,
        [65536, 1024],
    ],
    ids=["linear", "logarithmic", "32 alike", "64 alike", "two"],
)
def test_a_list_is_never_behind_splits(lengths: list[int]) -> None:
    splits, listed = both(lengths)
    assert listed > 0.85 and listed > splits - 0.01, (splits, listed)
