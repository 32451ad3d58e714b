"""What tests keep of sizes with symbols is what sympy says of them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import SymInt
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from kvcompile.passes.capture.capture import capture
from tests.support.models import tiny_hf
from tests.support.quick_symbols import (
    METHODS,
    OPERATORS,
    PLAIN,
    PLAIN_EVALUATION,
    PLAIN_EXPECTATION,
    PLAIN_EXPRESSION,
    PLAIN_NUMBER,
    PLAIN_OPERATORS,
    PLAIN_QUESTION,
)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_models_are_traced_alike(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    assert not any(getattr(SymNode, f"_{name}") is PLAIN[name] for name in METHODS)
    assert not any(getattr(SymInt, f"__{name}__") is PLAIN_OPERATORS[name] for name in OPERATORS)
    assert ShapeEnv.evaluate_sym_node is not PLAIN_EVALUATION
    assert SymNode.wrap_int is not PLAIN_NUMBER and SymNode.expr.fget is not PLAIN_EXPRESSION  # type: ignore[attr-defined]
    assert symbolic_shapes._guard_or is not PLAIN_QUESTION
    assert symbolic_shapes.expect_true is not PLAIN_EXPECTATION
    found = []
    for quick in (True, True, False):
        if not quick:
            for name in METHODS:
                monkeypatch.setattr(SymNode, f"_{name}", PLAIN[name])
            for name in OPERATORS:
                monkeypatch.setattr(SymInt, f"__{name}__", PLAIN_OPERATORS[name])
            monkeypatch.setattr(ShapeEnv, "evaluate_sym_node", PLAIN_EVALUATION)
            monkeypatch.setattr(SymNode, "expr", property(PLAIN_EXPRESSION))
            monkeypatch.setattr(SymNode, "wrap_int", PLAIN_NUMBER)
            monkeypatch.setattr(symbolic_shapes, "_guard_or", PLAIN_QUESTION)
            monkeypatch.setattr(symbolic_shapes, "expect_true", PLAIN_EXPECTATION)
        environments: list[ShapeEnv] = []
        made = ShapeEnv.__init__

        def kept(self: ShapeEnv, *given: Any, made: Any = made, own: Any = environments, **more: Any) -> None:
            made(self, *given, **more)
            own.append(self)

        with monkeypatch.context() as patch:
            patch.setattr(ShapeEnv, "__init__", kept)
            module = capture(tiny_hf(family, layers=2)).graph_module
        sizes = [
            str(node.meta["val"].shape)
            for node in module.graph.nodes
            if hasattr(node.meta.get("val"), "shape")
        ]
        guards = [[str(guard.expr) for guard in each.guards] for each in environments]
        found.append((module.code, sizes, guards))
        assert any(guards) and any("s" in size for size in sizes)
    assert found[0] == found[1] == found[2]
