"""How many threads share a loop (`include/workers.h`): fewer while one of them keeps the others waiting."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvcompile.kernels.cpp.host import linear, ops
from kvcompile.kernels.cpp.host.compiler import INCLUDE, built

DRIVER = """
#include "workers.h"
extern "C" {
kv::Workers* workers_new() { return new kv::Workers; }
void workers_delete(kv::Workers* own) { delete own; }
int64_t workers_of(kv::Workers* own, int64_t threads) { return own->of(threads); }
void workers_met(kv::Workers* own, int64_t took, int64_t waited) { own->met(took, waited); }
}
"""
CALM, LATE = (100_000, 4_000), (9_000_000, 8_900_000)  # nanoseconds: of a loop, of them waited at its end
Loop = Callable[[tuple[int, int]], int]


@pytest.fixture(scope="module")
def library() -> Any:
    found = ctypes.CDLL(
        str(built("workers_test", DRIVER, ["-std=c++17", "-O1", "-fPIC", "-shared", f"-I{INCLUDE}"]))
    )
    found.workers_new.restype = ctypes.c_void_p
    found.workers_of.restype = ctypes.c_int64
    return found


@pytest.fixture
def loop(library: Any) -> Iterator[Loop]:
    """A loop of eight threads that goes as told; with how many it was shared. One alone waits for nobody."""
    own = ctypes.c_void_p(library.workers_new())

    def run(told: tuple[int, int]) -> int:
        sharing: int = library.workers_of(own, ctypes.c_int64(8))
        if sharing > 1:
            library.workers_met(own, *(ctypes.c_int64(number) for number in told))
        return sharing

    yield run
    library.workers_delete(own)


def until(loop: Loop, told: tuple[int, int], wanted: int, most: int = 100_000) -> int:
    """How many such loops it takes until one has `wanted` threads."""
    return next(number for number in range(most) if loop(told) == wanted)


def test_nothing_changes_while_none_is_late(loop: Loop) -> None:
    assert {loop(CALM) for _ in range(2_000)} == {8}


@pytest.mark.parametrize(
    "told", [(50_000_000, 900_000), (300_000, 190_000)], ids=["little of it", "a moment"]
)
def test_the_ends_of_uneven_pieces_are_no_lateness(loop: Loop, told: tuple[int, int]) -> None:
    assert {loop(told) for _ in range(2_000)} == {8}


def test_a_late_loop_now_and_then_is_noise(loop: Loop) -> None:
    assert {loop(LATE if number % 200 == 0 else CALM) for number in range(10_000)} == {8}


def test_late_loops_halve_the_threads_until_none_is_late(loop: Loop) -> None:
    assert until(loop, LATE, 4) <= 3
    assert until(loop, LATE, 2) <= 3
    assert until(loop, LATE, 1) <= 3


def test_more_are_tried_again_and_more_seldom_while_they_are_late(loop: Loop) -> None:
    until(loop, LATE, 4)
    rests = []
    for _ in range(8):
        rests.append(until(loop, CALM, 8))
        assert until(loop, LATE, 4) <= 2, "a trial ends with its first late loop"
    assert rests[0] < rests[1] < rests[2] and rests[0] < 300
    assert max(rests) < 10_000, "a core that is free again is found within seconds"


def test_all_come_back_when_the_others_have_gone(loop: Loop) -> None:
    until(loop, LATE, 1)
    assert until(loop, CALM, 8) < 3_000
    for _ in range(20_000):
        assert loop(CALM) == 8
    until(loop, LATE, 4)
    assert until(loop, CALM, 8) < 300, "what was long ago makes no rest longer"


def test_what_is_computed_does_not_depend_on_who_comes(loop: Loop) -> None:
    """Many loops beside a program that has a core: the same bits each time."""
    ops.ready()
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(1, 512, generator=generator), torch.randn(768, 512, generator=generator)
    before = torch.get_num_threads()
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        torch.set_num_threads(4)
        wanted = linear.linear(x, weight)
        assert all(torch.equal(linear.linear(x, weight), wanted) for _ in range(300))
    finally:
        torch.set_num_threads(before)
        neighbour.kill()
        neighbour.wait()
