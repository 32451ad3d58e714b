"""A graph's digest: the same for the same computation, however a process has numbered and ordered its nodes."""

from __future__ import annotations

import operator
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx import Graph, GraphModule, Node

from kvcompile.passes.graph_digest import graph_digest, names_of
from kvcompile.passes.shard.collectives import add_over_ranks

aten = torch.ops.aten


class Weights(nn.Module):
    def __init__(self, constant: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("made_0", torch.tensor([constant]))


def graph_of(ways: list[int], constant: float = 2.0, name: str = "made_0") -> GraphModule:
    """x W + c and x c, by branches that stand in the order of `ways`, and the sums of both over ranks."""
    root, graph = Weights(constant), Graph()
    if name != "made_0":
        root.register_buffer(name, root.made_0)
    x = graph.placeholder("x")
    found: dict[int, Node] = {}
    for way in ways:
        if way == 0:
            product = graph.call_function(aten.linear.default, (x, graph.get_attr("linear.weight")))
            found[0] = graph.call_function(aten.add.Tensor, (product, graph.get_attr(name)))
        else:
            found[1] = graph.call_function(aten.mul.Tensor, (x, graph.get_attr(name)))
    first, second = found[0], found[1]
    graph.output((graph.call_function(operator.sub, (first, second)), first))
    return GraphModule(root, graph)


NAMED = frozenset({"linear.weight", "linear.bias"})


def told(module: GraphModule) -> str:
    return graph_digest(module, NAMED, {})


def test_order_and_names_of_nodes_and_constants_are_left_out() -> None:
    wanted = told(graph_of([0, 1]))
    assert told(graph_of([1, 0])) == wanted
    assert told(graph_of([1, 0], name="made_7")) == wanted
    assert names_of(Weights(1.0)) == NAMED | {"made_0"}


@given(kind=st.sampled_from(["constant", "argument", "operator", "weight", "output", "input"]))
@settings(deadline=None, max_examples=20)
def test_whatever_is_computed_is_in(kind: str) -> None:
    wanted, module = told(graph_of([0, 1])), graph_of([0, 1], constant=3.0 if kind == "constant" else 2.0)
    nodes = {node.target: node for node in module.graph.nodes}
    match kind:
        case "argument":
            end = nodes[operator.sub]
            end.args = (end.args[1], end.args[0])
        case "operator":
            nodes[aten.mul.Tensor].target = aten.div.Tensor
        case "weight":
            nodes["linear.weight"].target = "linear.bias"
        case "output":
            end = nodes["output"]
            end.args = (tuple(reversed(end.args[0])),)  # type: ignore[arg-type]
        case "input":
            nodes["x"].target = "y"
    assert told(module) != wanted


def test_which_part_of_a_weight_is_in() -> None:
    module = graph_of([0, 1])
    halves = [
        graph_digest(module, NAMED, {"linear.weight": ("linear.weight", part)}) for part in ("0:2", "2:4")
    ]
    assert len({*halves, told(module)}) == 3


@pytest.mark.parametrize("swapped", [False, True])
def test_collectives_count_in_their_order(swapped: bool) -> None:
    def sums(first: bool) -> str:
        graph = Graph()
        x = graph.placeholder("x")
        ways = (aten.neg.default, aten.exp.default)
        each = {way: graph.call_function(way, (x,)) for way in ways}
        added = {way: add_over_ranks(graph, each[way]) for way in (ways if first else ways[::-1])}
        graph.output(tuple(added[way] for way in ways))
        return told(GraphModule(nn.Module(), graph))

    assert (sums(True) == sums(not swapped)) is not swapped


@pytest.mark.slow
def test_gemma_3_is_the_same_in_every_process() -> None:
    """Its forward goes through a set of strings, whose order is another one with another seed."""
    script = (
        "from tests.coverage.configs import tiny_model\n"
        "from tests.support.ranks import over_ranks\n"
        "from kvcompile.passes.graph_digest import names_of\n"
        "model = tiny_model('gemma3_text')\n"
        "named = names_of(model)\n"
        "print(over_ranks(model, 2).sharding.digest(named))\n"
    )
    root = Path(__file__).parents[2]
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()[-1]
        for seed in (1, 2)
    }
    assert len(found) == 1
