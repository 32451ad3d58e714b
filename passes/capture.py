"""Capture: a model becomes one aten graph with dynamic batch and sequence, without a cache.

`torch.export` (non-strict) traces a wrapper that calls the model with `input_ids` and, where its forward
takes them, explicit `position_ids` [B, S] and `logits_to_keep` (an index tensor [K]); `use_cache=False`.
Nothing depends on a model's class, only on the signature of its forward. The weights of the graph are the
model's own tensors.

Tried in order, the first that exports wins: the attention implementation the model has (or sdpa where it is
neither sdpa nor eager), the other one; each with both extra inputs, without logits_to_keep, without
position_ids.
"""

from __future__ import annotations

import inspect
import logging
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from kvcompile.errors import CaptureError, ModelError
from kvcompile.passes.base import expr
from kvcompile.passes.clean import clean
from kvcompile.passes.evaluate import fetch_attr

log = logging.getLogger(__name__)

_WRAPPED = "kvcompile_wrapped"  # the wrapper's attribute; stripped from every name afterwards
_BATCH, _SEQ, _KEEP = 3, 11, 5  # example sizes: different, so that no two dynamic sizes share a symbol


@dataclass(frozen=True)
class CapturedInputs:
    """Which inputs the graph has besides `input_ids` [B, S]: `position_ids` [B, S], `logits_to_keep` [K]."""

    position_ids: bool
    logits_to_keep: bool

    @property
    def names(self) -> tuple[str, ...]:
        extra = (("position_ids", self.position_ids), ("logits_to_keep", self.logits_to_keep))
        return ("input_ids", *(name for name, present in extra if present))


@dataclass(frozen=True)
class Captured:
    """A captured model.

    graph_module: placeholders `inputs.names`, output a flat tuple of tensors; cleaned
    out_spec:     pytree spec of what the model returned; `rebuild` applies it
    logits_index: which of the graph's outputs holds the logits
    constants:    leaves of the model's output that are not tensors, by leaf index
    max_seq_len:  the longest sequence the model's own tables and asserts allow; None: no limit in the graph
    route:        how it was captured, e.g. "export, sdpa"; reasons: what failed before, one line each
    """

    graph_module: GraphModule
    inputs: CapturedInputs
    out_spec: pytree.TreeSpec
    logits_index: int
    route: str
    reasons: tuple[str, ...]
    seconds: float
    constants: tuple[tuple[int, Any], ...] = ()
    max_seq_len: int | None = None

    def rebuild(self, outputs: Sequence[Any]) -> Any:
        """The model's own output class around the graph's flat outputs."""
        leaves = list(outputs)
        for index, constant in self.constants:
            leaves.insert(index, constant)
        return pytree.tree_unflatten(leaves, self.out_spec)


class _Wrapper(nn.Module):
    """Calls the model by keyword; the forward of each subclass names exactly the inputs of the graph."""

    def __init__(self, model: nn.Module, first: str, fixed: dict[str, Any]):
        super().__init__()
        setattr(self, _WRAPPED, model)
        self.first, self.fixed = first, fixed

    def call(self, input_ids: Tensor, **extra: Tensor) -> Any:
        model = getattr(self, _WRAPPED)
        return model(**{self.first: input_ids}, **extra, **self.fixed)


class _Plain(_Wrapper):
    def forward(self, input_ids: Tensor) -> Any:
        return self.call(input_ids)


class _Positions(_Wrapper):
    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        return self.call(input_ids, position_ids=position_ids)


class _Keep(_Wrapper):
    def forward(self, input_ids: Tensor, logits_to_keep: Tensor) -> Any:
        return self.call(input_ids, logits_to_keep=logits_to_keep)


class _PositionsKeep(_Wrapper):
    def forward(self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor) -> Any:
        return self.call(input_ids, position_ids=position_ids, logits_to_keep=logits_to_keep)


_WRAPPERS = {
    CapturedInputs(False, False): _Plain,
    CapturedInputs(True, False): _Positions,
    CapturedInputs(False, True): _Keep,
    CapturedInputs(True, True): _PositionsKeep,
}


def capture(model: nn.Module) -> Captured:
    """Trace `model` into one graph. The model is left exactly as it was.

    Raises ModelError for what is no decoder over token ids, CaptureError when every route fails.
    """
    start = time.perf_counter()
    first, parameters = _signature(model)
    fixed = {"use_cache": False} if "use_cache" in parameters else {}
    variants = list(
        dict.fromkeys(
            CapturedInputs(
                positions and "position_ids" in parameters, keep and "logits_to_keep" in parameters
            )
            for positions, keep in ((True, True), (True, False), (False, True), (False, False))
        )
    )
    reasons: list[str] = []
    with eval_mode(model):
        for implementation in _implementations(model, reasons):
            for inputs in variants:
                route = ", ".join(["export", *([implementation] if implementation else []), *inputs.names])
                try:
                    with _attention_implementation(model, implementation), torch.no_grad():
                        program = _export(_WRAPPERS[inputs](model, first, fixed), inputs, _device(model))
                    captured = _finish(program, inputs, route, reasons, start)
                except Exception as error:  # export raises many kinds; each becomes one line of the report
                    reasons.append(f"{route}: {_first_line(error)}")
                    log.debug("capture route failed: %s", reasons[-1], exc_info=True)
                    continue
                log.info(
                    "capture: %s, %d nodes, %.2f s",
                    route,
                    len(captured.graph_module.graph.nodes),
                    captured.seconds,
                )
                return captured
    tried = "\n".join(f"  - {reason}" for reason in reasons)
    raise CaptureError(
        f"{type(model).__name__} could not be traced into one graph with dynamic batch and sequence."
        f" Tried:\n{tried}\n"
        "Remove Python control flow that depends on tensor values or on the exact batch or sequence length."
    )


def _signature(model: nn.Module) -> tuple[str, frozenset[str]]:
    """The name of the parameter that takes the token ids, and the names of all parameters."""
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise ModelError(f"expected a torch.nn.Module, got {name}")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder model; kvcompile takes decoder-only models")
    parameters = inspect.signature(model.forward).parameters
    required = [
        p.name
        for p in parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    first = "input_ids" if "input_ids" in parameters else required[0] if len(required) == 1 else ""
    if not first or set(required) - {first}:
        raise ModelError(
            f"{name}.forward must be callable with input_ids alone; it takes ({', '.join(parameters)})"
        )
    if "decoder_input_ids" in parameters:
        raise ModelError(f"{name} is an encoder-decoder model; kvcompile takes decoder-only models")
    return first, frozenset(parameters)


def _device(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in [*model.parameters(), *model.buffers()]), torch.device("cpu"))


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode, with each module's own training flag put back."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


def _configs(model: nn.Module) -> list[Any]:
    """Every config object of the model and its parts that chooses an attention implementation."""
    found = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) is not None:
            found[id(config)] = config
    return list(found.values())


def _implementations(model: nn.Module, reasons: list[str]) -> list[str | None]:
    """The attention implementations to try, in order; [None] for a model that has no such setting."""
    present = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if present is None:
        return [None]
    if present in ("sdpa", "eager"):
        first = present
    else:
        # Softcapping exists in the flash and eager spellings; sdpa would drop it silently.
        softcap = any(getattr(config, "attn_logit_softcapping", None) for config in _configs(model))
        first = "eager" if softcap or not getattr(model, "_supports_sdpa", True) else "sdpa"
        reasons.append(f"attention implementation {present!r} is opaque to export; traced under {first!r}")
    second = "eager" if first == "sdpa" else "sdpa"
    return [first] if second == "sdpa" and not getattr(model, "_supports_sdpa", False) else [first, second]


@contextmanager
def _attention_implementation(model: nn.Module, implementation: str | None) -> Iterator[None]:
    """Set the attention implementation on every config for the time of one export."""
    saved = [(config, dict(config.__dict__)) for config in _configs(model)] if implementation else []
    try:
        for config, _ in saved:
            if config._attn_implementation != implementation:
                config._attn_implementation = implementation
        yield
    finally:
        for config, attributes in saved:
            config.__dict__.clear()
            config.__dict__.update(attributes)


def _export(wrapper: nn.Module, inputs: CapturedInputs, device: torch.device) -> ExportedProgram:
    example = {
        "input_ids": torch.zeros(_BATCH, _SEQ, dtype=torch.int64, device=device),
        "position_ids": torch.arange(_SEQ, device=device).expand(_BATCH, _SEQ),
        "logits_to_keep": torch.arange(_KEEP, device=device),
    }
    rank2 = {
        0: Dim.DYNAMIC,
        1: Dim.DYNAMIC,
    }  # ranges and equal sizes are inferred; specialisation is an error
    dims = {"input_ids": rank2, "position_ids": rank2, "logits_to_keep": {0: Dim.DYNAMIC}}
    names = inputs.names
    program = torch.export.export(
        wrapper,
        tuple(example[name] for name in names),
        dynamic_shapes=tuple(dims[name] for name in names),
        strict=False,
    )
    mutates = any(
        isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        for node in program.graph.nodes
    )
    # In-place operators would make a node's value depend on when it is read. Slow: only where there are any.
    return program.run_decompositions({}) if mutates else program


def _finish(
    program: ExportedProgram, inputs: CapturedInputs, route: str, reasons: list[str], start: float
) -> Captured:
    """From an exported program to a plain graph module with the model's own names."""
    module = program.module(check_guards=False)
    assert isinstance(module, GraphModule)
    graph = module.graph
    graph.set_codegen(CodeGen())
    attributes: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            found = fetch_attr(module, str(node.target))
            node.target = _strip(str(node.target))
            node._rename(node.name.removeprefix(f"{_WRAPPED}_"))
            attributes[node.target] = found
        stack = node.meta.get("nn_module_stack")
        if stack:
            node.meta["nn_module_stack"] = {key: (_strip(path), kind) for key, (path, kind) in stack.items()}
        if node.op == "output":
            leaves = pytree.tree_leaves(node.args[0])
            node.args = (tuple(leaf for leaf in leaves if isinstance(leaf, Node)),)
    for node in list(graph.nodes):  # call_module nodes are export's guards; nothing else survives tracing
        if node.op == "call_module":
            graph.erase_node(node)
    constants = tuple((i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, Node))
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, name in zip(placeholders, inputs.names, strict=True):
        node.target = node.name = name

    graph_module = GraphModule(attributes, graph, "Captured")
    clean(graph_module)
    out_spec = program.call_spec.out_spec
    assert out_spec is not None
    return Captured(
        graph_module,
        inputs,
        out_spec,
        _logits_index(graph_module, out_spec, constants),
        route,
        tuple(reasons),
        time.perf_counter() - start,
        constants,
        _max_seq_len(program, placeholders[0]),
    )


def _strip(path: str) -> str:
    return path.removeprefix(_WRAPPED).removeprefix(".")


def _logits_index(
    graph_module: GraphModule, spec: pytree.TreeSpec, constants: tuple[tuple[int, Any], ...]
) -> int:
    """The output called `logits`, else the first of rank 3 with a static last size."""
    output = next(node for node in graph_module.graph.nodes if node.op == "output")
    tensors = output.args[0]
    if isinstance(spec.context, (list, tuple)) and "logits" in spec.context:
        leaf = list(spec.context).index("logits")
        return leaf - sum(1 for index, _ in constants if index < leaf)
    for index, node in enumerate(tensors):
        val = node.meta["val"]
        if val.dim() == 3 and not expr(val.shape[-1]).free_symbols:
            return index
    raise ModelError("the model returns no logits: expected an output of shape [batch, sequence, vocabulary]")


def _max_seq_len(program: ExportedProgram, input_ids: Node) -> int | None:
    bound = program.range_constraints.get(expr(input_ids.meta["val"].shape[1]))
    if bound is None or not getattr(bound.upper, "is_Integer", False) or int(bound.upper) >= 2**31:
        return None
    return int(bound.upper)


def _first_line(error: Exception) -> str:
    """The first line of an error, and the innermost line of the model's own code it came through."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    detail = next((line.lstrip("- ") for line in lines[1:] if line.startswith("- ")), "")
    if (
        "onstraints violated" in text and detail
    ):  # the first line of this one says nothing, the first item all
        text = f"the example's sizes were specialised: {detail.split('. If')[0]}"
    frames = traceback.extract_tb(error.__traceback__)
    skip = ("/torch/", "/passes/capture.py", "/kvcompile/", "<")
    own = [frame for frame in frames if not any(part in frame.filename for part in skip)]
    where = f" ({own[-1].filename.rsplit('/', 1)[-1]}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {text[:300]}{where}"
