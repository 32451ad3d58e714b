"""Rows of numbers of groups of channels: what is loaded of them, of any count, and what attention makes of it."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcompile.kernels.triton.helpers import module
from kvcompile.kernels.triton.tile import group_numbers
from kvcompile.kernels.triton.tile.addressing import SlotArray
from kvcompile.kernels.triton.tile.stacking import filled, stacks
from kvcompile.layouts import CacheLayout, Contiguous, Paged, Placement, Storage, mxfp4, uint
from kvcompile.layouts.storage.scale import ScaleDtype
from tests.support.kernel_specs import Shape
from tests.support.triton_attention import Case, check
from tests.support.triton_write import kernels_folder  # noqa: F401  (a fixture)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
N, SIZE = 16, 4  # slots of a tile; channels of a group
GROUPS = (1, 2, 3, 4, 5, 6, 7, 9, 12, 15)
DTYPES: tuple[ScaleDtype, ...] = ("float16", "float32", "e8m0")
SPARE = 24  # rows behind the tile


def stored(dtype: ScaleDtype) -> Storage:
    kept = mxfp4() if dtype == "e8m0" else uint(4, SIZE)
    return replace(kept, scale=replace(kept.scale, size=SIZE, dtype=dtype))


def numbers(count: int, dtype: torch.dtype) -> Tensor:
    """Rows of any bytes, some of them no finite number."""
    bits = torch.randint(
        0, 256, (N + SPARE, count * dtype.itemsize), generator=torch.Generator().manual_seed(count)
    )
    return bits.to(torch.uint8).view(dtype)


def loading(folder: Path, count: int, dtype: ScaleDtype, page: int, masked: bool) -> ModuleType:
    """A kernel that loads a tile of rows, from row `first` on (or from `rows`), and stores it."""
    storage = stored(dtype)
    source = SlotArray("", "64", 1, N, page)
    width = group_numbers.columns(storage, count * SIZE)
    base = "tl.load(rows_ptr + n)" if source.gathers else "first"
    lines = [
        "n = tl.arange(0, 16)",
        f"base = {base}.to(tl.int64)",
        "inside = n < end",
        *group_numbers.loaded(source, "keys_scale", "found", storage, count * SIZE, masked),
        f"tl.store(out_ptr + n[:, None] * {width} + tl.arange(0, {width})[None, :], found)",
    ]
    text = "@triton.jit\ndef loading(keys_scale_ptr, rows_ptr, out_ptr, first, end):\n"
    path = folder / f"loading_{count}_{dtype}_{page}_{masked}.py"
    path.write_text(module(text + "\n".join(f"    {line}" for line in lines)))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("page", [0, 4], ids=["dense", "gathered"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", GROUPS)
def test_what_is_loaded(tmp_path: Path, count: int, dtype: ScaleDtype, page: int) -> None:
    """Bit for bit, wherever the first row stands in a word, and zeros beyond the last group."""
    x = numbers(count, stored(dtype).scale.torch_dtype)
    width = group_numbers.columns(stored(dtype), count * SIZE)
    assert width >= count and width & (width - 1) == 0
    for masked in (False, True):
        kernel = loading(tmp_path, count, dtype, page, masked)
        for first in (0, 1, 2, 3, 7):
            rows = torch.randperm(N + SPARE)[:N] if page else first + torch.arange(N)
            end = 11 if masked else N
            out = torch.full((N, width), 7).to(x.dtype)
            kernel.loading[(1,)](x, rows.to(torch.int32), out, torch.tensor(first).item(), end)
            wanted = torch.zeros_like(out)
            wanted[:end, :count] = x[rows[:end]]
            assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8)), (masked, first)


@pytest.mark.parametrize("dtype", ["float16", "e8m0"])
def test_no_word_is_read_that_has_no_byte_of_the_row(dtype: ScaleDtype) -> None:
    """It may be behind the tensor's memory. And all words are read that have one."""
    source, size = SlotArray("", "64", 1, N), stored(dtype).scale.torch_dtype.itemsize
    for count in (count for count in range(3, 40) if count & (count - 1)):
        lines = group_numbers.loaded(source, "keys_scale", "found", stored(dtype), count * SIZE, False)
        (byte,) = (line.partition(" = ")[2] for line in lines if line.startswith("found_byte = "))
        at = [line.partition("tl.uint32)) + ")[2][:-1] for line in lines if "tl.load" in line]
        for row in range(8):
            first = eval(byte, {"base": 0, "n": row})
            assert first == row * count * size
            read = {eval(one, {"found_byte": first}) for one in at}
            assert read == {byte // 4 for byte in range(first, first + count * size)}


def test_a_row_takes_no_more_columns_than_the_next_power_of_two() -> None:
    for count in range(1, 40):
        for dtype in DTYPES:
            width = group_numbers.columns(stored(dtype), count * SIZE)
            least = {"float16": 2, "float32": 1, "e8m0": 4}[dtype] if count & (count - 1) else 1
            assert width == max(least, 1 << (count - 1).bit_length())


# Heads of 3, 5, 6 and 7 groups of 16 channels, in an odd number of slots, and in pages.
@settings(max_examples=6)
@given(
    keys=st.sampled_from((uint(4, 16), uint(2, 16), uint(4, 8), uint(8))),
    values=st.sampled_from((uint(4, 16), uint(4, 8), uint(2, 16), mxfp4())),
    dim=st.sampled_from((48, 80, 96, 112)),
    heads=st.sampled_from(((2, 1), (3, 3), (6, 1))),
    placement=st.sampled_from((Contiguous(), Paged(8), Paged(32))),
    dtype=st.sampled_from((torch.float16, torch.bfloat16, torch.float32)),
    chunks=st.sampled_from(((23, 1), (16, 15, 1, 1), (37, 1))),
)
def test_attention_over_any_number_of_groups(
    keys: Storage,
    values: Storage,
    dim: int,
    heads: tuple[int, int],
    placement: Placement,
    dtype: torch.dtype,
    chunks: tuple[int, ...],
) -> None:
    if values.element.kind == "codebook":
        dim = 96  # in groups of 32
    check(Case(CacheLayout(keys, values, placement), heads, (dim, dim), dtype, chunks=chunks, pads=(0, 3)))


@pytest.mark.parametrize("dim", [96, 160, 192])
def test_groups_of_32_channels(dim: int) -> None:
    """As `int4` has them; of keys and values of different numbers of groups the larger tells how many sets are rows."""
    nibbles = CacheLayout(uint(4, 32), uint(4, 32))
    check(Case(nibbles, (4, 2), (dim, 64), torch.bfloat16, chunks=(21, 1, 1), pads=(0,)))


def test_who_has_a_row_for_each_group() -> None:
    """A power of two of sets, unless heads times those are more rows than a product needs."""

    def often(heads: int, dims: tuple[int, int], layout: CacheLayout) -> int:
        site = Shape((heads, 1), dims).site(layout)
        assert not filled("decode", site, *dims, heads, torch.bfloat16) or dims == (128, 128)
        return stacks("decode", site, *dims, heads, torch.bfloat16)

    nibbles = CacheLayout(uint(4, 32), uint(4, 32))
    assert [often(1, (dim, dim), nibbles) for dim in (64, 96, 128, 160, 192, 256)] == [2, 4, 4, 8, 8, 8]
    assert often(1, (96, 64), nibbles) == often(1, (64, 96), nibbles) == 4
    assert [often(heads, (96, 96), nibbles) for heads in (4, 5, 8)] == [4, 1, 1]
    assert [often(heads, (192, 192), nibbles) for heads in (2, 3)] == [8, 1]
    assert often(1, (576, 576), nibbles) == 1  # more than 16
