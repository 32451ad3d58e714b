"""Submodules of a captured graph become part of it, or the model is refused: nothing that computes is dropped.

torch.export keeps what ran under `torch.autocast`, `torch.set_grad_enabled` or activation checkpointing as a
higher-order operator over a submodule. The bodies of those go into the graph, with autocast's casts spelled out
(passes/capture/autocast.py). Control flow (`torch.cond`, `while_loop`, `scan`, `map`) is refused by name.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from kvcompile.errors import ModelError
from kvcompile.passes.capture.autocast import Cast, cast_call
from kvcompile.passes.graph import source_line, target_name
from kvcompile.passes.probe.evaluate import fetch_attr
from kvcompile.passes.table import graph_pass

# Operators whose value is their body's, by the number of arguments before the body.
_GRAD = ("wrap_with_set_grad_enabled", 1)  # (enabled, body, *operands)
_AUTOCAST = ("wrap_with_autocast", 4)  # (device type, dtype, enabled, cache enabled, body, *operands)
_BODY_FIRST = ("tag_activation_checkpoint", "wrap", "wrap_activation_checkpoint", "inductor_compiled_code")
_BODY_AND_NAME = ("invoke_subgraph", "invoke_quant")  # (body, name, *operands)


@graph_pass("inline")
def inline(graph_module: GraphModule) -> int:
    """Put the bodies of transparent higher-order operators into the graph, in place; returns how many.

    Raises:
        ModelError: an operator with a body that is not known to be just its body, or a module that is called.
    """
    count = 0
    waiting: dict[Node, Cast | None] = dict.fromkeys(graph_module.graph.nodes)
    while waiting:
        node, cast = next(iter(waiting.items()))
        del waiting[node]
        if node.op == "call_module":
            _check_guard(graph_module, node)
        elif node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator):
            found = _body(node, cast)
            if found is None:
                continue
            body, operands, inside = found
            added = _insert(graph_module, node, fetch_attr(graph_module, body), operands, inside)
            waiting = {**dict.fromkeys(added, inside), **waiting}
            count += 1
    return count


def _body(node: Node, cast: Cast | None) -> tuple[str, tuple[Any, ...], Cast | None] | None:
    """The body's name, its operands, and the casts inside; None for what other passes spell out."""
    name, args = target_name(node), node.args
    if name == "flex_attention":
        return None
    inside, place, skipped = cast, -1, 0
    if name == _GRAD[0]:
        place = _GRAD[1]
    elif name == _AUTOCAST[0]:
        place = _AUTOCAST[1]
        device, dtype, enabled = args[:3]
        inside = Cast(str(device), dtype) if enabled else None  # type: ignore[arg-type]
    elif name in _BODY_FIRST:
        place = 0
    elif name in _BODY_AND_NAME:
        place, skipped = 0, 1
    body = args[place] if 0 <= place < len(args) else None
    if not isinstance(body, Node) or body.op != "get_attr":
        raise ModelError(
            f"the model uses {name}{_at(node)}, which has no form that a cache can be put into;"
            " write it without this operator"
        )
    return str(body.target), tuple(args[place + 1 + skipped :]), inside


def _insert(
    graph_module: GraphModule, node: Node, body: GraphModule, operands: tuple[Any, ...], cast: Cast | None
) -> list[Node]:
    """The body instead of `node`; returns the operators that came with it."""
    graph, known, added = graph_module.graph, {}, []
    given = iter(operands)
    result: Any = None
    with graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                known[inner] = next(given)
            elif inner.op == "output":
                result = torch.fx.map_arg(inner.args[0], known.__getitem__)
            elif inner.op == "get_attr":
                name = _adopt(graph_module, body, str(inner.target))
                known[inner] = graph.get_attr(name)
                known[inner].meta = dict(inner.meta)
            elif cast is not None and isinstance(inner.target, torch._ops.OpOverload):
                known[inner], new = cast_call(graph, inner, known, cast)
                added += new
            else:
                known[inner] = graph.node_copy(inner, known.__getitem__)
                added.append(known[inner])
    if isinstance(result, (list, tuple)):
        for user in list(node.users):
            if user.target is not operator.getitem:
                raise ModelError(f"the result of {target_name(node)}{_at(node)} is used as a whole")
            user.replace_all_uses_with(result[user.args[1]])  # type: ignore[index]
            graph.erase_node(user)
    else:
        node.replace_all_uses_with(result)
    graph.erase_node(node)
    return added


def _adopt(graph_module: GraphModule, body: GraphModule, name: str) -> str:
    """What a body has as an attribute becomes one of the graph's, under a name of its own."""
    found = fetch_attr(body, name)
    base = new = f"inlined_{name.replace('.', '_')}"
    number = 0
    while hasattr(graph_module, new) and getattr(graph_module, new) is not found:
        number += 1
        new = f"{base}_{number}"
    setattr(graph_module, new, found)
    return new


def _check_guard(graph_module: GraphModule, node: Node) -> None:
    """Of modules that are called, only export's guards may be there: they return nothing."""
    if not str(node.target).startswith("_guards") or node.users:
        kind = type(graph_module.get_submodule(str(node.target))).__name__
        raise ModelError(f"tracing left a call of {node.target} ({kind}) in the graph")


def _at(node: Node) -> str:
    line = source_line(node)
    return f" ({line})" if line else ""
