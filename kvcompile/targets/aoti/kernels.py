"""C++ kernels in a package: graphs call them by name, its code has them linked in, their sources lie beside.

    kernels/<name>.cpp, and the headers that they include

They are compiled for one instruction set, which the manifest names; whether the CPU that runs the package has it, is
asked when it is loaded (`targets/machine.py`).
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvcompile.compile import linear_nodes
from kvcompile.kernels.cpp.attend.values import MODELS
from kvcompile.kernels.cpp.host import ops, packaged, source
from kvcompile.kernels.cpp.host.compiler import INCLUDE
from kvcompile.kernels.cpp.host.source import KernelText
from kvcompile.kernels.cpp.isa import ISAS, Isa, isa, multiplies_rows

FOLDER = "kernels"
_OF_LEVEL = {"x86-64-v3": "avx2", "x86-64-v4": "avx512"}
_OPS = (ops.cpp_attend, ops.cpp_attend_many, ops.cpp_attend_columns, ops.cpp_linear, ops.cpp_linears)


def isa_of(level: str) -> Isa:
    """The instruction set of kernels in a package for CPUs of a level."""
    if level not in _OF_LEVEL:
        return isa()
    return next(own for own in ISAS if own.name == _OF_LEVEL[level])


def give_linear(module: GraphModule, own: Isa) -> None:
    """Have linear layers of one token call their kernel, and those of many where products of their dtype lack."""
    for nodes in linear_nodes.groups(module):
        specs = {_spec_of(node, own) for node in nodes}
        biases = [node.args[2] for node in nodes if len(node.args) > 2 and node.args[2] is not None]
        spec = specs.pop() if len(specs) == 1 else None
        one = spec is not None and spec == source.linear_spec(nodes[0].meta["val"].dtype)
        if len(nodes) > 1 and one and len(biases) in (0, len(nodes)):
            _together(module, nodes, biases, str(spec))
        else:
            for node in nodes:
                _alone(module, node, _spec_of(node, own))
    module.recompile()


def _alone(module: GraphModule, node: Node, spec: str | None) -> None:
    if spec is None:
        return
    x, weight, bias = (*node.args, None)[:3]
    with module.graph.inserting_before(node):
        dense = module.graph.call_function(torch.ops.aten.contiguous.default, (x,))
    node.target, node.args, node.kwargs = ops.cpp_linear, (dense, weight, bias, spec), {}


def _together(module: GraphModule, nodes: list[Node], biases: list[Any], spec: str) -> None:
    """Layers of one vector in one call, and its parts."""
    x, weights = nodes[0].args[0], [node.args[1] for node in nodes]
    sizes = [node.meta["val"].shape[-1] for node in nodes]
    made = linear_nodes.replace(module, nodes, torch.ops.aten.split_with_sizes.default, ())
    with module.graph.inserting_before(made):
        dense = module.graph.call_function(torch.ops.aten.contiguous.default, (x,))
        whole = module.graph.call_function(ops.cpp_linears, (dense, weights, biases, spec))
    made.args = (whole, sizes, -1)


def _spec_of(node: Node, own: Isa) -> str | None:
    x, weight, bias = (of.meta.get("val") if isinstance(of, Node) else None for of in (*node.args, None)[:3])
    return _linear_spec(x, weight, bias, own)


def _linear_spec(x: Any, weight: Any, bias: Any, own: Isa) -> str | None:
    """The kernel of a linear layer, by what is known of its tensors; None: it has none."""
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or x.dtype not in MODELS:
        return None
    if weight.dtype != x.dtype or weight.dim() != 2 or weight.stride(-1) != 1:
        return None
    if bias is not None and (bias.dtype != x.dtype or bias.shape != weight.shape[:1]):
        return None
    if all(isinstance(size, int) and size == 1 for size in x.shape[:-1]):
        return source.linear_spec(x.dtype)
    return source.linear_spec(x.dtype, True, own) if multiplies_rows(x.dtype, own) else None


def name_kernels(module: GraphModule) -> dict[str, KernelText]:
    """Put a kernel's name in the place of its spec in every call; the kernels by their names."""
    found: dict[str, KernelText] = {}
    for node in module.graph.nodes:
        if node.target not in _OPS:
            continue
        text = source.text_of(str(node.args[-1]))
        found[text.name] = text
        node.args = (*node.args[:-1], text.name)
    module.recompile()
    return found


def options(kernels: Mapping[str, KernelText], own: Isa) -> dict[str, Any]:
    """What AOTInductor must know to link kernels into a graph's library; nothing where there are none.

    Raises:
        KernelError: the compiler fails.
    """
    if not kernels:
        return {}
    texts = [kernels[name] for name in sorted(kernels)]
    # Libraries are all that it passes to the linker; -lm is one of them anyway, and objects follow it.
    given = " ".join(["m", *(shlex.quote(str(path)) for path in packaged.objects(texts, own))])
    return {"aot_inductor.custom_op_libs": [given], "aot_inductor.custom_ops_to_c_shims": packaged.SHIMS}


def write_sources(kernels: Mapping[str, KernelText], own: Isa, folder: Path) -> None:
    """The kernels' sources, each with the flags that it was compiled with in its first line.

    Raises:
        OSError: as files do.
    """
    if not kernels:
        return
    folder.mkdir()
    for name, text in kernels.items():
        told = " ".join(text.flags(own)).replace(str(INCLUDE), ".").replace('"', '\\"')
        (folder / f"{name}.cpp").write_text(f"// {told}\n{text.text}", "utf-8")
    for header in sorted(INCLUDE.glob("*.h")):
        shutil.copyfile(header, folder / header.name)
