"""Primitives in their portable form give the bits of PyTorch's."""

from __future__ import annotations

import pytest
import torch

from kvcompile.kernels.reference import codec, packing
from kvcompile.kernels.reference.codes.fp8 import from_code, to_code
from kvcompile.kernels.shared.dialect import ONNX, PYTORCH, TENSORRT, Dialect, current, speaking
from kvcompile.layouts import Storage, fp8, int8, mxfp4, nf4, uint, with_hadamard

PORTABLE = (ONNX, TENSORRT)


@pytest.mark.parametrize("dialect", PORTABLE, ids=("uint8", "int8"))
@pytest.mark.parametrize("width", (2, 3, 4, 8))
def test_packed_integers(width: int, dialect: Dialect) -> None:
    codes = torch.randint(0, 2**width, (7, 64), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    packed = packing.pack(codes, width)
    with speaking(dialect):
        own = packing.pack(codes, width)
        assert own.dtype == dialect.byte
        assert torch.equal(own.view(torch.uint8), packed)
        assert torch.equal(packing.unpack(own, width), codes.float())


@pytest.mark.parametrize("dtype", (torch.float8_e4m3fn, torch.float8_e5m2))
@pytest.mark.parametrize("dialect", PORTABLE, ids=("uint8", "int8"))
def test_fp8_by_arithmetic(dtype: torch.dtype, dialect: Dialect) -> None:
    """All numbers, all points between two of them, both sides of each, both sides of powers of two, and random ones."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()].sort().values
    middles = (numbers[1:] + numbers[:-1]) / 2
    powers = torch.arange(-24.0, 17.0).exp2()
    exact = torch.cat([numbers, middles, powers, -powers])
    inf = torch.tensor(float("inf"))
    random = torch.randn(50_000, generator=torch.Generator().manual_seed(0))
    x = torch.cat(
        [exact, exact.nextafter(inf), exact.nextafter(-inf), *(random * 10.0**e for e in range(-6, 5))]
    )
    most = torch.finfo(dtype).max
    x = x.clamp(-most, most)
    wanted = x.to(dtype)
    with speaking(dialect):
        codes = to_code(x, dtype)
        assert codes.dtype == dialect.byte
        assert torch.equal(from_code(codes, dtype), wanted.float())
        zero = wanted.float() == 0  # of which there are two
        assert torch.equal(codes.view(torch.uint8)[~zero], wanted.view(torch.uint8)[~zero])


STORAGES: tuple[Storage, ...] = (
    int8(),
    fp8("e4m3"),
    fp8("e5m2", scale="none"),
    uint(4, 16),
    uint(3, 16),
    uint(2, 32),
    with_hadamard(uint(4, 32)),
    nf4(),
    nf4(16),
    mxfp4(),
)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("dialect", PORTABLE, ids=("uint8", "int8"))
def test_storages(storage: Storage, dialect: Dialect) -> None:
    x = torch.randn(2, 3, 5, 32, generator=torch.Generator().manual_seed(1))
    wanted = codec.decode(storage, codec.encode(storage, x), torch.float32)
    q, p = torch.randn(2, 3, 4, 32), torch.rand(2, 3, 4, 5)
    with speaking(dialect):
        parts = codec.encode(storage, x)
        assert not any(part.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) for part in parts)
        assert torch.equal(codec.decode(storage, parts, torch.float32), wanted)
        dots, sums = codec.dot_keys(storage, q, parts), codec.weigh_values(storage, p, parts)
    double = wanted.double()
    eps = 16 * torch.finfo(torch.float32).eps
    assert (dots - q.double() @ double.mT).abs().max() <= eps * (q.double().abs() @ double.abs().mT).max()
    assert (sums - p.double() @ double).abs().max() <= eps * (p.double() @ double.abs()).max()


def test_the_dialect_ends_with_its_block() -> None:
    assert current() is PYTORCH
    with pytest.raises(RuntimeError), speaking(TENSORRT):
        assert current() is TENSORRT
        raise RuntimeError
    assert current() is PYTORCH
