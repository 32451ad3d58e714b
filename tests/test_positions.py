"""Positions: with the past length added, a chunk of new tokens gets what it would in the full sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Interpreter

from kvcompile.errors import DetectionError
from kvcompile.passes.canonicalize import canonicalize
from kvcompile.passes.capture import Captured, capture
from kvcompile.passes.detect import detect
from kvcompile.passes.positions import PAST_LENGTH, Positions, offset_positions
from tests.models import NanoGPT, TinyConfig, TinyLlama, TinyLlamaPositions, make, tiny_hf


class Cached(Interpreter):
    """Runs a canonical graph chunk by chunk: each attention node appends to a list of keys and values."""

    def __init__(self, positions: Positions):
        super().__init__(positions.graph_module)
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not torch.ops.kvcompile.attention.default:
            return super().call_function(target, args, kwargs)
        q, k, v, scale, window, layer = args
        if layer in self.cache:
            k, v = (torch.cat(pair, 2) for pair in zip(self.cache[layer], (k, v), strict=True))
        self.cache[layer] = (k, v)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        distance = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] - torch.arange(k.shape[2])
        shown = (distance >= 0) & (distance < (window if window >= 0 else k.shape[2]))
        return (q @ k.mT * scale).masked_fill(~shown, -torch.inf).softmax(-1) @ v


def offset(model: nn.Module) -> tuple[Captured, Positions]:
    captured = capture(model)
    return captured, offset_positions(canonicalize(captured, detect(captured)))


def check_decode(model: nn.Module) -> Positions:
    """Prefill of 15, then 1, 1 and 6 tokens, against the model on all 23."""
    captured, positions = offset(model)
    cached, ids, parts, start = Cached(positions), torch.randint(0, 61, (2, 23)), [], 0
    with torch.no_grad():
        for stop in (15, 16, 17, 23):
            values = {
                "input_ids": ids[:, start:stop],
                "position_ids": torch.arange(start, stop).expand(2, -1),
                "logits_to_keep": torch.arange(stop - start),
                PAST_LENGTH: torch.tensor(start),
            }
            names = [*captured.inputs.names, *([PAST_LENGTH] if positions.past_length else [])]
            parts.append(cached.run(*(values[name] for name in names))[captured.logits_index])
            start = stop
        reference = model(ids)
    reference = reference if isinstance(reference, Tensor) else reference.logits
    torch.testing.assert_close(torch.cat(parts, 1), reference, rtol=1e-4, atol=3e-5)
    return positions


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("kind", [NanoGPT, TinyLlama])
def test_aranges_are_offset(kind: type[nn.Module], eager: bool) -> None:
    positions = check_decode(make(kind, eager=eager))
    assert positions.past_length and len(positions.offsets) == 1
    assert positions.offsets[0].startswith("arange (models.py:")
    placeholders = [node.name for node in positions.graph_module.graph.nodes if node.op == "placeholder"]
    assert placeholders == ["input_ids", PAST_LENGTH]


@pytest.mark.parametrize("kind", ["gemma3", "gpt2"])
def test_position_ids_are_enough(kind: str) -> None:
    assert not check_decode(tiny_hf(kind)).past_length


def test_plain_position_ids() -> None:
    assert not check_decode(make(TinyLlamaPositions)).past_length


class Placed(NanoGPT):
    """NanoGPT with its last hidden states changed by a function of the module, the tokens' states and S."""

    table: Tensor

    def __init__(self, place: Callable[[Placed, Tensor], Tensor]):
        super().__init__(TinyConfig(num_layers=1))
        self.place = place
        self.register_buffer("table", torch.randn(96, 61))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.place(self, super().forward(input_ids))


OFFSET: dict[str, tuple[Callable[[Placed, Tensor], Tensor], int]] = {
    "slice of a buffer": (lambda m, x: x + m.table[: x.shape[1]], 2),
    "slice from 2": (lambda m, x: x + m.table[2 : x.shape[1] + 2], 2),
    "slice of a weight": (lambda m, x: x + m.wpe.weight[: x.shape[1], :1], 2),
    "shifted index": (lambda m, x: x + m.table[torch.arange(x.shape[1]) + 2], 1),
    "started arange": (lambda m, x: x + m.table[torch.arange(2, x.shape[1] + 2)], 2),
    "sinusoid": (lambda m, x: x + torch.sin(torch.arange(x.shape[1])[:, None] * m.table[0]), 1),
    "last logits": (lambda m, x: x, 1),
}


@pytest.mark.parametrize("case", OFFSET)
def test_positions_in_other_spellings(case: str) -> None:
    place, count = OFFSET[case]
    torch.manual_seed(0)
    assert len(check_decode(Placed(place).eval()).offsets) == count


REFUSED: dict[str, tuple[Callable[[Placed, Tensor], Tensor], str]] = {
    "length as a number": (lambda m, x: x * x.shape[1], "the sequence length enters mul as a number"),
    "comparison": (lambda m, x: x * (torch.arange(x.shape[1]) > 3)[:, None], "positions enter gt"),
    "token index": (
        lambda m, x: x[:, torch.arange(x.shape[1])],
        "positions index the tokens' own values in index",
    ),
    "steps": (lambda m, x: x + m.table[torch.arange(0, 2 * x.shape[1], 2)], "positions run in steps of 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_uses_of_the_length_are_refused(case: str) -> None:
    place, reason = REFUSED[case]
    torch.manual_seed(0)
    with pytest.raises(DetectionError, match=reason) as caught:
        offset(Placed(place).eval())
    assert caught.value.misses[0].source.startswith("test_positions.py:")


def test_rope_tables_follow_the_offset() -> None:
    """The rope nodes of the sites are those of the rewritten graph: they see past_length."""
    from kvcompile.passes.evaluate import depends_on, evaluate

    _, positions = offset(make(TinyLlama))
    rope = positions.sites[0].rope
    assert rope is not None and depends_on(rope.cos, [PAST_LENGTH])
    values = {"input_ids": torch.zeros(1, 6, dtype=torch.int64), PAST_LENGTH: torch.tensor(0)}
    (full,) = evaluate(positions.graph_module, [rope.cos], values)
    values = {"input_ids": torch.zeros(1, 2, dtype=torch.int64), PAST_LENGTH: torch.tensor(4)}
    (tail,) = evaluate(positions.graph_module, [rope.cos], values)
    torch.testing.assert_close(tail, full[:, 4:])
