"""A step of a module that runs as Python, as a graph: what it computes, which are equal, and every reason for none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvcompile
from kvcompile.kernels.ops.opaque import OpaqueModule
from kvcompile.passes.capture import python_step
from kvcompile.passes.capture.capture import capture
from kvcompile.passes.capture.opaque import describe
from kvcompile.passes.capture.step_graph import StepGraph
from kvcompile.passes.capture.step_proof import differs
from tests.coverage.configs import tiny_model
from tests.passes.capture.test_opaque import routed
from tests.passes.recurrent.test_state import Decay, Notes, OwnState, hybrid

CALLS = [0]


class InStep(Decay):
    """Does something in steps of one token alone."""

    act: Callable[[Any, Tensor], Tensor]

    def forward(self, x: Tensor, notes: Notes | None = None) -> Tensor:
        if notes is not None and notes.state is not None and x.shape[1] == 1:
            x = type(self).act(self, x)
        return super().forward(x, notes)


class Counts(InStep):
    def act(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return x


class CountsOutside(InStep):
    def act(self, x: Tensor) -> Tensor:
        CALLS[0] += 1
        return x


class Remembers(InStep):
    def act(self, x: Tensor) -> Tensor:
        self.last = x
        return x


class Asks(InStep):
    def act(self, x: Tensor) -> Tensor:
        return x if bool(x.abs().max() < 1e6) else x * 2


class Catches(InStep):
    def act(self, x: Tensor) -> Tensor:
        try:
            return x * (1.0 if float(x.abs().max()) < 1e6 else 2.0)
        except Exception:
            return x * 3


class Draws(InStep):
    def act(self, x: Tensor) -> Tensor:
        return x + 0 * torch.rand_like(x)


class Writes(InStep):
    def act(self, x: Tensor) -> Tensor:
        return x.mul_(1.0).add_(0.25).sub_(0.25)


class NumPy(InStep):
    def act(self, x: Tensor) -> Tensor:
        return x + float(x.detach().numpy().sum() * 0)


class OfBatch(InStep):
    def act(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 900 else x


class OfFive(InStep):
    def act(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] == 5 else x


class OfSeven(InStep):
    def act(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] % 7 == 0 else x


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2


class OwnFunction(InStep):
    def act(self, x: Tensor) -> Tensor:
        return Twice.apply(x) / 2


class Traced(InStep):
    """Something else, where somebody traces it."""

    def act(self, x: Tensor) -> Tensor:
        return x * 7 if torch.compiler.is_exporting() else x


class InPlace(Decay):
    """Its state is written to where it stands."""

    def forward(self, x: Tensor, notes: Notes | None = None) -> Tensor:
        if notes is None or notes.state is None:
            return super().forward(x, notes)
        outs = []
        for u in self.proj(x).unbind(1):
            notes.state.mul_(self.decay).add_(u)
            outs.append(notes.state.clone())
        return torch.stack(outs, 1)


def record_of(mixer: nn.Module) -> OpaqueModule:
    (record,) = capture(hybrid(mixer)).opaques
    python_step.give_steps([record])
    return record


@pytest.mark.parametrize(
    "mixer",
    [Decay(), Decay(ignores_state=True), OwnState(), InPlace(), OwnFunction(), Traced()],
    ids=["cache object", "one by one", "own attribute", "in place", "autograd function", "tells tracing"],
)
def test_graphs_give_what_python_gives(mixer: nn.Module) -> None:
    """Over steps that each go on from the one before: the same bits, in results and in the state."""
    record = record_of(mixer)
    for rows in (1, 2, 3):
        step = record.steps[rows == 1]
        assert isinstance(step, StepGraph), step
        inputs, state = record.example.step(record, rows)
        own = [tensor.clone() for tensor in state]
        generator = torch.Generator().manual_seed(rows)
        for _ in range(12):
            given = [torch.randn(x.shape, generator=generator) for x in inputs]
            wanted = record.next_token([x.clone() for x in given], state)
            found = step.run([x.clone() for x in given], own)
            for got, want in zip((*found, *own), (*wanted, *state), strict=True):
                assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("mixer", "one", "many"),
    [
        (Counts, "a step changes calls (Counts)", "a step changes calls (Counts)"),
        (CountsOutside, f"a step changes CALLS (global of {__name__})", "a step changes CALLS"),
        (Remembers, "a step changes last (Remembers)", "a step changes last"),
        (Asks, "its Python cannot be traced: ", "its Python cannot be traced: "),
        (Catches, "its Python asks for the value of a tensor (", "its Python asks for the value"),
        (Draws, "it draws random numbers", "it draws random numbers"),
        (Writes, "it writes into what it is given", "it writes into what it is given"),
        (NumPy, "its Python cannot be traced: ", "its Python cannot be traced: "),
        (OfBatch, None, "it depends on the number of sequences: "),
        (OfFive, None, "it depends on the number of sequences: "),
        (OfSeven, None, "it depends on the number of sequences: "),
        (lambda: Decay(scale=1.01), "it must be given two tokens at least", "it must be given two tokens"),
    ],
)
def test_what_stays_in_python_and_why(mixer: Callable[[], nn.Module], one: str | None, many: str) -> None:
    record = record_of(mixer())
    steps = record.steps
    if one is None:
        assert isinstance(steps[True], StepGraph)
    else:
        assert isinstance(steps[True], str) and one in steps[True]
    assert isinstance(steps[False], str) and many in steps[False]
    (line,) = describe([record], True)
    assert "stay in Python" in line and str(steps[False] if one is None else steps[True]) in line
    assert describe([record], False) == (line.partition("; its steps")[0],)


def test_hooks_of_parts_are_called_by_python() -> None:
    mixer = Decay()
    seen: list[int] = []
    mixer.proj.register_forward_hook(lambda *call: seen.append(1))
    record = record_of(mixer)
    assert all("a part of it has a forward hook" in str(step) for step in record.steps.values())


def test_fake_tensors_are_left_nowhere() -> None:
    """Tracing may end anywhere: the module and its cache object are as they were."""
    record = record_of(Asks())
    assert record.state is not None
    for holder in (vars(record.state.warm), vars(record.module)):
        assert not any("Fake" in type(value).__name__ for value in holder.values())
    assert torch.isfinite(record.state.warm.state).all()  # type: ignore[attr-defined]


def test_a_graph_that_gives_something_else_is_noticed() -> None:
    record = record_of(Decay())
    step = record.steps[True]

    def wrong(inputs: Any, state: Any) -> list[Tensor]:
        results = step.run(inputs, state)
        state[0].mul_(1.001)
        return results

    assert differs(record, record.example, step.run, 1) == ""
    assert "state 0 is off by" in differs(record, record.example, wrong, 1)
    assert "result 0 is off by" in differs(
        record, record.example, lambda i, s: [x * 1.001 for x in step.run(i, s)], 1
    )


def test_equal_layers_are_traced_once_with_weights_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[str] = []
    original = python_step._graph

    def noting(record: OpaqueModule, *args: Any) -> StepGraph:
        traced.append(record.path)
        return original(record, *args)

    monkeypatch.setattr(python_step, "_graph", noting)
    kinds = ["conv", "conv", "full_attention", "conv"]
    model = tiny_model("lfm2", changes={"layer_types": kinds, "num_hidden_layers": 4})
    records = capture(model).opaques
    assert len(records) > 2
    assert len({record.module.layer_idx for record in records}) == len(records)
    python_step.give_steps(records)
    assert set(traced) == {records[0].path}
    for record in records:
        own = dict(record.module.named_parameters())
        for one_sequence, step in record.steps.items():
            assert [w.data_ptr() for w in step.weights] == [own[name].data_ptr() for name in step.names]
            assert differs(record, record.example, step.run, 1 if one_sequence else 3) == ""


def test_a_layer_that_runs_something_else_is_traced_by_itself() -> None:
    model = tiny_model(
        "lfm2", changes={"layer_types": ["conv", "conv", "full_attention"], "num_hidden_layers": 3}
    )
    first, second = capture(model).opaques
    second.module.layer_idx = 0  # it reads the other's state now, which is no argument of its step
    python_step.give_steps([first, second])
    (step, other) = (record.steps[True] for record in (first, second))
    assert isinstance(step, StepGraph) and not isinstance(other, StepGraph), other
    assert "a step changes cache" in other or "a step of it raises" in other


def test_routers_stay_in_python_and_say_where() -> None:
    records = capture(routed()).opaques
    python_step.give_steps(records)
    assert all("test_opaque.py:" in str(step) for record in records for step in record.steps.values())


def test_the_pass_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOMPILE_DISABLE", "python_step")
    assert record_of(Decay()).steps == {}


def test_what_explain_says_is_what_the_recipe_does() -> None:
    model = hybrid(Decay())
    assert "its steps of one token are compiled" in str(kvcompile.explain(model))
    assert "its steps of one token" not in str(kvcompile.explain(model, compile={"mode": "none"}))
