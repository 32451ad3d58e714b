"""What a capture notes of a node is what PyTorch notes of it."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch.fx import proxy
from torch.fx.experimental import proxy_tensor

from kvcompile.passes.capture import forward_notes
from kvcompile.passes.capture.capture import capture
from kvcompile.passes.graph import source_line
from tests.support.models import tiny_hf

PLAIN = forward_notes.PLAIN, forward_notes.PLAIN_FORM


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of captures, PyTorch notes as it does where there are no tests."""
    monkeypatch.setattr(proxy, "CapturedTraceback", PLAIN[0])
    monkeypatch.setattr(proxy_tensor, "_extract_tensor_metadata", PLAIN[1])


def noted() -> list[tuple[str, Any, str]]:
    nodes = capture(tiny_hf("llama", layers=1)).graph_module.graph.nodes
    return [(node.name, node.meta.get("stack_trace"), source_line(node)) for node in nodes]


@pytest.mark.usefixtures("plain")
def test_nodes_say_the_same_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_notes, "_kept", {})
    own = noted()
    assert forward_notes._kept  # frames were looked at here
    assert (proxy.CapturedTraceback, proxy_tensor._extract_tensor_metadata) == PLAIN
    monkeypatch.setattr(forward_notes, "_INSTEAD", ())
    assert own == noted()
    assert sum(line.startswith("modeling_llama.py:") for _, _, line in own) > 20


@pytest.mark.usefixtures("plain")
def test_where_pytorch_has_other_names_it_notes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    own = noted()
    renamed = tuple((module, f"{name}_now", kind) for module, name, kind in forward_notes._INSTEAD)
    monkeypatch.setattr(forward_notes, "_INSTEAD", renamed)
    assert own == noted()
    assert not hasattr(proxy, "CapturedTraceback_now")


def test_other_tracers_note_the_whole_stack() -> None:
    class Whole(torch.fx.Tracer):
        record_stack_traces = True

    class Called(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.doubled(x)

        def doubled(self, x: torch.Tensor) -> torch.Tensor:
            return x + x

    with forward_notes.forward_notes():
        (node,) = Whole().trace(Called()).find_nodes(op="call_function", target=operator.add)
    assert [line for line in (node.stack_trace or "").splitlines() if "in doubled" in line]
