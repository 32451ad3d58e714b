"""Compiled for a CPU, a number that is stored in fewer bits and read once more in the same loop is the stored one."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor
from torch._inductor.codegen import cpp

from kvcompile.compile.rounding import rounding


def codes(x: Tensor, scales: Tensor) -> Tensor:
    """Codes of rows, whose scales go to `scales`."""
    scale = (x.abs().amax(-1, keepdim=True) / 7).half()
    scales.copy_(scale)
    return torch.round(x / scale.float() * 100)


def test_codes_are_made_with_the_scale_that_is_stored() -> None:
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    expected, found = torch.zeros(512, 1, dtype=torch.half), torch.zeros(512, 1, dtype=torch.half)
    with rounding():
        made = torch.compile(codes, options={"emulate_precision_casts": True})(x, found)
    assert torch.equal(made, codes(x, expected)) and torch.equal(found, expected)
    unrounded = torch.round(x / (x.abs().amax(-1, keepdim=True) / 7) * 100)
    assert not torch.equal(made, unrounded), "rounding changes no code here: this test shows nothing"


def test_an_older_pytorch_takes_no_number_for_its_rounded_one(monkeypatch: pytest.MonkeyPatch) -> None:
    own = cpp.CppKernel.cache_dtype_convert
    monkeypatch.setattr(inspect, "getsource", lambda of: "")
    with rounding():
        assert cpp.CppKernel.cache_dtype_convert is not own
        assert cpp.CppKernel.cache_dtype_convert(None, "x", torch.float, "y", torch.half) is None
    assert cpp.CppKernel.cache_dtype_convert is own
