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
import io
import logging
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from kvcompile.collector import paused
from kvcompile.errors import CaptureError, DetectionError, ModelError
from kvcompile.kernels.opaque import OpaqueModule, State, opaque
from kvcompile.passes.base import expr
from kvcompile.passes.calls import WRAPPED, CapturedInputs, example, wrap
from kvcompile.passes.clean import clean
from kvcompile.passes.evaluate import fetch_attr
from kvcompile.passes.feeding import prove
from kvcompile.passes.flex import spell_out
from kvcompile.passes.functionalize import functionalize, mutates
from kvcompile.passes.opaque import CannotBeOpaque, Run, Tracing, innermost, observe, settle
from kvcompile.passes.state import StateRefused, attributes_restored, find_states

log = logging.getLogger(__name__)

# What errors of tracing say where Python asks for values of tensors.
_DATA_DEPENDENT = (
    "data-dependent",
    "DataDependent",
    "DynamicOutputShape",
    "aten._local_scalar_dense",
    "aten.nonzero",
    "unbacked",
)
_BATCH, _SEQ, _KEEP = 3, 11, 5  # example sizes: different, so that no two dynamic sizes share a symbol


@dataclass(frozen=True)
class Captured:
    """A captured model.

    graph_module: placeholders `inputs.names`, output a flat tuple of tensors; cleaned
    out_spec:     pytree spec of what the model returned; `rebuild` applies it
    logits_index: which of the graph's outputs holds the logits
    constants:    leaves of the model's output that are not tensors, by leaf index
    max_seq_len:  the longest sequence the model's own tables and asserts allow; None: no limit in the graph
    route:        how it was captured, e.g. "export, sdpa"; reasons: what failed before, one line each
    opaques:      the modules that run as Python; they live as long as this record
    state_problem: recurrent state that was seen and cannot be carried; empty: none
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
    opaques: tuple[OpaqueModule, ...] = ()
    state_problem: str = ""

    def rebuild(self, outputs: Sequence[Any]) -> Any:
        """The model's own output class around the graph's flat outputs."""
        leaves = list(outputs)
        for index, constant in self.constants:
            leaves.insert(index, constant)
        return pytree.tree_unflatten(leaves, self.out_spec)


def capture(model: nn.Module) -> Captured:
    """Trace `model` into one graph. The model is left exactly as it was.

    Raises ModelError for what is no decoder over token ids, CaptureError when every route fails, DetectionError
    for recurrent state that cannot be carried.
    """
    start = time.perf_counter()
    first, parameters = _signature(model)
    reasons: list[str] = []
    if "position_ids" in parameters and not _counts_from_zero(model, first):
        parameters -= {"position_ids"}
        reasons.append("the model's own positions are not 0, 1, 2, ..: it makes them itself, in the graph")
    variants = list(
        dict.fromkeys(
            CapturedInputs(
                positions and "position_ids" in parameters, keep and "logits_to_keep" in parameters
            )
            for positions, keep in ((True, True), (True, False), (False, True), (False, False))
        )
    )
    with eval_mode(model), attributes_restored(model):
        route = _Route(model, first, "use_cache" in parameters, reasons)
        for implementation in _implementations(model, reasons):
            for inputs in variants:
                name = ", ".join(["export", *([implementation] if implementation else []), *inputs.names])
                try:
                    with _configured(model, implementation), torch.no_grad():
                        program, opaques = route.export(inputs, name)
                    captured = _finish(program, opaques, inputs, name, reasons, start)
                except DetectionError:
                    raise
                except Exception as error:  # export raises many kinds; each becomes one line of the report
                    reasons.append(f"{name}: {_first_line(error)}")
                    log.debug("capture route failed: %s", reasons[-1], exc_info=True)
                    continue
                log.info(
                    "capture: %s, %d nodes, %d opaque, %.2f s",
                    name,
                    len(captured.graph_module.graph.nodes),
                    len(captured.opaques),
                    captured.seconds,
                )
                return replace(captured, state_problem=route.state_problem)
    routes: dict[str, list[str]] = {}
    for reason in reasons:
        name, _, why = reason.partition(": ")
        routes.setdefault(why, []).append(name)
    tried = "\n".join(f"  - {'; '.join(names)}: {why}" for why, names in routes.items())
    raise CaptureError(
        f"{type(model).__name__} could not be traced into one graph with dynamic batch and sequence."
        f" Tried:\n{tried}\n"
        "Remove Python control flow that depends on tensor values or on the exact batch or sequence length."
    )


class _Route:
    """Exports of one model; remembers between attempts which of its parts must stay opaque."""

    def __init__(self, model: nn.Module, first: str, takes_use_cache: bool, reasons: list[str]):
        self.model, self.first, self.reasons = model, first, reasons
        self.names = {module: name for name, module in model.named_modules()}
        self.device = _device(model)
        self.opaque: dict[nn.Module, tuple[str, str]] = {}
        # Until a pass with a cache has shown that there is none. Some models only look at their config.
        self.has_state = takes_use_cache or any(hasattr(config, "use_cache") for config in _configs(model))
        self.state_problem = ""
        self.fixed = {"use_cache": False} if takes_use_cache else {}

    def export(self, inputs: CapturedInputs, name: str) -> tuple[ExportedProgram, tuple[OpaqueModule, ...]]:
        """One attempt; what Python it must not look into is found on the way."""
        wrapper = wrap(self.model, inputs, self.first, self.fixed)

        run = self._eager(wrapper, inputs)
        states = self._states(inputs, run)
        modules = {module: (self.names[module], "keeps recurrent state") for module in states} | self.opaque
        while True:
            observed = observe(list(modules), run) if modules else {}
            tracing = Tracing(modules, observed, states, lambda: wrapper.sizes)
            try:
                with tracing.patched():
                    program = _export(wrapper, inputs, self.device)
                break
            except Exception as error:
                found = self._culprits(error, modules)
                if not found:
                    raise
                self.reasons.append(
                    f"{name}: {_first_line(error)}: {', '.join(path for path, _ in found.values())} "
                    "will run as Python"
                )
                self.opaque |= found
                modules |= found
        for record, number in tracing.made:
            try:
                known = settle(record, observed[record.module], number)
                if record.state is not None:
                    prove(record, *known)
            except (StateRefused, CannotBeOpaque, ValueError) as refused:
                if record.state is None:
                    raise
                raise DetectionError(f"recurrent state cannot be carried: {refused}") from refused
        return program, tuple(record for record, _ in tracing.made)

    def _eager(self, wrapper: nn.Module, inputs: CapturedInputs) -> Run:
        def run(batch: int, tokens: int) -> object:
            return wrapper(*example(inputs, batch, tokens, 2, self.device))

        return run

    def _states(self, inputs: CapturedInputs, run: Run) -> dict[nn.Module, State]:
        if not self.has_state:
            return {}
        cached = wrap(self.model, inputs, self.first, dict.fromkeys(self.fixed, True))
        try:
            with _caching(self.model):
                states = find_states(self.model, self._eager(cached, inputs), run)
        except StateRefused as refused:
            self.state_problem, states = str(refused), {}
        except Exception as error:  # whatever the model raises; it matters only where tokens mix
            log.debug("no pass with the model's own cache", exc_info=True)
            problem = f"the model does not run with a cache of its own: {_first_line(error)}"
            self.state_problem, states = problem, {}
        self.has_state = bool(states)
        return states

    def _culprits(
        self, error: Exception, known: Mapping[nn.Module, object]
    ) -> dict[nn.Module, tuple[str, str]]:
        """The part of the model whose Python depends on values, with all that are like it."""
        if not _depends_on_values(error):
            return {}
        found = innermost(error, self.model)
        if found is None or found[1] in known:
            return {}
        reason = _first_line(error)
        like = [module for module in self.names if type(module) is type(found[1]) and module not in known]
        return {module: (self.names[module], reason) for module in like}


def _depends_on_values(error: BaseException | None) -> bool:
    """Whether tracing met Python that needs to know the values in a tensor."""
    while error is not None:
        text = f"{type(error).__name__}: {error}"
        if any(sign in text for sign in _DATA_DEPENDENT):
            return True
        error = error.__cause__ or error.__context__
    return False


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


def _counts_from_zero(model: nn.Module, first: str) -> bool:
    """Whether leaving out position_ids is the same as passing 0, 1, 2, .. (True where the model cannot be called)."""
    inputs = CapturedInputs(True, False)
    ids, positions = example(inputs, 2, 7, 1, _device(model))
    found = []
    for extra in ({}, {"position_ids": positions}):
        try:
            with eval_mode(model), torch.no_grad():
                found.append(
                    [leaf for leaf in pytree.tree_leaves(model(**{first: ids}, **extra)) if _real(leaf)]
                )
        except Exception as error:  # whatever is wrong shows better while it is traced
            log.debug("positions were not compared: %s", error, exc_info=True)
            return True
    return all(torch.allclose(a, b, rtol=1e-2, atol=1e-3) for a, b in zip(*found, strict=False))


def _real(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


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
def _configured(model: nn.Module, implementation: str | None) -> Iterator[None]:
    """The attention implementation on every config, and no cache by default, for the time of one export."""
    saved = [(config, dict(config.__dict__)) for config in _configs(model)]
    try:
        for config, _ in saved:
            if implementation and config._attn_implementation != implementation:
                config._attn_implementation = implementation
            if getattr(config, "use_cache", False):  # some models do not pass the argument on
                config.use_cache = False
        yield
    finally:
        for config, attributes in saved:
            config.__dict__.clear()
            config.__dict__.update(attributes)


@contextmanager
def _caching(model: nn.Module) -> Iterator[None]:
    """With a cache by default."""
    saved = [(config, config.use_cache) for config in _configs(model) if hasattr(config, "use_cache")]
    try:
        for config, _ in saved:
            config.use_cache = True
        yield
    finally:
        for config, value in saved:
            config.use_cache = value


def _export(wrapper: nn.Module, inputs: CapturedInputs, device: torch.device) -> ExportedProgram:
    rank2 = {
        0: Dim.DYNAMIC,
        1: Dim.DYNAMIC,
    }  # ranges and equal sizes are inferred; specialisation is an error
    dims = {"input_ids": rank2, "position_ids": rank2, "logits_to_keep": {0: Dim.DYNAMIC}}
    names = inputs.names
    with paused(), redirect_stderr(io.StringIO()):  # export prints its half-made graph where it fails
        return torch.export.export(
            wrapper,
            example(inputs, _BATCH, _SEQ, _KEEP, device),
            dynamic_shapes=tuple(dims[name] for name in names),
            strict=False,
        )


def _module(program: ExportedProgram, reasons: list[str]) -> GraphModule:
    """The program as one module, without in-place operators: a node's value would depend on when it is read."""
    module = program.module(check_guards=False)
    assert isinstance(module, GraphModule)
    spell_out(module)
    if mutates(module):
        problem = functionalize(module)
        if problem:  # slow, but it knows every operator
            reasons.append(f"decomposed by torch, because of an in-place operator: {problem}")
            module = program.run_decompositions({}).module(check_guards=False)
    assert isinstance(module, GraphModule)
    return module


def _finish(
    program: ExportedProgram,
    opaques: tuple[OpaqueModule, ...],
    inputs: CapturedInputs,
    route: str,
    reasons: list[str],
    start: float,
) -> Captured:
    """From an exported program to a plain graph module with the model's own names."""
    module = _module(program, reasons)
    graph = module.graph
    graph.set_codegen(CodeGen())
    attributes: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            found = fetch_attr(module, str(node.target))
            node.target = _strip(str(node.target))
            node._rename(node.name.removeprefix(f"{WRAPPED}_"))
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

    records = {record.key: record for record in opaques}
    for node in graph.nodes:
        if node.target is opaque:
            given, key = node.args
            node.args = ([given[index] for index in records[key].kept], key)
    graph_module = GraphModule(attributes, graph, "Captured")
    clean(graph_module)
    used = {node.args[1] for node in graph_module.graph.nodes if node.target is opaque}
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
        tuple(record for record in opaques if record.key in used),
    )


def _strip(path: str) -> str:
    return path.removeprefix(WRAPPED).removeprefix(".")


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
    skip = ("/torch/", "/passes/", "/kernels/", "/kvcompile/", "<")
    own = [frame for frame in frames if not any(part in frame.filename for part in skip)]
    where = f" ({own[-1].filename.rsplit('/', 1)[-1]}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {text[:300]}{where}"
