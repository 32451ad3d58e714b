"""`cached_attention_packed` by generated Triton kernels, interpreted: what they give each sequence alone."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcompile.kernels.triton.attend.decoded_rows import ALL
from kvcompile.kernels.triton.host import decoded_once, ops_rows
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.layouts import CacheLayout, InKeys, Paged, SinkWindow, fp8, int8, nf4, uint, with_hadamard
from kvcompile.specs import BiasSpec, MaskSpec, RotaryForm, ScoreSpec
from tests.support.new_memory import nonsense_in_new_memory  # noqa: F401  (a fixture)
from tests.support.packed import Packed, check, packed, schedule
from tests.support.triton_attention import Case
from tests.support.triton_write import kernels_folder  # noqa: F401  (a fixture)

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
LENGTHS = {"chunks": (24,), "pads": (0, 0, 0)}
CASES = {
    "plain": Case(CacheLayout(placement=Paged(8)), (4, 2), (16, 16), **LENGTHS),
    "int4, int8": Case(
        CacheLayout(uint(4, 16), int8(), Paged(16)),
        (4, 2),
        (16, 24),
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
    "ring, calibrated": Case(
        CacheLayout(fp8(scale="head"), with_hadamard(int8()), Paged(8), SinkWindow(3, 9)),
        (4, 2),
        mask=MaskSpec("sliding", 6),
        **LENGTHS,
    ),
    "halves": Case(
        CacheLayout(uint(4, 16), int8(), Paged(16)),
        (4, 2),
        (16, 24),
        score=ScoreSpec(4.0, BiasSpec("alibi")),
        dtype=torch.float16,
        rotary=RotaryForm("half", 0, 16),
        **LENGTHS,
    ),
    "turned": Case(
        CacheLayout(fp8(scale="head"), with_hadamard(uint(4, 8)), Paged(8)),
        (4, 2),
        (16, 24),
        score=ScoreSpec(sinks=True),
        dtype=torch.bfloat16,
        **LENGTHS,
    ),
    "latent": Case(CacheLayout(int8(), InKeys(16), Paged(16)), (4, 1), (48, 16), **LENGTHS),
}
UNSHRUNK = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    max_examples=40,
)
AROUND = (((0, 5), (1, 3)), ((0, 1), (1, 9), (2, 12)), ((2, 1), (0, 1)))


@pytest.mark.parametrize("name", ["ring, in cache", "plain", "turned"])
def test_sites_that_share_a_cache(name: str) -> None:
    """The first writes before, the last after; each turns its queries, at the places of their own sequences."""
    case = replace(CASES[name], heads=(2, 1))
    beyond = (((0, 11), (1, 2)), ((1, 1), (2, 4), (0, 3)))
    check(Packed(case, beyond, (0, 1)), "triton", shares=("first", "last"))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CASES)
def test_chunks_beside_decodes_go_round(name: str) -> None:
    check(Packed(CASES[name], AROUND, (0, 1, 2)), "triton")


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For how many sequences codes of packed calls were decoded to rows, and any number of new tokens is enough.

    Of each sequence rows are written of the tokens that it has in slots, and no others.
    """
    found: list[int] = []
    plain = ops_rows.decoded_rows

    def watched(*given: Any) -> list[Tensor]:
        outs: list[Tensor] = plain(*given)
        positions, decoded, starts = given[1], given[2], given[5]
        if starts is not None:
            found.append(outs[0].shape[0] if decoded else 0)
            for row, (start, end) in enumerate(pairwise(starts.tolist())):
                own = positions[
                    0, start:end
                ].tolist()  # of its new tokens, which option all makes rows of, too
                held = (
                    0 if not own else own[-1] + 1 if ALL in KernelSpec.from_json(given[3]).options else own[0]
                )
                made = min(held, decoded)
                for out in outs:
                    assert out[row, :, :made].isfinite().all() and out[row, :, made:].isnan().all()
        return outs

    monkeypatch.setattr(ops_rows, "decoded_rows", watched)
    monkeypatch.setattr(decoded_once, "LEAST_TILES", 0)
    return found


@pytest.mark.parametrize("name", ["turned", "halves"])
def test_codes_of_several_sequences_are_decoded_to_rows(name: str, rows: list[int]) -> None:
    """Of sequences that begin, that go on, that have one token and none; those that come first read slots."""
    steps = (((0, 5), (1, 9)), ((1, 1), (0, 9), (2, 12)), ((1, 1), (0, 1), (2, 0)), ((0, 1), (2, 3)))
    check(Packed(CASES[name], steps, (0, 1, 0, 1)), "triton")
    assert rows == [2, 2, 3, 1]


@pytest.mark.parametrize("most", [decoded_once.MOST, 0], ids=["rows", "slots"])
def test_where_a_graph_leaves_it_open_one_of_two_launches_ends_at_once(
    most: int, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoded_once, "is_known", lambda _: False)
    monkeypatch.setattr(decoded_once, "MOST", most)
    check(Packed(CASES["turned"], AROUND, (0, 1, 2)), "triton", shares=("first", "last"))
    assert rows == ([2, 2, 2, 2] if most else [0] * 4)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@UNSHRUNK
@given(one=packed("triton"))
def test_any_site_in_any_steps(one: Packed) -> None:
    check(one, "triton")


@pytest.mark.slow
@pytest.mark.timeout(7200)
@UNSHRUNK
@given(one=packed("triton"), dtype=st.sampled_from((torch.float16, torch.bfloat16)))
def test_any_site_reads_rows_in_any_steps(one: Packed, dtype: torch.dtype) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoded_once, "LEAST_TILES", 0)
        check(replace(one, case=replace(one.case, dtype=dtype)), "triton")


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(20))
def test_sites_in_many_steps(name: str, seed: int) -> None:
    check(schedule(CASES[name], random.Random(seed).randint), "triton")
