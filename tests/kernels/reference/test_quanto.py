"""Integers against code not ours: transformers' quantized cache, which rounds with optimum-quanto (Apache-2.0)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import QuantoQuantizedLayer

from kvcompile.kernels.reference import codec
from kvcompile.layouts import uint

pytest.importorskip("optimum.quanto", reason="pip install --no-deps optimum-quanto==0.2.7")


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """What their C++ does, which takes longer to compile than all else that is tested here."""
    return torch.cat([(packed >> bits * i) & 2**bits - 1 for i in range(8 // bits)])


@pytest.fixture(autouse=True)
def _without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from optimum.quanto.library.extensions.cpp import ext

    monkeypatch.setattr(ext, "_lib", SimpleNamespace(unpack=unpacked))


def vectors() -> Tensor:
    """[batch, KV heads, tokens, head_dim], with channels that stand out."""
    g = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, 40, 64, generator=g) * (1 + 9 * (torch.rand(64, generator=g) > 0.9))


@pytest.mark.parametrize("group", (32, 64))
@pytest.mark.parametrize("bits", (2, 4))
def test_same_bits_and_groups_give_the_same_numbers(bits: int, group: int) -> None:
    """Groups of channels of one token: both round to the nearest of 2^bits levels between the extremes."""
    layer = QuantoQuantizedLayer(nbits=bits, axis_key=0, axis_value=0, q_group_size=group)
    x = vectors()
    theirs = layer._dequantize(layer._quantize(x, axis=0))
    storage = uint(bits, group, "float32")
    ours = codec.decode(storage, codec.encode(storage, x), torch.float32)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert (ours - x).abs().mean() > 0.05  # and both are rounded


@pytest.mark.parametrize("bits", (2, 4))
def test_scales_in_half_precision_cost_little(bits: int) -> None:
    """What is stored by default has float16 scales: the error grows by less than a hundredth."""
    layer = QuantoQuantizedLayer(nbits=bits, axis_key=0, axis_value=0, q_group_size=32)
    x = vectors()
    theirs = (layer._dequantize(layer._quantize(x, axis=0)) - x).square().mean()
    storage = uint(bits, 32)
    ours = (codec.decode(storage, codec.encode(storage, x), torch.float32) - x).square().mean()
    assert ours <= 1.01 * theirs
