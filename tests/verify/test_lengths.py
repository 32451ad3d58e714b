"""Verified lengths: planned so that every constant has tokens on both sides, and what is not reached is told.

A rewrite that is wrong only beyond 256 tokens, at 300, or in a group of 64, is caught by `quick`; the short runs of 18
tokens are shown not to see it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from kvcompile import pipeline
from kvcompile import verify as verification
from kvcompile.errors import ModelError, VerificationError
from kvcompile.kernels.ops import cached_attention as ops
from kvcompile.kernels.reference import residual, visibility
from kvcompile.pipeline import Front, plan_for, understand
from kvcompile.recipe import Recipe
from kvcompile.verify import Check, long, verify
from kvcompile.verify.constants import _around, _of_records, constants
from kvcompile.verify.ids import vocabulary
from kvcompile.verify.lengths import FARTHEST, MINIMUM, Budget, Constant, schedule
from kvcompile.verify.original import Subject
from kvcompile.verify.shrink import shrink
from tests.support.models import NanoGPT, TinyConfig, make, tiny_hf


def at(*values: int, rank: int = 0) -> list[Constant]:
    return [Constant(value, "here", rank) for value in values]


def alone(run: tuple[int, ...]) -> set[int]:
    """Positions of tokens that come alone."""
    ends = list(itertools.accumulate(run))
    return {end - 1 for size, end in zip(run, ends, strict=True) if size == 1}


class TestSchedule:
    def test_without_constants(self) -> None:
        plan = schedule((), None, None, Budget())
        assert [sum(run) for run in plan.runs] == [MINIMUM] and not plan.missed
        assert alone(plan.runs[0]) == {391, 392} and plan.runs[0][-1] == 7 and max(plan.runs[0]) > 100

    def test_tokens_on_both_sides_of_a_constant_come_alone(self) -> None:
        (run,) = schedule(at(300), None, None, Budget()).runs
        assert {299, 300} <= alone(run) and sum(run) == MINIMUM

    def test_a_farther_constant_makes_a_second_run(self) -> None:
        plan = schedule(at(2048), None, None, Budget(FARTHEST, 9, 2))
        assert [sum(run) for run in plan.runs] == [MINIMUM, 2057]
        assert {2047, 2048} <= alone(plan.runs[1]) and not plan.missed

    def test_what_is_not_reached_is_told(self) -> None:
        plan = schedule(at(4096, 300), None, None, Budget())
        assert [c.value for c in plan.missed] == [4096] and str(plan.missed[0]) == "4,096 (here)"

    def test_no_text_is_longer_than_the_limit_and_none_of_its_constants_is_missed(self) -> None:
        plan = schedule(at(300, 100), 128, None, Budget())
        assert [sum(run) for run in plan.runs] == [128] and not plan.missed
        assert {99, 100} <= alone(plan.runs[0])

    def test_the_most_telling_first(self) -> None:
        """Of more constants than a run has passes for, those of positions come before those of shapes."""
        many = [*at(150, 200, 250, rank=2), *at(333, rank=0)]
        (run,) = schedule(many, None, None, Budget(passes=9)).runs
        assert {332, 333} <= alone(run) and not {150, 200, 250} & alone(run)

    def test_later_runs_step_over_what_earlier_ones_crossed(self) -> None:
        plan = schedule(at(100, 150, 200, 250, 300, 350), None, None, Budget(passes=9, runs=8))
        stepped = set().union(*map(alone, plan.runs))
        assert stepped >= {99, 100, 149, 150, 199, 200, 249, 250, 299, 300, 349, 350}

    def test_later_runs_end_after_what_they_step_over(self) -> None:
        plan = schedule(at(300, 70), None, None, Budget(passes=9, runs=2))
        assert [sum(run) for run in plan.runs] == [MINIMUM, 150]  # 140: where the second of 70 begins
        assert {299, 300} <= alone(plan.runs[0]) and plan.runs[1] == (69, 1, 1, 68, 1, 1, 9)

    def test_what_repeats_is_crossed_twice(self) -> None:
        (run,) = schedule(at(64), None, None, Budget(passes=12)).runs
        assert {63, 64, 127, 128} <= alone(run)
        (run,) = schedule(at(64, rank=2), None, None, Budget(passes=12)).runs
        assert {63, 64} <= alone(run) and not {127, 128} & alone(run)  # channels repeat nothing

    def test_pieces_are_no_larger_than_a_prefill_chunk(self) -> None:
        (run,) = schedule((), None, 32, Budget()).runs
        assert max(run) == 32 and sum(run) == MINIMUM

    @given(
        values=st.lists(st.integers(1, 6000), max_size=8),
        limit=st.none() | st.integers(1, 5000),
        chunk=st.none() | st.integers(1, 700),
        budget=st.builds(Budget, st.integers(1, 5000), st.integers(3, 40), st.integers(1, 4)),
    )
    def test_any(self, values: list[int], limit: int | None, chunk: int | None, budget: Budget) -> None:
        plan = schedule(at(*values), limit, chunk, budget)
        longest = max(map(sum, plan.runs))
        assert 1 <= len(plan.runs) <= budget.runs
        for run in plan.runs:
            assert min(run) > 0 and (chunk is None or max(run) <= chunk)
            assert limit is None or sum(run) <= limit
        assert sum(plan.runs[0]) >= min(MINIMUM, limit or MINIMUM)
        if budget.runs > 1:  # what is neither crossed nor told, no text can meet
            for value in {v for v in values if v <= FARTHEST} - {c.value for c in plan.missed}:
                assert value < longest or (limit is not None and value >= limit)


class TestConstants:
    def test_of_a_model_and_a_plan(self) -> None:
        _, front = subject("mistral")
        plan = plan_for(front, Recipe.load("paged_int8", max_tokens=128))
        found = {c.value: c for c in sorted(constants(front, plan), key=lambda c: -c.rank)}
        assert found[300].rank == 0 and "modeling_mistral.py" in "".join(
            c.where for c in constants(front, plan) if c.value == 300
        )
        assert (
            found[16].where == "page_size of placement of the layout" and found[512].where == "prefill_chunk"
        )
        assert 48 not in found  # the width of the model

    def test_of_a_table_that_positions_select_from(self) -> None:
        _, front = subject("nanogpt")
        plan = plan_for(front, Recipe.load("baseline"))
        assert any(
            c.value == 512 and c.where.startswith("table of embedding") for c in constants(front, plan)
        )

    def test_of_records_that_nobody_knows_yet(self) -> None:
        @dataclass(frozen=True)
        class Leaf:
            values: Tensor
            bounds: dict[str, tuple[int, ...]]
            head_dim: int = 77

        found = {c.value for c in _of_records([Leaf(torch.tensor([99.5, 7]), {"w": (300,)})], "x", 0)}
        assert {99, 100, 7, 300} <= found and 77 not in found

    def test_of_numbers_that_are_not_whole(self) -> None:
        assert {c.value for c in _around(99.5, "x", 0)} == {99, 100}
        assert 512 in {c.value for c in _around(6.238324625039508, "x", 0)}  # log(512)


@lru_cache
def subject(kind: str) -> tuple[nn.Module, Front]:
    """A model whose scores matter, of up to 512 tokens."""
    models: dict[str, Callable[[], nn.Module]] = {
        "llama": lambda: tiny_hf("llama", layers=2),
        "mistral": lambda: tiny_hf("mistral", layers=2, sliding_window=300),
        "nanogpt": lambda: make(NanoGPT, TinyConfig(max_seq_len=512)),
    }
    model = models[kind]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("q_proj.weight", "k_proj.weight", "c_attn.weight")):
                parameter.mul_(1.5 / (parameter.std() * parameter.shape[-1] ** 0.5))
    return model, understand(model)


GROUPS = {
    "cache": {
        "keys": {"dtype": "int4", "axis": "channel", "group": 64, "residual": 64},
        "values": {"dtype": "int8"},
    }
}
REFERENCE = {"compile": {"kernels": "reference"}}  # what is broken below
RECIPES: dict[str, Any] = {"baseline": {}, "int8": {"cache": {"keys": {"dtype": "int8"}}}, "groups": GROUPS}


def check(kind: str, recipe: str) -> tuple[Check, ...]:
    model, front = subject(kind)
    plan = plan_for(front, Recipe.load({**RECIPES[recipe], "runtime": {"max_tokens": 480}, **REFERENCE}))
    return verify(model, front, plan, "quick")


def short(kind: str, recipe: str) -> None:
    """What was all that looked at a cached graph: 18 tokens, with small budgets."""
    model, front = subject(kind)
    plan = plan_for(front, Recipe.load({**RECIPES[recipe], "runtime": {"max_tokens": 480}, **REFERENCE}))
    of = Subject(model, front, vocabulary(front, model), 512)
    verification._check_cache("short", of, shrink(plan), verification._QUICK_CHUNKS)


def _visible(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    def apply(patch: pytest.MonkeyPatch) -> None:
        inner = visibility.visible
        patch.setattr(visibility, "visible", lambda q, k, *rest: inner(q, k, *rest) & change(q, k))

    return apply


def _graph(change: Callable[[GraphModule], None]) -> Callable[[pytest.MonkeyPatch], None]:
    def apply(patch: pytest.MonkeyPatch) -> None:
        inner = pipeline.insert_cache

        def broken(*args: Any) -> Any:
            rewritten = inner(*args)
            change(rewritten.graph_module)
            rewritten.graph_module.recompile()
            return rewritten

        patch.setattr(pipeline, "insert_cache", broken)

    return apply


def _position_ids_end(module: GraphModule) -> None:
    _through(module, "position_ids", lambda positions: positions.clamp(max=256))


def _past_length_ends(module: GraphModule) -> None:
    _through(module, "past_length", lambda past: past.clamp(max=256))


def _through(module: GraphModule, name: str, change: Callable[[Tensor], Tensor]) -> None:
    node = next(n for n in module.graph.nodes if n.name == name)
    with module.graph.inserting_after(node):
        wrong = module.graph.call_function(change, (node,))
    node.replace_all_uses_with(wrong, delete_user_cb=lambda user: user is not wrong)


def _a_step_forgets(module: GraphModule) -> None:
    """Beyond 300 tokens, what a single token sees is nothing but itself."""
    for node in [n for n in module.graph.nodes if n.target is ops.cached_attention]:
        with module.graph.inserting_after(node):
            wrong = module.graph.call_function(_halved_when_alone, (node, _past(module)))
        node.replace_all_uses_with(wrong, delete_user_cb=lambda user, wrong=wrong: user is not wrong)


def _past(module: GraphModule) -> Node:
    return next(n for n in module.graph.nodes if n.name in ("past_length", "seq_lens"))


def _halved_when_alone(out: Tensor, past: Tensor) -> Tensor:
    late = bool((past >= 200).all()) and out.shape[2] == 1
    return out / 2 if late else out


def _group_of_64_read_short(patch: pytest.MonkeyPatch) -> None:
    """Of a group of 64 half is read, and the first of it for the other half; smaller groups are as they should."""
    inner = residual.take

    def broken(x: Tensor, index: Tensor) -> Tensor:
        if index.shape[1] >= 64 and index.shape[1] % 64 == 0:
            index = torch.where(torch.arange(index.shape[1]) % 64 < 32, index, index[:, :1])
        return inner(x, index)

    patch.setattr(residual, "take", broken)


BROKEN: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = {
    "a window one short, of 300": (_visible(lambda q, k: q - k != 299), "mistral", "baseline"),
    "nothing beyond 300": (_visible(lambda q, k: q - k < 300), "llama", "baseline"),
    "the token at 256 is not seen": (_visible(lambda q, k: k != 256), "llama", "int8"),
    "a group of 64 read short": (_group_of_64_read_short, "llama", "groups"),
    "positions end at 256": (_graph(_position_ids_end), "llama", "baseline"),
    "positions end at 256, rounded": (_graph(_position_ids_end), "llama", "int8"),
    "learned positions end at 256": (_graph(_past_length_ends), "nanogpt", "baseline"),
    "a step is wrong from 200 on": (_graph(_a_step_forgets), "nanogpt", "baseline"),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("what", BROKEN)
def test_broken_far_on(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    breaks, kind, recipe = BROKEN[what]
    assert {
        c.tokens >= MINIMUM for c in check(kind, recipe) if c.name in ("lossless", "cache, own sizes")
    } == {True}
    breaks(monkeypatch)
    short(kind, recipe)  # sees nothing
    with pytest.raises(VerificationError, match=r"layer|logits") as caught:
        check(kind, recipe)
    assert caught.value.error > 0


def test_the_half_that_failed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _visible(lambda q, k: q - k < 300)(monkeypatch)
    with pytest.raises(
        VerificationError, match=r"'lossless' failed: layer 0 \(model.layers.0.self_attn"
    ) as caught:
        check("llama", "baseline")
    assert caught.value.layer == 0


def test_more_noise_in_a_longer_text_is_measured_before_anything_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the short run's noise does not explain an error, that of the text itself may."""
    asked: list[int] = []
    inner = long.oracles
    monkeypatch.setattr(long, "allowed", lambda noise, dtype: 1e30 if asked else 0.0)
    monkeypatch.setattr(long, "oracles", lambda *a, **k: (asked.append(1), inner(*a, **k))[1])
    assert any(c.name == "lossless" for c in check("llama", "baseline")) and asked


class Declines(nn.Module):
    """A model that raises for what `problem` says."""

    def __init__(self, model: nn.Module, problem: Callable[[Tensor], bool]):
        super().__init__()
        self.model, self.problem = model, problem

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.problem(input_ids):
            raise IndexError("index out of range in self")
        logits = self.model(input_ids)
        assert isinstance(logits, Tensor)
        return logits


class TestOriginal:
    """What the original declines makes a run shorter, or of other ids, and is told."""

    def check(self, problem: Callable[[Tensor], bool], recipe: str = "baseline") -> Check:
        model, front = subject("nanogpt")
        plan = plan_for(front, Recipe.load({**RECIPES[recipe], "runtime": {"max_tokens": 480}, **REFERENCE}))
        checks = verify(Declines(model, problem), front, plan, "quick")
        return next(c for c in checks if c.name == "lossless")

    @pytest.mark.parametrize("recipe", ["baseline", "int8"])
    def test_a_length(self, recipe: str) -> None:
        found = self.check(lambda ids: ids.shape[1] > 203, recipe)
        assert found.tokens == 203 and "takes no more than 203 tokens: IndexError" in str(found)

    def test_ids(self) -> None:
        found = self.check(lambda ids: bool((ids >= 25).any()))
        assert found.tokens >= MINIMUM and "declines some ids from 15 on: IndexError" in found.note

    def test_both(self) -> None:
        found = self.check(lambda ids: bool((ids >= 25).any()) or ids.shape[1] > 303)
        assert found.tokens == 303 and "some ids" in found.note and "303 tokens" in found.note

    def test_everything(self) -> None:
        with pytest.raises(ModelError, match="does not run on 2 tokens"):
            self.check(lambda ids: True)

    def test_what_was_not_reached_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(long.SECONDS, "quick", 0.0)
        model, front = subject("nanogpt")
        plan = plan_for(front, Recipe.load({"runtime": {"prefill_chunk": 450, "max_tokens": 480}}))
        found = next(c for c in verify(model, front, plan, "quick") if c.name == "lossless")
        assert found.tokens == MINIMUM and "not reached: 450 (prefill_chunk)" in str(found)
        monkeypatch.setitem(long.SECONDS, "quick", 60.0)
        found = [c for c in verify(model, front, plan, "quick") if c.name == "lossless"][-1]
        assert found.tokens > 450 and "not reached" not in str(found)


class LastOnly(nn.Module):
    def __init__(self, model: nn.Module, keep_dim: bool):
        super().__init__()
        self.model, self.keep_dim = model, keep_dim

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = self.model(input_ids)
        assert isinstance(logits, Tensor)
        return logits[:, -1:] if self.keep_dim else logits[:, -1]


@pytest.mark.parametrize("keep_dim", [True, False])
def test_logits_of_the_last_token_only(keep_dim: bool) -> None:
    model, front = subject("nanogpt")
    plan = plan_for(front, Recipe.load("baseline", max_tokens=64))
    with pytest.raises(ModelError, match=r"expected logits of every token, \[2, 64, vocabulary\]") as caught:
        verify(LastOnly(model, keep_dim), front, plan, "quick")
    assert "those of the last token only" in str(caught.value)


def test_rows_are_padded_by_more_than_a_piece_and_by_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding that is seen from the second piece on is caught, and so are positions that count it."""
    assert subject("llama")[1].ragged
    pads: list[list[int]] = []
    inner = long.cached_run

    def noted(*args: Any, **kwargs: Any) -> Any:
        pads.append([int(args[5][1]), args[6][0]])
        return inner(*args, **kwargs)

    monkeypatch.setattr(long, "cached_run", noted)
    check("llama", "baseline")
    assert any(pad > first for pad, first in pads) and any(0 < pad < first for pad, first in pads)


class TestPrograms:
    """What runs a program or an artifact goes on over the plan's own groups, pages and windows."""

    def chunks(self, recipe: dict[str, Any], first: tuple[int, ...] = (9, 1, 1, 6, 1), least: int = 0) -> Any:
        _, front = subject("llama")
        return long.program_chunks(front, plan_for(front, Recipe.load(recipe)), first, least)

    def test_nothing_to_meet(self) -> None:
        assert self.chunks({"runtime": {"max_tokens": 480}}) == (9, 1, 1, 6, 1)

    def test_groups(self) -> None:
        found = self.chunks({**GROUPS, "runtime": {"max_tokens": 480}})
        assert found[:5] == (9, 1, 1, 6, 1) and {63, 64, 127, 128} <= alone(found) and sum(found) > 128

    def test_a_window(self) -> None:
        retention = {"kind": "sink_window", "sinks": 4, "window": 200, "positions": "original"}
        found = self.chunks({"cache": {"retention": retention}, "runtime": {"max_tokens": 480}})
        assert {199, 200, 203, 204} <= alone(found)

    def test_at_least_and_at_most(self) -> None:
        assert sum(self.chunks({"runtime": {"max_tokens": 480}}, least=MINIMUM)) == MINIMUM
        assert sum(self.chunks({"runtime": {"max_tokens": 30}}, least=MINIMUM)) == 30
