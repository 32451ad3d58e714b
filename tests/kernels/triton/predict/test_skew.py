"""Programs over places, against a simulation in small steps of time, and what must hold of any grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompile.kernels.triton.predict.model import Model
from kvcompile.kernels.triton.predict.skew import spent
from kvcompile.kernels.triton.predict.turn import Turn, rate
from kvcompile.util.machines import MACHINES

H200 = Model(MACHINES["h200"])
SMALL = Model(replace(H200.machine, multiprocessors=3, bandwidth=1e11))
TURN = Turn(32768.0, 32768.0, 0.1e-6, "issue", 0.3e-6, 0.5e-6, 1)
START, END = 1.0e-6, 0.4e-6
programs = st.lists(st.integers(0, 40).map(float), min_size=1, max_size=30)


def stepped(turns: Sequence[float], places: int, model: Model, step: float) -> float:
    """The same in small steps of time; nothing of it is shared with the model but the rates."""
    waiting = list(turns)
    slots: list[list[list[float]]] = [[] for _ in range(model.machine.multiprocessors)]
    for _ in range(places):
        for slot in slots:
            if waiting:
                slot.append([START, waiting.pop(0), END])
    now = 0.0
    while any(slots):
        counts = [sum(one[0] <= 0 < one[1] for one in slot) for slot in slots]
        for slot, beside in zip(slots, counts, strict=True):
            for one in list(slot):
                if one[0] > 0:
                    one[0] -= step
                elif one[1] > 0:
                    one[1] -= step * rate(TURN, beside, sum(counts), model).turns
                else:
                    one[2] -= step
                    if one[2] <= 0:
                        slot.remove(one)
                        if waiting:
                            slot.append([START, waiting.pop(0), END])
        now += step
    return now


@pytest.mark.parametrize(
    ("turns", "places"),
    [([5.0] * 7, 2), ([1.0, 9.0, 0.0, 30.0, 2.0, 2.0, 14.0, 3.0, 3.0, 8.0], 1), ([40.0], 4)],
)
def test_it_is_what_small_steps_give(turns: list[float], places: int) -> None:
    found = spent(turns, TURN, START, END, places, SMALL)
    assert found.seconds == pytest.approx(stepped(turns, places, SMALL, 2e-9), rel=0.01)


def test_whole_waves_follow_each_other() -> None:
    """Programs that fill all places twice take twice as long as those that fill them once."""
    once = spent([20.0] * 9, TURN, START, END, 3, SMALL).seconds
    assert once == pytest.approx(START + 20 / rate(TURN, 3, 9, SMALL).turns + END)
    assert spent([20.0] * 18, TURN, START, END, 3, SMALL).seconds == pytest.approx(2 * once)


@settings(max_examples=50)
@given(programs, st.integers(1, 4))
def test_no_grid_beats_its_bytes_or_its_longest_program(turns: list[float], places: int) -> None:
    found = spent(turns, TURN, START, END, places, SMALL)
    assert found.seconds >= sum(turns) * TURN.bytes / SMALL.machine.copied * (1 - 1e-9)
    assert found.seconds >= START + max(turns) / rate(TURN, 1, 1, SMALL).turns + END - 1e-12
    assert found.seconds == pytest.approx(sum(found.on.values()))


@settings(max_examples=50)
@given(programs, st.integers(0, 40), st.integers(1, 4))
def test_a_further_program_makes_no_grid_faster(turns: list[float], more: int, places: int) -> None:
    before = spent(turns, TURN, START, END, places, SMALL).seconds
    assert spent([*turns, float(more)], TURN, START, END, places, SMALL).seconds >= before * (1 - 1e-9)


@settings(max_examples=50)
@given(st.integers(1, 40), st.integers(1, 30), st.integers(1, 4))
def test_longer_programs_take_longer(turns: int, count: int, places: int) -> None:
    shorter = spent([float(turns)] * count, TURN, START, END, places, SMALL).seconds
    longer = spent([turns + 1.0] * count, TURN, START, END, places, SMALL).seconds
    assert longer > shorter


def test_skew_costs() -> None:
    """One long sequence among short ones leaves most of the device idle: the design's simulation gave 20 %."""
    even = spent([16.0] * 512, TURN, START, END, 3, H200)
    skewed = spent([1.0] * 504 + [960.0 + 1.0] * 8, TURN, START, END, 3, H200)
    assert skewed.seconds > 4 * even.seconds
    assert max(skewed.on, key=lambda name: skewed.on[name]) == "tail"
