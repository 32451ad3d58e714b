"""State: what a forward changes and a later one reads is refused by name; what does no harm works."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvcompile.errors import ModelError
from kvcompile.passes.capture.capture import capture
from kvcompile.passes.capture.changes import Snapshot
from tests.passes.capture.test_trace import Rows, agree
from tests.support.models import NanoGPT, make, tiny_hf

CALLS = 0


class Layer(nn.Module):
    """Somewhere in the model: `act(self, x)` does something to the layer, besides its result."""

    def __init__(self, act: Callable[[Layer, Tensor], Tensor]):
        super().__init__()
        self.act = act
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(32))
        self.register_buffer("kv", torch.zeros(8, 96, 32))
        self.register_buffer("inv_freq", torch.rand(16))
        self.plain, self.number, self.flag = torch.zeros(()), 0, False
        self.longest = 24
        self.table: Tensor | None = None
        self.log: list[Tensor] = []
        self.notes: dict[str, Any] = {}
        self.turns: dict[int, None] = {0: None}
        self.helper = Helper()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, x)


class Helper:
    """An object that is no module."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class Model(nn.Module):
    def __init__(self, act: Callable[[Layer, Tensor], Tensor]):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(61, 32), nn.Linear(32, 61)
        self.layers = nn.ModuleList([Layer(act)])

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.layers[0](self.embed(input_ids)))


def buffer_counter(self: Layer, x: Tensor) -> Tensor:
    self.count += 1
    return x * self.count


def data_counter(self: Layer, x: Tensor) -> Tensor:
    self.count.data += 1
    return x * self.count


def new_buffer(self: Layer, x: Tensor) -> Tensor:
    self.count = self.count + 1
    return x * self.count


def running_mean(self: Layer, x: Tensor) -> Tensor:
    self.mean.mul_(0.9).add_(0.1 * x.mean((0, 1)))
    return x - self.mean


def replaced_mean(self: Layer, x: Tensor) -> Tensor:
    self.table = x.mean((0, 1)) if self.table is None else 0.9 * self.table + 0.1 * x.mean((0, 1))
    return x - self.table


def number_counter(self: Layer, x: Tensor) -> Tensor:
    self.number += 1
    return x * self.number


def late_counter(self: Layer, x: Tensor) -> Tensor:
    """Nothing is seen of it in the first calls."""
    self.number += 1
    return x * 2 if self.number > 100 else x


def alternating(self: Layer, x: Tensor) -> Tensor:
    self.flag = not self.flag
    return x * 2 if self.flag else x


def first_call(self: Layer, x: Tensor) -> Tensor:
    first, self.flag = not self.flag, True
    return x * 2 if first else x


def longest_seen(self: Layer, x: Tensor) -> Tensor:
    """RoPE whose base follows the longest text so far, as dynamic NTK scaling is often written."""
    size = x.shape[1]
    if self.table is None or self.number < size:
        self.number = size
        self.table = torch.arange(size)[:, None] * self.inv_freq / size
    angles = self.table[:size]
    return x + torch.cat([angles.cos(), angles.sin()], -1)


def history(self: Layer, x: Tensor) -> Tensor:
    self.log.append(x.mean((0, 1)))
    return x + torch.stack(self.log).sum(0)


def in_a_dict(self: Layer, x: Tensor) -> Tensor:
    self.notes["calls"] = self.notes.get("calls", 0) + 1
    return x * self.notes["calls"]


def in_the_keys_of_a_dict(self: Layer, x: Tensor) -> Tensor:
    (turn,) = self.turns
    self.turns[turn + 1] = self.turns.pop(turn)
    return x * turn


def in_an_object(self: Layer, x: Tensor) -> Tensor:
    return self.helper(x)


def in_a_global(self: Layer, x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return x * CALLS


def in_the_class(self: Layer, x: Tensor) -> Tensor:
    Layer.shared = getattr(Layer, "shared", 0) + 1
    return x * Layer.shared


def previous_tokens(self: Layer, x: Tensor) -> Tensor:
    before, self.table = self.table, x[:1, -1:]
    return x if before is None else x + before


def largest_token(self: Layer, x: Tensor) -> Tensor:
    self.number = max(self.number, int(x.argmax()))
    return x * self.number


REFUSED: list[tuple[Callable[[Layer, Tensor], Tensor], str]] = [
    (buffer_counter, r"the buffer layers\.0\.count"),
    (data_counter, r"the data of layers\.0\.count \(Layer\)"),
    (new_buffer, r"layers\.0\.count \(Layer\)"),
    (running_mean, r"the buffer layers\.0\.mean"),
    (replaced_mean, r"layers\.0\.table \(Layer\).*made of the tokens"),
    (number_counter, r"layers\.0\.number \(Layer\).*changes with every call"),
    (late_counter, r"layers\.0\.number \(Layer\).*changes with every call"),
    (alternating, r"layers\.0\.flag \(Layer\).*changes with every call"),
    (first_call, r"layers\.0\.flag \(Layer\).*another result after"),
    (longest_seen, r"layers\.0\.(number|table) \(Layer\).*another result after lengths"),
    (history, r"layers\.0\.log \(Layer\)"),
    (in_a_dict, r"layers\.0\.notes \(Layer\)"),
    (in_the_keys_of_a_dict, r"layers\.0\.turns \(Layer\).*another result after lengths"),
    (in_an_object, r"layers\.0\.helper \(Layer\)"),
    (in_a_global, r"CALLS \(global of tests\.passes\.capture\.test_harmless\)"),
    (in_the_class, r"shared \(class Layer\)"),
    (previous_tokens, r"layers\.0\.table \(Layer\)"),
    (largest_token, r"layers\.0\.number \(Layer\).*made of the tokens"),
]


@pytest.mark.parametrize(("act", "told"), REFUSED, ids=[act.__name__ for act, _ in REFUSED])
def test_what_a_later_forward_reads_is_refused_by_name(
    act: Callable[[Layer, Tensor], Tensor], told: str
) -> None:
    model = Model(act)
    before = {name: value.clone() for name, value in model.layers[0].state_dict().items()}
    with pytest.raises(ModelError, match=told):
        capture(model)
    layer: Any = model.layers[0]
    assert all(torch.equal(layer.state_dict()[name], value) for name, value in before.items())
    left = (layer.number, layer.flag, layer.table, layer.log, layer.notes, layer.helper.calls)
    assert left == (0, False, None, [], {}, 0) and layer.turns == {0: None}


def unread_counter(self: Layer, x: Tensor) -> Tensor:
    self.count += 1
    self.number += 2
    return x


def unread_result(self: Layer, x: Tensor) -> Tensor:
    self.table = x
    self.log.append(x)
    return x * 2


def overwritten(self: Layer, x: Tensor) -> Tensor:
    self.mean.copy_(self.inv_freq.repeat(2))
    return x + self.mean


def filled_and_read(self: Layer, x: Tensor) -> Tensor:
    """A cache of the model's own, at its beginning: nothing of it is read but what was just written."""
    batch, size, _ = x.shape
    self.kv[:batch, :size] = x
    return self.kv[:batch, :size] * 2


def table_by_length(self: Layer, x: Tensor) -> Tensor:
    size = x.shape[1]
    if self.table is None or self.table.shape[0] < size:
        self.table = torch.arange(size)[:, None] * self.inv_freq
    angles = self.table[:size]
    return x + torch.cat([angles.cos(), angles.sin()], -1)


def table_for_this_length(self: Layer, x: Tensor) -> Tensor:
    if self.number != x.shape[1]:
        self.number = x.shape[1]
        self.register_buffer("mask", torch.ones(x.shape[1], x.shape[1]).tril(), persistent=False)
    return self.mask @ x


def set_once(self: Layer, x: Tensor) -> Tensor:
    if not self.flag:
        self.flag, self.notes["ready"] = True, True
    return x * 3


def seen_rope(self: Layer, x: Tensor) -> Tensor:
    """As transformers wrote it: a table that is made anew where a text is longer than any before."""
    size = x.shape[1]
    if size > self.longest or self.table is None:
        self.longest = max(size, 24)
        self.table = torch.arange(self.longest)[:, None] * self.inv_freq
    angles = self.table[:size]
    return x + torch.cat([angles.cos(), angles.sin()], -1)


HARMLESS = [unread_counter, unread_result, overwritten, filled_and_read, table_by_length]
HARMLESS += [table_for_this_length, set_once]


@pytest.mark.parametrize("act", HARMLESS, ids=[act.__name__ for act in HARMLESS])
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_what_does_no_harm_works(act: Callable[[Layer, Tensor], Tensor], used: bool) -> None:
    model = Model(act)
    if used and act is not table_for_this_length:  # from a used state that one asks whether S is 7
        model(torch.zeros(2, 7, dtype=torch.int64))
    agree(model, capture(model))


def test_a_table_that_grows() -> None:
    """Beyond the table the model makes another one, so a fresh model is traced up to it."""
    captured = capture(Model(seen_rope))
    assert captured.max_seq_len == 24


def by_length_in_a_buffer(self: Layer, x: Tensor) -> Tensor:
    """Reads what an earlier, longer text has left behind."""
    self.mean[: min(32, x.shape[1])] = 1.0
    return x + self.mean


def test_a_buffer_that_is_partly_written() -> None:
    with pytest.raises(ModelError, match=r"the buffer layers\.0\.mean"):
        capture(Model(by_length_in_a_buffer))


def torch_noise(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    return x + torch.rand(32)


def dropout(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    return F.dropout(x, 0.1, True)


def attention_dropout(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1, is_causal=True)


def python_noise(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    return x + random.random()


def numpy_noise(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    return x + float(numpy.random.rand())


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (torch_noise, r"aten\.rand\.default draws random numbers"),
        (dropout, r"aten\.dropout\.default draws random numbers"),
        (attention_dropout, r"aten\.scaled_dot_product_attention\.default draws random numbers"),
        (python_noise, "draws random numbers of Python's `random`"),
        (numpy_noise, "draws random numbers of numpy"),
    ],
)
def test_random_numbers_are_refused(body: Callable[..., Tensor], told: str) -> None:
    model = Rows(body)
    states = random.getstate(), torch.get_rng_state()
    with pytest.raises(ModelError, match=told):
        capture(model)
    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1])


def test_random_numbers_that_nobody_uses() -> None:
    def unused(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
        torch.rand(3)
        return F.dropout(x, 0.3, self.training)

    model = Rows(unused).eval()
    agree(model, capture(model))


def test_a_plain_model_runs_twice_and_no_more() -> None:
    """Looking for state costs a plain model two short forwards, and the comparison one."""
    model = make(NanoGPT)
    sizes = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["idx"]), with_kwargs=True
    )
    original = model.forward
    model.forward = lambda idx: original(idx)
    capture(model)
    real = [tuple(ids.shape) for ids in sizes if type(ids) is Tensor]
    assert real == [(1, 5), (1, 11), (2, 1)]


def test_a_plain_transformers_model_changes_nothing() -> None:
    model = tiny_hf("llama", layers=1)
    before = Snapshot(model)
    model(torch.zeros(1, 5, dtype=torch.int64), use_cache=False)
    assert before.changed() == ()


def test_a_random_number_that_nobody_uses_is_no_reason() -> None:
    """As in models that drop whole layers in training."""

    class Dropping(nn.Module):
        def __init__(self, used: bool) -> None:
            super().__init__()
            self.embed, self.head, self.used = nn.Embedding(9, 8), nn.Linear(8, 9), used

        def forward(self, input_ids: Tensor) -> Tensor:
            import random

            x = self.embed(input_ids)
            chance = random.uniform(0, 1)
            if (self.training or self.used) and chance < 0.5:
                return self.head(x)
            q = x[:, None]
            return self.head(x + nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0])

    assert capture(Dropping(False).eval()).graph_module is not None
    with pytest.raises(ModelError, match="random"):
        capture(Dropping(True).eval())
