"""Clean a captured graph: no guards, no no-ops, no dead code; few spellings of the same thing.

Asserts and guards go first: they count as side effects, so a guard over a mask would keep the whole mask
alive. Then casts to the dtype a value has, dropout in eval mode, full slices and `detach` go, and equal calls
merge. `baddbmm` and two-operand `einsum` become products with `permute` and `add`, so that the rules meet one
spelling, and `hstack` and its kin become `cat`; `view` and `view_as` become `reshape`, so that no node depends on
another's strides. Products of differences of probabilities become differences of products (`distribute.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from kvcompile.passes.capture.decompose_complex import to_real
from kvcompile.passes.graph import call, expr, shape, target_name, value
from kvcompile.passes.rewrite.distribute import distribute
from kvcompile.passes.table import graph_pass

aten = torch.ops.aten

_ASSERTS = (
    "_assert_tensor_metadata",
    "_assert_async",
    "_assert_scalar",
    "sym_constrain_range",
    "_functional_assert_async",
    "sym_constrain_range_for_size",
    "_check",
    "_check_is_size",
    "_guards_fn",
    "_assert",
)
# Along which dimension they join tensors of two or more dimensions, and as a rule of those with fewer.
_STACKED = {
    aten.hstack.default: 1,
    aten.vstack.default: 0,
    aten.concatenate.default: None,
    aten.concat.default: None,
}
_IDENTITY = ("detach", "detach_", "alias", "lift_fresh_copy", "lift_fresh")


@graph_pass("clean")
def clean(graph_module: GraphModule) -> int:
    """Clean `graph_module` in place; returns how many nodes became others."""
    graph = graph_module.graph
    changed = 0
    for node in list(graph.nodes):
        if node.op in ("call_function", "call_module") and is_assert(node):
            graph.erase_node(node) if not node.users else None
            changed += 1
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        same = _no_op(node)
        if same is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
            changed += 1
        elif node.target in (aten.view.default, aten._unsafe_view.default):
            # A view was legal for the strides of the trace; a rewritten attention may return others.
            node.target = aten.reshape.default
        elif node.target is aten.view_as.default:
            node.target = aten.reshape_as.default
        elif node.target in _STACKED:
            changed += _joined(node)
        elif node.target is aten.baddbmm.default:
            _split_baddbmm(node)
            changed += 1
        elif node.target is aten.einsum.default:
            changed += _split_einsum(node)
        elif node.target is aten.cumsum.default:
            changed += _count(node)
    changed += to_real(graph_module) + distribute(graph) + _merge_equal(graph_module)
    eliminate_dead_code(graph_module)
    return changed


def eliminate_dead_code(graph_module: GraphModule, keep: Iterable[Node] = ()) -> None:
    """Drop every node that neither the outputs nor `keep` need; placeholders stay."""
    drop_dead(graph_module.graph, keep)
    graph_module.graph.lint()
    graph_module.recompile()


def drop_dead(graph: Graph, keep: Iterable[Node] = ()) -> None:
    """The same for a graph that is no module's yet, so that its code is made once."""
    output = next(node for node in graph.nodes if node.op == "output")
    results = output.args[0]
    output.args = ((results, tuple(keep)),)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    output.args = (results,)


def _merge_equal(graph_module: GraphModule) -> int:
    """One node for equal calls on equal arguments, e.g. tables and masks that each layer makes anew."""
    seen: dict[Any, Node] = {}
    merged = 0
    for node in list(graph_module.graph.nodes):
        if node.op not in ("call_function", "get_attr") or not _is_pure(node):
            continue
        key = (node.op, node.target, repr(node.args), repr(sorted(node.kwargs.items())))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph_module.graph.erase_node(node)
            merged += 1
    return merged


def _is_pure(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.op == "get_attr" or node.target is operator.getitem
    tags = node.target.tags
    return not node.target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in tags


def is_assert(node: Node) -> bool:
    return (str(node.target) if node.op == "call_module" else target_name(node)) in _ASSERTS


def _no_op(node: Node) -> Node | None:
    """The argument that `node` merely passes on, if it does."""
    name, first = target_name(node), node.args[0] if node.args else None
    if not isinstance(first, Node):
        return None
    if name in _IDENTITY:
        return first
    if name == "dropout" and (node.args[2] is False or node.args[1] == 0):
        return first
    before, after = value(first), value(node)
    if (
        name in ("to", "_to_copy", "type_as")
        and isinstance(before, torch.Tensor)
        and isinstance(after, torch.Tensor)
    ):
        same = before.dtype == after.dtype and before.device == after.device
        return first if same and not node.kwargs.get("memory_format") else None
    # x[..., 0:huge] is x
    if (
        name == "slice"
        and len(node.args) >= 4
        and node.args[2] in (0, None)
        and node.args[3] in (None, 2**63 - 1)
    ):
        return first if len(node.args) < 5 or node.args[4] == 1 else None
    return None


def _joined(node: Node) -> int:
    """hstack, vstack, concat -> cat."""
    parts, dim = node.args[0], _STACKED[node.target]  # type: ignore[index]
    assert isinstance(parts, (list, tuple))
    if dim is None:
        node.target = aten.cat.default
        return 1
    if any(not isinstance(part, Node) or len(shape(part)) < 2 for part in parts):
        return 0
    node.target, node.args = aten.cat.default, (parts, dim)
    return 1


def _split_baddbmm(node: Node) -> None:
    """baddbmm(c, a, b, beta, alpha) -> beta * c + alpha * bmm(a, b)."""
    bias, left, right = node.args[:3]
    graph = node.graph
    with graph.inserting_before(node):
        result = call(graph, aten.bmm.default, (left, right), node)
        for operand, factor in (("alpha", node.kwargs.get("alpha", 1)), ("beta", node.kwargs.get("beta", 1))):
            if factor == 1:
                continue
            if operand == "alpha":
                result = call(graph, aten.mul.Tensor, (result, factor), node)
            else:
                bias = call(graph, aten.mul.Tensor, (bias, factor), node) if factor else None
        if bias is not None:
            result = call(graph, aten.add.Tensor, (result, bias), node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _split_einsum(node: Node) -> int:
    """A contraction of two operands over one label -> permute, matmul, permute. Others stay as they are."""
    equation, operands = node.args[0], node.args[1]
    assert isinstance(equation, str) and isinstance(operands, (list, tuple))
    first = operands[0]
    assert isinstance(first, Node)
    left, arrow, out = _without_ellipsis(equation.replace(" ", ""), operands).partition("->")
    terms = left.split(",")
    if not arrow or len(terms) != 2 or "." in left + out or any(len(set(t)) != len(t) for t in (*terms, out)):
        return 0
    a, b = terms
    shared = [label for label in a if label in b]
    contracted = [label for label in shared if label not in out]
    rows, columns = [label for label in a if label not in b], [label for label in b if label not in a]
    if len(contracted) != 1 or not rows or len(columns) != 1 or not set(rows + columns) <= set(out):
        return 0
    # More than one label of `a` alone: all but the queries act as batch, e.g. GQA's groups.
    sizes = dict(zip(a, shape(first), strict=True))
    dynamic = [label for label in rows if expr(sizes[label]).free_symbols]
    row = rows[0] if len(rows) == 1 else dynamic[0] if len(dynamic) == 1 else ""
    if not row:
        return 0
    # What the operands share comes first, so that the heads of a group stand beside each other.
    batch = sorted((label for label in a if label in out and label != row), key=lambda label: label not in b)
    graph = node.graph
    with graph.inserting_before(node):
        lhs = _permuted(operands[0], a, [*batch, row, contracted[0]], node)
        rhs = _permuted(
            operands[1], b, [label for label in batch if label in b] + [contracted[0], columns[0]], node
        )
        for axis, label in enumerate(batch):
            if label not in b:
                rhs = call(graph, aten.unsqueeze.default, (rhs, axis), node)
        product = call(graph, aten.matmul.default, (lhs, rhs), node)
        result = _permuted(product, "".join([*batch, row, columns[0]]), list(out), node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return 1


def _without_ellipsis(equation: str, operands: Sequence[Any]) -> str:
    """...ij,...kj->...ik as abij,abkj->abik, where all operands have as many of these dimensions."""
    terms = equation.partition("->")[0].split(",")
    counts = {len(shape(x)) - len(t.replace("...", "")) for x, t in zip(operands, terms, strict=True)}
    free = [label for label in "abcdefghijklmnopqrstuvwxyz" if label not in equation]
    if len(counts) != 1 or not all("..." in term for term in terms):
        return equation
    return equation.replace("...", "".join(free[: counts.pop()]))


def _count(node: Node) -> int:
    """cumsum(ones(S)) -> arange(S) + 1, which is a position of each token."""
    source, dim = node.args[0], node.args[1]
    assert isinstance(source, Node)
    if source.target is not aten.ones.default or len(shape(source)) != 1 or dim not in (0, -1):
        return 0
    sizes = source.args[0]
    assert isinstance(sizes, (list, tuple))
    val, graph = value(node), node.graph
    with graph.inserting_before(node):
        places = call(
            graph, aten.arange.default, (sizes[0],), node, {"dtype": val.dtype, "device": val.device}
        )
        found = call(graph, aten.add.Tensor, (places, 1), node)
    node.replace_all_uses_with(found)
    graph.erase_node(node)
    return 1


def _permuted(operand: Any, labels: str, wanted: list[str], like: Node) -> Node:
    order = [labels.index(label) for label in wanted]
    if order == sorted(order):
        assert isinstance(operand, Node)
        return operand
    return call(like.graph, aten.permute.default, (operand, order), like)
