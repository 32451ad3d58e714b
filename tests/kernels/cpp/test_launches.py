"""Which kernels a site is said to run, and which it asks for when it runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvcompile.kernels.cpp.host import ops, source
from kvcompile.kernels.cpp.host.launches import launches
from kvcompile.kernels.cpp.isa import ISAS, isa, multiplies_rows
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import CacheLayout, InKeys, Ring, SinkWindow, Slots, TopPages, int8
from kvcompile.specs import RotaryForm
from tests.support.triton_attention import H2O, Case, check

ROPE = RotaryForm("half", 0, 16)
CASES = {
    "plain": Case(CacheLayout(int8(), int8()), (4, 2), (24, 16), chunks=(5, 1)),
    "turned": Case(CacheLayout(), (4, 2), (16, 16), rotary=ROPE, chunks=(5, 1)),
    "Quest": Case(CacheLayout(selection=TopPages(4, 2)), (4, 2), (16, 16), rotary=ROPE, chunks=(13, 1)),
    "in keys": Case(CacheLayout(int8(), InKeys(16)), (2, 1), (48, 16), chunks=(5, 1)),
    "H2O": Case(CacheLayout(placement=Slots(), retention=H2O), (4, 2), (16, 16), chunks=(5, 1)),
    "in cache": Case(
        CacheLayout(placement=Ring(), retention=SinkWindow(3, 6, "in_cache")),
        (2, 2),
        (16, 16),
        rotary=ROPE,
        chunks=(5, 1),
    ),
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The specs that the launcher asks for."""
    found: list[str] = []
    real = source.address_of

    def address_of(spec: str) -> int:
        found.append(spec)
        return real(spec)

    monkeypatch.setattr(source, "address_of", address_of)
    ops.forget()
    yield found
    monkeypatch.undo()
    ops.forget()


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CASES)
def test_what_is_said_is_what_is_asked_for(name: str, asked: list[str]) -> None:
    case = CASES[name]
    check(case, "cpp")
    site: SiteSpec = case.site
    said = launches(site, case.heads, case.dims, case.dtype, isa())
    assert {one.spec for one in said if one.role != "linear"} == set(asked)
    assert len(asked) == len(set(asked)) > 0


def test_linear_layers_of_many_have_one_where_products_lack_or_rows_may_be_few() -> None:
    for dtype, names in (
        (torch.bfloat16, ("amx_bf16", "avx512_bf16", "avx512", "avx2")),
        (torch.float32, ("amx_bf16", "avx512_bf16", "avx512", "avx2")),
    ):
        for own in ISAS:
            said = launches(SiteSpec(CacheLayout(), 1.0), (2, 1), (16, 16), dtype, own)
            many = [one for one in said if one.role == "linear" and one.when == "a prompt"]
            assert bool(many) == multiplies_rows(dtype, own) == (own.name in names)
