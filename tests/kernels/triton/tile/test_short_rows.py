"""Codes of 2 bits in rows of few words, 8 as of 64 channels: which steps read them as words, and that attention over
them is the reference's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from kvcompile.kernels.triton.spec import KernelSpec, Role
from kvcompile.kernels.triton.tile.channel_blocks import step_in_words
from kvcompile.kernels.triton.tile.reader import reader
from kvcompile.layouts import (
    CacheLayout,
    Contiguous,
    Paged,
    Placement,
    Storage,
    TopPages,
    int8,
    per_channel,
    uint,
    with_residual,
)
from tests.support.kernel_specs import recipe_layouts, spec
from tests.support.triton_attention import Case, check
from tests.support.triton_write import kernels_folder  # noqa: F401  (a fixture)

KIVI2 = recipe_layouts("kivi2")["causal"]


def words(made: KernelSpec) -> tuple[bool, bool]:
    """Whether keys and values are read in words."""
    return tuple(reader(made, side).words for side in ("keys", "values"))  # type: ignore[return-value]


def of(
    layout: CacheLayout, role: Role = "decode", shape: str = "llama", **changes: object
) -> tuple[bool, bool]:
    made, _ = spec(role, layout, shape)
    return words(replace(made, **changes))  # type: ignore[arg-type]


def test_who_reads_them_as_words() -> None:
    """Steps of few rows, whose tile has whole groups of tokens; else neither side."""
    assert of(KIVI2) == (True, True)
    assert of(replace(KIVI2, placement=Paged(64))) == (True, True)
    assert of(replace(KIVI2, placement=Paged(32))) == (True, True)
    assert of(replace(KIVI2, values=int8())) == (True, True)
    assert of(replace(KIVI2, values=uint(2))) == (True, True)
    assert of(KIVI2, "prefill") == (False, False)
    assert of(KIVI2, shape="mqa") == (True, True)  # 16 heads, a row once: codes of values take their scales
    assert of(KIVI2, shape="smollm2") == (True, True)
    assert of(KIVI2, shape="gemma") == (True, True)
    assert of(KIVI2, dtype="float32") == (False, False)
    assert of(replace(KIVI2, placement=Paged(16))) == (False, False)
    assert of(KIVI2, block_n=16) == (False, False)  # half a group: its scales multiply the queries
    assert of(KIVI2, num_qo_heads=64, num_kv_heads=2) == (False, False)  # 32 rows
    assert of(replace(KIVI2, selection=TopPages(64, 4), placement=Paged(64)))[1] is False
    assert of(CacheLayout(uint(2, 32), uint(2, 32))) == (False, False)
    # Values beside keys of another width stay bytes.
    assert of(replace(KIVI2, keys=per_channel(4, 32, 128))) == (True, False)
    assert of(replace(KIVI2, keys=per_channel(2, 64, 128))) == (False, False)


@pytest.mark.parametrize(
    ("keys", "dim", "rows", "role"),
    [
        (per_channel(2, 32, 128), 128, 17, "decode"),
        (per_channel(2, 32, 128), 32, 4, "decode"),
        (per_channel(2, 64, 128), 128, 4, "decode"),
        (per_channel(4, 32, 128), 128, 4, "decode"),
        (per_channel(2, 32, 128), 128, 4, "prefill"),
        (uint(2, 32), 128, 4, "decode"),
    ],
    ids=str,
)
def test_which_steps(keys: Storage, dim: int, rows: int, role: str) -> None:
    assert step_in_words("decode", per_channel(2, 32, 128), 64, 16)
    assert not step_in_words(role, keys, dim, rows)


@settings(max_examples=6, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    group=st.sampled_from((2, 4, 8, 16)),
    dim=st.sampled_from((64, 96, 128, 256)),
    values=st.sampled_from((uint(2, 32), uint(2), with_residual(uint(2, 64), 5), uint(4, 32), int8())),
    heads=st.sampled_from(((4, 1), (6, 3), (2, 2), (16, 1))),
    pages=st.integers(0, 3),
    dtype=st.sampled_from((torch.float16, torch.bfloat16)),
    chunks=st.sampled_from(((23, 1), (16, 15, 1, 1), (37, 1))),
)
@example(16, 64, uint(2, 32), (4, 1), 1, torch.bfloat16, (37, 1))
@example(4, 128, with_residual(uint(2, 64), 5), (4, 1), 0, torch.bfloat16, (23, 1))
@example(16, 128, uint(2, 32), (16, 1), 0, torch.float16, (16, 15, 1, 1))
# A group of values is longer than the channels of a plane.
@example(8, 128, with_residual(uint(2, 64), 5), (16, 1), 0, torch.float16, (37, 1))
def test_attention_over_them(
    group: int,
    dim: int,
    values: Storage,
    heads: tuple[int, int],
    pages: int,
    dtype: torch.dtype,
    chunks: tuple[int, ...],
) -> None:
    """Tiles of 16 slots, of one group or several, as the interpreter has them.

    pages: how many times the tokens of a group, or 8, a page has; 0: there are none
    """
    placement: Placement = Paged(pages * max(group, 8)) if pages else Contiguous()
    layout = CacheLayout(per_channel(2, group, 2 * group), values, placement)
    case = Case(layout, heads, (dim, dim), dtype, chunks=chunks, pads=(0, 3))
    made = KernelSpec("decode", case.site, *heads, dim, dim, str(dtype).removeprefix("torch."), 4, 16)
    few = reader(made, "keys").stack * heads[0] // heads[1] <= 16
    assert words(made)[0] is few or dim == 256  # those of long rows also where scales multiply the queries
    check(case)
