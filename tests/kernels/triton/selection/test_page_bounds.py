"""Steps that read chosen pages by generated kernels: against a dictionary of tokens, in tiles of every kind.

A tile lies in one chosen page, or goes over several; pages of the pool are larger, smaller, or there are none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvcompile.kernels.shared import page_summaries
from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.config import Config, using
from kvcompile.kernels.triton.generate import generate
from kvcompile.kernels.triton.host import ops_pages
from kvcompile.kernels.triton.host.launches import launches
from kvcompile.kernels.triton.host.site_kernels import kernels_of
from kvcompile.layouts import (
    CacheLayout,
    InKeys,
    Paged,
    TopPages,
    fp8,
    int8,
    model_dtype,
    mxfp4,
    uint,
    with_hadamard,
    with_residual,
)
from kvcompile.specs import BiasSpec, RotaryForm, ScoreSpec
from tests.support.kernel_specs import H200, SHAPES, recipe_layouts
from tests.support.triton_attention import Case, check, ran
from tests.support.triton_write import kernels_folder  # noqa: F401  (a fixture)

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
ALIBI, SINKS = ScoreSpec(bias=BiasSpec("alibi")), ScoreSpec(softcap=4.0, sinks=True)
CHUNKS = (37, 1, 1, 5, 1)
CASES = {
    "plain": Case(CacheLayout(selection=TopPages(4, 5)), (4, 2)),
    "pages of a tile": Case(
        CacheLayout(int8(), int8(), selection=TopPages(16, 2)), (4, 2), dtype=torch.bfloat16
    ),
    "pages of two tiles": Case(CacheLayout(fp8(), uint(4, 16), selection=TopPages(32, 1)), (3, 1), (48, 32)),
    "pages of no tile": Case(CacheLayout(int8(), model_dtype(), selection=TopPages(5, 4)), score=ALIBI),
    "in a pool of larger pages": Case(
        CacheLayout(int8(), int8(), Paged(32), selection=TopPages(16, 2)), (6, 2), score=SINKS
    ),
    "in a pool of smaller pages": Case(
        CacheLayout(uint(4, 16), model_dtype(), Paged(8), selection=TopPages(16, 2)), (4, 1)
    ),
    "scattered in a pool": Case(
        CacheLayout(mxfp4(), int8(), Paged(16), selection=TopPages(6, 3)), dims=(32, 16)
    ),
    "turned by RoPE": Case(
        CacheLayout(int8(), int8(), selection=TopPages(8, 3)),
        (4, 2),
        (24, 40),
        torch.float16,
        rotary=RotaryForm("interleaved", 0, 8),
    ),
    "turned by Hadamard, too": Case(
        CacheLayout(with_hadamard(int8()), with_hadamard(uint(4)), selection=TopPages(7, 3)),
        (4, 2),
        (24, 40),
        rotary=RotaryForm("half", 0, 24),
    ),
    "newest in full": Case(
        CacheLayout(with_residual(int8(), 5), with_residual(uint(2, 8), 6, 3), selection=TopPages(4, 3)),
        (4, 1),
    ),
    "first in full, in a pool": Case(
        CacheLayout(with_residual(fp8(), 0, 6), int8(), Paged(16), selection=TopPages(16, 2)), (4, 1)
    ),
    "latent": Case(CacheLayout(int8(), InKeys(16), selection=TopPages(4, 4)), (4, 1), (48, 16), score=SINKS),
    "group of 20": Case(CacheLayout(selection=TopPages(8, 2)), (20, 1)),
}


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "block"),
    # A tile of one page and of several; the others have one that the tests of tiles have.
    [(name, 16) for name in CASES]
    + [pytest.param(name, 64, marks=() if name == "pages of a tile" else pytest.mark.slow) for name in CASES],
)
def test_a_step_reads_the_pages_that_it_chose(name: str, block: int) -> None:
    case = replace(CASES[name], chunks=CHUNKS, pads=(0, 9))
    with using("decode", Config(block_n=block)):
        check(case)
        held = ran(case, "triton").held
    assert [bool((pages >= 0).any()) for pages in held] == [count == 1 for count in CHUNKS]


def test_a_sequence_that_begins_with_a_step_and_one_that_has_none_yet() -> None:
    case = Case(
        CacheLayout(int8(), int8(), selection=TopPages(2, 2)), chunks=(1, 1, 1, 1, 1, 1, 1), pads=(0, 3, 7)
    )
    check(case)


@pytest.mark.parametrize("storage", [model_dtype(), int8(), with_hadamard(uint(4))], ids=str)
def test_all_pages_are_the_full_cache(storage: Any) -> None:
    case = Case(CacheLayout(storage, storage), chunks=(9, 1, 1))
    every = replace(case, layout=replace(case.layout, selection=TopPages(4, 4)))
    assert torch.equal(ran(every, "triton").out, ran(case, "triton").out)


# ---- bounds alone


@settings(deadline=None, max_examples=6, suppress_health_check=list(HealthCheck), phases=(Phase.generate,))
@given(data=st.data(), seed=st.integers(0, 10**6))
def test_bounds_and_summaries_are_those_of_the_reference(data: st.DataObject, seed: int) -> None:
    """Of any head, group and page size, of few and of many pages, from any strides of q and k."""
    dim, size = data.draw(st.sampled_from((4, 24, 64, 80))), data.draw(st.integers(2, 9))
    group, heads, limit = data.draw(st.sampled_from((1, 3, 4))), data.draw(st.integers(1, 2)), 300
    dtype = data.draw(st.sampled_from((torch.float32, torch.float16, torch.bfloat16)))
    sm_scale = data.draw(st.sampled_from((dim**-0.5, 1.0, -0.3)))
    positions = torch.tensor([[-4], [0], [data.draw(st.integers(1, 290))], [290]])
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(4, 1, group * heads, dim, generator=g).to(dtype).transpose(1, 2)
    k = torch.randn(4, 1, heads, dim, generator=g).to(dtype).transpose(1, 2)
    selection, older = TopPages(size, 3), torch.randn(4, heads, limit, dim, generator=g).to(dtype)
    smallest, largest = (
        torch.full((4, heads, -(-limit // size), dim), float("nan"), dtype=dtype) for _ in "ab"
    )
    for row, (position,) in enumerate(positions.tolist()):
        if position > 0:
            own = torch.arange(position)[None]
            page_summaries.summarise(
                selection,
                older[row : row + 1, :, :position],
                own,
                *(x[row : row + 1] for x in (smallest, largest)),
            )
    mine = (smallest.clone(), largest.clone())
    page_summaries.summarise(selection, k, positions, smallest, largest)
    site = SiteSpec(CacheLayout(selection=selection), sm_scale, kernels="triton")
    spec = kernels_of(site, (group * heads, heads), (dim, dim), dtype, q.device, False).spec("page_bounds")
    span = data.draw(st.sampled_from((291, limit)))
    pages = -(-span // size)
    spec = replace(spec, block_n=data.draw(st.sampled_from((4, 32))))
    found = ops_pages.page_bounds(q, k, positions, *mine, pages, spec.to_json())
    for got, wanted in zip(mine, (smallest, largest), strict=True):
        assert torch.equal(got.isnan(), wanted.isnan()) and torch.equal(got.nan_to_num(), wanted.nan_to_num())
    scaled = q.float().unflatten(1, (heads, group)) * sm_scale
    low, high = (x[:, :, None, :pages].float() for x in (smallest, largest))
    bounds = torch.maximum(scaled * low, scaled * high).sum(-1).amax(2)
    newest = positions.clamp(min=0)[:, None] // size
    page = torch.arange(pages).expand_as(bounds)
    assert (found[page > newest] == float("-inf")).all() and (found[page == newest] == float("inf")).all()
    older_page = page < newest
    torch.testing.assert_close(found[older_page], bounds[older_page], rtol=1e-5, atol=1e-5)


# ---- what is launched


def test_the_launches_of_a_step_and_of_a_prompt() -> None:
    layout = recipe_layouts("quest_int8")["causal"]
    one, many = ([launch.spec for launch in SHAPES["llama"].kernels(layout, H200, n)] for n in (1, 64))
    assert [spec.role for spec in one] == ["append", "page_bounds", "decode", "combine"]
    assert [spec.role for spec in many] == ["append", "prefill"]
    assert "chosen" in one[2].options and "pages_read_ptr" in generate(one[2]).text
    assert "pages_read_ptr" not in generate(many[1]).text


def test_what_may_be_read_as_a_whole_is_read_as_without_a_selection() -> None:
    """Of at most 64 pages of 16 tokens there is nothing to choose."""
    layout = recipe_layouts("quest_int8")["causal"]
    site = SHAPES["llama"].site(layout)
    few = launches(site, (32, 8), (128, 128), torch.bfloat16, H200, limit=1024)
    assert [launch.spec.role for launch in few] == ["append", "decode", "combine"]
    assert not any("chosen" in launch.spec.options for launch in few)


def test_a_role_is_only_for_a_selection() -> None:
    site = SiteSpec(CacheLayout(), 0.1, kernels="triton")
    spec = kernels_of(site, (4, 2), (16, 16), torch.float32, torch.device("cpu"), False).spec("page_bounds")
    with pytest.raises(ValueError, match="for a selection of pages"):
        generate(spec)
    spec = replace(spec, site=replace(site, layout=CacheLayout(selection=TopPages(4, 2))), options=("lse",))
    with pytest.raises(ValueError, match="knows no options"):
        generate(spec)
