"""Numbers of groups of channels that stay in float16, where minima are products (`kernels/triton/attend/minima.py`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcompile.kernels.triton.attend.context import Attend
from kvcompile.kernels.triton.spec import Role
from kvcompile.layouts import CacheLayout, Contiguous, Paged, Placement, Storage, uint
from tests.support.budget import within
from tests.support.kernel_specs import spec
from tests.support.triton_attention import Case, check, oracle, ran
from tests.support.triton_write import kernels_folder  # noqa: F401  (a fixture)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
NIBBLES = CacheLayout(uint(4, 16), uint(4, 16))


@dataclass(frozen=True)
class Powers(Case):
    """Tokens whose keys and values are larger by powers of two, and queries whose channels are, beside a constant."""

    of_keys: tuple[int, ...] = ()
    of_values: tuple[int, ...] = ()
    of_queries: tuple[int, ...] = ()
    beside: float = 0.0

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().qkv()

        def times(x: Tensor, powers: tuple[int, ...], axis: int) -> Tensor:
            shape = [1] * x.dim()
            shape[axis] = len(powers)
            every = torch.tensor(powers).view(shape).repeat_interleave(-(-x.shape[axis] // len(powers)), axis)
            return x * torch.exp2(every.narrow(axis, 0, x.shape[axis]).float()).to(x.dtype)

        k, v = times(k, self.of_keys, 2), times(v + self.beside, self.of_values, 2)
        return times(q, self.of_queries, 3), k, v


def powers(least: int, most: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(least, most), min_size=1, max_size=4).map(tuple)


@settings(max_examples=6)
@given(
    of_keys=powers(-6, 1),
    of_values=powers(-8, 12),
    of_queries=powers(-7, 1),
    beside=st.sampled_from((0.0, 3.0, -0.25)),
    dtype=st.sampled_from((torch.float16, torch.bfloat16)),
    keys=st.sampled_from((uint(4, 16), uint(4, 8), uint(2, 16))),
    placement=st.sampled_from((Contiguous(), Paged(16))),
)
def test_numbers_of_any_size(
    of_keys: tuple[int, ...],
    of_values: tuple[int, ...],
    of_queries: tuple[int, ...],
    beside: float,
    dtype: torch.dtype,
    keys: Storage,
    placement: Placement,
) -> None:
    """float16 holds probabilities times scales, and their minima enter as they would number by number."""
    case = Powers(
        CacheLayout(keys, uint(4, 16), placement),
        (2, 1),
        (32, 32),
        dtype,
        chunks=(23, 1),
        pads=(0,),
        of_keys=of_keys,
        of_values=of_values,
        of_queries=of_queries,
        beside=beside,
    )
    got, same = ran(case, "triton"), ran(case, "reference")
    wanted, _ = oracle(case, got.held)
    last = slice(case.chunks[0], None)
    within(*(x[:, :, last] for x in (got.out, same.out, wanted)), dtype, few=True)


@dataclass(frozen=True)
class FarApart(Case):
    """All tokens weigh alike but one, which weighs next to nothing, and whose values are ten million times theirs."""

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().qkv()
        q, k, v = torch.zeros_like(q), torch.zeros_like(k), v * 2.0**-10
        q[..., 0] = 8.0
        k[..., 5, 0] = -20.0 * math.sqrt(self.dims[0]) / 4  # p = exp(-40) of the others'
        v[..., 5, :] *= 2.0**23
        return q, k, v


def test_values_that_differ_by_ten_million() -> None:
    """One large scale takes no bits of the others."""
    check(FarApart(NIBBLES, (2, 1), (32, 32), torch.float16, chunks=(23, 1), pads=(0,)))


def narrow(role: Role, layout: CacheLayout, block_n: int, dtype: str = "bfloat16") -> tuple[bool, bool]:
    of, _ = spec(role, layout)
    attend = Attend(replace(of, block_m=4, block_n=block_n, dtype=dtype))
    return attend.narrow(attend.keys), attend.narrow(attend.values.of)


def test_who_has_them() -> None:
    """Steps of a single warp; of prompts, and of programs of several warps, rows of products are full or far apart."""
    whole = CacheLayout(uint(4, 32), uint(4, 32))
    assert narrow("decode", whole, 32) == (True, True)
    assert narrow("decode", replace(whole, placement=Paged(16)), 32) == (True, True)
    assert narrow("decode", CacheLayout(values=uint(4, 32)), 32) == (False, True)
    assert narrow("decode", whole, 64) == (False, False)
    assert narrow("decode", whole, 32, "float32") == (False, False)
    assert narrow("prefill", whole, 32) == (False, False)


@given(st.floats(-1e4, 1e4, width=32))
def test_what_tf32_has_of_a_sum(number: float) -> None:
    """It and what is left are the number, and neither has more than 11 and 13 bits."""
    whole = torch.tensor(number)
    high = (whole.view(torch.int32) & -8192).view(torch.float32)
    low = whole - high
    assert float(high) + float(low) == number
    for part, bits in ((float(high), 11), (float(low), 13)):
        mantissa, _ = math.frexp(part)
        assert mantissa * 2**bits == int(mantissa * 2**bits)
