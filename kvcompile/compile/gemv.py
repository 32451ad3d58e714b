"""Linear layers of few tokens: a kernel that reads the weights once, in their own dtype.

A matrix-vector product only reads its matrix, and the BLAS behind `aten::mm` is slow at it. On CPUs two forms are
faster, on GPUs one:

| form | what it is | where |
|---|---|---|
| kernel | `kernels/cpp/include/linear.cpp`, sums in fp32 | CPUs: a C++ compiler, a graph that stays here |
| loop | a product and a sum, which Inductor turns into a threaded, fused loop | CPUs, else |
| kernel | role linear (`kernels/triton/linear/linear.py`), sums in fp32 | GPUs: Triton, rows of whole vectors |

Packages have the kernels linked in (`targets/aoti/kernels.py`), and the loop where there is none.

For more than one row, which is decided while tracing, the BLAS stays. On CPUs there are five exceptions where the
kernel could run, and `kernels/cpp/include/linear_rows.cpp` takes its place:

| rows | why |
|---|---|
| any, where the processor has no products of the weights' dtype | bfloat16 with AVX2 alone: 18 GFLOP/s, float32 110 |
| any in bfloat16, where the processor multiplies float32 faster | 512 rows 285 GFLOP/s, BLAS 168 (`products.py`) |
| up to 64, in float32, which is seen when they come | weights are read once: 8 rows of SmolLM2 23 ms, BLAS 60 |
| up to 16, in bfloat16 where the kernel has its products | 8 rows of SmolLM2 13 ms, BLAS 30 |
| any in float32, and up to 256 in bfloat16, on AMD's processors | MKL has AVX2 there: 64 rows 90 ms, BLAS 145 |

Layers of one vector (queries, keys and values; gate and up) are one call of the kernel. On a CPU threads begin, and
wait for each other at the end, once for all of them: with a neighbour on a core, that wait is most of a step. On a GPU
a launch begins and ends once, and small layers do not fill it alone; a gate, its activation and what it opens are one
launch there as well, and so are a layer and its activation (`compile/gates.py`), and norms and residuals of one token
(`compile/norms.py`). The pass puts ops in the place of layers; which form one has is chosen when it is traced
(`compile/linear_forms.py`).
"""

from __future__ import annotations

import copy

import torch
from torch.fx import GraphModule

from kvcompile.compile import linear_forms  # noqa: F401  (defines the ops)
from kvcompile.compile.gates import join_activations, join_gates
from kvcompile.compile.linear_nodes import argument, computed, groups, replace
from kvcompile.compile.norms import join_norms
from kvcompile.compile.turned import turn_products
from kvcompile.passes.table import disabled, graph_pass

NAME = "gemv"


def made_by_inductor(mode: str) -> bool:
    """Whether a product on a GPU computes its weight while it is read: of one row, Inductor's does when it tunes.

    A weight that goes to a kernel of ours, or to the BLAS, is written to memory first.
    """
    return mode == "max-autotune"


def with_gemv(
    module: GraphModule, gates: bool = False, norms: bool = False, made: bool = True
) -> GraphModule:
    """A copy of a region whose linear layers choose their form when they are traced; the others: as of `give_gemv`.

    KVCOMPILE_DISABLE=gemv leaves it out, to bisect.
    """
    if disabled(NAME):
        return module
    return give_gemv(copy.deepcopy(module), gates=gates, norms=norms, made=made)


@graph_pass("gemv")
def give_gemv(
    module: GraphModule, kernels: bool = True, gates: bool = False, norms: bool = False, made: bool = True
) -> GraphModule:
    """The same in place.

    kernels: whether the form may be a kernel, which is compiled where the graph runs
    gates:   whether a gate and what it opens, or a layer and its activation, may be one call
    norms:   whether a token's norm may be part of the layers behind it: a graph of one token of one sequence
    made:    whether layers whose weights the graph computes are among them
    """
    if disabled(NAME):
        return module
    turn_products(module)
    if gates:
        join_gates(module, made)
        join_activations(module, made)
    if norms:
        join_norms(module)
    for nodes in groups(module):
        if not made and any(map(computed, nodes)):
            continue
        if not kernels:
            for node in nodes:
                node.target = torch.ops.kvcompile.linear_loop.default
        elif len(nodes) == 1:
            nodes[0].target = torch.ops.kvcompile.linear.default
        else:
            weights, biases = ([argument(node, at) for node in nodes] for at in (1, 2))
            replace(
                module, nodes, torch.ops.kvcompile.linear_group.default, (nodes[0].args[0], weights, biases)
            )
    module.recompile()
    return module
