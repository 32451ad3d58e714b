"""Which numbers a position, a distance or a length can meet, in a model's graph and in a plan.

Of the graph: every number that stands as an argument of an operator, where positions or token ids enter it (rank 0)
or anywhere else but in shapes (rank 2); the values of small constant tensors there, and the sizes of tables that
positions select from. Of what detection found and of the plan: every whole number in their records, walked by their
fields, whatever those are; but for the sizes of the model's channels and heads, which no length meets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvcompile.layouts import CacheLayout
from kvcompile.passes.graph import descendants, source_line, target_name
from kvcompile.passes.probe.evaluate import fetch_attr
from kvcompile.pipeline import Front
from kvcompile.plan import Plan
from kvcompile.verify.lengths import Constant

_MOST = 1 << 20  # no text is as long as what is above: an id, a mask's minimum, the end of a slice
_SMALL = 64  # elements of a tensor whose values count
_NOT_WHOLE = 1e-3  # how far from a whole number the power of a logarithm may be
# Arguments of these are shapes and dimensions.
_SHAPES = frozenset(
    [
        "view",
        "reshape",
        "_unsafe_view",
        "expand",
        "permute",
        "transpose",
        "unsqueeze",
        "squeeze",
        "sym_size",
        "getitem",
        "to",
        "_to_copy",
        "layer_norm",
        "native_layer_norm",
        "rms_norm",
        "flatten",
        "unflatten",
        "split",
        "split_with_sizes",
        "chunk",
        "unbind",
        "linear",
        "matmul",
        "mm",
        "bmm",
        "addmm",
        "embedding",
        "softmax",
        "_softmax",
        "clone",
        "contiguous",
        "detach",
        "stack",
        "cat",
        "new_ones",
        "new_zeros",
        "full",
        "zeros",
        "ones",
    ]
)
_TABLES = frozenset(
    ["embedding", "index", "index_select", "gather", "take_along_dim", "slice", "select", "take"]
)
# What records say of channels, heads and layers.
_SIZES = frozenset(
    [
        "layer",
        "kv_source",
        "num_qo_heads",
        "num_kv_heads",
        "head_dim",
        "v_head_dim",
        "bits",
        "channels",
        "rotary_dim",
        "start",
        "max_batch",
        "rope",
        "latent",
        "scales",
        "because",
        "module_path",
        "source",
        "idiom",
        "states",
        "mask_rows",
        "pages",
    ]
)


def constants(front: Front, plan: Plan, of_graph: Sequence[Constant] | None = None) -> tuple[Constant, ...]:
    """All of them, each as often as it stands there.

    of_graph: those of the model's graph, where they are known
    """
    found = list(of_model(front) if of_graph is None else of_graph)
    found += _of_records(front.sites, "a site", 0)
    for decision in plan.decisions:
        found += _of_layout(decision.layout)
        found += _of_records((decision.mask, decision.score), "a site", 0)
    found.append(Constant(plan.limits.prefill_chunk, "prefill_chunk", 1))
    return tuple(dict.fromkeys(c for c in found if 1 < c.value < _MOST))


def of_model(front: Front) -> tuple[Constant, ...]:
    """Those of the model's graph."""
    return tuple(_of_graph(front.captured.graph_module))


def _of_layout(layout: CacheLayout) -> Iterator[Constant]:
    """Windows, budgets, groups, residuals, pages; and the slots of a layout that has a number of them."""
    yield from _of_records(layout, "the layout", 1)
    if layout.bounded:
        yield Constant(layout.slots(None), "slots of the layout", 1)


def _of_graph(module: GraphModule) -> Iterator[Constant]:
    positional, entered = _positional(module)
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        name, line = target_name(node), source_line(node)
        where = f"{name} at {line}" if line else name
        near = any(source in positional for source in node.all_input_nodes) or node in entered
        if name not in _SHAPES:
            for number in _numbers((node.args, dict(node.kwargs))):
                yield from _around(number, where, 0 if near else 2)
        if not near:
            continue
        for source in node.all_input_nodes:
            if source.op != "get_attr":
                continue
            tensor = fetch_attr(module, str(source.target))
            if not isinstance(tensor, Tensor):
                continue
            if tensor.numel() <= _SMALL:
                for number in tensor.flatten().tolist():
                    yield from _around(number, where, 0)
            if name in _TABLES:
                # The ids' own table is no matter of lengths: positions do not select from it.
                yield from (Constant(size, f"table of {where}", 0) for size in tensor.shape[:-1])


def _positional(module: GraphModule) -> tuple[set[Node], set[Node]]:
    """Nodes that positions and lengths alone decide; and those that token ids decide as whole numbers."""
    nodes = list(module.graph.nodes)
    ids = [n for n in nodes if n.op == "placeholder" and n.name == "input_ids"]
    given = [n for n in nodes if n.op == "placeholder" and n.name not in ("input_ids", "logits_to_keep")]
    sizes = [n for n in nodes if target_name(n) == "sym_size"]
    weights = [n for n in nodes if n.op == "get_attr" and _is_weight(module, n)]
    behind = [user for n in ids for user in n.users if target_name(user) != "sym_size"]
    tainted = descendants([*behind, *(user for n in weights for user in n.users)])
    positional = descendants([*given, *sizes]) - tainted
    entered = {n for n in descendants(behind) if _is_whole(n) and all(map(_is_whole, n.all_input_nodes))}
    return positional, entered


def _is_weight(module: GraphModule, node: Node) -> bool:
    tensor = fetch_attr(module, str(node.target))
    return isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel() > 16 * _SMALL


def _is_whole(node: Node) -> bool:
    val = node.meta.get("val")
    return not (isinstance(val, Tensor) and val.is_floating_point())


def _around(number: float, where: str, rank: int) -> Iterator[Constant]:
    """The whole numbers next to `number`; and what it may be the logarithm of."""
    if not math.isfinite(number) or abs(number) >= _MOST:
        return
    number = abs(number)
    yield from (Constant(whole, where, rank) for whole in {math.floor(number), math.ceil(number)})
    if rank == 0 and number != round(number) and number < math.log(_MOST):
        for power in (math.exp(number), 2.0**number):
            if abs(power - round(power)) < _NOT_WHOLE * power and round(power) > 2:
                yield Constant(round(power), f"logarithm in {where}", rank)


def _numbers(tree: Any) -> Iterator[float]:
    for leaf in torch.utils._pytree.tree_leaves(tree):
        if isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
            yield leaf


def _of_records(record: Any, where: str, rank: int, seen: frozenset[int] = frozenset()) -> Iterator[Constant]:
    """Whole numbers in records, containers, expressions, small tensors and graphs; nodes are not followed."""
    if id(record) in seen:
        return
    seen = seen | {id(record)}
    match record:
        case bool() | str() | None | Node():
            return
        case int() | float():
            if record == record and abs(record) < _MOST and float(record).is_integer():
                yield Constant(abs(int(record)), where, rank)
        case sympy.Basic():
            yield from (Constant(abs(int(x)), where, rank) for x in record.atoms(sympy.Integer))
        case Tensor():
            if record.numel() <= _SMALL:
                for number in record.flatten().tolist():
                    yield from _around(number, where, rank)
            yield from (Constant(size, f"table of {where}", rank) for size in record.shape)
        case GraphModule():
            yield from (c for node in record.graph.nodes for c in _of_node(node, where, rank))
        case Mapping():
            for value in record.values():
                yield from _of_records(value, where, rank, seen)
        case list() | tuple() | set() | frozenset():
            for value in record:
                yield from _of_records(value, where, rank, seen)
        case _ if is_dataclass(record) and not isinstance(record, type):
            for field in fields(record):
                if field.name not in _SIZES:
                    name = f"{field.name} of {where}" if rank else where
                    yield from _of_records(getattr(record, field.name), name, rank, seen)


def _of_node(node: Node, where: str, rank: int) -> Iterator[Constant]:
    if node.op == "call_function" and target_name(node) not in _SHAPES:
        for number in _numbers((node.args, dict(node.kwargs))):
            yield from _around(number, where, rank)
