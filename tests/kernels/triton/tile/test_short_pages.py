"""Tiles of several groups of tokens that share scales, over pages shorter than the tile: each group is found in its
page, and attention is the reference's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcompile.kernels.triton.config import case_of, config
from kvcompile.kernels.triton.device import Device
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.kernels.triton.tile.addressing import SlotArray
from kvcompile.kernels.triton.tile.reader import reader
from kvcompile.layouts import CacheLayout, Paged, Storage, int8, per_channel, uint
from tests.support.kernel_specs import SHAPES, recipe_layouts
from tests.support.triton_attention import Case, check
from tests.support.triton_write import kernels_folder  # noqa: F401  (a fixture)

TILE = 16  # slots, as the interpreter has them


@settings(max_examples=8)
@given(
    bits=st.sampled_from((4, 8)),
    group=st.sampled_from((2, 4, 8)),
    pages=st.sampled_from((1, 3, 5)),
    values=st.sampled_from((uint(4, 16), uint(8), int8())),
    heads=st.sampled_from(((4, 1), (6, 3), (2, 2))),
    dim=st.sampled_from((64, 80)),
    dtype=st.sampled_from((torch.float16, torch.bfloat16)),
    chunks=st.sampled_from(((23, 1), (16, 15, 1, 1), (37, 1), (1, 1, 1))),
)
@example(bits=4, group=2, pages=1, values=int8(), heads=(2, 2), dim=64, dtype=torch.float16, chunks=(37, 1))
def test_attention_over_them(
    bits: int,
    group: int,
    pages: int,
    values: Storage,
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
    chunks: tuple[int, ...],
) -> None:
    """Pages of 8, 24 and 40 tokens: none is a multiple of a tile, and all have whole groups."""
    layout = CacheLayout(per_channel(bits, group, 2 * group), values, Paged(8 * pages))
    case = Case(layout, heads, (dim, dim), dtype, chunks=chunks, pads=(0, 3))
    made = KernelSpec("decode", case.site, *heads, dim, dim, str(dtype).removeprefix("torch."), 4, TILE)
    assert reader(made, "keys").affine
    check(case)


@pytest.mark.parametrize(("page", "affine"), [(32, True), (96, True), (64, True), (16, False), (48, False)])
def test_a_page_has_whole_groups_of_32(page: int, affine: bool) -> None:
    """Then a tile of any case has several; what chooses tiles and what reads them agree."""
    site = SHAPES["llama"].site(replace(recipe_layouts("kivi4")["causal"], placement=Paged(page)))
    case = case_of("decode", site, 32, 8, 128, 128, torch.bfloat16)
    own = config(case, site, Device("NVIDIA H200", 90, 132))
    made = KernelSpec("decode", site, 32, 8, 128, 128, "bfloat16", own.block_m, own.block_n)
    assert (case.affine, reader(made, "keys").affine, own.block_n > 32) == (affine,) * 3
    assert reader(replace(made, block_n=64), "keys").affine is affine


@pytest.mark.parametrize("masked", [False, True])
def test_a_group_has_one_place_in_the_table(masked: bool) -> None:
    short = SlotArray("", "slots", 2, 64, page_size=32)
    lines = "\n".join(short.groups("k_groups", 32, masked))
    assert lines.count("tl.load") == 1 and ("mask=" in lines) is masked
    whole = "\n".join(replace(short, page_size=128).groups("k_groups", 32, masked))
    assert "tl.load" not in whole  # the page of the tile is that of its groups
