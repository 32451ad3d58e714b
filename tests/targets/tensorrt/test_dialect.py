"""What TensorRT's dialect says in its own way (`kernels/shared/stable_sort.py`, `kernels/reference/linear_write.py`) is
the same."""

from __future__ import annotations

import pytest
import torch

from kvcompile.kernels.reference import linear_write
from kvcompile.kernels.shared import stable_sort
from kvcompile.kernels.shared.dialect import TENSORRT, speaking


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_counted_places_are_those_of_a_stable_sort(descending: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randint(-3, 4, (2, 3, 17)).to(dtype)  # many equals
    if dtype.is_floating_point:
        x[0, 0, 3:6], x[0, 1, :4] = float("inf"), float("-inf")
    expected = x.argsort(dim=-1, descending=descending, stable=True)
    with speaking(TENSORRT):
        assert torch.equal(stable_sort.order(x, descending=descending, stable=True), expected)
        assert torch.equal(stable_sort.places(x, descending=descending).argsort(-1), expected)


def test_rows_are_written_behind_their_sequences_and_padding_behind_them() -> None:
    torch.manual_seed(0)
    slots, count = 12, 5
    buffer = torch.randn(4, 2, slots, 3)
    rows = torch.randn(4, 2, count, 3)
    # Two left-padded prompts (one of padding only), a whole one, and a sequence that goes on up to the last slot.
    positions = torch.arange(count) + torch.tensor([-2, -5, 0, slots - count])[:, None]
    got = buffer.clone()
    linear_write.write(got, rows, positions)
    for row in range(4):
        for column, place in enumerate(positions[row].tolist()):
            if place >= 0:
                assert torch.equal(got[row, :, place], rows[row, :, column])
        # Nothing that stood before the sequence's new tokens has changed.
        start = max(int(positions[row, 0]), 0)
        assert torch.equal(got[row, :, :start], buffer[row, :, :start])


@pytest.mark.parametrize(
    "shape, dtype, fits",
    [
        ((1, 2, 8, 4), torch.float16, True),
        ((1, 2, 8, 4), torch.bfloat16, True),
        ((1, 2, 8, 4), torch.float32, True),
        ((1, 2, 8, 4), torch.int8, False),
        ((1, 2, 8), torch.float16, False),
    ],
)
def test_which_buffers_take_it(shape: tuple[int, ...], dtype: torch.dtype, fits: bool) -> None:
    assert linear_write.fits(torch.zeros(shape, dtype=dtype)) is fits
