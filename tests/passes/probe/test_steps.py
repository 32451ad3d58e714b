"""Running a graph node by node gives what calling it gives, and holds what is still needed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from kvcompile.passes.capture.capture import capture
from kvcompile.passes.graph_module import module_of
from kvcompile.passes.probe.steps import Steps
from kvcompile.pipeline import understand
from tests.support.models import NanoGPT, make


def sums() -> GraphModule:
    """relu(x) + exp(x) + weight, the sum stacked with itself; and one value that nobody uses."""
    graph = Graph()
    x = graph.placeholder("x")
    weight = graph.get_attr("weight")
    one = graph.call_function(torch.relu, (x,))
    other = graph.call_function(torch.exp, (x,))
    graph.call_function(torch.neg, (x,))
    both = graph.call_function(torch.add, (one, other), {"alpha": 1})
    held = graph.call_function(torch.add, (both,), {"other": weight})
    graph.output((graph.call_function(torch.stack, ([held, held],), {"dim": 0}), x))
    root = nn.Module()
    root.weight = nn.Parameter(torch.tensor([2.0, 3.0]))
    return GraphModule(root, graph)


def test_the_same_as_a_call() -> None:
    module, x = sums(), torch.tensor([-1.0, 1.0])
    steps = Steps(module)
    for given in (x, 2 * x):  # more than once
        found, same = steps.run(given)
        assert torch.equal(found, module(given)[0]) and same is given
        assert not steps.env


def test_a_captured_decoder() -> None:
    model = make(NanoGPT)
    captured = capture(model)
    ids = torch.randint(0, 61, (2, 9))
    with torch.no_grad():
        assert torch.equal(Steps(captured.graph_module).run(ids)[0], model(ids))


class Watched(Steps):
    """Notes how many values there are when each node runs, and which of them are tensors still alive."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.held: dict[str, set[str]] = {}
        self.made: dict[str, weakref.ref[Tensor]] = {}

    def run_node(self, node: Node) -> Any:
        self.held[node.name] = {known.name for known in self.env}
        self.held[f"{node.name} alive"] = {name for name, made in self.made.items() if made() is not None}
        value = super().run_node(node)
        if node.op != "get_attr":
            self.made[node.name] = weakref.ref(value)
        return value


def test_values_go_with_their_last_use() -> None:
    gc.disable()
    try:
        steps = Watched(sums())
        steps.run(torch.tensor([-1.0, 1.0]))
    finally:
        gc.enable()
    assert {"relu", "exp"} <= steps.held["add"]
    assert not {"relu", "exp"} & steps.held["add_1"] and not {"relu", "exp"} & steps.held["add_1 alive"]
    assert {"add", "weight"} <= steps.held["add_1"] and "x" in steps.held["stack"]
    assert "add" not in steps.held["stack"]


def test_what_a_node_reads_besides_its_arguments_stays() -> None:
    module = sums()
    nodes = {node.name: node for node in module.graph.nodes}
    steps = Watched(module, {nodes["stack"]: [nodes["exp"]]})
    steps.run(torch.tensor([-1.0, 1.0]))
    assert "exp" in steps.held["stack"] and "relu" not in steps.held["stack"]


def test_nothing_is_held_where_a_run_ends_early() -> None:
    class Ends(Steps):
        def run_node(self, node: Node) -> Any:
            if node.name == "add_1":
                raise StopAsyncIteration
            return super().run_node(node)

    steps = Ends(sums())
    with pytest.raises(StopAsyncIteration):
        steps.run(torch.ones(2))
    assert not steps.env


def test_code_is_written_when_it_is_called() -> None:
    module = sums()
    made = module_of(module, module.graph, "Sums")
    assert type(made).__name__ == "Sums"
    output = next(node for node in made.graph.nodes if node.op == "output")
    x = torch.tensor([-1.0, 1.0])
    before = made(x)[0]
    output.args = ((output.args[0][0], output.args[0][0]),)
    made.recompile()
    assert torch.equal(made(x)[1], before) and "stack" in made.code


def test_the_collector_rests_and_goes_on() -> None:
    """Also after an error; who has switched it off finds it off."""
    model = make(NanoGPT)
    asked: list[bool] = []
    model.register_forward_pre_hook(lambda *_: asked.append(gc.isenabled()))
    understand(model)
    assert gc.isenabled() and asked and not any(asked)
    with pytest.raises(Exception, match="Linear"):
        understand(nn.Linear(4, 4))
    assert gc.isenabled()
    gc.disable()
    try:
        understand(model)
        assert not gc.isenabled()
    finally:
        gc.enable()
