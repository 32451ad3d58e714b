"""How fast programs make turns: closed forms, bounds, and that nothing that costs more is predicted to be faster."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompile.kernels.triton.predict.assumptions import EXPECTED, HARSH, KIND
from kvcompile.kernels.triton.predict.model import Model
from kvcompile.kernels.triton.predict.turn import Turn, rate
from kvcompile.util.machines import MACHINES

H200 = Model(MACHINES["h200"])
TURN = Turn(32768.0, 32768.0, 0.1e-6, "issue", 0.3e-6, 0.5e-6, 1)
ROUNDING = 1 + 1e-9
seconds = st.floats(0.0, 5e-6)
turns = st.builds(
    lambda size, near, busy, alone, latency, ahead: Turn(
        size, size + near, busy, "issue", busy + alone, latency, ahead
    ),
    st.floats(1.0, 1e6),
    st.floats(0.0, 1e6),
    seconds,
    seconds,
    seconds,
    st.integers(0, 4),
)
models = st.builds(Model, st.sampled_from(list(MACHINES.values())), st.sampled_from([EXPECTED, KIND, HARSH]))
together = st.tuples(st.integers(1, 8), st.integers(1, 132)).map(lambda pair: (pair[0], pair[0] * pair[1]))


def test_one_program_waits_for_all_in_turn() -> None:
    """Alone and with one buffer, a turn is latency, copy, and computing."""
    alone = rate(replace(TURN, ahead=0), 1, 1, H200)
    copied = max(TURN.bytes / H200.machine.copied, TURN.near / (EXPECTED.near * H200.machine.clock))
    assert alone.turns == pytest.approx(1 / (TURN.latency + TURN.alone + copied))


def test_two_servers_that_need_the_same_are_known() -> None:
    """N customers of two equal servers: N / (N + 1) of a server's rate (Lazowska et al. 1984)."""
    need = TURN.bytes * 132 / H200.machine.copied
    equal = replace(TURN, busy=need, alone=0.0, latency=0.0, ahead=0)
    for count in (1, 2, 5):
        assert rate(equal, count, count * 132, H200).turns * count == pytest.approx(
            count / (count + 1) / need
        )


@given(turns, together, models)
def test_no_server_does_more_than_it_can(turn: Turn, shared: tuple[int, int], model: Model) -> None:
    beside, active = shared
    found = rate(turn, beside, active, model).turns
    assert found * turn.bytes * active <= model.machine.copied * ROUNDING
    assert found * beside * turn.busy <= ROUNDING and found * turn.alone <= ROUNDING
    assert found * beside * turn.near <= model.assumed.near * model.machine.clock * ROUNDING


@given(turns, together, st.sampled_from(["bytes", "near", "busy", "alone", "latency"]), st.floats(1.0, 4.0))
def test_what_costs_more_is_not_faster(turn: Turn, shared: tuple[int, int], name: str, times: float) -> None:
    more = {name: getattr(turn, name) * times}
    more |= {"near": max(turn.near, turn.bytes * times)} if name == "bytes" else {}
    more |= {"alone": turn.alone + more["busy"] - turn.busy} if name == "busy" else {}
    slower = replace(turn, **more)
    assert rate(slower, *shared, H200).turns <= rate(turn, *shared, H200).turns * ROUNDING


@given(turns, together)
def test_more_buffers_are_never_slower(turn: Turn, shared: tuple[int, int]) -> None:
    found = [rate(replace(turn, ahead=ahead), *shared, H200).turns for ahead in range(4)]
    assert all(more >= less / ROUNDING for less, more in pairwise(found))


@given(turns, together)
def test_more_programs_do_more_together(turn: Turn, shared: tuple[int, int]) -> None:
    """Each is slower, all of them are not."""
    beside, active = shared
    full = active // beside
    here = rate(turn, beside, active, H200).turns
    more = rate(turn, beside + 1, active + full, H200).turns
    assert more <= here * ROUNDING and more * (active + full) >= here * active / ROUNDING


def test_the_limit_is_what_there_is_too_little_of() -> None:
    assert rate(replace(TURN, bytes=1e6, near=1e6), 3, 396, H200).limit == "memory"
    assert rate(replace(TURN, busy=5e-6, alone=5e-6), 3, 396, H200).limit == "issue"
    assert rate(replace(TURN, latency=9e-6, ahead=0), 1, 132, H200).limit == "latency"
    assert rate(replace(TURN, bytes=1.0, near=1e6), 3, 396, H200).limit == "L2 cache"
