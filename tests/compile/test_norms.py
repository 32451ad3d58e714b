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
from kvcompile.kernels.triton.linear.norm import NormForm
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
        self.norm, self.next_norm, self.shift = (nn.Parameter(torch.rand(WIDTH) + 0.5) for _ in range(3))
        self.of_tokens = nn.Parameter(torch.rand(3, WIDTH))
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


def scaled(h: Tensor, dtype: torch.dtype | None, centred: bool = False) -> Tensor:
    """In float32, but where the model is."""
    own = h if dtype is None else aten.to.dtype(h, torch.float32)
    own = aten.sub.Tensor(own, aten.mean.dim(own, [-1], True)) if centred else own
    mean = aten.mean.dim(aten.pow.Tensor_Scalar(own, 2), [-1], True)
    return aten.mul.Tensor(own, aten.rsqrt.default(aten.add.Tensor(mean, EPS)))  # type: ignore[no-any-return]


def wide(weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    return weight if dtype is None else aten.to.dtype(weight, torch.float32)


def rounded(of: Tensor, dtype: torch.dtype | None) -> Tensor:
    return of if dtype is None else aten.to.dtype(of, dtype)


def like(of: Tensor, h: Tensor, dtype: torch.dtype | None) -> Tensor:
    return of if dtype is None else aten.type_as.default(of, h)


NormOf = Callable[["Block", Tensor, torch.dtype | None], Tensor]
# As models write them in a dtype, None: in float32, whose casts the passes have dropped. Then options of the kernel.
FORMS: dict[str, tuple[NormOf, set[str]]] = {
    "Llama": (lambda own, h, dtype: rms(own.norm, h, dtype), {"rms"}),
    "Llama 4": (
        lambda own, h, dtype: aten.mul.Tensor(like(scaled(h, dtype), h, dtype), own.norm),
        {"rms"},
    ),
    "OLMo 2": (
        lambda own, h, dtype: rounded(aten.mul.Tensor(own.norm, scaled(h, dtype)), dtype),
        {"rms", "wide"},
    ),
    "Helium": (
        lambda own, h, dtype: rounded(aten.mul.Tensor(wide(own.norm, dtype), scaled(h, dtype)), dtype),
        {"rms", "wide"},
    ),
    "Gemma": (
        lambda own, h, dtype: like(
            aten.mul.Tensor(scaled(h, dtype), aten.add.Tensor(wide(own.norm, dtype), 1.0)), h, dtype
        ),
        {"rms", "wide", "one"},
    ),
    "nanochat": (lambda own, h, dtype: like(scaled(h, dtype), h, dtype), {"rms", "plain"}),
    "Cohere": (
        lambda own, h, dtype: rounded(aten.mul.Tensor(wide(own.norm, dtype), scaled(h, dtype, True)), dtype),
        {"layer"},
    ),
    "GPT-NeoX": (
        lambda own, h, dtype: aten.layer_norm.default(h, [WIDTH], own.norm, own.shift, EPS, False),
        {"layer", "shift"},
    ),
    "MPT": (lambda own, h, dtype: aten.layer_norm.default(h, [WIDTH], own.norm, None, EPS), {"layer"}),
    "OLMo": (
        lambda own, h, dtype: rounded(
            aten.layer_norm.default(
                h if dtype is None else aten.to.dtype(h, torch.float32), [WIDTH], None, None, EPS
            ),
            dtype,
        ),
        {"layer", "plain"},
    ),
}


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
    return linear(own.q, rms(own.norm, aten.relu.default(residual), None))


def of_a_layer(own: Block, x: Tensor, residual: Tensor) -> Tensor:
    return linear(own.q, rms(own.norm, linear(own.out, x), None))


def added_twice(own: Block, x: Tensor, residual: Tensor) -> Tensor:
    made = linear(own.out, x)
    return linear(own.q, rms(own.norm, add(residual, made), None)) + made


def added_twofold(own: Block, x: Tensor, residual: Tensor) -> Tensor:
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


def weight_from_one(dtype: torch.dtype | None, one: float) -> Form:
    """Of a model's dtype 1 + w is rounded before it multiplies; and another number than 1."""
    return behind(
        lambda own, h: rounded(aten.mul.Tensor(scaled(h, dtype), aten.add.Tensor(own.norm, one)), dtype)
    )


def another_mean(own: Block, h: Tensor) -> Tensor:
    less = aten.sub.Tensor(h, aten.mean.dim(h, [-2], True))
    mean = aten.mean.dim(aten.pow.Tensor_Scalar(less, 2), [-1], True)
    return aten.mul.Tensor(own.norm, aten.mul.Tensor(less, aten.rsqrt.default(aten.add.Tensor(mean, EPS))))  # type: ignore[no-any-return]


def of_two_dimensions(own: Block, h: Tensor) -> Tensor:
    return aten.layer_norm.default(h, [3, WIDTH], own.of_tokens, None, EPS)  # type: ignore[no-any-return]


def shift_is_computed(own: Block, h: Tensor) -> Tensor:
    return aten.layer_norm.default(h, [WIDTH], own.norm, aten.mul.Tensor(own.shift, 2.0), EPS)  # type: ignore[no-any-return]


def mean_is_read(own: Block, h: Tensor) -> Tensor:
    mean = aten.mean.dim(aten.pow.Tensor_Scalar(h, 2), [-1], True)
    made = aten.mul.Tensor(h, aten.rsqrt.default(aten.add.Tensor(mean, EPS)))
    return aten.mul.Tensor(own.norm, made) + mean  # type: ignore[no-any-return]


ALONE = {
    "of an embedding": of_an_embedding,
    "of a layer": of_a_layer,
    "what is added is read": added_twice,
    "added twofold": added_twofold,
    "a computed weight": computed,
    "less one": behind(centred),
    "a mean of tokens": behind(of_tokens),
    "a mean of fourth powers": behind(cubes),
    "a weight from one that is rounded": weight_from_one(torch.bfloat16, 1.0),
    "a weight from two": weight_from_one(None, 2.0),
    "less another mean": behind(another_mean),
    "a norm of several tokens": behind(of_two_dimensions),
    "a computed shift": behind(shift_is_computed),
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


@pytest.mark.parametrize("dtype", DECODERS, ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_a_norm_rounds_as_the_model_does(name: str, dtype: torch.dtype) -> None:
    """In the kernel within the budget; of several tokens it is spelled out as the graph had it, bit for bit."""
    norm, wanted = FORMS[name]

    def form(casts: torch.dtype | None) -> Form:
        return behind(lambda own, h: norm(own, h, casts))

    plain, module, calls = joined(form(None if dtype == torch.float32 else dtype), dtype)
    assert calls == ["linear_added", "linear_normed"]
    assert not [node for node in module.graph.nodes if str(node.target).startswith(("aten.layer", "aten.to"))]
    x, residual = vectors(dtype, 1, 1)
    truth = copy.deepcopy(plain).double()
    truth.form = form(None)
    with recording() as launches:  # which runs nothing
        module(x, residual)
    within(module(x, residual), plain(x, residual), truth(x.double(), residual.double()), dtype, few=True)
    own = {option.partition("[")[0] for option in launches[-1].kernel.spec.options}
    # In float32 nothing is rounded.
    lost = {"wide"} if dtype == torch.float32 and "one" not in wanted else set()
    assert own - {"bias", "channels", "layers", "interpreted"} == wanted - lost
    x, residual = vectors(dtype, 2, 3)
    assert torch.equal(module(x, residual), plain(x, residual))


def expert(own: Block, y: Tensor) -> Tensor:
    return aten.relu.default(y)  # type: ignore[no-any-return]


def gate_beside(own: Block, y: Tensor) -> Tensor:
    opened = aten.mul.Tensor(aten.silu.default(linear(own.gate, y)), linear(own.up, y))
    return aten.cat.default([opened, aten.relu.default(y)], -1)  # type: ignore[no-any-return]


def read_before(own: Block, x: Tensor, residual: Tensor) -> Tensor:
    y = rms(own.norm, add(residual, linear(own.out, x)), None)
    first = aten.relu.default(y)
    return aten.cat.default([linear(own.q, y), first, linear(own.k, y)], -1)  # type: ignore[no-any-return]


KEPT: dict[str, tuple[Form, list[str]]] = {
    "an expert reads it": (behind(lambda own, h: rms(own.norm, h, None), expert), []),
    "a gate and an expert": (behind(lambda own, h: rms(own.norm, h, None), gate_beside), ["linear_gated"]),
    "it is read before": (read_before, []),
    "it is returned": (behind(lambda own, h: rms(own.norm, h, None), lambda own, y: y), []),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_norm_that_others_read_is_written_by_layers(name: str) -> None:
    form, further = KEPT[name]
    plain, module, calls = joined(form)
    assert calls == ["linear_added", "linear_normed", *further]
    x, residual = vectors(torch.float32, 1, 1)
    truth = copy.deepcopy(plain).double()(x.double(), residual.double())
    within(module(x, residual), plain(x, residual), truth, torch.float32, few=True)
    with recording() as launches:
        module(x, residual)
    assert ["kept" in one.kernel.spec.options for one in launches] == [False, True, *(False for _ in further)]
    x, residual = vectors(torch.float32, 2, 3)
    assert torch.equal(module(x, residual), plain(x, residual))


def test_a_norm_that_gates_read_and_others_is_no_part_of_gates() -> None:
    def form(own: Block, x: Tensor, residual: Tensor) -> Tensor:
        return gate_beside(own, rms(own.norm, add(residual, linear(own.out, x)), None))

    assert joined(form)[2] == ["linear", "linear_gated"]


def times(x: Tensor, factor: float) -> Tensor:
    return aten.mul.Tensor(x, factor)  # type: ignore[no-any-return]


# How a token is added up, and the residuals of calls that do it.
SUMS: dict[str, tuple[Form, list[int]]] = {
    "a residual": (lambda own, x, r: add(r, linear(own.out, x)), [1]),
    "a part of it": (lambda own, x, r: add(r, times(linear(own.out, x), 0.22)), [1]),
    "beside a block": (lambda own, x, r: add(add(linear(own.out, x), aten.relu.default(x)), r), [2]),
    "beside a part of a block": (
        lambda own, x, r: add(r, add(aten.relu.default(x), times(linear(own.out, x), 0.7))),
        [2],
    ),
    "beside another layer": (lambda own, x, r: add(add(linear(own.out, x), linear(own.q, x)), r), [2]),
    "behind another layer": (lambda own, x, r: add(add(r, linear(own.out, x)), linear(own.q, x)), [1, 1]),
    "three blocks": (
        lambda own, x, r: add(add(add(linear(own.out, x), x), aten.relu.default(x)), r),
        [],
    ),
    "no number": (lambda own, x, r: add(r, times(linear(own.out, x), float("inf"))), []),
    "another vector": (lambda own, x, r: add(r, aten.mul.Tensor(linear(own.out, x), own.norm)), []),
    "the part is read": (
        lambda own, x, r: (lambda part: add(add(r, part), aten.relu.default(part)))(
            times(linear(own.out, x), 0.22)
        ),
        [],
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SUMS)
def test_a_token_is_added_up_in_the_order_of_the_graph(name: str, dtype: torch.dtype) -> None:
    sum_of, wanted = SUMS[name]

    def form(own: Block, x: Tensor, residual: Tensor) -> Tensor:
        h = sum_of(own, x, residual)
        y = aten.layer_norm.default(h, [WIDTH], own.norm, None, EPS)
        return aten.cat.default([linear(own.k, y), h], -1)  # type: ignore[no-any-return]

    plain, module, _ = joined(form, dtype)
    sums = [node for node in module.graph.nodes if node.target is own_ops.linear_added.default]
    assert [len(node.args[3]) for node in sums] == wanted
    x, residual = vectors(dtype, 2, 3)
    assert torch.equal(module(x, residual).nan_to_num(), plain(x, residual).nan_to_num())
    if wanted:
        x, residual = vectors(dtype, 1, 1)
        truth = copy.deepcopy(plain).double()(x.double(), residual.double())
        within(module(x, residual), plain(x, residual), truth, dtype, few=True)


def test_a_token_of_another_region_is_normed_by_who_reads_it() -> None:
    def form(own: Block, x: Tensor, residual: Tensor) -> Tensor:
        return aten.add.Tensor(linear(own.q, rms(own.norm, x, None)), residual)  # type: ignore[no-any-return]

    plain, module, calls = joined(form)
    assert calls == ["linear_normed"]
    x, residual = vectors(torch.float32, 1, 1)
    truth = copy.deepcopy(plain).double()(x.double(), residual.double())
    within(module(x, residual), plain(x, residual), truth, torch.float32, few=True)


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
    dtype = torch.bfloat16 if "rounded" in name else torch.float32
    plain, module, calls = joined(ALONE[name], dtype)
    assert not [call for call in calls if "normed" in call or "added" in call]
    x, residual = vectors(dtype, 2, 3)
    torch.testing.assert_close(module(x, residual), plain(x, residual))


def test_it_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOMPILE_DISABLE", "norms")
    assert joined(DECODERS[torch.float32])[2] == ["linear", "linear_gated", "linear", "linear_group"]


def test_a_row_that_registers_do_not_hold_is_normed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one whose weight has another dtype."""
    from kvcompile.kernels.triton.host import linear as kernels

    plain, module, _ = joined(DECODERS[torch.float32])
    x, residual = vectors(torch.float32, 1, 1)
    form = NormForm(EPS)
    assert kernels.takes_norm(x, kernels.Norm(form, (plain.norm,)))
    assert not kernels.takes_norm(x, kernels.Norm(form, (plain.norm.double(),)))
    assert not kernels.takes_norm(x, kernels.Norm(form, (plain.norm[:16],)))
    monkeypatch.setattr(kernels, "_NORMED", 1)
    with recording() as launches:
        module(x, residual)
    assert launches and not [one for one in launches if "rms" in str(one.kernel.spec.options)]
    truth = copy.deepcopy(plain).double()(x.double(), residual.double())
    within(module(x, residual), plain(x, residual), truth, torch.float32)
