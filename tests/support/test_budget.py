"""The error budget of numeric tests (`tests/support/budget.py`): what it lets pass, and what it does not."""

from __future__ import annotations

import pytest
import torch

from tests.support.budget import within


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_another_order_of_sums_passes_and_an_error_of_few_units_does_not(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(8, 256, generator=g).to(dtype), torch.randn(256, 16, generator=g).to(dtype)
    truth, torchs = a.double() @ b.double(), a @ b
    ours = (a[:, :128].float() @ b[:128].float() + a[:, 128:].float() @ b[128:].float()).to(dtype)
    within(ours, torchs, truth, dtype)
    within(torchs, torchs, truth, dtype)
    eps = torch.finfo(dtype).eps
    with pytest.raises(AssertionError, match="factor off by"):  # everywhere a little
        within(ours.double() * (1 + 16 * eps), torchs, truth, dtype, "factor")
    one = ours.double()
    one[3, 5] += 16 * eps * truth.abs().max()
    with pytest.raises(AssertionError, match="one off by"):  # and in one place
        within(one, torchs, truth, dtype, "one", few=True)
    one[3, 5] = torch.nan
    with pytest.raises(AssertionError, match="not finite"):
        within(one, torchs, truth, dtype, few=True)
