"""Equal layers are traced once: the graph is the one that tracing every layer gives, or every layer is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.node import map_arg
from torch.nn import functional as F

import kvcompile
from kvcompile.passes.capture import plain
from kvcompile.passes.capture.capture import capture
from kvcompile.passes.capture.captured import Captured
from kvcompile.passes.capture.traced_once import Once, expand
from kvcompile.passes.probe.evaluate import fetch_attr
from tests.support.marks import cases
from tests.support.models import TinyConfig, make, tiny_hf

WIDTH = TinyConfig.hidden_size


def structure(graph_module: GraphModule, named: bool = True) -> Any:
    """What a graph computes, operator by operator; sizes are those that they were traced as.

    named: whether weights are told apart by their names, else by their values
    """
    known: dict[Any, str] = {}
    for node in graph_module.graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            known[node] = f"size {val}"
        elif node.op == "get_attr" and not named:
            known[node] = f"<{float(fetch_attr(graph_module, str(node.target)).double().sum())}>"
        elif node.op in ("placeholder", "get_attr"):
            known[node] = f"<{node.target}>"
        else:
            args = map_arg((node.args, sorted(node.kwargs.items())), known.__getitem__)
            paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
            # Others may be computed once for all layers.
            where = paths if "linear" in str(node.target) else None
            form = (val.shape, val.stride(), val.dtype) if isinstance(val, Tensor) else ()
            known[node] = f"%{hash((node.op, str(node.target), repr(args), str(form), str(where)))}"
    return known[next(node for node in graph_module.graph.nodes if node.op == "output")]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers were copied in each graph."""
    found: list[int] = []

    def counting(graph_module: GraphModule, once: Once) -> int:
        found.append(expand(graph_module, once))
        return found[-1]

    monkeypatch.setattr(plain, "expand", counting)
    return found


def both(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> tuple[Captured, Captured]:
    once = capture(model)
    with monkeypatch.context() as patch:
        patch.setattr(Once, "of", staticmethod(lambda model: None))
        return once, capture(model)


def alike(model: nn.Module, monkeypatch: pytest.MonkeyPatch, named: bool = True) -> Captured:
    """Both graphs are the same; the one whose layers were traced once."""
    once, every = both(model, monkeypatch)
    assert structure(once.graph_module, named) == structure(every.graph_module, named)
    assert (once.out_spec, once.route, once.max_seq_len) == (every.out_spec, every.route, every.max_seq_len)
    return once


def same(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both graphs are the same; and so are the logits."""
    alike(model, monkeypatch)
    ids = torch.randint(0, 50, (2, 19), generator=torch.Generator().manual_seed(1))
    found = kvcompile.optimize(model, compile={"mode": "none"}, verify="off")(ids)
    wanted = model(ids)
    torch.testing.assert_close(*(one if isinstance(one, Tensor) else one.logits for one in (found, wanted)))


@pytest.mark.parametrize(
    "kind,layers,copied",
    [
        ("gpt2", {"layers": 3}, 2),
        pytest.param("llama", {"layers": 3}, 2, marks=pytest.mark.slow),  # quick with a layer that differs
        *(pytest.param(kind, {"layers": 5}, 4, marks=pytest.mark.slow) for kind in ("mixtral", "phi")),
        ("gemma3", {"layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}, 2),
    ],
)
def test_types(
    kind: str, layers: dict[str, Any], copied: int, copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    same(tiny_hf(kind, **layers), monkeypatch)
    assert copies[0] == copied


def _scaling(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= 1.5


def _epsilon(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 0.1


def _activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.ReLU()


def _bias(model: Any) -> None:
    model.model.layers[1].mlp.down_proj = nn.Linear(WIDTH + 8, WIDTH)


def _wider(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = (
        nn.Linear(WIDTH, 72, bias=False),
        nn.Linear(WIDTH, 72, bias=False),
        nn.Linear(72, WIDTH, bias=False),
    )


def _hook(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * 2)


def _forward(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    own = mlp.forward
    mlp.forward = lambda x: own(x) * 2


def _other_class(model: Any) -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    model.model.layers[1].mlp.down_proj = Doubled(WIDTH + 8, WIDTH, bias=False)


CHANGES = [_scaling, _epsilon, _activation, _bias, _wider, _hook, _forward, _other_class]


def changed(change: Callable[[Any], None]) -> Any:
    model: Any = tiny_hf("llama", layers=3, hidden_size=WIDTH, intermediate_size=WIDTH + 8)
    change(model)
    return model.eval()


@pytest.mark.few(2)
@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_differs_is_traced(change: Callable[[Any], None], copies: list[int]) -> None:
    capture(changed(change))
    assert copies[0] == 1  # of three layers, two are equal


@pytest.mark.parametrize("change", cases(CHANGES, (_scaling, _hook)))
def test_with_a_layer_that_differs_the_graph_is_the_same(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    (same if change is _scaling else alike)(changed(change), monkeypatch)


def test_an_attribute_that_is_not_read_is_none(copies: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_hf("llama", layers=4)
    model.model.layers[1].mlp.note = "mine"
    model.model.layers[2].self_attn.other = nn.Linear(3, 3)  # a part, though nothing calls it
    alike(model, monkeypatch)
    assert copies[0] == 2


def test_weights_that_layers_share(copies: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_hf("llama", layers=4)
    layers = model.model.layers
    layers[2].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    layers[3].mlp.gate_proj.weight = layers[3].mlp.up_proj.weight  # two of one layer: another pattern
    alike(model, monkeypatch, named=False)
    assert copies[0] == 2
    shared = layers[0].mlp.gate_proj.weight = nn.Parameter(layers[0].mlp.up_proj.weight.detach() * 0.5)
    for layer in layers[1:]:
        layer.mlp.gate_proj.weight = shared
    once = alike(model, monkeypatch, named=False)
    names = {str(n.target) for n in once.graph_module.graph.nodes if n.op == "get_attr"}
    assert sum("gate_proj" in name for name in names) == 1  # one weight has one name


class Block(nn.Module):
    """A layer that would be known, by its name; what it does is up to its subclasses."""

    def __init__(self, number: int):
        super().__init__()
        self.number, self.heads = number, 4
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def attend(self, x: Tensor) -> Tensor:
        batch, size, width = x.shape
        q, k, v = (
            part.view(batch, size, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(width, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, size, width))

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        return self.attend(x)


class ReadsNumber(Block):
    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        return self.attend(x) * (1 + self.number)


class ReadsAll(Block):
    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        return self.attend(x) * (1 + vars(self)["number"])


class WritesInput(Block):
    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        x.mul_(1.5)
        return self.attend(x)


class WritesOwn(Block):
    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        y = self.attend(x).clone()
        y[..., :3] *= 2.0
        return y


class Keeps(Block):
    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(x)
        return self.attend(x) + seen[0]


class Gives(Block):
    """What it is given comes back, and a number, and two names of one tensor."""

    def forward(self, x: Tensor, seen: list[Tensor]) -> Any:
        y = self.attend(x)
        return {"old": x, "new": (y, y), "scale": 0.5}


class Deep(nn.Module):
    def __init__(self, kind: type[Block], layers: int = 4):
        super().__init__()
        self.embed, self.head = nn.Embedding(61, WIDTH), nn.Linear(WIDTH, 61)
        self.layers = nn.ModuleList(kind(number) for number in range(layers))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        seen: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, seen)
            if isinstance(x, dict):
                x = x["new"][0] + x["new"][1] * x["scale"] + x["old"]
        return self.head(x)


class WritesLater(Deep):
    """What a layer has made is written to: it may be more than one layer's."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, []).add_(1.0)
        return self.head(x)


class Leaves(Block):
    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        y = self.attend(x)
        self.last = y.abs().amax()
        return y


class ReadsWhatIsLeft(Deep):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, [])
        return self.head(x + self.layers[2].last * 2)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Block, *Block.__subclasses__()):
        monkeypatch.setattr(kind, "__module__", "transformers.models.made_up")


@pytest.mark.few(2)
@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    "kind,copied",
    [
        (Block, [3]),
        (WritesOwn, [3]),
        (Gives, [3]),
        (ReadsNumber, [0]),  # every layer is traced, between its marks
        (ReadsAll, [0]),
        (Keeps, []),  # none is
        (WritesInput, []),
    ],
)
def test_what_layers_do(
    kind: type[Block], copied: list[int], copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    once, every = both(make(Deep, kind), monkeypatch)
    assert copies == copied
    assert structure(once.graph_module) == structure(every.graph_module)


@pytest.mark.usefixtures("known")
def test_what_is_written_to_later(copies: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    once, every = both(make(WritesLater, Block), monkeypatch)
    assert copies == [] and structure(once.graph_module) == structure(every.graph_module)


@pytest.mark.usefixtures("known")
def test_what_layers_leave_behind(copies: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(ReadsWhatIsLeft, Leaves)
    model(torch.zeros(3, 11, dtype=torch.int64))  # as large as what is traced, and there before
    once, every = both(model, monkeypatch)
    assert copies == [] and structure(once.graph_module) == structure(every.graph_module)


def test_layers_of_others_are_not_looked_at() -> None:
    assert Once.of(make(Deep, Block)) is None


def test_the_model_is_left_as_it_was() -> None:
    model: Any = tiny_hf("llama", layers=4)
    before = [dict(vars(module)) for module in model.modules()]
    kinds = {type(module): dict(vars(type(module))) for module in model.modules()}
    capture(model)
    assert [dict(vars(module)) for module in model.modules()] == before
    assert all(dict(vars(kind)) == own for kind, own in kinds.items())
