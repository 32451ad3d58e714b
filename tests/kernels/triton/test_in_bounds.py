"""Generated kernels touch no memory but what they are given, and go nowhere by what nobody has written.

The interpreter reads any address that the process has, so that a wrong one is found by a GPU alone, as an illegal
access, or never. Here each is looked at, and memory that PyTorch hands out is full of NaN and of the largest integers.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvcompile.kernels.triton.device import Device, acting_as
from tests.gpu.sites import SITES, vectors
from tests.support.in_bounds import OutOfBounds, in_bounds
from tests.support.runner import run

FEW = ("model, pages of 16", "mixed")
H200 = Device("NVIDIA H200", 90, 132)


@pytest.fixture(autouse=True)
def _full_of_nonsense() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


def asked(name: str, chunks: tuple[int, ...]) -> None:
    sized, cpu = SITES[name], torch.device("cpu")
    qkv = vectors(sized, 3, sum(chunks), torch.float32, cpu)
    pads = torch.tensor([0, 5, 21])
    with in_bounds():
        run(sized.site(), qkv, chunks, pads, **sized.extra(cpu))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in SITES]
)
def test_a_site_touches_its_own(name: str) -> None:
    asked(name, (40, 1, 5, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", SITES)
def test_tiles_of_a_large_gpu_touch_their_own(name: str) -> None:
    with acting_as(H200):
        asked(name, (80, *[1] * 20, 70, 1, 1))


def test_an_address_of_nobody_is_found() -> None:
    """Tables name pages that a pool does not have."""
    from kvcompile.kernels.triton.host.attention import cached_attention
    from kvcompile.kernels.triton.tools.synthetic_cache import sample

    sized = SITES["model, pages of 16"]
    of = sample(sized.site(), sized.heads, sized.dims, (40, 50), torch.float32, torch.device("cpu"))
    assert of.table is not None
    with in_bounds():
        cached_attention(of.inputs(0))
        of.table[1, 1] = 1 << 20
        with pytest.raises(Exception, match="places of nobody") as told:
            cached_attention(of.inputs(0))
    assert isinstance(told.value.__cause__, OutOfBounds)
