"""Gates of MLPs: which are joined into one call, and that it gives what the graph gave, spelled out or by a kernel."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

from kvcompile.compile import gemv, linear_forms
from kvcompile.compile.inductor import ShapeClass, Tracer, compile_region
from kvcompile.kernels.triton.host.launch import recording
from tests.support.budget import within

aten = torch.ops.aten
WIDTH, ROWS = 32, 24


class Layers(nn.Module):
    """A gate, what it opens, and a layer that holds both; `form` says what is made of them."""

    def __init__(self, form: Callable[[Layers, Tensor], Tensor], bias: tuple[bool, bool]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.gate, self.up = (nn.Linear(WIDTH, ROWS, bias=own) for own in bias)
        self.whole = nn.Linear(WIDTH, 2 * ROWS, bias=bias[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self, x)


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return aten.linear.default(x, layer.weight, layer.bias)  # type: ignore[no-any-return]


def halves(own: Layers, x: Tensor, dim: int = -1) -> tuple[Tensor, Tensor]:
    cut = aten.chunk.default(linear(own.whole, x), 2, dim)
    return cut[0], cut[1]


def twice(own: Layers, x: Tensor) -> Tensor:
    gate = linear(own.gate, x)
    return aten.mul.Tensor(aten.silu.default(gate), linear(own.up, x)) + gate  # type: ignore[no-any-return]


def opened_twice(own: Layers, x: Tensor) -> Tensor:
    up = linear(own.up, x)
    return aten.mul.Tensor(aten.silu.default(linear(own.gate, x)), up) + up  # type: ignore[no-any-return]


def activated_twice(own: Layers, x: Tensor) -> Tensor:
    act = aten.silu.default(linear(own.gate, x))
    return aten.mul.Tensor(act, linear(own.up, x)) + act  # type: ignore[no-any-return]


def cut_in_three(own: Layers, x: Tensor) -> Tensor:
    cut = aten.chunk.default(linear(own.whole, x), 3, -1)
    return aten.mul.Tensor(aten.silu.default(cut[0]), cut[1])  # type: ignore[no-any-return]


def along_tokens(own: Layers, x: Tensor) -> Tensor:
    gate, up = halves(own, x.repeat(1, 2, 1), 1)
    return aten.mul.Tensor(aten.silu.default(gate), up)  # type: ignore[no-any-return]


def whole_is_read(own: Layers, x: Tensor) -> Tensor:
    whole = linear(own.whole, x)
    cut = aten.chunk.default(whole, 2, -1)
    return aten.mul.Tensor(aten.silu.default(cut[0]), cut[1]) + whole.sum()  # type: ignore[no-any-return]


def one_half(own: Layers, x: Tensor) -> Tensor:
    cut = aten.chunk.default(linear(own.whole, x), 2, -1)
    return aten.mul.Tensor(aten.silu.default(cut[0]), cut[0])  # type: ignore[no-any-return]


def gated(activation: Callable[[Tensor], Tensor], turned: bool = False) -> Callable[[Layers, Tensor], Tensor]:
    def form(own: Layers, x: Tensor) -> Tensor:
        pair = activation(linear(own.gate, x)), linear(own.up, x)
        return aten.mul.Tensor(*(reversed(pair) if turned else pair))  # type: ignore[no-any-return]

    return form


def cut(second: bool) -> Callable[[Layers, Tensor], Tensor]:
    def form(own: Layers, x: Tensor) -> Tensor:
        first, last = halves(own, x)
        gate, up = (last, first) if second else (first, last)
        return aten.mul.Tensor(up, aten.silu.default(gate))  # type: ignore[no-any-return]

    return form


JOINED = {
    "silu": gated(aten.silu.default),
    "gelu": gated(aten.gelu.default),
    "gelu, said": gated(lambda x: aten.gelu.default(x, approximate="none")),
    "gelu of tanh": gated(lambda x: aten.gelu.default(x, approximate="tanh")),
    "relu": gated(aten.relu.default),
    "the other way round": gated(aten.silu.default, turned=True),
    "halves": cut(second=False),
    "halves, the gate second": cut(second=True),
}
ACTIVATED = {
    name: lambda own, x, act=act: act(linear(own.whole, x))
    for name, act in {
        "silu": aten.silu.default,
        "gelu": aten.gelu.default,
        "gelu of tanh": lambda x: aten.gelu.default(x, approximate="tanh"),
        "relu": aten.relu.default,
    }.items()
}
NOT_ACTIVATED = {
    "sigmoid": lambda own, x: aten.sigmoid.default(linear(own.whole, x)),
    "the layer is read": lambda own, x: (lambda y: aten.silu.default(y) + y)(linear(own.whole, x)),
    "no layer": lambda own, x: aten.silu.default(x),
    "layers of a vector": lambda own, x: aten.silu.default(linear(own.gate, x)) + linear(own.up, x),
}
ALONE = {
    "another activation": gated(aten.sigmoid.default),
    "the gate is read": twice,
    "what it opens is read": opened_twice,
    "the activation is read": activated_twice,
    "of another vector": lambda own, x: aten.mul.Tensor(
        aten.silu.default(linear(own.gate, x)), linear(own.up, x + 1)
    ),
    "no layer opens": lambda own, x: aten.mul.Tensor(aten.silu.default(linear(own.gate, x)), x[..., :ROWS]),
    "a number": lambda own, x: aten.mul.Tensor(aten.silu.default(linear(own.gate, x)), 2.0),
    "with itself": lambda own, x: (lambda act: aten.mul.Tensor(act, act))(
        aten.silu.default(linear(own.gate, x))
    ),
    "thirds": cut_in_three,
    "halves of tokens": along_tokens,
    "the whole is read": whole_is_read,
    "one half with itself": one_half,
}


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels for GPUs are what linear layers may run: in Triton's interpreter."""
    monkeypatch.setattr(linear_forms, "on_gpu", lambda device: True)
    with torch.no_grad():
        yield


def joined(name: str, bias: tuple[bool, bool] = (True, True)) -> tuple[Layers, GraphModule, int]:
    """The layers, their graph after the pass, and calls in it that are gates."""
    plain = Layers((JOINED | ALONE)[name], bias).eval()
    module = gemv.give_gemv(symbolic_trace(plain), gates=True)
    module.graph.lint()
    calls = [node.target for node in module.graph.nodes]
    return plain, module, calls.count(torch.ops.kvcompile.linear_gated.default)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("name", JOINED)
def test_a_gate_is_one_call(name: str, biased: bool) -> None:
    """Of several tokens spelled out, bit for bit; and the launches of one token are one."""
    plain, module, found = joined(name, (biased, biased))
    assert found == 1
    assert not [
        node for node in module.graph.nodes if "chunk" in str(node.target) or "mul" in str(node.target)
    ]
    x = torch.randn(2, 3, WIDTH)
    assert torch.equal(module(x), plain(x))


@pytest.mark.parametrize("name", ALONE)
def test_what_lies_between_and_is_read_stays(name: str) -> None:
    plain, module, found = joined(name)
    assert found == 0
    x = torch.randn(2, 3, WIDTH)
    assert torch.equal(module(x), plain(x))


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("name", (*ACTIVATED, *NOT_ACTIVATED))
def test_a_layer_and_its_activation_are_one_call(name: str, biased: bool) -> None:
    form = (NOT_ACTIVATED if name in NOT_ACTIVATED else ACTIVATED)[name]
    plain = Layers(form, (biased, biased)).eval()
    module = gemv.give_gemv(symbolic_trace(plain), gates=True)
    calls = [node.target for node in module.graph.nodes]
    assert calls.count(torch.ops.kvcompile.linear_activated.default) == (name in ACTIVATED)
    x = torch.randn(2, 3, WIDTH)
    assert torch.equal(module(x), plain(x))
    if name in ACTIVATED:
        x = torch.randn(1, 1, WIDTH)
        within(module(x), plain(x), copy.deepcopy(plain).double()(x.double()), torch.float32, few=True)
        with recording() as launches:
            module(x)
        assert [one.kernel.spec.role for one in launches] == ["linear"]


def test_one_bias_of_two_is_no_gate() -> None:
    assert joined("silu", (True, False))[2] == 0 and joined("silu", (False, True))[2] == 0


@pytest.mark.parametrize("name", JOINED)
def test_one_token_runs_one_kernel(name: str) -> None:
    plain, module, _ = joined(name)
    x = torch.randn(1, 1, WIDTH)
    within(module(x), plain(x), copy.deepcopy(plain).double()(x.double()), torch.float32, few=True)
    with recording() as launches:
        module(x)
    assert [(one.kernel.spec.role, "layers[2]" in one.kernel.spec.options) for one in launches] == [
        ("linear", True)
    ]


@pytest.mark.parametrize("rows", [(1, ROWS), (ROWS, 1)])
def test_a_gate_of_one_row_opens_all_rows_alike(rows: tuple[int, int]) -> None:
    """And all rows of a gate what has one row: a product may broadcast, the kernel does not."""
    plain = Layers(JOINED["silu"], (True, True)).eval()
    plain.gate, plain.up = (nn.Linear(WIDTH, count) for count in rows)
    module, x = gemv.give_gemv(symbolic_trace(plain), gates=True), torch.randn(1, 1, WIDTH)
    within(module(x), plain(x), copy.deepcopy(plain).double()(x.double()), torch.float32, few=True)
    assert module(x).shape == (1, 1, ROWS)


def test_halves_of_an_odd_number_of_rows_are_two_and_one() -> None:
    plain = Layers(JOINED["halves"], (True, True)).eval()
    plain.whole = nn.Linear(WIDTH, 3)
    module, x = gemv.give_gemv(symbolic_trace(plain), gates=True), torch.randn(1, 1, WIDTH)
    within(module(x), plain(x), copy.deepcopy(plain).double()(x.double()), torch.float32, few=True)


def test_layers_of_a_vector_are_one_launch() -> None:
    """Those that the kernel does not take run as they did, and so do several tokens."""

    def form(own: Layers, x: Tensor) -> Tensor:
        return linear(own.gate, x) + linear(own.up, x) * 2 + linear(own.whole, x)[..., :ROWS]

    plain = Layers(form, (True, True)).eval()
    module = gemv.give_gemv(symbolic_trace(plain), gates=True)
    x = torch.randn(1, 1, WIDTH)
    within(module(x), plain(x), copy.deepcopy(plain).double()(x.double()), torch.float32, few=True)
    for given, wanted in ((x, 1), (torch.randn(1, 2, WIDTH), 0), (torch.randn(2, 1, WIDTH), 0)):
        with recording() as launches:
            module(given)
        assert len(launches) == wanted
    plain.half()
    assert module(x.half()).dtype == torch.float16


def of_bytes(own: Layers, x: Tensor) -> Tensor:
    """All weights are computed, but for that of the last layer."""

    def layer(inner: nn.Linear) -> Tensor:
        weight = aten.mul.Tensor(inner.weight, 2.0)
        return aten.linear.default(x, weight, inner.bias)  # type: ignore[no-any-return]

    gate = aten.mul.Tensor(aten.silu.default(layer(own.gate)), layer(own.up))
    return aten.cat.default([gate, layer(own.whole), linear(own.up, x)], -1)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("mode", "own"),
    [
        ("default", {"kvcompile.linear_gated.default": 1, "kvcompile.linear.default": 2}),
        ("max-autotune", {"kvcompile.linear.default": 1, "aten.linear.default": 3}),
    ],
)
def test_products_that_inductor_tunes_compute_their_weights(
    mode: str, own: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read bytes; a kernel that is launched for itself would have them written to memory as numbers before."""
    found: list[GraphModule] = []

    def compiled(module: GraphModule, *_: object, **more: object) -> None:
        found.append(module)

    monkeypatch.setattr(torch._inductor, "standalone_compile", compiled)
    tracer = Tracer(ShapeClass(True, True, True))
    x = tracer.empty((1, 1, WIDTH), torch.float32, torch.device("cpu"))
    compile_region(symbolic_trace(Layers(of_bytes, (True, True)).eval()), [x], tracer, mode)
    names = [str(node.target) for node in found[0].graph.nodes if "linear" in str(node.target)]
    assert Counter(names) == own


def test_it_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOMPILE_DISABLE", "gemv")
    assert joined("silu")[2] == 0
