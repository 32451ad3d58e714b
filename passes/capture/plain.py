"""From an exported program to a plain graph: the model's own names, no bodies, no writes, a flat tuple of tensors.

`logits_index` says which of the tensors are the logits: one row per sequence and (kept) token. A model that gives
anything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from kvcompile.errors import CaptureError, ModelError
from kvcompile.kernels.ops.opaque import OpaqueModule, opaque
from kvcompile.passes.capture.first_line import first_line
from kvcompile.passes.capture.flex import spell_out
from kvcompile.passes.capture.functionalize import functionalize, mutates, read_back
from kvcompile.passes.capture.harmless import check_random, check_writes
from kvcompile.passes.capture.inline import inline
from kvcompile.passes.capture.inputs import WRAPPED, CapturedInputs
from kvcompile.passes.capture.last_token import LastToken, choose_tokens
from kvcompile.passes.capture.subclasses import open_subclasses
from kvcompile.passes.capture.trace import Traced, shape_env
from kvcompile.passes.capture.traced_once import NotOnce, expand
from kvcompile.passes.graph import expr, shape, told
from kvcompile.passes.graph_module import module_of
from kvcompile.passes.probe.evaluate import fetch_attr
from kvcompile.passes.rewrite.clean import clean

aten = torch.ops.aten


@dataclass(frozen=True)
class Plain:
    """The graph, how the model's output is built from its results, and what was noticed on the way.

    inputs: of the graph, which may choose tokens where the model takes the last
    """

    graph_module: GraphModule
    inputs: CapturedInputs
    last: LastToken | None
    out_spec: pytree.TreeSpec
    logits_index: int
    constants: tuple[tuple[int, Any], ...]
    reasons: tuple[str, ...]


def plain(traced: Traced, inputs: CapturedInputs, opaques: Sequence[OpaqueModule]) -> Plain:
    """The program as one cleaned graph over the model's own weights.

    Raises:
        NotOnce: layers that were not traced are not those that were; only where some were not.
        CaptureError: what depends on the tokens came as a constant.
        ModelError: what the graph would drop silently (control flow, a buffer that changes, random numbers), or no
            logits.
    """
    reasons: list[str] = []
    program = traced.program
    module = _functional(traced, reasons)
    graph = module.graph
    graph.set_codegen(CodeGen())
    attributes: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            found = fetch_attr(module, str(node.target))
            if isinstance(found, FakeTensor):  # it has no values, and other sizes with every call
                raise CaptureError(
                    f"tracing took what is computed from the tokens for a constant of the model ({told(node)}); "
                    "compute with operators that tracing sees (`x.detach()` in place of `x.data`)"
                )
            node.target = _strip(str(node.target))
            node._rename(node.name.removeprefix(f"{WRAPPED}_"))
            attributes[node.target] = found
        stack = node.meta.get("nn_module_stack")
        if stack:
            node.meta["nn_module_stack"] = {key: (_strip(path), kind) for key, (path, kind) in stack.items()}
        if node.op == "output":
            leaves = pytree.tree_leaves(node.args[0])
            node.args = (tuple(leaf for leaf in leaves if isinstance(leaf, Node)),)
    for node in list(graph.nodes):
        if node.op == "call_module":  # `inline` has seen to it that these are export's guards
            graph.erase_node(node)
    open_subclasses(graph, attributes)
    constants = tuple((i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, Node))
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, name in zip(placeholders, inputs.names, strict=True):
        node.target = node.name = name
    written = _written(graph.nodes)

    records = {record.key: record for record in opaques}
    for node in graph.nodes:
        if node.target is opaque:
            given, key = node.args
            node.args = ([given[index] for index in records[key].kept], key)
    graph_module = module_of(attributes, graph, "Captured")
    clean(graph_module)
    check_writes(graph_module, written)
    check_random(graph_module)
    out_spec = program.call_spec.out_spec
    assert out_spec is not None
    last = choose_tokens(graph_module)
    if last is not None:
        inputs = replace(inputs, logits_to_keep=True)
        reasons.append("the model gives logits of the last token only: the graph gives those of any")
    index = _logits_index(graph_module, out_spec, constants, shape_env(program).replacements)
    return Plain(graph_module, inputs, last, out_spec, index, constants, tuple(reasons))


def _functional(traced: Traced, reasons: list[str]) -> GraphModule:
    """The program as one module, without in-place operators: a node's value would depend on when it is read."""
    program = traced.program
    module = program.module(check_guards=False)
    assert isinstance(module, GraphModule)
    inline(module)
    if traced.once is not None:
        expand(module, traced.once)
    spell_out(module)
    if mutates(module):
        problem = functionalize(module)
        if problem and traced.once is not None:
            raise NotOnce(problem)  # what torch decomposes below are all layers
        if problem:  # slow, but it knows every operator
            reasons.append(f"decomposed by torch, because of an in-place operator: {problem}")
            try:
                module = program.run_decompositions({}).module(check_guards=False)
            except Exception as error:  # of its own making, as a name that no model has
                raise CaptureError(
                    f"an in-place operator cannot be made a value: {problem}; torch cannot either "
                    f"({first_line(error)}). Write into a new tensor, or into a registered buffer"
                ) from error
            assert isinstance(module, GraphModule)
            inline(module)
            read_back(module)
    return module


def _written(nodes: Any) -> list[str]:
    """Buffers and constants that the forward leaves something else in."""
    return [
        str(node.args[0].target)
        for node in nodes
        if node.target is aten.copy_.default and node.args[0].op == "get_attr"
    ]


def _strip(path: str) -> str:
    return path.removeprefix("L['self'].").removeprefix(WRAPPED).removeprefix(".")


def _logits_index(
    graph_module: GraphModule,
    spec: pytree.TreeSpec,
    constants: tuple[tuple[int, Any], ...],
    same: dict[Any, Any],
) -> int:
    """The output called `logits`, else the first [B, S, vocabulary]."""
    wanted = "expected an output of shape [batch, sequence, vocabulary]"
    output = next(node for node in graph_module.graph.nodes if node.op == "output")
    tensors = output.args[0]
    names = _names(spec)
    if "logits" in names:
        leaf = sum(child.num_leaves for child in spec.children()[: names.index("logits")])
        index = leaf - sum(1 for number, _ in constants if number < leaf)
        problem = _not_logits(graph_module, tensors[index], same)
        if problem:
            raise ModelError(f"the model's logits {problem}; {wanted}, one row for each token")
        return index
    if "last_hidden_state" in names:
        raise ModelError(
            f"the model returns hidden states and no logits: {wanted}. Take the class with the language-model head"
        )
    problems = []
    for index, node in enumerate(tensors):
        problem = _not_logits(graph_module, node, same)
        if not problem:
            return index
        problems.append(f"output {index} {problem}")
    found = "; ".join(problems) or "it returns no tensor"
    raise ModelError(f"the model returns no logits: {wanted}, one row for each token; {found}")


def _names(spec: pytree.TreeSpec) -> list[Any]:
    """The names of what a model gives, in the order of its leaves; empty: it has none."""
    names = list(spec.context) if isinstance(spec.context, (list, tuple)) else []
    if is_dataclass(spec.type) and names and isinstance(names[0], (list, tuple)):
        return list(names[0])  # beside those that are None, which are no leaves
    return names


def _not_logits(graph_module: GraphModule, node: Node, same: dict[Any, Any]) -> str:
    """What is wrong with the shape of an output; empty: it has a row for each sequence and (kept) token."""
    val = node.meta["val"]
    inputs = {str(n.target): shape(n) for n in graph_module.graph.nodes if n.op == "placeholder"}
    if not isinstance(val, torch.Tensor):
        return "is a number"
    sizes = [expr(size).xreplace(same) for size in val.shape]
    told = f"have the shape [{', '.join(_told(size, inputs, same) for size in sizes)}]"
    if val.dim() != 3 or sizes[2].free_symbols or not val.is_floating_point():
        return told
    rows = [inputs["input_ids"][1], *inputs.get("logits_to_keep", ())]
    batch = expr(inputs["input_ids"][0]).xreplace(same)
    kept = [expr(size).xreplace(same) for size in rows]
    if sizes[0] == batch and sizes[1] in kept:
        return ""
    if sizes[0] == batch and sizes[1] == 1:
        return f"{told}: one row of each sequence"
    return told


def _told(size: Any, inputs: dict[str, tuple[Any, ...]], same: dict[Any, Any]) -> str:
    names = {expr(s).xreplace(same): n for n, s in zip("BS", inputs["input_ids"], strict=True)}
    names |= {expr(s).xreplace(same): "K" for s in inputs.get("logits_to_keep", ())}
    return str(size.xreplace({old: sympy.Symbol(new) for old, new in names.items()}))
