"""NF4 and MXFP4 against tables that are not ours: the OCP specification's, torch's, transformers', the quantiles'."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from gguf.quants import MXFP4
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.integrations.mxfp4 import FP4_VALUES

from kvcompile.kernels.oracle import quantize
from kvcompile.kernels.reference import codec
from kvcompile.kernels.reference.codes import codebook, scales
from kvcompile.kernels.reference.packing import unpack
from kvcompile.kernels.shared.dialect import ONNX, PYTORCH, TENSORRT, speaking
from kvcompile.layouts import CODES, Scale, mxfp4, nf4

# OCP Microscaling Formats 1.0: E2M1 has a sign, two bits of exponent with bias 1, one of mantissa (5.3.3).
E2M1 = {
    sign << 3 | exponent << 1 | mantissa: (-1) ** sign
    * (
        Fraction(mantissa, 2)
        if exponent == 0
        else Fraction(2) ** (exponent - 1) * (1 + Fraction(mantissa, 2))
    )
    for sign, exponent, mantissa in itertools.product((0, 1), range(4), (0, 1))
}


def e2m1_of(x: Fraction) -> int:
    """The code of a number: the nearest; in the middle, the one of even mantissa; beyond the largest, the largest."""
    codes = [code for code in E2M1 if code < 8]
    size = abs(x)
    nearest = min(codes, key=lambda code: (abs(E2M1[code] - size), code & 1))
    return nearest | (8 if x < 0 else 0)


def mxfp4_of(block: list[float]) -> tuple[int, list[int]]:
    """A block of 32 as section 6.3 has it: the byte of its scale, and the codes of its elements."""
    largest = max(abs(Fraction(x)) for x in block)
    exponent = -127
    if largest:
        exponent = math.frexp(float(largest))[1] - 1 - 2
    exponent = max(-127, min(127, exponent))
    return exponent + 127, [e2m1_of(Fraction(x) / Fraction(2) ** exponent) for x in block]


def test_the_codes_of_e2m1_are_those_of_the_specification() -> None:
    assert [float(E2M1[code]) for code in range(16)] == FP4_VALUES == list(CODES["e2m1"].numbers)
    assert [2 * x for x in CODES["e2m1"].numbers] == list(MXFP4.kvalues)


@pytest.mark.parametrize("dialect", [PYTORCH, ONNX, TENSORRT], ids=("pytorch", "onnx", "tensorrt"))
def test_every_scale_is_a_power_of_two(dialect: object) -> None:
    """All 256 bytes, as torch's own dtype reads them."""
    data = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    wanted = data.view(torch.float8_e8m0fnu).float()
    with speaking(dialect):  # type: ignore[arg-type]
        own = data.view(torch.int8) if dialect is TENSORRT else data
        got = scales.numbers(Scale("group", 32, "e8m0"), own)
    assert torch.equal(got[:255], wanted[:255]) and got[255].isnan() and wanted[255].isnan()
    assert got[0] == 2.0**-127


def edges() -> Tensor:
    """Numbers at, and next to, every threshold and level, with either sign, and powers of two."""
    levels = [float(level) for level in E2M1.values()]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(sorted(set(levels)))]
    exact = torch.tensor([*levels, *middles, 5.0, 7.0, 1e9, -1e9, 0.0, 0.1, -0.1])
    return torch.cat([exact, exact.nextafter(torch.tensor(9e9)), exact.nextafter(torch.tensor(-9e9))])


@pytest.mark.parametrize("dialect", [PYTORCH, ONNX, TENSORRT], ids=("pytorch", "onnx", "tensorrt"))
def test_elements_round_as_the_specification_says(dialect: object) -> None:
    x = edges()
    wanted = torch.tensor([e2m1_of(Fraction(float(number))) for number in x])
    with speaking(dialect):  # type: ignore[arg-type]
        assert torch.equal(codebook.nearest(CODES["e2m1"], x).long(), wanted)


@given(
    exponent=st.integers(-149, 127),
    seed=st.integers(0, 10**6),
    spread=st.sampled_from((0, 3, 20)),
    fraction=st.sampled_from((1.0, 1.5, 1.9999999, 1.0000001)),
)
def test_blocks_are_those_of_the_specification_bit_for_bit(
    exponent: int, seed: int, spread: int, fraction: float
) -> None:
    g = torch.Generator().manual_seed(seed)
    x = (torch.rand(32, generator=g) * 2 - 1) * 2.0 ** -torch.randint(
        0, spread + 1, (32,), generator=g
    ).float()
    x = (x.double() * 2.0**exponent).float()
    x[seed % 32] = float(np.float32(fraction)) * 2.0 ** min(exponent, 126)
    byte, codes = mxfp4_of(x.tolist())
    data, scale = codec.encode(mxfp4(), x[None])
    assert int(scale[0, 0]) == byte
    assert unpack(data, 4)[0].tolist() == codes
    back = [float(E2M1[code] * Fraction(2) ** (byte - 127)) for code in codes]
    assert codec.decode(mxfp4(), [data, scale], torch.float32)[0].tolist() == back
    for dialect in (ONNX, TENSORRT):
        with speaking(dialect):
            assert torch.equal(codec.encode(mxfp4(), x[None])[1].view(torch.uint8), scale)


def test_blocks_are_those_of_gguf_too() -> None:
    """llama.cpp's MXFP4 has the same scale and, but for ties, the same elements."""
    x = np.random.default_rng(0).standard_normal((64, 32), dtype=np.float32)
    theirs = torch.from_numpy(MXFP4.dequantize_blocks(MXFP4.quantize_blocks(x)))
    own = torch.from_numpy(x)
    assert torch.equal(codec.decode(mxfp4(), codec.encode(mxfp4(), own), torch.float32), theirs)


@pytest.mark.parametrize("storage", [mxfp4(), nf4(), nf4(32)], ids=str)
def test_what_is_no_number_stays_none(storage: object) -> None:
    """A NaN in a vector is not rounded away in silence; its own group is gone, as with every other scale."""
    x = torch.randn(4, 64)
    x[1, 5] = math.nan
    back = codec.decode(storage, codec.encode(storage, x), torch.float32)  # type: ignore[arg-type]
    assert back[1, :32].isnan().all() and not back[[0, 2, 3]].isnan().any()


def test_what_is_infinite_is_the_largest_that_there_is() -> None:
    x = torch.randn(2, 32)
    x[0, 3], x[1, 4] = math.inf, -math.inf
    storage = mxfp4()
    back = codec.decode(storage, codec.encode(storage, x), torch.float32)
    older, _ = quantize.older_and_newest(storage, x[None])
    assert back[0, 3] == 6 * 2.0**125 and back[1, 4] == -6 * 2.0**125
    assert torch.equal(older[0], back)


def test_the_levels_of_nf4_are_quantiles_of_a_normal_distribution() -> None:
    """QLoRA, appendix E: 2^(k-1) + 1 quantiles above zero and 2^(k-1) below, scaled to [-1, 1]."""
    offset = (1 - 1 / 30 + 1 - 1 / 32) / 2
    normal = torch.distributions.Normal(0.0, 1.0)
    above = normal.icdf(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    below = -normal.icdf(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    wanted = torch.cat([below, torch.zeros(1, dtype=torch.float64), above.flip(0)])
    wanted = wanted.sort().values / wanted.max()
    torch.testing.assert_close(
        torch.tensor(CODES["nf4"].levels, dtype=torch.float64), wanted, rtol=0, atol=2e-7
    )


@given(seed=st.integers(0, 10**6), group=st.sampled_from((0, 32)))
def test_nf4_takes_the_nearest_level(seed: int, group: int) -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed))
    storage = nf4(group, "float32")
    data, scale = codec.encode(storage, x)
    levels = np.array(CODES["nf4"].levels)
    scaled = x.unflatten(-1, (-1, group or 64)) / scale[..., None]
    nearest = np.abs(scaled.double().numpy()[..., None] - levels).argmin(-1)
    assert torch.equal(unpack(data, 4).long(), torch.from_numpy(nearest).flatten(-2))
