"""Norms between linear layers: which are joined with them, and that it gives what the graph gave, or kernels do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

from kvcompile.compile import gemv, linear_forms
from kvcompile.kernels.triton.host.launch import recording
from tests.support.budget import within

aten, own_ops = torch.ops.aten, torch.ops.kvcompile
WIDTH, INNER = 32, 48
EPS = 1e-5
Form = Callable[["Block", Tensor, Tensor], Tensor]


class Block(nn.Module):
    """The end of an attention block, an MLP, and the layers that the next begins with."""

    def __init__(self, form: Form, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.norm, self.next_norm = (nn.Parameter(torch.rand(WIDTH) + 0.5) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 16)
        self.to(dtype)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.form(self, x, residual)


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return aten.linear.default(x, layer.weight, layer.bias)  # type: ignore[no-any-return]


def add(x: Tensor, y: Tensor) -> Tensor:
    return aten.add.Tensor(x, y)  # type: ignore[no-any-return]


def rms(weight: Tensor, x: Tensor, dtype: torch.dtype | None = torch.bfloat16, eps: float = EPS) -> Tensor:
    """As transformers writes it; dtype: of the model, None: float32, whose casts the passes have dropped."""
    own = x if dtype is None else aten.to.dtype(x, torch.float32)
    mean = aten.mean.dim(aten.pow.Tensor_Scalar(own, 2), [-1], True)
    made = aten.mul.Tensor(own, aten.rsqrt.default(aten.add.Tensor(mean, eps)))
    return aten.mul.Tensor(weight, made if dtype is None else aten.to.dtype(made, dtype))  # type: ignore[no-any-return]


def decoder(dtype: torch.dtype | None) -> Form:
    def form(own: Block, x: Tensor, residual: Tensor) -> Tensor:
        h = add(residual, linear(own.out, x))
        y = rms(own.norm, h, dtype)
        opened = aten.mul.Tensor(aten.silu.default(linear(own.gate, y)), linear(own.up, y))
        h = add(h, linear(own.down, opened))
        y = rms(own.next_norm, h, dtype)
        return aten.cat.default([linear(own.q, y), linear(own.k, y), h], -1)  # type: ignore[no-any-return]

    return form


def behind(
    of: Callable[[Block, Tensor], Tensor], read: Callable[[Block, Tensor], Tensor] | None = None
) -> Form:
    """Layers behind what `of` makes of a token that is added up; read: what else is read."""

    def form(own: Block, x: Tensor, residual: Tensor) -> Tensor:
        h = add(residual, linear(own.out, x))
        y = of(own, h)
        found = [linear(own.q, y), h] + ([read(own, y)] if read else [])
        return aten.cat.default(found, -1)  # type: ignore[no-any-return]

    return form


def of_an_embedding(own: Block, x: Tensor, residual: Tensor) -> Tensor:
    return linear(own.q, rms(own.norm, residual, None))


def of_a_layer(own: Block, x: Tensor, residual: Tensor) -> Tensor:
    return linear(own.q, rms(own.norm, linear(own.out, x), None))


def added_twice(own: Block, x: Tensor, residual: Tensor) -> Tensor:
    made = linear(own.out, x)
    return linear(own.q, rms(own.norm, add(residual, made), None)) + made


def scaled(own: Block, x: Tensor, residual: Tensor) -> Tensor:
    h = aten.add.Tensor(residual, linear(own.out, x), alpha=2)
    return linear(own.q, rms(own.norm, h, None))


def computed(own: Block, x: Tensor, residual: Tensor) -> Tensor:
    y = rms(own.norm, add(residual, linear(own.out, x)), None)
    return aten.linear.default(y, aten.mul.Tensor(own.q.weight, 2.0))  # type: ignore[no-any-return]


def centred(own: Block, h: Tensor) -> Tensor:
    mean = aten.mean.dim(aten.pow.Tensor_Scalar(h, 2), [-1], True)
    root = aten.rsqrt.default(aten.add.Tensor(mean, EPS))
    return aten.mul.Tensor(own.norm, aten.mul.Tensor(aten.sub.Tensor(h, 1.0), root))  # type: ignore[no-any-return]


def of_tokens(own: Block, h: Tensor) -> Tensor:
    mean = aten.mean.dim(aten.pow.Tensor_Scalar(h, 2), [-2], True)
    made = aten.mul.Tensor(h, aten.rsqrt.default(aten.add.Tensor(mean, EPS)))
    return aten.mul.Tensor(own.norm, made)  # type: ignore[no-any-return]


def cubes(own: Block, h: Tensor) -> Tensor:
    mean = aten.mean.dim(aten.pow.Tensor_Scalar(h, 4), [-1], True)
    made = aten.mul.Tensor(h, aten.rsqrt.default(aten.add.Tensor(mean, EPS)))
    return aten.mul.Tensor(own.norm, made)  # type: ignore[no-any-return]


def shifted_weight(own: Block, h: Tensor) -> Tensor:
    return rms(aten.add.Tensor(own.norm, 1.0), h, None)


def mean_is_read(own: Block, h: Tensor) -> Tensor:
    mean = aten.mean.dim(aten.pow.Tensor_Scalar(h, 2), [-1], True)
    made = aten.mul.Tensor(h, aten.rsqrt.default(aten.add.Tensor(mean, EPS)))
    return aten.mul.Tensor(own.norm, made) + mean  # type: ignore[no-any-return]


ALONE = {
    "of an embedding": of_an_embedding,
    "of a layer": of_a_layer,
    "what is added is read": added_twice,
    "added twofold": scaled,
    "a computed weight": computed,
    "something else reads it": behind(
        lambda own, h: rms(own.norm, h, None), lambda own, y: aten.relu.default(y)
    ),
    "less one": behind(centred),
    "a mean of tokens": behind(of_tokens),
    "a mean of fourth powers": behind(cubes),
    "a weight from one": behind(shifted_weight),
    "the mean is read": behind(mean_is_read),
}


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels for GPUs are what linear layers may run: in Triton's interpreter."""
    monkeypatch.setattr(linear_forms, "on_gpu", lambda device: True)
    with torch.no_grad():
        yield


def joined(form: Form, dtype: torch.dtype = torch.float32) -> tuple[Block, GraphModule, list[str]]:
    """The block, its graph after the pass, and our calls in it."""
    plain = Block(form, dtype).eval()
    module = gemv.give_gemv(symbolic_trace(plain), gates=True, norms=True)
    module.graph.lint()
    names = [str(node.target) for node in module.graph.nodes if "kvcompile" in str(node.target)]
    return plain, module, [name.split(".")[1] for name in names]


def vectors(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x, residual = (torch.randn(*shape, WIDTH, generator=g).to(dtype) for _ in range(2))
    return x, residual


DECODERS = {
    torch.float32: decoder(None),
    torch.bfloat16: decoder(torch.bfloat16),
    torch.float16: decoder(torch.float16),
}


@pytest.mark.parametrize("dtype", DECODERS, ids=str)
def test_no_launch_stands_between_two_layers(dtype: torch.dtype) -> None:
    plain, module, calls = joined(DECODERS[dtype], dtype)
    assert calls == ["linear_added", "linear_gated_normed", "linear_added", "linear_normed"]
    x, residual = vectors(dtype, 1, 1)
    truth = copy.deepcopy(plain).double()
    truth.form = decoder(None)
    within(module(x, residual), plain(x, residual), truth(x.double(), residual.double()), dtype)
    with recording() as launches:
        module(x, residual)
    options = [{option.partition("[")[0] for option in one.kernel.spec.options} for one in launches]
    wanted = [{"bias", "residual"}, {"silu", "rms"}, {"residual"}, {"bias", "rms"}]
    assert [own - {"channels", "layers", "interpreted"} for own in options] == wanted


@pytest.mark.parametrize("rows", [(1, INNER), (INNER, 1)])
def test_a_gate_that_is_broadcast_is_spelled_out(rows: tuple[int, int]) -> None:
    plain = Block(DECODERS[torch.float32]).eval()
    plain.gate, plain.up = (nn.Linear(WIDTH, count, bias=False) for count in rows)
    module = gemv.give_gemv(symbolic_trace(plain), gates=True, norms=True)
    assert torch.ops.kvcompile.linear_gated_normed.default in {node.target for node in module.graph.nodes}
    x, residual = vectors(torch.float32, 1, 1)
    truth = copy.deepcopy(plain).double()(x.double(), residual.double())
    within(module(x, residual), plain(x, residual), truth, torch.float32)


@pytest.mark.parametrize("dtype", DECODERS, ids=str)
def test_what_no_kernel_takes_is_spelled_out(dtype: torch.dtype) -> None:
    """Of several tokens it is what the graph was, bit for bit."""
    plain, module, _ = joined(DECODERS[dtype], dtype)
    x, residual = vectors(dtype, 2, 3)
    assert torch.equal(module(x, residual), plain(x, residual))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_norm_that_rounds_otherwise_is_spelled_out(dtype: torch.dtype) -> None:
    """Its product is rounded to bfloat16, in a model of another dtype."""
    plain, module, calls = joined(decoder(torch.bfloat16), dtype)
    assert "linear_normed" in calls
    x, residual = vectors(dtype, 1, 1)
    plain.norm.data, plain.next_norm.data = plain.norm.data.float(), plain.next_norm.data.float()
    if dtype == torch.float32:
        with recording() as launches:
            module(x, residual)
        assert not [one for one in launches if any("rms" in option for option in one.kernel.spec.options)]


@pytest.mark.parametrize("name", ALONE)
def test_others_stay(name: str) -> None:
    plain, module, calls = joined(ALONE[name])
    assert not [call for call in calls if "normed" in call or "added" in call]
    x, residual = vectors(torch.float32, 2, 3)
    torch.testing.assert_close(module(x, residual), plain(x, residual))


def test_it_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOMPILE_DISABLE", "norms")
    assert joined(DECODERS[torch.float32])[2] == ["linear", "linear_gated", "linear", "linear_group"]


def test_a_row_that_registers_do_not_hold_is_normed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one whose weight has another dtype."""
    from kvcompile.kernels.triton.host import linear as kernels

    plain, module, _ = joined(DECODERS[torch.float32])
    x, residual = vectors(torch.float32, 1, 1)
    assert kernels.takes_norm(x, kernels.Norm(plain.norm, EPS))
    assert not kernels.takes_norm(x, kernels.Norm(plain.norm.double(), EPS))
    assert not kernels.takes_norm(x, kernels.Norm(plain.norm[:16], EPS))
    monkeypatch.setattr(kernels, "_NORMED", 1)
    with recording() as launches:
        module(x, residual)
    assert launches and not [one for one in launches if "rms" in str(one.kernel.spec.options)]
    truth = copy.deepcopy(plain).double()(x.double(), residual.double())
    within(module(x, residual), plain(x, residual), truth, torch.float32)
