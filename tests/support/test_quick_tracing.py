"""What tests note of a node is what PyTorch notes of it."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.fx import proxy
from torch.fx.experimental import proxy_tensor

from kvcompile.passes.capture.capture import capture
from kvcompile.passes.graph import source_line
from tests.support.models import tiny_hf
from tests.support.quick_tracing import PLAIN, PLAIN_FORM, Forwards, no_form


def test_nodes_say_the_same_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert proxy.CapturedTraceback is Forwards
    assert proxy_tensor._extract_tensor_metadata is no_form
    notes = []
    for kind, form in ((Forwards, no_form), (PLAIN, PLAIN_FORM)):
        monkeypatch.setattr(proxy, "CapturedTraceback", kind)
        monkeypatch.setattr(proxy_tensor, "_extract_tensor_metadata", form)
        nodes = capture(tiny_hf("llama", layers=1)).graph_module.graph.nodes
        notes.append([(node.name, node.meta.get("stack_trace"), source_line(node)) for node in nodes])
    assert notes[0] == notes[1]
    assert sum(line.startswith("modeling_llama.py:") for _, _, line in notes[0]) > 20


def test_other_tracers_note_the_whole_stack() -> None:
    class Whole(torch.fx.Tracer):
        record_stack_traces = True

    class Called(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.doubled(x)

        def doubled(self, x: torch.Tensor) -> torch.Tensor:
            return x + x

    (node,) = Whole().trace(Called()).find_nodes(op="call_function", target=operator.add)
    assert [line for line in (node.stack_trace or "").splitlines() if "in doubled" in line]
