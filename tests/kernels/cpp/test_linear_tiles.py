"""The kernel of linear layers that multiplies tiles (AMX), by loops where this processor has none: any shape against
float64, and what a row's bits depend on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcompile.kernels.cpp import isa
from kvcompile.kernels.cpp.host import ops, source
from kvcompile.kernels.cpp.host.compiler import INCLUDE
from kvcompile.kernels.cpp.isa import Isa
from tests.kernels.cpp.test_linear_rows import layer
from tests.support.budget import rounding

BY_HAND = Isa("tiles", frozenset(), ("-DKV_PAIRS", "-DKV_TILES", "-DKV_TILES_BY_HAND"), "vec_portable.h")
OWN = [BY_HAND, *(own for own in isa.available() if isa.multiplies_tiles(torch.bfloat16, own))]
DTYPE = torch.bfloat16
STRIP = 32  # rows of weights, and vectors, that are multiplied at a time


@pytest.fixture(params=OWN, ids=lambda own: own.name)
def tiles(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(source, "isa", lambda: request.param)
        ops.forget()
        yield
    ops.forget()


def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    ops.ready()
    out: Tensor = ops.cpp_linear(x, weight, bias, "linear_tiles bf16")
    return out


def right(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    wanted = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    off = (run(x, weight, bias).double() - wanted).abs()
    return bool((off <= rounding(x, weight, bias)).all())


@pytest.mark.usefixtures("tiles")
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 80),
    columns=st.integers(1, 100),
    channels=st.integers(1, 200),
    apart=st.sampled_from((0, 0, 1, 6)),
    biased=st.booleans(),
)
@example(rows=33, columns=STRIP, channels=64, apart=0, biased=True)
@example(rows=16, columns=3 * STRIP + 1, channels=95, apart=1, biased=False)
def test_any_shape(rows: int, columns: int, channels: int, apart: int, biased: bool) -> None:
    x, weight, bias = layer(rows, columns, channels, DTYPE, apart)
    assert right(x, weight, bias if biased else None)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(
    ("rows", "columns", "channels"),
    # Channels of several depths, with threads that wait for each other's sums; vectors of several chunks.
    [(250, 33, 2300), (180, 64, 4000), (256, 20, 3000)],
)
def test_sums_that_are_kept(rows: int, columns: int, channels: int) -> None:
    x, weight, bias = layer(rows, columns, channels, DTYPE)
    assert rows * channels * 2 > 1 << 20, "of PACKED_BYTES"
    assert right(x, weight, bias)
    assert torch.equal(run(x[:5], weight, bias), run(x, weight, bias)[:5])


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("channels", [203, 64])
def test_a_row_has_the_same_bits_whatever_is_beside_it(channels: int) -> None:
    x, weight, bias = layer(70, 131, channels, DTYPE)
    whole = run(x, weight, bias)
    for first, last in ((0, 1), (0, 2), (3, 19), (16, 33), (1, 70), (69, 70)):
        assert torch.equal(run(x[first:last], weight, bias), whole[first:last]), (first, last)
    for strip in (
        slice(0, 1),
        slice(5, 50),
        slice(130, 131),
    ):  # nor on which rows of weights are beside its own
        assert torch.equal(run(x, weight[strip], bias[strip]), whole[:, strip])


@pytest.mark.usefixtures("tiles")
def test_threads_change_nothing() -> None:
    x, weight, bias = layer(37, 300, 257, DTYPE)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(run(x, weight, bias))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_no_number_stays_where_it_is(value: float) -> None:
    """Of a vector, of a row of weights, beside edges that are filled up with zeros."""
    x, weight, bias = layer(18, 35, 50, DTYPE)
    clean = run(x, weight, bias)
    x[17, 49], weight[34, 49] = value, value
    found = run(x, weight, bias)
    assert torch.equal(found[:17, :34], clean[:17, :34])
    assert not found[17].isfinite().any() and not found[:, 34].isfinite().any()


@pytest.mark.usefixtures("tiles")
def test_what_was_in_memory_before_changes_nothing() -> None:
    x, weight, bias = layer(2, 40, 50, DTYPE)
    clean = run(x, weight, bias)
    run(torch.full((80, 200), float("nan"), dtype=DTYPE), torch.ones(40, 200, dtype=DTYPE))
    assert torch.equal(run(x, weight, bias), clean)


@pytest.mark.skipif(OWN == [BY_HAND], reason="this processor has no tiles")
def test_pytorchs_library_uses_tiles_as_well() -> None:
    """Each shapes them as it needs them: neither takes them as the other left them."""
    x, weight, bias = layer(300, 512, 512, DTYPE)
    wanted = torch.nn.functional.linear(x, weight, bias)
    few = run(x[:9], weight, bias)
    for rows in (300, 33, 256, 9):
        assert torch.equal(run(x[:9], weight, bias), few)
        part = torch.nn.functional.linear(x[:rows], weight, bias)
        torch.testing.assert_close(part, wanted[:rows])


@pytest.mark.parametrize("own", isa.available(), ids=lambda own: own.name)
def test_saved_code_runs_where_another_set_is_asked_for(own: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls the kernel of tiles by name; KVCOMPILE_CPU_ISA names a set without them."""
    monkeypatch.setattr(source, "isa", lambda: own)
    ops.forget()
    assert right(*layer(20, 35, 50, DTYPE))
    ops.forget()


def test_tiles_are_those_of_a_processor_that_lets_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """AMX alone of Intel's has them, and a process must be given leave to use them."""
    own = isa.ISAS[0]
    assert own.name == "amx_bf16" and isa.multiplies_tiles(DTYPE, own)
    assert not isa.multiplies_tiles(torch.float32, own)
    assert not any(isa.multiplies_tiles(DTYPE, other) for other in isa.ISAS[1:])
    flags = " ".join(sorted(own.needs))
    monkeypatch.setattr(isa.Path, "read_text", lambda *_, **__: f"model name\t: any\nflags\t\t: {flags}\n")
    for may, name in ((True, "amx_bf16"), (False, "avx512_bf16")):
        monkeypatch.setattr(isa, "_may_use_tiles", lambda may=may: may)
        isa.available.cache_clear()
        assert isa.available()[0].name == name
    monkeypatch.undo()
    isa.available.cache_clear()


def test_the_request_is_the_same_in_both_languages() -> None:
    text = (INCLUDE / "tiles.h").read_text("utf-8")
    assert "REQUEST = 0x1023, TILE_DATA = 18;" in text
    assert isa.ASKED == (0x1023, 18)
