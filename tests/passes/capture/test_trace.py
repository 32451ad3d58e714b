"""Ways of tracing: what Python makes of sizes is followed, by Dynamo where plain tracing cannot; nothing is baked."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kvcompile
from kvcompile.errors import CaptureError, ModelError
from kvcompile.passes.capture.capture import capture
from kvcompile.passes.capture.captured import Captured
from kvcompile.passes.graph import target_name
from tests.support.models import NanoGPT, RMSNorm, make, rotate_half, tiny_hf

VOCAB, WIDTH, HEADS = 61, 32, 4
EAGER: dict[str, Any] = {"compile": {"mode": "none"}, "max_tokens": 96, "max_batch": 2}
Body = Callable[["Rows", Tensor, Tensor], Tensor]


class Rows(nn.Module):
    """Embeddings, one line of Python in between, a head: what a test is about is `body(self, x, ids)`."""

    inv_freq: Tensor

    def __init__(self, body: Body):
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.register_buffer("inv_freq", torch.rand(WIDTH // 2))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.body(self, self.embed(input_ids), input_ids))


class LenRope(nn.Module):
    """A decoder whose RoPE asks `len(positions)`, and whose heads are walked over one by one."""

    inv_freq: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(VOCAB, WIDTH), RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.register_buffer("inv_freq", 100.0 ** -(torch.arange(0, 8, 2) / 8))

    def table(self, positions: Tensor) -> Tensor:
        angles = positions.float().view(len(positions), 1) * self.inv_freq
        return torch.cat([angles, angles], -1)

    def forward(self, input_ids: Tensor) -> Tensor:
        angles = self.table(torch.arange(len(input_ids[0])))
        x = self.embed(input_ids)
        batch, size, _ = x.shape
        q, k, v = (t.view(batch, size, HEADS, 8).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        q, k = (t * angles.cos() + rotate_half(t) * angles.sin() for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.out(torch.cat(tuple(iter(y.transpose(0, 1))), -1)))


def len_of_positions(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    positions = torch.arange(ids.shape[1])
    angles = positions[:, None] * self.inv_freq
    return x + torch.cat([angles, angles], -1)[: len(positions)].cos()


def len_of_a_row(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    return x * torch.arange(len(ids[0]))[:, None]


def int_of_a_size(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    return x * torch.arange(int(x.shape[1]))[:, None]


def logarithm(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    return x * max(1.0, math.log(ids.shape[1], 4.0))


def root(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    return x / math.sqrt(ids.shape[1])


def over_heads(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    heads = x.unflatten(-1, (HEADS, -1)).permute(2, 0, 1, 3)
    return torch.cat([head.softmax(-1) * number for number, head in enumerate(heads)], -1)


def through_numpy(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    return x * torch.from_numpy((ids.numpy() == 1).astype("float32"))[..., None]


def logits(captured: Captured, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return captured.graph_module(ids)[captured.logits_index]


def agree(model: nn.Module, captured: Captured) -> None:
    for batch, size in ((1, 1), (1, 7), (2, 23), (5, 64)):
        ids = torch.randint(0, VOCAB, (batch, size), generator=torch.Generator().manual_seed(size))
        with torch.no_grad():
            torch.testing.assert_close(logits(captured, ids), model(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "way"),
    [
        (len_of_positions, "strict export"),
        (len_of_a_row, "strict export"),
        (int_of_a_size, "strict export"),
        (through_numpy, "strict export"),
        (logarithm, "export"),
        (root, "export"),
        (over_heads, "export"),
    ],
)
def test_python_that_makes_numbers_of_sizes(body: Body, way: str) -> None:
    model = Rows(body)
    captured = capture(model)
    assert captured.route == f"{way}, input_ids" and captured.max_seq_len is None
    assert len(captured.reasons) == (way != "export")
    agree(model, captured)


def test_a_decoder_whose_rope_asks_for_a_length() -> None:
    model = LenRope().eval()
    fast = kvcompile.optimize(model, **EAGER)
    ids = torch.randint(0, VOCAB, (2, 41), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model(ids)
    found = torch.cat([fast(part) for part in ids.split((17, 1, 1, 22), dim=1)], dim=1)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    told = kvcompile.explain(fast)
    assert told.route == "strict export, input_ids"
    assert any("specialized it to be a constant (11)" in reason for reason in told.reasons)
    assert "captured by strict export" in str(told)
    assert [decision.module_path for decision in fast.plan.decisions] == [""]


def test_names_of_weights_and_modules_are_the_models_own() -> None:
    class Walking(NanoGPT):
        def forward(self, input_ids: Tensor) -> Tensor:
            return super().forward(input_ids[:, : len(input_ids[0])])

    model = make(Walking)
    captured = capture(model)
    assert captured.route.startswith("strict export")
    own = dict(model.named_parameters())
    for name, parameter in captured.graph_module.named_parameters():
        assert own[name].data_ptr() == parameter.data_ptr()
    stacks = [node.meta.get("nn_module_stack") or {} for node in captured.graph_module.graph.nodes]
    assert "h.0" in {path for stack in stacks for path, _ in stack.values()}


def test_plain_models_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcompile.passes.capture import route as passes

    ways: list[str] = []
    original = passes.trace

    def noting(*args: Any, **kwargs: Any) -> Any:
        ways.append(args[3] if len(args) > 3 else "export")
        return original(*args, **kwargs)

    monkeypatch.setattr(passes, "trace", noting)
    capture(make(NanoGPT))
    assert ways == ["export"]


def unrolled(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    return torch.stack([x[:, i] for i in range(len(ids[0]))], 1)


def listed(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    return x * torch.tensor(ids.tolist())[..., None]


@pytest.mark.parametrize("body", [unrolled, listed])
def test_what_is_baked_in_is_refused(body: Body) -> None:
    with pytest.raises(CaptureError, match=r"(?s)export, input_ids.*strict export, input_ids.*specialized"):
        capture(Rows(body))


class Answer(nn.Module):
    """Returns something of another shape."""

    def __init__(self, of: Callable[[Tensor], Any]):
        super().__init__()
        self.inner, self.of = make(NanoGPT), of

    def forward(self, input_ids: Tensor) -> Any:
        return self.of(self.inner(input_ids))


@pytest.mark.parametrize(
    ("of", "told"),
    [
        (lambda x: x[:, -2:-1], r"no logits.*output 0 have the shape \[B, 1, 61\]: one row of each sequence"),
        (lambda x: x[:, 0], r"no logits.*output 0 have the shape \[B, 61\]"),
        (
            lambda x: x[:, -1, :7],
            r"no logits.*output 0 have the shape \[B, 7\]",
        ),  # seven classes, and 61 words
        (lambda x: x.transpose(0, 1), r"no logits.*output 0 have the shape \[S, B, 61\]"),
        (lambda x: x.flatten(0, 1), r"no logits.*output 0 have the shape \[B\*S, 61\]"),
        (lambda x: x.argmax(-1), r"no logits.*output 0 have the shape \[B, S\]"),
        (lambda x: None, "no logits.*it returns no tensor"),
    ],
)
def test_no_logits_for_each_token(of: Callable[[Tensor], Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        capture(Answer(of))


def test_hidden_states_are_no_logits() -> None:
    with pytest.raises(ModelError, match="returns hidden states and no logits"):
        capture(tiny_hf("llama", layers=1).model)


def test_a_call_that_tracing_leaves_is_not_dropped() -> None:
    from torch.fx import Graph, GraphModule

    from kvcompile.passes.capture.inline import inline

    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_module("scale", (x,)))
    with pytest.raises(ModelError, match=r"left a call of scale \(Linear\)"):
        inline(GraphModule({"scale": nn.Linear(2, 2)}, graph))
    assert target_name(next(iter(graph.nodes))) == "x"
