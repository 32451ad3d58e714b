"""Generated kernels that append and attend, as one op, over every kind of site, against oracles in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from kvcompile.layouts import (
    CacheLayout,
    InKeys,
    Paged,
    SinkWindow,
    Window,
    fp8,
    int8,
    mxfp4,
    nf4,
    per_channel,
    uint,
    with_hadamard,
    with_residual,
)
from kvcompile.specs import RotaryForm
from tests.support.triton_attention import Case, cases, check
from tests.support.triton_write import kernels_folder  # noqa: F401  (a fixture)

# A score far above a softcap: its exp2 is inf, and 1 / inf the 0 that is meant.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
# The interpreter is slow: an example that fails is told as it is.
AS_IT_IS = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)


@settings(AS_IT_IS, max_examples=6)
@given(case=cases())
def test_any_site(case: Case) -> None:
    check(case)


@settings(AS_IT_IS, max_examples=3)
@given(case=cases(scored=True))
def test_any_site_of_a_retention_by_scores(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(AS_IT_IS, max_examples=400)
@given(case=cases())
def test_many_sites(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(AS_IT_IS, max_examples=200)
@given(case=cases(scored=True))
def test_many_sites_of_a_retention_by_scores(case: Case) -> None:
    check(case)


LATENT = {
    "plain": Case(CacheLayout(int8(), InKeys(512)), (4, 1), (576, 512), torch.bfloat16),
    "scaled by channel, turned when read": Case(
        CacheLayout(per_channel(4, 8, 8), InKeys(512), before_rope=True),
        (4, 1),
        (576, 512),
        rotary=RotaryForm("interleaved", 512, 64),
    ),
    "calibrated, turned when read": Case(
        CacheLayout(fp8(scale="head"), InKeys(512), before_rope=True),
        (4, 1),
        (576, 512),
        rotary=RotaryForm("half", 512, 64),
    ),
    "turned": Case(CacheLayout(with_hadamard(uint(4, 32)), InKeys(512)), (4, 1), (576, 512), torch.float16),
    "groups, pieces of padding": Case(
        CacheLayout(uint(4, 32), InKeys(512)), (4, 1), (576, 512), torch.bfloat16
    ),
    "groups of 2 bits": Case(CacheLayout(uint(2, 32), InKeys(512)), (4, 1), (576, 512), torch.bfloat16),
    "groups that pieces have in part": Case(
        CacheLayout(uint(4, 64), InKeys(512)), (4, 1), (576, 512), torch.bfloat16
    ),
    "a codebook": Case(CacheLayout(nf4(32), InKeys(512)), (4, 1), (576, 512), torch.bfloat16),
    "powers of two": Case(
        CacheLayout(with_hadamard(mxfp4()), InKeys(512)), (4, 1), (576, 512), torch.bfloat16
    ),
    "scaled by channel": Case(
        CacheLayout(per_channel(4, 8, 8), InKeys(512)), (4, 1), (576, 512), torch.bfloat16
    ),
    "scaled by channel, of two tiles, the newest in full": Case(
        CacheLayout(with_residual(per_channel(2, 32, 32), 32), InKeys(512)),
        (4, 1),
        (576, 512),
        torch.bfloat16,
    ),
    "the first in full": Case(
        CacheLayout(with_residual(fp8(), 0, 2), InKeys(512)), (4, 1), (576, 512), torch.bfloat16
    ),
}


@pytest.mark.parametrize("name", LATENT)
def test_the_latent_of_mla(name: str) -> None:
    """Keys of 576 channels, the first 512 of which are the values."""
    # Groups of tokens that are settled, and tokens that are not yet.
    longer = LATENT[name].layout.keys.residual > 2
    check(replace(LATENT[name], chunks=(65, 1, 5, 1) if longer else (9, 1), pads=(0,)))


# More query heads to a KV head than leave rows for groups of channels: codes take the scales of these, in a step too.
FULL_ROWS = {
    "groups of 32 of 128 channels": Case(CacheLayout(uint(4, 32), uint(4, 32)), (5, 1), (128, 128)),
    "groups of 16 of 64, columns of padding": Case(CacheLayout(uint(4, 32), uint(4, 16)), (5, 1), (64, 64)),
    "of bytes": Case(CacheLayout(uint(4, 64), uint(8, 32)), (9, 1), (128, 128)),
    "of values alone, beside tokens in full": Case(
        CacheLayout(per_channel(4, 8, 8), with_residual(uint(4, 32), 8)), (6, 1), (128, 128)
    ),
    "two heads, columns of padding": Case(CacheLayout(uint(4, 32), uint(4, 32)), (2, 1), (64, 64)),
}


@pytest.mark.parametrize("name", FULL_ROWS)
def test_heads_that_fill_the_rows_of_a_product(name: str) -> None:
    """Against the oracle: a group's scale taken for another's is far out of the budget."""
    check(replace(FULL_ROWS[name], dtype=torch.float16, chunks=(9, 1), pads=(0,)))


# A tile of 16 slots is two pages, or four; chunks end within pages, at their ends, and reach over a window.
GIVEN_BACK = {
    "window": Case(
        CacheLayout(int8(), int8(), Paged(8, released=True), Window(7)),
        chunks=(1, 1, 12, 1, 9, 1, 1),
        pads=(2, 0),
    ),
    "sinks": Case(
        CacheLayout(placement=Paged(4, released=True), retention=SinkWindow(3, 6)),
        chunks=(9, 1, 1, 14, 1, 1),
        pads=(0, 5),
    ),
}


@pytest.mark.parametrize("name", GIVEN_BACK)
def test_pages_that_were_given_back_are_not_multiplied(name: str) -> None:
    """Their places name a page of nobody, which holds no numbers; what no query sees of them has a probability of 0."""
    check(GIVEN_BACK[name])
