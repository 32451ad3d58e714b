"""Linear layers: the kernels against float64, and where they take the place of the graph's own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from kvcompile.compile import gemv
from kvcompile.kernels.cpp import isa, products
from kvcompile.kernels.cpp.generate import generate
from kvcompile.kernels.cpp.host import ops, prefill, source
from kvcompile.kernels.cpp.host.linear import MOST, linear, linear_many, linears
from kvcompile.kernels.cpp.isa import VARIABLE, Isa, available
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import CacheLayout
from kvcompile.targets.aoti import kernels as packaged
from tests.kernels.cpp.test_attention import PAIRS
from tests.support.budget import rounding, within

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def vectors(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(rows + columns)
    shapes = ((1, 1, columns), (rows, columns), (rows,))
    x, weight, bias = (torch.randn(shape, generator=g).to(dtype) for shape in shapes)
    return x, weight, bias


@pytest.mark.optimized
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [own.name for own in available()])
def test_sums_are_those_of_float32(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, name)
    ops.forget()
    for rows, columns in ((576, 576), (49, 65), (1537, 577), (1, 3), (3, 1), (5, 8192)):
        x, weight, bias = vectors(rows, columns, dtype)
        for own in (bias, None):
            wanted = x.double() @ weight.double().T + (0 if own is None else own.double())
            got = linear(x, weight, own)
            assert got.shape == (1, 1, rows) and got.dtype == dtype
            # A sum in float32, rounded once.
            limit = torch.finfo(dtype).eps * wanted.abs() + columns**0.5 * 2e-6
            assert bool(((got.double() - wanted).abs() <= limit).all())
    ops.forget()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_several_layers_of_a_token_are_each_alone(dtype: torch.dtype, biased: bool) -> None:
    """Bit for bit; of rows that are in several pieces, in one, and in none."""
    shapes = ((1537, 577), (3, 577), (40, 577), (1, 577), (700, 577))
    x, _, _ = vectors(1, 577, dtype)
    made = [vectors(rows, columns, dtype)[1:] for rows, columns in shapes]
    wide = torch.randn(64, 600).to(dtype)[:, :577]  # rows that lie apart
    weights, biases = [*(weight for weight, _ in made), wide], [*(bias for _, bias in made), made[0][1][:64]]
    got = linears(x, weights, biases if biased else [])
    assert [own.shape for own in got] == [(1, 1, weight.shape[0]) for weight in weights]
    for own, weight, bias in zip(got, weights, biases, strict=True):
        assert torch.equal(own, linear(x, weight, bias if biased else None))
    assert len(linears(x, weights[:1] * MOST, [])) == MOST


@pytest.mark.few(4)  # every instruction set, and every dtype
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("own_isa", [*available(), PAIRS], ids=lambda own: own.name)
def test_many_tokens(own_isa: Isa, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and many, blocks of tokens, rows and columns that are whole and that are not."""
    monkeypatch.setattr(source, "isa", lambda: own_isa)
    ops.forget()
    for tokens, rows, columns in (
        (2, 9, 13),
        (6, 130, 64),
        (10, 7, 257),
        (32, 5, 70),
        (64, 12, 129),
        (66, 129, 257),
        (258, 130, 300),
        (390, 3, 5),
        (768, 20, 17),
    ):
        _, weight, bias = vectors(rows, columns, dtype)
        x = torch.randn(2, tokens // 2, columns, generator=torch.Generator().manual_seed(tokens)).to(dtype)
        for own in (bias, None):
            wanted = x.double() @ weight.double().T + (0 if own is None else own.double())
            got = linear_many(x, weight, own)
            assert got.shape == wanted.shape and got.dtype == dtype
            limit = rounding(x, weight, own)
            assert bool(((got.double() - wanted).abs() <= limit).all()), (tokens, rows, columns)
    assert linear_many(x[:, :0], weight).shape == (2, 0, 20)
    ops.forget()


@pytest.mark.few(2)  # every instruction set, and every dtype
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("own_isa", [*available(), PAIRS], ids=lambda own: own.name)
def test_a_row_does_not_depend_on_those_beside_it(
    own_isa: Isa, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, as long as they are few."""
    monkeypatch.setattr(source, "isa", lambda: own_isa)
    ops.forget()
    _, weight, bias = vectors(131, 203, dtype)
    x = torch.randn(8, 203, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = linear_many(x, weight, bias)
    for count in range(1, 9):
        assert torch.equal(linear_many(x[:count], weight, bias), whole[:count]), count
    assert torch.equal(linear_many(x[5:7], weight, bias), whole[5:7])
    ops.forget()


def test_rows_of_a_wider_weight() -> None:
    x, weight, _ = vectors(40, 96, torch.float32)
    part = weight[3:33, :64]
    assert torch.allclose(linear(x[..., :64].contiguous(), part), x[..., :64] @ part.T, atol=1e-5)


def test_channels_that_do_not_lie_together_are_refused() -> None:
    x, weight, _ = vectors(8, 16, torch.float32)
    with pytest.raises(RuntimeError, match="needs the channels of a weight side by side"):
        linear(x[..., ::2].contiguous(), weight[:, ::2])


class Layer(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, own: torch.dtype | None = None):
        super().__init__()
        self.inner = nn.Linear(8, 6, dtype=own or dtype)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten.linear.default(x, self.inner.weight, self.inner.bias)


def traced(x: Tensor, layer: Layer, kernels: bool = True) -> str:
    """The ops of a layer after the pass, as they are traced for x."""
    module = gemv.give_gemv(symbolic_trace(layer), kernels)
    return str(make_fx(module)(x).graph)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(
    ("weight", "bias"),
    [((6, 8), (1,)), ((6, 8), ()), ((6, 8), (1, 6)), ((8,), None)],
    ids=["a number for all rows", "a number alone", "a bias that is a row", "a weight that is one row"],
)
def test_what_pytorch_broadcasts_is_broadcast(
    weight: tuple[int, ...], bias: tuple[int, ...] | None, kernels: bool
) -> None:
    """The kernel has a number for each row, and takes nothing else for them."""
    layer = Layer()
    given = None if bias is None else nn.Parameter(torch.randn(bias))
    layer.inner.weight, layer.inner.bias = nn.Parameter(torch.randn(weight)), given
    for x in (torch.randn(1, 1, 8), torch.randn(1, 2, 8)):
        wanted = layer(x)
        with torch.no_grad():
            got = gemv.give_gemv(symbolic_trace(layer), kernels)(x)
        assert got.shape == wanted.shape
        within(got, wanted, copy.deepcopy(layer).double()(x.double()), torch.float32, few=True)
        assert packaged._linear_spec(x, layer.inner.weight, given, isa.isa()) is None


class Several(nn.Module):
    """Layers of one vector: some with a bias, one whose weight is computed, one of another vector."""

    def __init__(self, layers: int = 3, biased: tuple[bool, ...] = (True,) * 3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 3 + n, biased[n % len(biased)]) for n in range(layers))
        self.after = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        made = [torch.ops.aten.linear.default(x, own.weight, own.bias) for own in self.layers]
        computed = torch.ops.aten.linear.default(x, self.layers[0].weight * 2)
        return *made, computed, torch.ops.aten.linear.default(made[0], self.after.weight, self.after.bias)


@pytest.mark.parametrize(
    ("layers", "biased", "calls"),
    # The one with a computed weight, and the one of another vector, are calls of their own.
    [
        (3, (True,), (1, 2)),
        (3, (False,), (1, 2)),
        (3, (True, False), (0, 5)),
        (20, (False,), (2, 2)),
        (17, (True,), (1, 3)),
    ],
)
def test_layers_of_one_vector_are_one_call(
    layers: int, biased: tuple[bool, ...], calls: tuple[int, int]
) -> None:
    layer = Several(layers, biased)
    module = gemv.give_gemv(symbolic_trace(layer))
    module.graph.lint()
    one, two = torch.randn(1, 1, 8), torch.randn(1, 2, 8)
    text = str(make_fx(module)(one).graph)
    assert (text.count("kvcompile.cpp_linears"), text.count("kvcompile.cpp_linear.")) == calls
    text = str(make_fx(module)(two).graph)
    assert (text.count("kvcompile.cpp_linears"), text.count("kvcompile.cpp_linear.")) == (0, layers + 2)
    for x in (one, two):
        for got, wanted in zip(module(x), layer(x), strict=True):
            assert got.shape == wanted.shape and torch.allclose(got, wanted, atol=1e-6)


def test_more_layers_than_a_call_takes_are_refused() -> None:
    x, weight, _ = vectors(3, 8, torch.float32)
    with pytest.raises(RuntimeError, match="takes at most 16 linear layers"):
        linears(x, [weight] * (MOST + 1), [])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_token_takes_the_kernel_and_more_the_blas(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But in float32, and in bfloat16 where its products are the kernel's, which looks at how many there are."""
    monkeypatch.setattr(isa, "lacks_products_of", lambda dtype, own=None: False)
    layer = Layer(dtype)
    one, two = torch.randn(1, 1, 8).to(dtype), torch.randn(1, 2, 8).to(dtype)
    assert "cpp_linear" in traced(one, layer)
    few = (torch.float32, torch.bfloat16) if isa.multiplies_pairs() else (torch.float32,)
    assert ("cpp_linear" in traced(two, layer)) == (dtype in few)
    assert "cpp_linear" not in traced(one, layer, kernels=False), "what is packaged has no kernel"
    module = gemv.give_gemv(symbolic_trace(layer))
    for x in (one, two):
        wanted = x.double() @ layer.inner.weight.double().T + layer.inner.bias.double()
        off = (module(x).double() - wanted).abs()
        assert bool((off <= rounding(x, layer.inner.weight, layer.inner.bias)).all())


@pytest.mark.parametrize("slow", [False, True])
def test_many_tokens_take_it_where_the_processor_lacks_their_products(
    slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isa, "lacks_products_of", lambda dtype, own=None: slow and dtype == torch.bfloat16)
    layer = Layer(torch.bfloat16)
    x = torch.randn(2, 20, 8, dtype=torch.bfloat16)
    assert ("cpp_linear" in traced(x, layer)) == (slow or isa.multiplies_pairs())
    assert "cpp_linear" not in traced(x, layer, kernels=False), "what is packaged has no kernel"
    wanted = x.double() @ layer.inner.weight.double().T + layer.inner.bias.double()
    off = (gemv.give_gemv(symbolic_trace(layer))(x).double() - wanted).abs()
    assert bool((off <= rounding(x, layer.inner.weight, layer.inner.bias)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_blas_has_many_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the rows that come: compiled code is the same for any number. On AMD's processors floats are the kernel's."""
    monkeypatch.setattr(products, "floats_are_faster", lambda: False)
    if not isa.multiplies_rows(dtype) or isa.lacks_products_of(dtype):
        pytest.skip(f"{isa.isa().name}: the kernel takes any number of rows in {dtype}, or none")
    amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text("utf-8")
    most = {(torch.float32, False): 64, (torch.bfloat16, False): 16, (torch.bfloat16, True): 256}.get(
        (dtype, amd or isa.multiplies_tiles(dtype))
    )
    _, weight, bias = vectors(131, 203, dtype)
    x = torch.randn(270, 203, generator=torch.Generator().manual_seed(1)).to(dtype)
    for own in (bias, None):
        for rows in (70, 270) if most is None else (most, most + 1, 270):
            found = linear_many(x[None, :rows], weight, own)[0]
            if most is not None and rows > most:
                assert torch.equal(found, F.linear(x[:rows], weight, own))
            else:  # but for sums that are rounded alike
                assert dtype == torch.bfloat16 or not torch.equal(found, F.linear(x[:rows], weight, own))
            wanted = x[:rows].double() @ weight.double().T + (0 if own is None else own.double())
            assert bool(((found.double() - wanted).abs() <= rounding(x[:rows], weight, own)).all())


def _named(name: str) -> Isa:
    return next(own for own in isa.ISAS if own.name == name)


def test_which_processors_lack_products(monkeypatch: pytest.MonkeyPatch) -> None:
    half = (torch.bfloat16, torch.float16)
    avx2, pairs = _named("avx2").needs, _named("avx512_bf16").needs
    for features, lacks in (
        (avx2, half),
        (pairs, half[1:]),
        (pairs | {"avx512_fp16"}, ()),
        (avx2 | {"amx_bf16"}, half[1:]),
        (frozenset(), ()),
    ):
        monkeypatch.setattr(isa, "_features", lambda features=features: features)
        isa.available.cache_clear()
        found = tuple(dtype for dtype in DTYPES if isa.lacks_products_of(dtype))
        assert set(found) == set(lacks), features
    monkeypatch.undo()
    isa.available.cache_clear()


@pytest.mark.parametrize("advantage", [1.9, 0.5])
def test_products_are_of_floats_where_these_are_faster(
    advantage: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of bfloat16 on a processor that has its products; without them, and in other dtypes, it does not matter."""
    monkeypatch.setattr(products, "_advantage", lambda: advantage)
    monkeypatch.setattr(isa, "available", lambda: isa.ISAS)
    products.floats_are_faster.cache_clear()
    pairs, wide = _named("avx512_bf16"), advantage > 1
    site = SiteSpec(CacheLayout(), 0.125)
    for dtype in DTYPES:
        own = wide and dtype == torch.bfloat16
        assert isa.widens(dtype, pairs) == own
        assert not any(isa.widens(dtype, other) for other in isa.ISAS if not isa.multiplies_pairs(other))
        prompt = prefill.spec_of(site, (9, 3, 64, 64), dtype, False, pairs)
        assert prompt.options == (("wide",) if own else ())
        assert ("using T = float;" in generate(prompt)) == own
    assert source.linear_spec(torch.bfloat16, True, pairs) == f"linear_{'many' if wide else 'few'} bf16"
    tiles = source.linear_spec(torch.bfloat16, True, _named("amx_bf16"))
    assert tiles == f"linear_{'many' if wide else 'tiles'} bf16"
    monkeypatch.setattr(isa, "available", lambda: [own for own in isa.ISAS if not isa.multiplies_pairs(own)])
    assert not isa.widens(torch.bfloat16, pairs), "nothing is known of another machine's processor"
    monkeypatch.undo()
    products.floats_are_faster.cache_clear()


def test_what_is_faster_is_measured_while_a_graph_is_traced() -> None:
    """With real tensors: those of the tracer multiply in no time."""
    found: list[Any] = []
    real = products._advantage
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
        patch.setattr(products, "_advantage", lambda: found.append(real()) or found[-1])
        patch.setattr(products.torch, "mm", lambda x, y, mm=torch.mm: found.append(type(x)) or mm(x, y))
        products.floats_are_faster.__wrapped__()
    *made, advantage = found
    assert {*made} == {Tensor} and 0 < advantage < float("inf")


def test_no_compiler_takes_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcompile.kernels.cpp import available as here

    monkeypatch.setattr(here, "problem", lambda device: "no compiler")
    assert "cpp_linear" not in traced(torch.randn(1, 1, 8), Layer())
    assert "sum" in traced(torch.randn(1, 1, 8), Layer())


def test_other_dtypes_take_the_loop() -> None:
    assert "cpp_linear" not in traced(torch.randn(1, 1, 8).double(), Layer(torch.float64))
