"""When a call of a layer is like an earlier one of an equal layer, so that it need not be traced again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcompile.kernels.ops.opaque import template
from kvcompile.passes.capture.equal_layers import Called

X = torch.zeros(2, 6)


def called(*arguments: Any) -> Called:
    found = Called.of(*template((arguments, {})))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ((X + 1, 3), True),  # values may differ
        ((X, 4), False),
        ((X, 3.0), False),
        ((torch.zeros(2, 7), 3), False),
        ((torch.zeros(2, 7)[:, :6], 3), False),  # of the same shape, and another stride
        ((torch.zeros(13)[1:].view(2, 6), 3), False),  # of the same strides, elsewhere in its memory
        ((X.half(), 3), False),
        ((X[None], 3), False),
    ],
)
def test_calls_are_alike_but_for_the_values_of_tensors(other: tuple[Any, ...], same: bool) -> None:
    assert called(X, 3).alike(called(*other)) == same
