"""`cached_attention_packed` by C++ kernels: what they give each sequence alone; nobody's numbers are not even read."""

from __future__ import annotations

import math
import random

import pytest

from kvcompile.layouts import CacheLayout, Paged, SinkWindow, int8, nf4, uint
from kvcompile.specs import BiasSpec, RotaryForm, ScoreSpec
from tests.support.packed import Packed, check, packed_case, schedule
from tests.support.triton_attention import Case

LENGTHS = {"chunks": (24,), "pads": (0, 0, 0, 0, 0)}
CASES = {
    "plain": Case(CacheLayout(placement=Paged(8)), (4, 2), (32, 16), **LENGTHS),
    "int4, int8": Case(
        CacheLayout(uint(4, 16), int8(), Paged(16)),
        (4, 2),
        (32, 24),
        score=ScoreSpec(4.0, BiasSpec("alibi"), True),
        rotary=RotaryForm("half", 0, 16),
        **LENGTHS,
    ),
    "ring, in cache": Case(
        CacheLayout(uint(3, 8), nf4(16), Paged(8), SinkWindow(3, 6, "in_cache")),
        (2, 2),
        rotary=RotaryForm("interleaved", 8, 8),
        **LENGTHS,
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_sites_in_any_steps(name: str, seed: int) -> None:
    check(schedule(CASES[name], random.Random(seed).randint), "cpp", unwritten=math.nan)


def test_a_chunk_goes_round_a_ring_beside_decodes() -> None:
    steps = (((0, 5), (1, 3)), ((0, 1), (1, 13), (2, 12)), ((2, 1), (1, 1), (0, 1)))
    check(Packed(CASES["ring, in cache"], steps, (0, 1, 3)), "cpp", unwritten=math.nan)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(60))
def test_any_site_in_any_steps(seed: int) -> None:
    draw = random.Random(seed)
    check(schedule(packed_case(draw.choice, "cpp"), draw.randint), "cpp")
