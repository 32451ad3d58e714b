"""Linear layers on a CPU: of few tokens, a kernel that reads the weights once, in their own dtype.

A matrix-vector product only reads its matrix, and the BLAS behind `aten::mm` is slow at it. Two forms are faster:

| form | what it is | where |
|---|---|---|
| kernel | `kernels/cpp/include/linear.cpp`, sums in fp32 | three dtypes, a C++ compiler, a graph that stays here |
| loop | a product and a sum, which Inductor turns into a threaded, fused loop | else |

Packages have the kernels linked in (`targets/aoti/kernels.py`), and the loop where there is none.

For more than one row, which is decided while tracing, the BLAS stays, with four exceptions where the kernel could run,
and one of `kernels/cpp/include/linear_many.cpp` or `linear_few.cpp` takes its place:

| rows | why |
|---|---|
| any, where the processor has no products of the weights' dtype | bfloat16 with AVX2 alone: 18 GFLOP/s, float32 110 |
| any in bfloat16, where the processor multiplies float32 faster | 512 rows 285 GFLOP/s, BLAS 168 (`products.py`) |
| up to 64, in float32, which is seen when they come | weights are read once: 8 rows of SmolLM2 30 ms, BLAS 92 |
| up to 16, in bfloat16 where the kernel has its products | 8 rows of SmolLM2 18 ms, BLAS 37 |

Layers of one vector (queries, keys and values; gate and up) are one call of the kernel: threads begin, and wait for
each other at the end, once for all of them. With a neighbour on a core, that wait is most of a step.
"""

from __future__ import annotations

import copy
import importlib
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from kvcompile.passes.table import disabled, graph_pass

_LIB = torch.library.Library("kvcompile", "FRAGMENT")
_LIB.define("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor")
_LIB.define("linear_loop(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor")
_LIB.define("linear_group(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor[]")
_TOGETHER = 16  # MOST_LAYERS of `kernels/cpp/include/call.h`
_KERNELS = (torch.float32, torch.float16, torch.bfloat16)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K], weight [N, K] -> [..., N]; sums in fp32."""
    one = _one_token(x)
    if (one or _several(x.dtype)) and (kernel := _kernel(x, weight, bias)) is not None:
        run = kernel.linear if one else kernel.linear_many
        made: Tensor = run(x.contiguous(), weight, bias)
        return made
    return _loop(x, weight, bias)


def _group(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    """Several layers of the same x, in one call of the kernel where it is one token's."""
    layers = list(zip(weights, biases, strict=True))
    given = [bias for bias in biases if bias is not None]
    kernels = [_kernel(x, weight, bias) for weight, bias in layers]
    if not _one_token(x) or None in kernels or len(given) not in (0, len(weights)):
        return [_linear(x, weight, bias) for weight, bias in layers]
    made: list[Tensor] = kernels[0].linears(x.contiguous(), weights, given)
    return made


def _one_token(x: Tensor) -> bool:
    return x.dtype.is_floating_point and all(isinstance(size, int) and size == 1 for size in x.shape[:-1])


def _several(dtype: torch.dtype) -> bool:
    return importlib.import_module("kvcompile.kernels.cpp.isa").multiplies_rows(dtype)  # type: ignore[no-any-return]


def _loop(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same without a kernel."""
    rows = x.shape[:-1]
    if not _one_token(x):
        return F.linear(x, weight, bias)
    out = (x.reshape(1, -1).float() * weight.float()).sum(-1)
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype).reshape(*rows, weight.shape[0])


def _kernel(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """What launches the kernel, or None where it has none for these."""
    same = x.dtype == weight.dtype and (bias is None or (bias.dtype == x.dtype and bias.is_contiguous()))
    if x.device.type != "cpu" or x.dtype not in _KERNELS or not same or weight.stride(-1) != 1:
        return None
    available = importlib.import_module("kvcompile.kernels.cpp.available")
    if available.problem(x.device) is not None:
        return None
    return importlib.import_module("kvcompile.kernels.cpp.host.linear")


_LIB.impl("linear", _linear, "CompositeImplicitAutograd")
_LIB.impl("linear_loop", _loop, "CompositeImplicitAutograd")
_LIB.impl("linear_group", _group, "CompositeImplicitAutograd")


NAME = "cpu_gemv"


def with_gemv(module: GraphModule) -> GraphModule:
    """A copy of a region whose linear layers choose their form when they are traced.

    KVCOMPILE_DISABLE=cpu_gemv leaves it out, to bisect.
    """
    return module if disabled(NAME) else give_gemv(copy.deepcopy(module))


@graph_pass("cpu_gemv")
def give_gemv(module: GraphModule, kernels: bool = True) -> GraphModule:
    """The same in place; kernels: whether the form may be a kernel, which is compiled where the graph runs."""
    if disabled(NAME):
        return module
    for nodes in groups(module):
        if not kernels:
            for node in nodes:
                node.target = torch.ops.kvcompile.linear_loop.default
        elif len(nodes) == 1:
            nodes[0].target = torch.ops.kvcompile.linear.default
        else:
            weights, biases = ([_argument(node, at) for node in nodes] for at in (1, 2))
            replace(
                module, nodes, torch.ops.kvcompile.linear_group.default, (nodes[0].args[0], weights, biases)
            )
    module.recompile()
    return module


def groups(module: GraphModule) -> list[list[Node]]:
    """The linear layers of a graph, those of one vector together; at most so many as the kernel takes."""
    found: dict[Node, list[list[Node]]] = {}
    for node in module.graph.nodes:
        if node.target is not torch.ops.aten.linear.default:
            continue
        # Weights that are computed may come late; what takes them stays where it is.
        computed = any(
            of is not None and of.op == "call_function" for of in (_argument(node, 1), _argument(node, 2))
        )
        of_x = found.setdefault(node.args[0], [[]])
        if computed:
            of_x.insert(0, [node])
        elif len(of_x[-1]) < _TOGETHER:
            of_x[-1].append(node)
        else:
            of_x.append([node])
    return [nodes for of_x in found.values() for nodes in of_x if nodes]


def replace(module: GraphModule, nodes: Sequence[Node], target: OpOverload, args: tuple[Any, ...]) -> Node:
    """Put one call, which gives a list, in the place of `nodes`; its weights, which are no calls, come before it."""
    graph, first = module.graph, nodes[0]
    for own in [of for node in nodes for of in (_argument(node, 1), _argument(node, 2)) if of is not None]:
        if own.op == "get_attr":
            first.prepend(own)
    with graph.inserting_before(first):
        made = graph.call_function(target, args)
        parts = [graph.call_function(operator.getitem, (made, number)) for number in range(len(nodes))]
    for node, part in zip(nodes, parts, strict=True):
        part.meta = dict(node.meta)
        node.replace_all_uses_with(part)
        graph.erase_node(node)
    return made


def _argument(node: Node, number: int) -> Node | None:
    """An argument of a linear layer: 1 its weight, 2 its bias."""
    given = (*node.args, *([node.kwargs["bias"]] if "bias" in node.kwargs else []), None)
    own = given[number]
    return own if isinstance(own, Node) else None
