"""The kernel of linear layers of more than one token: any shape against float64, and which rows have the same bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcompile.kernels.cpp.host import ops, source
from kvcompile.kernels.cpp.isa import VARIABLE, available, isa, multiplies_pairs
from tests.support.budget import rounding

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMS = ("few", "many")
LIBRARY = {torch.float32: 64, torch.bfloat16: 16, torch.float16: 16}  # rows that no processor leaves to it


def run(form: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    ops.ready()
    out: Tensor = ops.cpp_linear(x, weight, bias, f"linear_{form} {source.MODELS[x.dtype]}")
    return out


def layer(
    rows: int, columns: int, channels: int, dtype: torch.dtype, apart: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """x, a weight whose rows lie `apart` more than their channels, and a bias."""
    g = torch.Generator().manual_seed(rows * 7 + columns * 3 + channels)
    shapes = ((rows, channels), (columns, channels + apart), (columns,))
    x, weight, bias = (torch.randn(shape, generator=g).to(dtype) for shape in shapes)
    return x, weight[:, :channels], bias


def most_unpacked(form: str, dtype: torch.dtype) -> int:
    """For how many rows the kernel reads weights as they lie; it packs them for more."""
    pairs = dtype == torch.bfloat16 and form == "few" and multiplies_pairs()
    soon = "avx512f" in isa().needs and (dtype == torch.float32 or pairs)
    return 8 if soon else 16


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 200),
    channels=st.integers(1, 400),
    apart=st.sampled_from((0, 0, 1, 6)),
    biased=st.booleans(),
)
# Of half precision, a result below the normal ones.
@example(rows=37, columns=129, channels=1, apart=0, biased=False)
def test_any_shape(
    dtype: torch.dtype, form: str, rows: int, columns: int, channels: int, apart: int, biased: bool
) -> None:
    x, weight, bias = layer(rows, columns, channels, dtype, apart)
    own = bias if biased else None
    wanted = x.double() @ weight.double().T + (bias.double() if biased else 0)
    off = (run(form, x, weight, own).double() - wanted).abs()
    assert bool((off <= rounding(x, weight, own)).all())


@pytest.mark.few(3)  # every instruction set, and every dtype
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [own.name for own in available()])
def test_blocks_of_all_sizes(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are several blocks, channels that are packed in parts, columns that are more than there are threads."""
    monkeypatch.setenv(VARIABLE, name)
    ops.forget()
    for rows, columns, channels in (
        (520, 50, 33),
        (9, 130, 3103),
        (1030, 7, 1600),
        (17, 49, 1568),
        (16, 97, 4609),
        (20, 5, 0),
    ):
        x, weight, bias = layer(rows, columns, channels, dtype)
        wanted = x.double() @ weight.double().T + bias.double()
        off = (run("many", x, weight, bias).double() - wanted).abs()
        assert bool((off <= rounding(x, weight, bias)).all()), (rows, columns, channels)
    ops.forget()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [203, 2049])
def test_a_row_has_the_same_bits_whatever_is_beside_it(channels: int, dtype: torch.dtype, form: str) -> None:
    """Of few rows, and of more."""
    few = most_unpacked(form, dtype)
    x, weight, bias = layer(LIBRARY[dtype] if form == "few" else 530, 131, channels, dtype)
    for first, last in ((1, few), (few + 1, len(x))):
        if first > last:
            continue
        whole = run(form, x[:last], weight, bias)
        for count in {first, (first + last) // 3, last - 1} - {0}:
            if count >= first:
                assert torch.equal(run(form, x[:count], weight, bias), whole[:count]), count
        start = min(3, last - first)
        assert torch.equal(run(form, x[start:last], weight, bias), whole[start:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_change_nothing(dtype: torch.dtype) -> None:
    """Nor does who holds which vectors in another dtype."""
    x, weight, bias = layer(37, 300, 257, dtype)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(run("many", x, weight, bias))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], other) for other in found[1:])
