"""Logits of the last token only become logits of chosen tokens: `x[:, -1]` becomes `x[:, logits_to_keep]`.

Many hand-written decoders do so where no targets are given (nanoGPT: `self.lm_head(x[:, [-1], :])`). Checking a cache
takes other tokens, too: those in the middle of a chunk. What comes after the choice must treat each token by itself;
that is not looked at here but proved of the graph that comes out, as of any other (`passes/dependence`).

| what the model does | before | after |
|---|---|---|
| `x[:, -1:]`, `x[:, [-1]]` | [B, 1, C] | [B, K, C] |
| `x[:, -1]` | [B, C] | [B * K, C], and its logits [B, K, V] |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic
from torch.fx.node import map_arg

from kvcompile.errors import ModelError
from kvcompile.passes.graph import expr, shape, source_line, value
from kvcompile.passes.probe.evaluate import fetch_attr
from kvcompile.passes.table import graph_pass
from kvcompile.util.faking import faking

aten = torch.ops.aten
KEEP = "logits_to_keep"
_HINT = 5  # of the number of tokens chosen, while shapes are computed


@dataclass(frozen=True)
class LastToken:
    """A model that gives the last token's logits. flat: without a dimension of tokens, [B, V]."""

    flat: bool


@graph_pass("last_token")
def choose_tokens(module: GraphModule) -> LastToken | None:
    """Let the graph take `logits_to_keep` [K] and give [B, K, V] where it gave the last token's; None: it does not.

    Raises:
        ModelError: what comes after the choice is made for one token only.
    """
    graph = module.graph
    given = {str(node.target): node for node in graph.nodes if node.op == "placeholder"}
    output = next(node for node in graph.nodes if node.op == "output")
    if KEEP in given:
        return None
    ids = given["input_ids"]
    tokens = expr(shape(ids)[1])
    choices = [node for node in graph.nodes if _is_last(node, module, tokens)]
    after = _after(choices)
    found = [node for node in output.args[0] if node in after]
    if len(found) != 1 or not _is_logits(found[0], ids):
        return None
    (logits,) = found
    place = output.args[0].index(logits)
    flat = value(logits).dim() == 2
    with graph.inserting_after(list(given.values())[-1]):
        keep = graph.placeholder(KEEP)
    keep.meta["val"] = _any_indices(ids)
    made = [_choose(node, keep) for node in choices if logits in _after([node])]
    logits = output.args[0][place]  # another node, where the choice was the end
    if flat:
        with graph.inserting_before(output):
            rows = graph.call_function(aten.sym_size.int, (ids, 0))
            shaped = graph.call_function(aten.reshape.default, (logits, [rows, -1, int(shape(logits)[-1])]))
        shaped.meta = dict(logits.meta)
        output.replace_input_with(logits, shaped)
        made.append(rows)
    _reshape(graph, _after(made))
    graph.lint()
    module.recompile()
    return LastToken(flat)


def _is_last(node: Node, module: GraphModule, tokens: Any) -> bool:
    """Whether a node takes the last token of [B, S, ..]."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return False
    sizes = shape(node.args[0])
    if len(sizes) != 3 or expr(sizes[1]) != tokens:
        return False
    rest: tuple[Any, ...] = node.args[1:]
    if node.target is aten.select.int:
        dim, index = rest
        at = expr(value(index)) if isinstance(index, Node) else index
        return dim in (1, -2) and at in (-1, tokens - 1)
    if node.target is aten.slice.Tensor:
        dim, start, end = rest[:3] if len(rest) > 2 else (*rest, None)
        one = rest[3:] in ((), (1,)) and expr(shape(node)[1]) == 1
        return dim in (1, -2) and start == -1 and one and _no_end(end)
    if node.target is aten.index.Tensor:
        (indices,) = rest
        if len(indices) != 2 or indices[0] is not None or not isinstance(indices[1], Node):
            return False
        if indices[1].op != "get_attr":
            return False
        found = fetch_attr(module, str(indices[1].target))
        return isinstance(found, Tensor) and found.dtype == torch.int64 and found.tolist() == [-1]
    return False


def _no_end(end: Any) -> bool:
    return end is None or (isinstance(end, int) and end > 2**60)


def _after(nodes: Iterable[Node]) -> set[Node]:
    """All that depends on some nodes, these included; not the output."""
    found: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found and node.op != "output":
            found.add(node)
            stack.extend(node.users)
    return found


def _is_logits(node: Node, ids: Node) -> bool:
    """Whether an output is [B, V] or [B, 1, V], a number for each word and not for a few classes."""
    val = value(node)
    if not isinstance(val, Tensor) or not val.is_floating_point() or val.dim() not in (2, 3):
        return False
    rows, *one, words = (expr(size) for size in val.shape)
    if rows != expr(shape(ids)[0]) or any(size != 1 for size in one) or words.free_symbols:
        return False
    tables = [user.args[0] for user in ids.users if user.target is aten.embedding.default]
    return all(2 * int(words) >= int(shape(table)[0]) for table in tables if isinstance(table, Node))


def _any_indices(ids: Node) -> Tensor:
    """Fake indices [K], of any number of tokens."""
    mode, source = value(ids).fake_mode, ConstantSource(KEEP)
    env = mode.shape_env
    symbol = env.create_symbol(_HINT, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    size = env.create_symintnode(symbol, hint=_HINT, source=source)
    with mode:
        return torch.empty(size, dtype=torch.int64, device=value(ids).device)


def _choose(node: Node, keep: Node) -> Node:
    """Put the choice of some tokens in the place of that of the last; returns its first node."""
    graph, source = node.graph, node.args[0]
    assert isinstance(source, Node)
    with graph.inserting_before(node):
        first = found = graph.call_function(aten.index.Tensor, (source, [None, keep]))
        first.meta = dict(node.meta)
        if node.target is aten.select.int:
            found = graph.call_function(aten.reshape.default, (first, [-1, int(shape(source)[2])]))
            found.meta = dict(node.meta)
    node.replace_all_uses_with(found)
    graph.erase_node(node)
    return first


def _reshape(graph: Graph, nodes: set[Node]) -> None:
    """Compute the shapes of nodes anew."""
    for node in graph.nodes:
        if node not in nodes:
            continue
        args, kwargs = map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
        mode = next(n.meta["val"].fake_mode for n in graph.nodes if n.op == "placeholder")
        try:
            with faking(mode):
                node.meta["val"] = node.target(*args, **kwargs)
        except Exception as error:  # an operator raises anything for shapes that it does not take
            at = source_line(node) or str(node.target)
            raise ModelError(
                "the model gives logits of the last token only, and what it computes them with is made for one token "
                f"({at}: {(str(error).splitlines() or [''])[0]}); return the logits of all"
            ) from error
