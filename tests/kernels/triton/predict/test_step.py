"""Linear layers of one token, and a whole step: what programs read, nothing beats its bytes, and the model's shape."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompile.kernels.triton.linear.linear import loop
from kvcompile.kernels.triton.predict import step
from kvcompile.kernels.triton.predict.assumptions import EXPECTED, HARSH, KIND
from kvcompile.kernels.triton.predict.launch import Predicted
from kvcompile.kernels.triton.predict.linears import Form, Layers, predicted, recorded
from kvcompile.kernels.triton.predict.model import Model
from kvcompile.kernels.triton.predict.step import LINEARS, STEPS, Prepared
from kvcompile.kernels.triton.predict.work import linear
from kvcompile.kernels.triton.tools.assemble import Assembled
from kvcompile.util.machines import MACHINES
from tests.support.predicted import H200, fact

RESULTS = Path(__file__).parents[4] / "benchmarks" / "results" / "gpu_day_h200" / "decode.json"
PAGE = Path(__file__).parents[4] / "docs" / "kernels.md"
STRAIGHT = replace(fact(registers=90, shared=64, instructions=600), instructions=None, waits=5)
GATE = next(of for of in LINEARS if of.activation)


def time_of(
    of: Layers, code: Assembled = STRAIGHT, model: Model = H200, form: Form | None = None
) -> Predicted:
    made = recorded(of, model.machine, form)
    return predicted(made, {made.request: code}, model)


@pytest.fixture(scope="module")
def made_up() -> Prepared:
    """Steps on an H200, with facts that are made up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "facts", lambda requests, progress: dict.fromkeys(requests, STRAIGHT))
        return step.prepared(H200.machine)


@pytest.mark.parametrize("of", LINEARS, ids=lambda of: of.name)
def test_a_launch_reads_its_weights_once_and_the_token_in_each_program(of: Layers) -> None:
    made = recorded(of, H200.machine)
    own = linear(made)
    results = sum(of.rows[:1] if of.activation else of.rows)
    turns = max(1, loop(made.spec)[1])
    assert len(own.programs) == made.programs == results // made.spec.block_m and {*own.programs} == {turns}
    token = 2 * of.columns * (2 if of.normed else 1)  # and the norm's weight
    moved = sum(own.programs) * own.bytes
    others = 2 * results * (2 if of.added else 1)
    assert moved == pytest.approx(of.weight_bytes + token + others, rel=1e-6)
    assert own.near - own.bytes == pytest.approx(token / turns)
    assert own.waits is None and not own.before


def test_a_program_that_cannot_hold_its_rows_makes_turns() -> None:
    """Four rows of 14,336 columns are 56 loads of a thread of four warps: seven turns, of two loads of each row."""
    of = Layers("down", 14336, (4096,))
    own = linear(recorded(of, H200.machine, Form(4, 1024, 4)))
    assert {*own.programs} == {7.0} and len(own.programs) == 1024
    assert sum(own.programs) * own.bytes == pytest.approx(of.weight_bytes + 2 * 14336 + 2 * 4096)
    assert own.near - own.bytes == pytest.approx(2 * 14336 / 7)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(LINEARS[:4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.integers(20, 255),
    st.integers(0, 12),
)
def test_no_launch_beats_its_bytes_and_waits_take_no_less(
    of: Layers, rows: int, warps: int, registers: int, waits: int
) -> None:
    form, of = Form(rows, 256 * warps, warps), replace(of, normed=False)  # which has no turns
    code = replace(STRAIGHT, registers=registers, waits=waits)
    one = time_of(of, code, form=form)
    assert of.weight_bytes / H200.machine.copied < one.bytes / H200.machine.copied <= one.seconds
    assert one.seconds == pytest.approx(sum(one.on.values()))
    assert one.seconds <= time_of(of, replace(code, waits=waits + 1), form=form).seconds * (1 + 1e-9)


def test_few_programs_that_wait_leave_the_memory_idle() -> None:
    """Of kernels that a multiprocessor holds once, one that waits for load after load takes far more than its bytes."""
    alone = replace(STRAIGHT, shared=200_000, opcodes={"FFMA": 100})
    once, often = (time_of(LINEARS[1], replace(alone, waits=waits)) for waits in (1, 8))
    assert once.places == often.places == 1
    assert often.seconds > 2 * once.seconds and often.limit in ("latency", "tail")


@pytest.mark.parametrize("name", MACHINES)
def test_every_machine_has_predictions(name: str) -> None:
    one = time_of(GATE, model=Model(MACHINES[name]))
    assert 0.3 < one.share < 1


def test_a_gate_is_one_launch_that_takes_less_than_its_layers_apart() -> None:
    apart = [Layers(side, GATE.columns, GATE.rows[:1]) for side in ("gate", "up")]
    assert time_of(GATE).seconds < sum(time_of(of).seconds for of in apart)
    assert time_of(GATE).bytes < sum(time_of(of).bytes for of in apart)


def test_steps_read_what_was_counted_where_steps_were_measured() -> None:
    """Weights but for those of the norms, and with the cache all that a token must read."""
    file = json.loads(RESULTS.read_text("utf-8"))
    assert file["shape"].startswith("Llama-3.1-8B")
    rows = file["variants"]["baseline+cudagraphs"]["contexts"]
    assert {*map(str, STEPS.values())} <= {*rows}
    norms = 65 * 4096 * 2
    for context in STEPS.values():
        assert rows[str(context)]["weight_bytes"] == step.WEIGHT_BYTES + norms
        read = step.WEIGHT_BYTES + 32 * step.case_bytes(step.shape_of(context))
        assert rows[str(context)]["read_bytes"] == pytest.approx(read, rel=1e-3)


def test_a_step_is_its_launches(made_up: Prepared) -> None:
    """Which and how often; its time is theirs together, and its share of all bytes that a token must read."""
    for name, context in STEPS.items():
        parts = step.parts(name, H200, made_up)
        counts = {part.launch.role: part.times for part in parts}
        layer = ["append", "decode", "combine", *(f"linear: {of.name}" for of in LINEARS[:-1])]
        assert counts == {"norm": 2, "linear: head": 1} | dict.fromkeys(layer, 32)
        (own,) = (found for found in step.times(H200, made_up).values() if found.name == name)
        assert own.seconds == pytest.approx(sum(part.times * part.launch.seconds for part in parts))
        assert own.share == pytest.approx(own.bytes / own.seconds / H200.machine.copied)
        assert own.bytes == step.WEIGHT_BYTES + 32 * step.case_bytes(step.shape_of(context))
        linears = sum(part.times * part.launch.seconds for part in parts if "linear" in part.launch.role)
        apart = 32 * (EXPECTED.launch + EXPECTED.program + EXPECTED.hit)
        apart += 63 * next(part.launch.seconds for part in parts if part.launch.role == "norm")
        assert step.without_layers(name, H200, made_up) == pytest.approx(own.seconds - linears + apart)


def test_a_longer_text_takes_what_its_cache_takes(made_up: Prepared) -> None:
    few, many = (step.times(H200, made_up)[name] for name in STEPS)
    assert many.seconds - few.seconds > 0.9 * (many.bytes - few.bytes) / H200.machine.copied


def test_ends_of_assumptions_are_ends_of_steps(made_up: Prepared) -> None:
    kind, own, harsh = (step.times(Model(H200.machine, each), made_up) for each in (KIND, EXPECTED, HARSH))
    assert all(kind[name].seconds < own[name].seconds < harsh[name].seconds for name in STEPS)


def test_the_table_of_a_step_adds_up() -> None:
    """Without assembling: what stands there together is the sum of the launches, and its share is that of the goal."""
    text = PAGE.read_text("utf-8")
    table = text[text.index("<!-- predicted:step -->") : text.index("<!-- /predicted:step -->")]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines()[3:] if line]
    launches, sums = [row for row in rows if row[1]], {row[0]: row[2:] for row in rows if not row[1]}
    for at, name in enumerate(STEPS):
        total = sum(int(row[1]) * float(row[2 + at]) for row in launches)
        # Each is rounded to a tenth of a microsecond.
        assert float(sums["together, ms"][at]) == pytest.approx(total / 1000, abs=0.03)
        low, high = map(float, sums["between, ms"][at].split(" and "))
        assert low < float(sums["together, ms"][at]) < high
        goal = next(line for line in text.splitlines() if line.startswith(f"| 10: {name}, a token"))
        share = float(sums["of copy bandwidth"][at].strip("%"))
        assert share == pytest.approx(100 * float(goal.split("|")[3]), abs=0.6)


def test_other_types_have_other_forms() -> None:
    half, full = (
        recorded(replace(LINEARS[1], dtype=kind), H200.machine) for kind in (torch.float16, torch.float32)
    )
    assert half.spec.block_n == 2 * full.spec.block_n
