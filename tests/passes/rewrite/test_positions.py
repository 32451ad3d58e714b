"""Positions: with the past length added, a chunk of new tokens gets what it would in the full sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Interpreter

import kvcompile
from kvcompile.api import build
from kvcompile.errors import DetectionError, LimitError, PlanError
from kvcompile.passes.capture.capture import capture
from kvcompile.passes.capture.captured import Captured
from kvcompile.passes.detect.detect import detect
from kvcompile.passes.rewrite.canonicalize import canonicalize
from kvcompile.passes.rewrite.positions import PAST_LENGTH, Positions, offset_positions
from kvcompile.pipeline import plan_for, understand
from kvcompile.recipe import Recipe
from tests.support.models import NanoGPT, TinyConfig, TinyLlama, TinyLlamaPositions, make, tiny_hf


class Cached(Interpreter):
    """Runs a canonical graph chunk by chunk: each attention node appends to a list of keys and values."""

    def __init__(self, positions: Positions):
        super().__init__(positions.graph_module)
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not torch.ops.kvcompile.attention.default:
            return super().call_function(target, args, kwargs)
        q, k, v, scale, _, window, layer = args
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


@pytest.mark.few(2)
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
    "steps": (lambda m, x: x + m.table[torch.arange(1, 2 * x.shape[1] + 1, 2)], 2),
    "steps of a fraction": (
        lambda m, x: x * torch.arange(x.shape[1], dtype=torch.float64)[:, None].mul(0.5).float(),
        2,
    ),
    "comparison": (lambda m, x: x * (torch.arange(x.shape[1]) > 3)[:, None], 1),
    "where, by parity": (
        lambda m, x: torch.where((torch.arange(x.shape[1]) % 2 == 0)[:, None] & (x > 0), x, 2 * x),
        1,
    ),
    "half precision": (
        lambda m, x: x + torch.sin(torch.arange(x.shape[1], dtype=torch.bfloat16)[:, None].float() / 7),
        2,
    ),
    "masked by position": (
        lambda m, x: x.masked_fill(torch.arange(x.shape[1])[:, None] < m.table[3, :1].abs() * 9, 0.5),
        1,
    ),
    "last logits": (lambda m, x: x, 1),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("case", OFFSET)
def test_positions_in_other_spellings(case: str) -> None:
    place, count = OFFSET[case]
    torch.manual_seed(0)
    assert len(check_decode(Placed(place).eval()).offsets) == count


REFUSED: dict[str, tuple[Callable[[Placed, Tensor], Tensor], str]] = {
    "length as a number": (lambda m, x: x * x.shape[1], "the sequence length enters mul as a number"),
    "length in a filled tensor": (
        lambda m, x: x + torch.full((1,), x.shape[1]),
        "the sequence length enters full as a number",
    ),
    "distance to the end": (
        lambda m, x: x * (x.shape[1] - torch.arange(x.shape[1]))[:, None],
        "the sequence length enters rsub as a number",
    ),
    "batch as a number": (lambda m, x: x / x.shape[0], "the number of rows enters as a number"),
    "reversed": (
        lambda m, x: x + m.table[torch.arange(x.shape[1] - 1, -1, -1)],
        "the sequence length enters arange",
    ),
    "token index": (
        lambda m, x: x[:, torch.arange(x.shape[1])],
        "positions index the tokens' own values in index",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_uses_of_the_length_are_refused(case: str) -> None:
    place, reason = REFUSED[case]
    torch.manual_seed(0)
    with pytest.raises(DetectionError, match=reason) as caught:
        offset(Placed(place).eval())
    assert caught.value.misses[0].source.startswith("test_positions.py:")


def test_rope_tables_follow_the_offset() -> None:
    """The tables of the sites are those of the rewritten graph: they see past_length."""
    from kvcompile.passes.probe.evaluate import depends_on, evaluate

    _, positions = offset(make(TinyLlama))
    rope = positions.sites[0].rope
    assert rope is not None and all(depends_on(table, [PAST_LENGTH]) for table in rope.k.tables)
    values = {"input_ids": torch.zeros(1, 6, dtype=torch.int64), PAST_LENGTH: torch.tensor(0)}
    full = evaluate(positions.graph_module, list(rope.k.tables), values)
    values = {"input_ids": torch.zeros(1, 2, dtype=torch.int64), PAST_LENGTH: torch.tensor(4)}
    for table, tail in zip(full, evaluate(positions.graph_module, list(rope.k.tables), values), strict=True):
        torch.testing.assert_close(tail, table[:, :, 4:])


class Counting(NanoGPT):
    """Positions as RoBERTa makes them: the number of tokens up to here that are no padding, 0 for padding."""

    def __init__(self, pad: int = 7, total: Callable[[Tensor], Tensor] = lambda x: x.cumsum(1)):
        super().__init__(TinyConfig(num_layers=1))
        self.pad, self.total = pad, total

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            real = input_ids.ne(self.pad).int()
            position_ids = (self.total(real).type_as(real) * real).long()
        x = self.wte(input_ids) + self.wpe(position_ids)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def test_counted_tokens_are_a_state() -> None:
    """The count goes on over chunks, rows and resets, with padding tokens anywhere among the tokens."""
    model = make(Counting)
    fast = kvcompile.optimize(model, max_tokens=64, max_batch=3, compile={"mode": "none"}, verify="thorough")
    assert "it makes them itself" in kvcompile.explain(fast).reasons[0]
    assert fast.plan.state_bytes == 8 and not fast.program.takes_position_ids
    ids = torch.randint(0, 61, (3, 24), generator=torch.Generator().manual_seed(3))
    ids[:, [3, 11, 12, 20]] = ids[0, 5:7] = ids[1, 0] = model.pad
    for _ in range(2):
        found = torch.cat([fast(part) for part in ids.split([9, 1, 1, 1, 8, 4], 1)], 1)
        torch.testing.assert_close(found, model(ids), rtol=1e-4, atol=1e-5)
        fast.reset()


@pytest.mark.parametrize(
    ("total", "reason"),
    [
        (lambda x: x.flip(1).cumsum(1).flip(1), "tokens mix outside attention"),
        (lambda x: x.cumprod(1), "tokens mix outside attention"),
        (lambda x: x.float().cumsum(1), "tokens mix outside attention"),
    ],
)
def test_other_sums_are_refused(total: Callable[[Tensor], Tensor], reason: str) -> None:
    with pytest.raises(DetectionError, match=reason):
        offset(make(Counting, 1, total))


class CountingRope(TinyLlama):
    """RoPE at positions that are counted from a mask of ones."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.run(input_ids, torch.ones_like(input_ids).cumsum(1) - 1)


def test_positions_counted_from_ones() -> None:
    model = make(CountingRope)
    retention = {"kind": "sink_window", "sinks": 2, "window": 30, "positions": "in_cache"}
    for more in ({"max_tokens": 64}, {"cache": {"retention": retention}}):
        fast = kvcompile.optimize(model, compile={"mode": "none"}, **more)
        ids = torch.randint(0, 61, (2, 20))
        found = torch.cat([fast(part) for part in ids.split([9, 1, 10], 1)], 1)
        torch.testing.assert_close(found, model(ids), rtol=1e-4, atol=1e-5)


SCALED: dict[str, tuple[dict[str, Any], int]] = {
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, 48),
    "longrope": (
        {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 40}
        | {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]},
        40,
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("case", SCALED)
def test_rotary_tables_that_depend_on_the_length(case: str) -> None:
    """Exact up to where they change, and refused beyond: keys in the cache would have to be rotated anew."""
    scaling, most = SCALED[case]
    scaling = {"rope_theta": 10000.0, **scaling}
    model = tiny_hf("llama", layers=1, rope_parameters=scaling, max_position_embeddings=48)
    front = understand(model)
    assert front.detection.limit is not None and front.detection.limit.tokens == most
    with pytest.raises(PlanError, match=f"has {most} positions: its positions mean something else"):
        plan_for(front, Recipe.load("baseline", max_tokens=most + 1))
    fast = build(model, front, Recipe.load("baseline", compile={"mode": "none"}))
    assert fast.plan.limits.max_tokens == most
    ids = torch.randint(0, 61, (2, most))
    found = torch.cat([fast(part).logits for part in ids.split([9, 1, most - 10], 1)], 1)
    torch.testing.assert_close(found, model(ids).logits, rtol=1e-4, atol=1e-5)


def test_learned_positions_end() -> None:
    """The table's length is the limit, also where every layer is a ring."""
    front = understand(tiny_hf("gpt2", layers=1, max_position_embeddings=100, n_positions=100))
    assert front.detection.limit is not None and front.detection.limit.tokens == 100
    assert plan_for(front, Recipe.load("baseline")).limits.max_tokens == 100
    window = Recipe.load("baseline", cache={"retention": {"kind": "window", "size": 9}})
    assert plan_for(front, window).limits.max_tokens == 100
    with pytest.raises(PlanError, match="has 100 positions: its tables of positions end there"):
        plan_for(front, Recipe.load("baseline", max_tokens=101))
    assert understand(tiny_hf("llama", layers=1)).detection.limit is None


class CountingFrom(NanoGPT):
    """A table of positions that are counted as RoBERTa does it: from `first` on, of the tokens that `counted` shows."""

    def __init__(self, rows: int, first: int, counted: Callable[[Tensor], Tensor]):
        super().__init__(TinyConfig(max_seq_len=rows, num_layers=1))
        self.first, self.counted = first, counted

    def forward(self, input_ids: Tensor) -> Tensor:
        shown = self.counted(input_ids).long()
        x = self.wte(input_ids) + self.wpe(shown.cumsum(1) * shown + self.first)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


@pytest.mark.parametrize(("first", "pad"), [(1, 0), (1, 1), (0, 2), (7, 60)])
def test_counted_positions_end(first: int, pad: int) -> None:
    """A table of 50 rows is long enough for as many tokens as the model itself can compute, whatever the padding is."""
    model = make(CountingFrom, 50, first, lambda ids: ids != pad).eval()
    most = 49 - first
    ids = torch.full((1, most + 1), 5)
    with pytest.raises(IndexError):
        model(ids)
    front = understand(model)
    assert front.detection.limit is not None and front.detection.limit.tokens == most
    with pytest.raises(PlanError, match=f"has {most} positions: its tables of positions end there"):
        plan_for(front, Recipe.load("baseline", max_tokens=most + 1))
    fast = build(model, front, Recipe.load("baseline", max_tokens=most, compile={"mode": "none"}))
    found = torch.cat([fast(part) for part in ids[:, :most].split([9, 1, most - 10], 1)], 1)
    torch.testing.assert_close(found, model(ids[:, :most]), rtol=1e-4, atol=1e-5)
    with pytest.raises(LimitError):
        fast(ids[:, :1])


def test_counted_positions_without_an_end() -> None:
    """The table has rows for twice as many tokens as are looked at where a model does not say what it is made for."""
    assert understand(make(CountingFrom, 2**15, 0, lambda ids: ids != 0)).detection.limit is None
