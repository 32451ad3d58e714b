"""Complex arithmetic as real arithmetic: rotary embeddings written with complex phases become products and sums.

    (a + ib) (c + id) = (ac - bd) + i (ad + bc)

Each complex value becomes a pair of real ones. Inductor compiles complex operators for fixed sizes only, and no
export target takes them. Where a graph has a complex operator that is not known here, all stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node, map_arg

from kvcompile.passes.graph import call, target_name, value
from kvcompile.passes.probe.evaluate import fetch_attr

aten = torch.ops.aten
Pair = tuple[Node, Node]  # real and imaginary part
# Operators that move elements, and do to both parts what they do to the whole.
_ALIKE = frozenset(
    (
        *(
            "unsqueeze",
            "squeeze",
            "reshape",
            "view",
            "_unsafe_view",
            "flatten",
            "unflatten",
            "expand",
            "repeat",
        ),
        *(
            "slice",
            "select",
            "narrow",
            "index",
            "index_select",
            "transpose",
            "permute",
            "clone",
            "contiguous",
            "neg",
        ),
    )
)
_ARITHMETIC = ("mul", "add", "sub")
_CASTS = ("to", "_to_copy")
_KNOWN = frozenset(
    (
        *(
            "view_as_complex",
            "view_as_real",
            "real",
            "imag",
            "polar",
            "complex",
            "conj",
            "_conj",
            "resolve_conj",
        ),
        *(*_ARITHMETIC, *_CASTS, *_ALIKE),
    )
)


def to_real(graph_module: GraphModule) -> int:
    """Rewrite the complex part of `graph_module` in place; returns how many operators that were."""
    graph = graph_module.graph
    nodes = [node for node in graph.nodes if _touches_complex(node)]
    if not all(_known(node) for node in nodes):
        return 0
    pairs: dict[Node, Pair] = {}
    for node in nodes:
        if node.op == "get_attr":
            pairs[node] = _constant(graph_module, node)
            continue
        with graph.inserting_before(node):
            found = _rewrite(node, pairs)
        if isinstance(found, tuple):
            pairs[node] = found
        else:
            node.replace_all_uses_with(found)
    for node in reversed(nodes):
        graph.erase_node(node)
    return len(nodes)


def _is_complex(node: object) -> bool:
    val = value(node)
    return isinstance(node, Node) and isinstance(val, torch.Tensor) and val.is_complex()


def _touches_complex(node: Node) -> bool:
    return _is_complex(node) or any(_is_complex(used) for used in node.all_input_nodes)


def _known(node: Node) -> bool:
    if node.op == "get_attr":
        return True
    name = target_name(node)
    if name in _CASTS and not (_is_complex(node) and _is_complex(node.args[0])):
        return False
    if name in _ARITHMETIC and node.kwargs:
        return False
    return node.op == "call_function" and name in _KNOWN


def _constant(module: GraphModule, node: Node) -> Pair:
    """A complex table of the model as two real ones."""
    table = fetch_attr(module, str(node.target))
    made = []
    for name, part in (("real", table.real), ("imag", table.imag)):
        path = f"{str(node.target).replace('.', '_')}_{name}"
        module.register_buffer(path, part.contiguous(), persistent=False)
        with node.graph.inserting_before(node):
            new = node.graph.get_attr(path)
        with node.meta["val"].fake_mode as mode:
            new.meta["val"] = mode.from_tensor(part.contiguous(), static_shapes=True)
        made.append(new)
    return made[0], made[1]


def _rewrite(node: Node, pairs: dict[Node, Pair]) -> Pair | Node:
    """The pair that stands for a complex node, or the node for a real one."""
    name, graph = target_name(node), node.graph
    first = node.args[0]

    def op(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        return call(graph, target, args, node, kwargs)

    def parts(operand: Any) -> tuple[Any, Any]:
        return pairs[operand] if _is_complex(operand) else (operand, None)

    def product(a: Any, b: Any) -> Any:
        a, b = (b, a) if not isinstance(a, Node) else (a, b)
        return op(aten.mul.Tensor, a, b)

    match name:
        case "view_as_complex":
            return op(aten.select.int, first, -1, 0), op(aten.select.int, first, -1, 1)
        case "complex":
            assert isinstance(first, Node) and isinstance(node.args[1], Node)
            return first, node.args[1]
        case "polar":
            angle = node.args[1]
            return product(first, op(aten.cos.default, angle)), product(first, op(aten.sin.default, angle))
        case "view_as_real":
            return op(aten.stack.default, list(parts(first)), -1)
        case "real" | "imag":
            chosen = parts(first)[0 if name == "real" else 1]
            assert isinstance(chosen, Node)
            return chosen
        case "mul":
            (a, b), (c, d) = parts(first), parts(node.args[1])
            if b is None:
                return product(a, c), product(a, d)
            if d is None:
                return product(a, c), product(b, c)
            real = op(aten.sub.Tensor, product(a, c), product(b, d))
            return real, op(aten.add.Tensor, product(a, d), product(b, c))
        case "add" | "sub":
            (a, b), (c, d) = parts(first), parts(node.args[1])
            target = aten.add.Tensor if name == "add" else aten.sub.Tensor
            if b is None or d is None:
                imag = b if d is None else d if name == "add" else op(aten.neg.default, d)
            else:
                imag = op(target, b, d)
            return op(target, a, c), imag
        case "conj" | "_conj":
            a, b = parts(first)
            return a, op(aten.neg.default, b)
        case "resolve_conj":
            return parts(first)
        case "to" | "_to_copy":
            dtype = torch.float64 if node.meta["val"].dtype == torch.complex128 else torch.float32
            a, b = parts(first)
            return op(aten.to.dtype, a, dtype), op(aten.to.dtype, b, dtype)
        case _:
            real, imag = (_with_parts(node, pairs, part) for part in (0, 1))
            return real, imag


def _with_parts(node: Node, pairs: dict[Node, Pair], part: int) -> Node:
    """The same operator on one part of its complex operands."""

    def chosen(used: Node) -> Node:
        return pairs[used][part] if _is_complex(used) else used

    args, kwargs = map_arg((node.args, dict(node.kwargs)), chosen)
    assert callable(node.target)
    return call(node.graph, node.target, args, node, kwargs)
