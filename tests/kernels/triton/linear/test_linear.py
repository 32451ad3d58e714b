"""The role linear in Triton's interpreter: against float64, with tiles of a large GPU too, in its own memory alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcompile.compile.linear_forms import ACTIVATIONS
from kvcompile.compile.norm_forms import OWN, normed
from kvcompile.kernels.triton.device import Device, acting_as
from kvcompile.kernels.triton.host.linear import (
    activated,
    added,
    form,
    gated,
    holds_norm,
    linears,
    norm_in,
    takes,
    takes_norm,
    takes_residual,
)
from kvcompile.kernels.triton.linear import linear as role
from kvcompile.kernels.triton.linear.norm import NormForm
from tests.support.budget import rounding, within
from tests.support.in_bounds import in_bounds

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NORMS = (
    "",
    "wide",
    "wide one",
    "plain",
    "centred",
    "layer",
    "layer shift",
    "layer plain",
    "layer plain shift",
)
H200 = Device("NVIDIA H200", 90, 132)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _full_of_nonsense() -> Iterator[None]:
    """Memory that PyTorch hands out is full of NaN: what a kernel forgets to write shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int, apart: int = 0) -> Tensor:
    """Random numbers; apart: numbers between rows that are NaN."""
    whole = torch.full((*shape[:-1], shape[-1] + apart), torch.nan)
    whole[..., : shape[-1]] = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return whole.to(dtype)[..., : shape[-1]]


def norm_tensors(how: str, columns: int, dtype: torch.dtype) -> list[Tensor]:
    """What a norm multiplies by, and what it adds."""
    words = how.split()
    there = (*(("norm",) if "plain" not in words else ()), *(("shift",) if "shift" in words else ()))
    return [drawn((columns,), dtype, 20 + at) for at, _ in enumerate(there)]


@given(
    columns=st.integers(1, 45).map(lambda number: 16 * number),
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
    apart=st.sampled_from((0, 16, 160)),
    large=st.booleans(),
)
def test_layers_of_one_token(
    columns: int, rows: list[int], dtype: torch.dtype, biased: bool, apart: int, large: bool
) -> None:
    x = drawn((1, 1, columns), dtype, 0)
    weights = [drawn((count, columns), dtype, 1 + at, apart) for at, count in enumerate(rows)]
    biases = [drawn((count,), dtype, 9 + at) for at, count in enumerate(rows)] if biased else []
    assert takes(x, weights, biases)
    with in_bounds(), acting_as(H200) if large else nullcontext():
        found = linears(x, weights, biases)
    for own, weight, bias in zip(found, weights, biases or [None] * len(rows), strict=True):
        assert own.shape == (1, 1, weight.shape[0]) and own.dtype == dtype
        assert own.storage_offset() % role.APART == 0
        truth = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert bool(((own.double() - truth).abs() <= rounding(x, weight, bias)).all())


@settings(max_examples=25)
@given(
    columns=st.integers(1, 20).map(lambda number: 16 * number),
    rows=st.integers(24, 40),
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    biased=st.booleans(),
    large=st.booleans(),
)
def test_a_gate_and_what_it_opens(
    columns: int, rows: int, dtype: torch.dtype, activation: str, biased: bool, large: bool
) -> None:
    x = drawn((1, 1, columns), dtype, 0)
    weights = [drawn((rows, columns), dtype, seed) * columns**-0.5 for seed in (1, 2)]
    biases = [drawn((rows,), dtype, seed) for seed in (3, 4)] if biased else []

    def plain(dtype: torch.dtype) -> Tensor:
        of = [None, None] if not biased else [bias.to(dtype) for bias in biases]
        gate, up = (F.linear(x.to(dtype), w.to(dtype), b) for w, b in zip(weights, of, strict=True))
        return ACTIVATIONS[activation](gate) * up

    with in_bounds(), acting_as(H200) if large else nullcontext():
        found = gated(x, weights, biases, activation)
    assert found.shape == (1, 1, rows)
    within(found, plain(dtype), plain(torch.float64), dtype, activation, few=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("how", NORMS)
def test_a_norm_rounds_where_models_do(how: str, dtype: torch.dtype) -> None:
    """Through an identity: numbers of a norm, which PyTorch's float32 rounds otherwise at near ties alone."""
    columns = 208
    x, tensors = drawn((1, 1, columns), dtype, 0) + 3, norm_tensors(how, columns, dtype)
    wanted = normed(x, tensors, 1e-5, how, "" if "layer" in how else OWN)
    with in_bounds():
        (found,) = linears(x, [torch.eye(columns, dtype=dtype)], [], norm_in(how, 1e-5, tensors))
    assert wanted.dtype == dtype and int((found != wanted).sum()) <= 2
    torch.testing.assert_close(found, wanted)


@settings(max_examples=25)
@given(
    # Of more, registers hold no gate behind a norm that shifts.
    columns=st.integers(1, 24).map(lambda number: 16 * number),
    rows=st.lists(st.integers(12, 20), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(("", "silu")),
    how=st.sampled_from(NORMS),
    eps=st.sampled_from((1e-6, 1e-5, 0.5)),
    large=st.booleans(),
)
def test_a_token_that_is_normed_by_who_reads_it(
    columns: int, rows: list[int], dtype: torch.dtype, activation: str, how: str, eps: float, large: bool
) -> None:
    """Its mean is not near 0: a LayerNorm takes it off before it squares."""
    x, tensors = drawn((1, 1, columns), dtype, 0) + 3, norm_tensors(how, columns, dtype)
    rows = rows[:1] * 2 if activation else rows
    weights = [drawn((count, columns), dtype, 2 + at) * columns**-0.5 for at, count in enumerate(rows)]
    norm = norm_in(how, eps, tensors)

    def plain(dtype: torch.dtype) -> list[Tensor]:
        casts = OWN if dtype.itemsize == 2 and "layer" not in how else ""
        own = normed(x.to(dtype), [of.to(dtype) for of in tensors], eps, how, casts)
        found = [F.linear(own, of.to(dtype)) for of in weights]
        return [F.silu(found[0]) * found[1]] if activation else found

    with in_bounds(), acting_as(H200) if large else nullcontext():
        assert takes(x, weights, []) and takes_norm(x, norm, 2 if activation else 1)
        made = [gated(x, weights, [], activation, norm)] if activation else linears(x, weights, [], norm)
        if not activation:  # the token behind its norm is one more result, and the others are what they were
            *same, own = linears(x, weights, [], norm._replace(kept=True))
            assert all(map(torch.equal, same, made))
            spelled = normed(x, tensors, eps, how, OWN if dtype.itemsize == 2 and "layer" not in how else "")
            torch.testing.assert_close(own, spelled)
            assert own.storage_offset() % role.APART == 0
    found, torchs, truth = (torch.cat(of, -1) for of in (made, plain(dtype), plain(torch.float64)))
    within(found, torchs, truth, dtype, few=True)


@settings(max_examples=25)
@given(
    columns=st.integers(1, 30).map(lambda number: 16 * number),
    rows=st.integers(24, 40),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
    large=st.booleans(),
)
def test_results_that_are_added_to_others(
    columns: int, rows: int, dtype: torch.dtype, biased: bool, large: bool
) -> None:
    x, weight = drawn((1, 1, columns), dtype, 0), drawn((rows, columns), dtype, 1)
    bias = drawn((rows,), dtype, 2) if biased else None
    residual = drawn((1, 1, rows), dtype, 3)
    assert takes_residual(x, weight, residual)
    assert not takes_residual(x, weight, residual.double()) and not takes_residual(x, weight, residual[0])
    with in_bounds(), acting_as(H200) if large else nullcontext():
        found = added(x, weight, bias, [residual])
    assert found.shape == (1, 1, rows)
    truth = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    within(found, residual + F.linear(x, weight, bias), truth + residual.double(), dtype, few=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.22, -3.0])
@pytest.mark.parametrize("count", [1, 2])
def test_sums_are_rounded_one_after_the_other(count: int, factor: float, dtype: torch.dtype) -> None:
    """Of an identity each is exact but for its rounding, that of the bias too: PyTorch's bits."""
    x = drawn((1, 1, 48), dtype, 0)
    residuals = [drawn((1, 1, 48), dtype, 1 + at) * 3 for at in range(count)]
    bias = drawn((48,), dtype, 9) / 7
    wanted = (x + bias) * factor
    for residual in residuals:
        wanted = residual + wanted
    with in_bounds():
        found = added(x, torch.eye(48, dtype=dtype), bias, residuals, factor)
    assert torch.equal(found, wanted)


@settings(max_examples=25)
@given(
    columns=st.integers(1, 20).map(lambda number: 16 * number),
    rows=st.integers(24, 40),
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    biased=st.booleans(),
    large=st.booleans(),
)
def test_a_layer_and_its_activation(
    columns: int, rows: int, dtype: torch.dtype, activation: str, biased: bool, large: bool
) -> None:
    x, weight = drawn((1, 1, columns), dtype, 0), drawn((rows, columns), dtype, 1) * columns**-0.5
    bias = drawn((rows,), dtype, 2) if biased else None

    def plain(dtype: torch.dtype) -> Tensor:
        of = None if bias is None else bias.to(dtype)
        return ACTIVATIONS[activation](F.linear(x.to(dtype), weight.to(dtype), of))

    with in_bounds(), acting_as(H200) if large else nullcontext():
        found = activated(x, weight, bias, activation)
    assert found.shape == (1, 1, rows)
    within(found, plain(dtype), plain(torch.float64), dtype, activation, few=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_columns_than_registers_hold_are_read_in_turns(dtype: torch.dtype) -> None:
    """Whole turns, whole tiles behind them, and a part of one."""
    x, weight = drawn((1, 1, 1744), dtype, 0), drawn((5, 1744), dtype, 1)
    own, _ = form(1744, [5], 1, dtype, Device("Triton's interpreter", 0, 1))
    assert "for start in range(0, 1536, 256)" in role.generate(own).text and 1744 % own.block_n
    with in_bounds():
        (found,) = linears(x, [weight])
    assert bool(
        ((found.double() - F.linear(x.double(), weight.double())).abs() <= rounding(x, weight, None)).all()
    )


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_what_is_no_number_stays_none(activation: str) -> None:
    """Of a gate, and of what it opens. No infinities: of one, PyTorch's own gelu makes no number."""
    x = torch.zeros(1, 1, 16)
    x[..., 0] = 1.0
    values = (torch.nan, -3e4, 3e4, -0.5, 2.0, 0.0, -0.0)
    gate, up = torch.zeros(len(values), 16), torch.zeros(len(values), 16)
    gate[:, 0] = torch.tensor(values)
    up[:, 0] = 1.0
    wanted = ACTIVATIONS[activation](torch.tensor(values))
    found = gated(x, [gate, up], [], activation)[0, 0]
    assert torch.equal(found.isnan(), wanted.isnan())
    truth = ACTIVATIONS[activation](torch.tensor(values, dtype=torch.float64))
    within(found[1:], wanted[1:], truth[1:], torch.float32, few=True)
    assert gated(x, [up, gate], [], activation)[0, 0, 0].isnan()


GIVEN: dict[str, tuple[bool, Callable[[], tuple[Tensor, list[Tensor], list[Tensor]]]]] = {
    "as they are": (True, lambda: (torch.ones(1, 1, 32), [torch.ones(3, 32)], [])),
    "rows apart": (True, lambda: (torch.ones(1, 1, 32), [torch.ones(3, 48)[:, :32]], [])),
    "another dtype": (False, lambda: (torch.ones(1, 1, 32), [torch.ones(3, 32).half()], [])),
    "float64": (False, lambda: (torch.ones(1, 1, 32).double(), [torch.ones(3, 32).double()], [])),
    "columns side by side": (False, lambda: (torch.ones(1, 1, 32), [torch.ones(32, 48).T[:3]], [])),
    "rows at any place": (False, lambda: (torch.ones(1, 1, 32), [torch.ones(3, 40)[:, :32]], [])),
    "columns from any on": (False, lambda: (torch.ones(1, 1, 32), [torch.ones(3, 48)[:, 3:35]], [])),
    "columns from a vector on": (True, lambda: (torch.ones(1, 1, 32), [torch.ones(3, 48)[:, 4:36]], [])),
    "no rows": (False, lambda: (torch.ones(1, 1, 32), [torch.ones(0, 32)], [])),
    "a bias of one of two": (
        False,
        lambda: (torch.ones(1, 1, 32), [torch.ones(3, 32)] * 2, [torch.ones(3)]),
    ),
    "a bias of another dtype": (
        False,
        lambda: (torch.ones(1, 1, 32), [torch.ones(3, 32)], [torch.ones(3).double()]),
    ),
    "a bias with gaps": (
        False,
        lambda: (torch.ones(1, 1, 32), [torch.ones(3, 32)], [torch.ones(6)[::2]]),
    ),
    "a number for all rows": (
        False,
        lambda: (torch.ones(1, 1, 32), [torch.ones(3, 32)], [torch.ones(1)]),
    ),
    "too many": (False, lambda: (torch.ones(1, 1, 32), [torch.ones(3, 32)] * 17, [])),
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_it_takes(name: str) -> None:
    wanted, made = GIVEN[name]
    assert bool(takes(*made())) == wanted


@given(
    columns=st.integers(1, 4000).map(lambda number: 16 * number),
    rows=st.lists(st.integers(1, 300_000), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    gate=st.booleans(),
)
def test_a_program_is_cut_for_the_device(
    columns: int, rows: list[int], dtype: torch.dtype, gate: bool
) -> None:
    """No thread holds more loads than registers but in turns, none is idle, and a large device has programs enough."""
    sides = 2 if gate else 1
    rows = rows[:1] if gate else rows
    own, warps = form(columns, rows, sides * len(rows), dtype, H200, activation="silu" if gate else None)
    a_warp = 32 * 16 // dtype.itemsize
    assert own.block_n == warps * a_warp and (warps == 1 or own.block_n <= columns)
    loads = own.block_m * sides * -(-columns // own.block_n)
    assert own.block_m in (1, 2) and (own.block_m == 1 or not gate or loads <= role.LOADS)
    assert own.block_m == 1 or role.grid(own, rows)[0] >= 2 * H200.multiprocessors
    first = role.places(rows)
    assert all(
        a + count <= b and b % role.APART == 0 for a, b, count in zip(first, first[1:], rows, strict=False)
    )


@pytest.mark.parametrize(
    "options",
    [
        ("channels[16]",),
        ("channels[16]", "layers[1]", "swish"),
        ("channels[16]", "layers[2]", "relu", "silu"),
        ("channels[16]", "layers[2]", "residual"),
        ("channels[16]", "layers[1]", "residual", "silu"),
        ("channels[16]", "layers[3]", "silu"),
        ("channels[16]", "layers[1]", "kept"),
        ("channels[16]", "layers[1]", "factor[0.5]"),
        ("channels[16]", "layers[1]", "residual", "residual[2]"),
        ("channels[16]", "layers[1]", "residual", "factor[0.5]", "factor[2.0]"),
    ],
)
def test_options_that_it_does_not_know_are_refused(options: tuple[str, ...]) -> None:
    from dataclasses import replace

    own, _ = form(16, [3], 1, torch.float32, H200)
    with pytest.raises(ValueError, match=r"linear takes options channels\[k\], layers\[l\]"):
        role.generate(replace(own, options=options))


def test_a_long_token_has_its_layer_norm_in_a_launch_of_its_own() -> None:
    """In bytes: of float32 half as many columns. Behind one that is not, a program has four rows."""
    norm = NormForm(1e-5, True, frozenset({"shift"}))
    for dtype, longest in ((torch.bfloat16, 3072), (torch.float32, 1536)):
        assert holds_norm(longest, dtype, H200, norm) and not holds_norm(longest + 16, dtype, H200, norm)
        assert holds_norm(longest + 16, dtype, H200, NormForm(1e-5))
    assert form(2560, (2560,) * 3, 3, torch.bfloat16, H200, norm=norm)[0].block_m == 4
    assert form(2560, (512,), 1, torch.bfloat16, H200, norm=norm)[0].block_m == 1


@pytest.mark.parametrize(
    "options",
    [
        ("wide",),
        ("rms[1e-05]", "layer[1e-05]"),
        ("rms[1e-05]", "one"),
        ("rms[1e-05]", "shift"),
        ("layer[1e-05]", "wide"),
    ],
)
def test_norms_that_are_none_are_refused(options: tuple[str, ...]) -> None:
    from dataclasses import replace

    own, _ = form(16, [3], 1, torch.float32, H200)
    with pytest.raises(ValueError, match=r"a norm is rms\[eps\] with wide"):
        role.generate(replace(own, options=(*own.options, *options)))


def test_a_norm_in_turns_is_refused() -> None:
    """Of a row that registers do not hold, nobody would know the mean before it is used."""
    own, _ = form(53248, [3], 1, torch.bfloat16, H200, norm=NormForm(1e-5))
    with pytest.raises(ValueError, match="a token of 53248 channels is not normed in turns"):
        role.generate(own)


def test_activations_are_those_of_the_graph() -> None:
    assert role.ACTIVATIONS.keys() == ACTIVATIONS.keys()
