"""Every operator that is cut, over every cut of its operands: what each rank has, is what its placement says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from kvcompile.passes.probe.steps import Steps
from kvcompile.passes.shard.build import Builder
from kvcompile.passes.shard.cuts import Placement, blocks, cut_of, is_whole, whole
from kvcompile.passes.shard.forms import RULES, form_of
from kvcompile.passes.shard.wishes import Wishes
from kvcompile.verify.ranks import InStep

aten = torch.ops.aten
Sizes = tuple[tuple[int, ...], ...]
# Name: operator, sizes of its operands, its arguments made of them.
CASES: dict[str, tuple[Any, Sizes, Callable[..., tuple[Any, ...]]]] = {
    "add": (aten.add.Tensor, ((2, 4, 6), (4, 6)), lambda a, b: (a, b)),
    "mul, broadcast": (aten.mul.Tensor, ((2, 4, 6), (2, 1, 6)), lambda a, b: (a, b)),
    "mul, itself": (aten.mul.Tensor, ((4, 6),), lambda a: (a, a)),
    "silu": (aten.silu.default, ((4, 6),), lambda a: (a,)),
    "where": (aten.where.self, ((4, 6), (4, 6)), lambda a, b: (a, a, b)),
    "reshape, split": (aten.reshape.default, ((2, 3, 24),), lambda a: (a, [2, 3, 4, 6])),
    "reshape, join": (aten.reshape.default, ((2, 3, 4, 6),), lambda a: (a, [2, 3, -1])),
    "reshape, across": (aten.reshape.default, ((4, 6),), lambda a: (a, [8, 3])),
    "flatten": (aten.flatten.using_ints, ((2, 4, 6),), lambda a: (a, 1)),
    "unflatten": (aten.unflatten.int, ((2, 24),), lambda a: (a, -1, [4, 6])),
    "unsqueeze": (aten.unsqueeze.default, ((4, 6),), lambda a: (a, 1)),
    "squeeze": (aten.squeeze.dim, ((4, 1, 6),), lambda a: (a, 1)),
    "transpose": (aten.transpose.int, ((2, 4, 6),), lambda a: (a, 1, 2)),
    "permute": (aten.permute.default, ((2, 4, 6),), lambda a: (a, [2, 0, 1])),
    "t": (aten.t.default, ((4, 6),), lambda a: (a,)),
    "expand": (aten.expand.default, ((2, 1, 6),), lambda a: (a, [2, 4, 6])),
    "repeat_interleave": (aten.repeat_interleave.self_int, ((2, 4, 3),), lambda a: (a, 3, 1)),
    "slice": (aten.slice.Tensor, ((4, 12),), lambda a: (a, 1, 3, 9)),
    "slice, from the end": (aten.slice.Tensor, ((4, 12),), lambda a: (a, -1, -8, 2**62)),
    "slice, strided": (aten.slice.Tensor, ((4, 12),), lambda a: (a, 1, 1, 12, 2)),
    "select": (aten.select.int, ((4, 3, 6),), lambda a: (a, 1, -1)),
    "cat": (aten.cat.default, ((4, 6), (4, 2)), lambda a, b: ([a, b, a], -1)),
    "stack": (aten.stack.default, ((4, 6), (4, 6)), lambda a, b: ([a, b], 1)),
    "linear": (aten.linear.default, ((2, 4, 6), (8, 6)), lambda a, b: (a, b)),
    "linear, bias": (aten.linear.default, ((2, 4, 6), (8, 6), (8,)), lambda a, b, c: (a, b, c)),
    "mm": (aten.mm.default, ((4, 6), (6, 8)), lambda a, b: (a, b)),
    "bmm": (aten.bmm.default, ((4, 3, 6), (4, 6, 8)), lambda a, b: (a, b)),
    "matmul, broadcast": (aten.matmul.default, ((2, 4, 3, 6), (4, 6, 8)), lambda a, b: (a, b)),
    "addmm": (aten.addmm.default, ((8,), (4, 6), (6, 8)), lambda c, a, b: (c, a, b)),
    "sum": (aten.sum.dim_IntList, ((2, 4, 6),), lambda a: (a, [1])),
    "mean, kept": (aten.mean.dim, ((2, 4, 6),), lambda a: (a, [-1], True)),
    "softmax": (aten.softmax.int, ((2, 4, 6),), lambda a: (a, -1)),
    "layer_norm": (aten.layer_norm.default, ((2, 4, 6), (6,), (6,)), lambda a, b, c: (a, [6], b, c)),
    "index_select": (
        aten.index_select.default,
        ((4, 6),),
        lambda a: (a, 0, torch.tensor([3, 0, 1, 1])),
    ),
    "embedding": (aten.embedding.default, ((4, 6),), lambda a: (a, torch.tensor([[3, 0], [1, 1]]))),
    "index": (aten.index.Tensor, ((4, 5, 6),), lambda a: (a, [None, torch.tensor([[3, 0], [1, 1]])])),
}
PARTS = [
    ("blocks", lambda size: blocks(size, 2)),
    ("interleaved", lambda size: cut_of(size, [np.arange(0, size, 2), np.arange(1, size, 2)])),
    ("overlapping", lambda size: cut_of(size, [np.arange(0, size - 1), np.arange(1, size)])),
]


def graph_of(case: str) -> tuple[Graph, list[Node], Node]:
    """One call as a graph, its operands as placeholders and indices as constants."""
    target, sizes, arguments = CASES[case]
    graph, mode = Graph(), FakeTensorMode(shape_env=ShapeEnv())
    operands = [graph.placeholder(f"x{i}") for i in range(len(sizes))]
    for node, size in zip(operands, sizes, strict=True):
        with mode:
            node.meta["val"] = torch.empty(size)
    root: dict[str, Tensor] = {}

    def constant(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        node = graph.get_attr(f"index{len(root)}")
        root[f"index{len(root)}"] = value
        node.meta["val"] = mode.from_tensor(value)
        return node

    given = torch.utils._pytree.tree_map_only(Tensor, constant, arguments(*operands))
    node = graph.call_function(target, given)
    fake = torch.fx.node.map_arg(given, lambda n: n.meta["val"])
    if target is aten.where.self:
        fake = (fake[0].bool(), *fake[1:])
    with mode:
        node.meta["val"] = target(*fake)
    graph.output((node,))
    node.meta["root"] = root
    return graph, operands, node


def ranks_of(
    case: str, placements: Sequence[Placement], wish: Placement | None = None
) -> tuple[Builder, Node, list[list[Tensor]], Tensor]:
    """The ranks' graphs of a call whose operands have these placements; what they give; and what it gives whole."""
    graph, operands, node = graph_of(case)
    root = GraphModule(node.meta.pop("root"), graph)
    nodes = list(graph.nodes)
    forms = {each: form for each in nodes if (form := form_of(each)) is not None}
    constants = frozenset(each for each in nodes if each.op == "get_attr")
    wishes = Wishes(forms, constants, {each: i for i, each in enumerate(nodes)}, {})
    builder = Builder(root, 2, forms, wishes)
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(each.meta["val"].shape, generator=generator) for each in operands]
    if CASES[case][0] is aten.where.self:
        values[0] = values[0] > 0
    for each, placement in zip(operands, placements, strict=True):
        made = tuple(own.placeholder(each.name) for own in builder.built.graphs)
        builder.natural[each] = placement
        builder.values[(each, placement)] = made
    builder.call(node)
    own = [builder.get(node, builder.natural[node]), builder.whole(node)]
    for rank, each in enumerate(builder.built.graphs):
        each.output(tuple(local[rank] for local in own))
    held = [
        {name: getattr(root, name) for name in builder.built.pieces}
        | {name: made[rank] for name, made in builder.built.made.items()}
        for rank in range(2)
    ]
    modules = [GraphModule(held[rank], each) for rank, each in enumerate(builder.built.graphs)]
    given = [[taken(v, p, rank) for v, p in zip(values, placements, strict=True)] for rank in range(2)]
    results = InStep([Steps(module) for module in modules]).run(given)
    return builder, node, [list(result) for result in results], GraphModule(root, graph)(*values)[0]


def taken(x: Tensor, placement: Placement, rank: int) -> Tensor:
    for dim, cut in enumerate(placement):
        if cut is not None:
            x = x.index_select(dim, torch.from_numpy(cut.indices(rank)))
    return x


@pytest.mark.few(2)
@pytest.mark.parametrize("case", CASES)
def test_each_rank_has_what_its_placement_says(case: str) -> None:
    sizes = CASES[case][1]
    choices = [
        [whole(len(size))]
        + [
            tuple(cut(n) if d == dim else None for d in range(len(size)))
            for dim, n in enumerate(size)
            for _, cut in PARTS
            if n > 2
        ]
        for size in sizes
    ]
    cut = False
    for placements in product(*choices):
        builder, node, results, truth = ranks_of(case, placements)
        natural = builder.natural[node]
        cut = cut or not is_whole(natural) or node in builder.built.rows
        for rank, (local, everything) in enumerate(results):
            torch.testing.assert_close(
                local, taken(truth, natural, rank), msg=f"{case}, {placements}, {natural}"
            )
            torch.testing.assert_close(everything, truth, msg=f"{case}, {placements}: put together")
    assert cut, "no cut goes through: the operator may as well have no form"


def test_every_family_is_tried() -> None:
    tried = {CASES[case][0]._schema.name for case in CASES}
    shared = {rule for name, rule in RULES.items() if name in tried}
    left = {name for name, rule in RULES.items() if rule not in shared}
    assert left <= {"aten::_grouped_mm", "aten::grouped_mm", "transformers::grouped_mm_fallback"}


def test_what_has_no_form_gets_all_of_its_operands() -> None:
    assert form_of(graph_of("add")[1][0]) is None
    module = nn.Module()
    graph = Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(4, 6)
        node = graph.call_function(aten.flip.default, (x, [0]))
        node.meta["val"] = torch.empty(4, 6)
    assert form_of(node) is None
    wishes = Wishes({}, frozenset(), {x: 0, node: 1}, {})
    builder = Builder(GraphModule(module, graph), 2, {}, wishes)
    placement = (blocks(4, 2), None)
    builder.natural[x] = placement
    builder.values[(x, placement)] = tuple(own.placeholder("x") for own in builder.built.graphs)
    builder.call(node)
    assert is_whole(builder.natural[node]) and builder.built.moved == [("gather", x)]
