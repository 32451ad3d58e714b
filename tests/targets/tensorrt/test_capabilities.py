"""Every rule of `targets/tensorrt/capabilities.py`: graphs that break it, some that just do not, and what TensorRT
says.

The graphs are single nodes. Where a rule refuses, so does a real build (or the parser); where it does not, an engine
comes out. So a rule that TensorRT no longer needs, or that is too narrow, shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from kvcompile.errors import ExportError
from kvcompile.targets.tensorrt import capabilities
from tests.support.onnx_graphs import (
    BF16,
    F16,
    F32,
    FP8,
    I8,
    I32,
    I64,
    U8,
    attention,
    binary,
    flat_update,
    graph,
    matmul,
    node,
    scatter,
    through,
    topk,
    update,
)

trt = pytest.importorskip("tensorrt_rtx_bindings")


@dataclass(frozen=True)
class Case:
    """hits: graphs that break the rule; misses: graphs that just do not; targets: what is built for."""

    rule: str
    hits: tuple[Callable[[], onnx.ModelProto], ...]
    misses: tuple[Callable[[], onnx.ModelProto], ...]
    targets: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = field(default=("SM89",))  # where the hits are built all the same


CASES = (
    Case(
        "bits",
        (
            lambda: binary("BitwiseAnd", I32),
            lambda: binary("BitwiseXor", I32),
            lambda: binary("BitShift", U8, direction="LEFT"),
        ),
        (lambda: binary("And", TensorProto.BOOL), lambda: binary("Div", I32)),
    ),
    Case("bytes", (lambda: through(U8), lambda: scatter(U8)), (lambda: through(I8), lambda: scatter(I8))),
    Case("small-floats", (lambda: through(FP8), lambda: scatter(FP8)), (lambda: through(F16),)),
    Case("topk", (lambda: topk(3841),), (lambda: topk(3840),)),
    Case("softcap", (lambda: attention(softcap=30.0),), (lambda: attention(softcap=0.0), attention)),
    Case("attention-outputs", (lambda: attention("o pk2 pv2"),), (attention,)),
    Case("scatter-reduction", (lambda: scatter(F32, reduction="add"),), (lambda: scatter(F32),)),
    Case(
        "no-operator",
        (
            lambda: graph([node("NonZero", "x", "y")], {"x": (F32, ["b", 8])}, {"y": (I64, [2, "n"])}),
            lambda: graph([node("Unique", "x", "y")], {"x": (F32, ["b", 8])}, {"y": (F32, ["n"])}),
        ),
        (lambda: binary("Add", F32),),
    ),
    Case(
        "cache-update",
        (
            lambda: update(I8),
            lambda: update(mode="circular"),
            lambda: update(slots="t"),
            lambda: update(before=True),
            lambda: update(after=True),
            flat_update,
        ),
        (update, lambda: update(BF16), lambda: update(F32)),
    ),
    Case("turing-bf16", (lambda: matmul(BF16),), (lambda: matmul(F16),), ("SM75",)),
    Case("turing-fp32", (lambda: matmul(F32),), (lambda: matmul(F16),), ("SM75",)),
)


def refusal(model: onnx.ModelProto, targets: Sequence[str]) -> str | None:
    """What TensorRT itself says against a model; None: it builds an engine."""
    errors: list[str] = []

    class Logger(trt.ILogger):  # type: ignore[misc]
        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                errors.append(message)

    logger = Logger()
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(model.SerializeToString()):
        return str(parser.get_error(0).desc())
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    for number in range(network.num_inputs):
        value = network.get_input(number)
        if -1 in tuple(value.shape):
            profile.set_shape(value.name, *([n if s == -1 else s for s in value.shape] for n in (1, 2, 4)))
    config.add_optimization_profile(profile)
    if targets:
        config.num_compute_capabilities = len(targets)
        for place, name in enumerate(targets):
            config.set_compute_capability(trt.ComputeCapability.__members__[name], place)
    made = builder.build_serialized_network(network, config)
    return None if made is not None else " ".join(errors) or "no reason given"


def problems(model: onnx.ModelProto, targets: Sequence[str]) -> list[str]:
    return capabilities.problems(ir.from_proto(model), targets)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_rule_refuses_what_tensorrt_refuses(case: Case) -> None:
    for hit in case.hits:
        found = problems(hit(), case.targets)
        assert len(found) >= 1 and any(line.endswith(f"[{case.rule}]") for line in found), found
        assert refusal(hit(), case.targets) is not None, f"TensorRT takes {hit()}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_rule_takes_what_tensorrt_takes(case: Case) -> None:
    for miss in case.misses:
        assert problems(miss(), case.targets) == []
        assert refusal(miss(), case.targets) is None
    if case.targets:  # a rule of a GPU says nothing of others
        for hit in case.hits:
            assert problems(hit(), case.elsewhere) == []
            assert refusal(hit(), case.elsewhere) is None


def test_every_rule_has_a_case() -> None:
    assert [case.rule for case in CASES] == [rule.name for rule in capabilities.RULES]


def test_every_rule_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[3] / "docs" / "tensorrt.md").read_text(encoding="utf-8")
    for rule in capabilities.RULES:
        assert f"`{rule.name}`" in text


def test_the_message_names_node_layer_reason_and_way_out() -> None:
    nodes = [
        helper.make_node("BitwiseAnd", ["x", "x"], ["low"], name="node_and_7"),
        helper.make_node("ScatterND", ["cache_3_keys_data", "at", "low"], ["cache_3_keys_data_out"]),
    ]
    model = graph(
        nodes,
        {"x": (I32, ["b", 2]), "cache_3_keys_data": (I32, ["b", 32]), "at": (I64, ["b", 2, 2])},
        {"cache_3_keys_data_out": (I32, ["b", 32])},
    )
    with pytest.raises(ExportError) as caught:
        capabilities.check(ir.from_proto(model), (), "step.onnx")
    assert str(caught.value) == (
        "TensorRT cannot hold step.onnx:\n"
        "  - node_and_7 (BitwiseAnd, layer 3): TensorRT has no BitwiseAnd; say it by quotients and remainders of int32 "
        "or fp32 numbers (kvcompile's own graphs do) [bits]"
    )
