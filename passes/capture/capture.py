"""Capture: a model becomes one aten graph with dynamic batch and sequence, without a cache.

`torch.export` traces a wrapper that calls the model with `input_ids` and, where its forward
takes them, explicit `position_ids` [B, S] and `logits_to_keep` (an index tensor [K]); `use_cache=False`.
Nothing depends on a model's class, only on the signature of its forward. The weights of the graph are the
model's own tensors.

Tried in order, the first that is right for all sizes wins: the attention implementation the model has (or sdpa where
it is neither sdpa nor eager), the other one; each without and then with Dynamo (passes/capture/trace.py); each with
both extra inputs, without logits_to_keep, without position_ids.

A graph is believed when what it takes for granted about sizes has been looked at (passes/capture/guards.py), when the
forward changes nothing that a later one reads (passes/capture/harmless.py), and when it gives what the model gives at
other sizes than those it was traced with.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from kvcompile.errors import CaptureError, DetectionError, ModelError
from kvcompile.kernels.ops.opaque import OpaqueModule, State, opaque
from kvcompile.original.outputs import Outputs
from kvcompile.passes.capture.as_eager import as_eager
from kvcompile.passes.capture.changes import Place
from kvcompile.passes.capture.first_line import first_line
from kvcompile.passes.capture.guards import TOKENS, Threshold, sizes_to_try, threshold
from kvcompile.passes.capture.harmless import check_changes, check_hidden_writes
from kvcompile.passes.capture.inputs import CapturedInputs, example, wrap
from kvcompile.passes.capture.joined import join, worth_it
from kvcompile.passes.capture.last_token import LastToken
from kvcompile.passes.capture.opaque import CannotBeOpaque, Run, Tracing, innermost, observe, settle
from kvcompile.passes.capture.plain import Plain, plain
from kvcompile.passes.capture.shown import Shown
from kvcompile.passes.capture.step_proof import Example
from kvcompile.passes.capture.trace import BATCH, SEQ, WAYS, Traced, Way, trace
from kvcompile.passes.capture.traced_once import Once
from kvcompile.passes.graph import expr, module_path, told
from kvcompile.passes.graph_module import unwritten
from kvcompile.passes.probe.steps import Steps
from kvcompile.passes.recurrent.replay import prove
from kvcompile.passes.recurrent.state import StateRefused, attributes_restored, find_states
from kvcompile.passes.table import disabled, graph_pass
from kvcompile.util.serial import as_the_caller

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
_LONGEST = 4096  # tokens of a comparison
_CHECKED = ((1, TOKENS), (1, SEQ))  # sizes at which it is seen what a forward changes
_OTHERS = ((2, 17), (4, 6))  # sizes at which a graph that Dynamo made is compared besides
_VARIANTS = tuple(CapturedInputs(*given) for given in product((True, False), repeat=2))  # in this order


@dataclass(frozen=True)
class Captured:
    """A captured model.

    graph_module: placeholders `inputs.names`, output a flat tuple of tensors; cleaned
    out_spec:     pytree spec of what the model returned; `rebuild` applies it
    logits_index: which of the graph's outputs holds the logits
    constants:    leaves of the model's output that are not tensors, by leaf index
    max_seq_len:  the longest sequence the model's own tables and asserts allow; None: no limit in the graph
    route:        how it was captured, e.g. "export, sdpa" or "strict export, eager"
    reasons:      what failed before, one line each
    opaques:      the modules that run as Python; they live as long as this record
    state_problem: recurrent state that was seen and cannot be carried; empty: none
    last:         set where the model itself gives the last token's logits alone
    changing:     what a forward changes without harm, as (path of the module, attribute)
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
    last: LastToken | None = None
    changing: frozenset[tuple[str, str]] = frozenset()

    @property
    def rebuild(self) -> Outputs:
        """The model's own output class around the graph's flat outputs."""
        flat = self.last is not None and self.last.flat
        return Outputs(self.out_spec, self.constants, self.logits_index if flat else None)


def nothing(*_: object) -> None:
    """Nothing is made beside."""


@graph_pass("capture")
@torch.random.fork_rng(devices=[])  # tracing runs the model, which may draw numbers
def capture(
    model: nn.Module,
    foresee: Callable[[Captured], object] = nothing,
    tracing: Callable[[], object] = nothing,
) -> Captured:
    """Trace `model` into one graph. The model is left exactly as it was.

    foresee: called with each graph before it is compared with the model, so that what others make of it, compilers
        above all, is made beside; one that is not right is not the one that is given back
    tracing: called once, when the model's own forwards have run that come before: Python has one core from then on,
        and for seconds

    Raises ModelError for what is no decoder over token ids, CaptureError when every route fails, DetectionError
    for recurrent state that cannot be carried.
    """
    start, beside = time.perf_counter(), 0.0
    first, parameters = _signature(model)
    reasons: list[str] = []
    shown = Shown(model, first, frozenset({"position_ids", "logits_to_keep"} & parameters), device_of(model))

    pending = [tracing]

    def begin() -> None:
        while pending:
            pending.pop()()

    def new_route() -> _Route:
        return _Route(model, first, "use_cache" in parameters, reasons, begin)

    with eval_mode(model), attributes_restored(model):
        route = new_route()
        for implementation, way, inputs in product(_implementations(model, reasons), WAYS, _VARIANTS):
            if (way == "strict export" and not route.may_be_strict) or not shown.may_be(inputs):
                continue
            name = ", ".join([way, *([implementation] if implementation else []), *inputs.names])
            before, problem = tuple(reasons), None
            try:
                with _configured(model, implementation), torch.no_grad():
                    attempt = route.attempt(inputs, name, way)
                begun = time.perf_counter()
                foresee(attempt.captured)
                beside += time.perf_counter() - begun
                with _configured(model, implementation), torch.no_grad():
                    attempt.confirm()
                if _is_another(model, implementation):  # which may compute something else
                    with _configured(model, None), torch.no_grad():
                        attempt.confirm(traced_under=implementation)
            except Exception as error:  # export raises many kinds; each becomes one line of the report
                problem = error
            # Asked last, for compilers of what was foreseen go on beside. Where it is not shown, nothing was attempted.
            if not shown.left_out(inputs):
                reasons[:] = [*before, *shown.news()]
                route = new_route()
            elif problem is None:
                seconds = time.perf_counter() - start - beside
                found = replace(attempt.captured, seconds=seconds, state_problem=route.state_problem)
                nodes, opaque_ = len(found.graph_module.graph.nodes), len(found.opaques)
                log.info("capture: %s, %d nodes, %d opaque, %.2f s", name, nodes, opaque_, seconds)
                return found
            elif isinstance(problem, ModelError) and not isinstance(problem, CaptureError):
                raise problem  # no other way makes it another model
            else:
                reasons.append(f"{name}: {first_line(problem)}")
                log.debug("capture route failed: %s", reasons[-1], exc_info=problem)
    problems = [_declined(model, first, size) for size in (*_CHECKED, (BATCH, SEQ))]
    if all(problems):
        raise ModelError(
            f"{type(model).__name__} does not run on token ids: {problems[-1]}. Expected a decoder: token ids, int64 "
            "[batch, sequence], to logits [batch, sequence, vocabulary]"
        )
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

    def __init__(
        self,
        model: nn.Module,
        first: str,
        takes_use_cache: bool,
        reasons: list[str],
        begin: Callable[[], None],
    ):
        self.model, self.first, self.reasons = model, first, reasons
        self.begin = begin  # what goes on beside Python; until then, it has all cores
        self.names = {module: name for name, module in model.named_modules()}
        self.device = device_of(model)
        self.opaque: dict[nn.Module, tuple[str, str]] = {}
        # Until a pass with a cache has shown that there is none. Some models only look at their config.
        self.has_state = takes_use_cache or any(hasattr(config, "use_cache") for config in _configs(model))
        self.has_mixers = self.checked = False
        self.once = not disabled(
            "traced_once"
        )  # until it is known that equal layers must be traced one by one
        self.written: tuple[Place, ...] = ()
        self.changes: tuple[Place, ...] | None = (
            None  # what a forward without a cache changes, once it is known
        )
        self.state_problem = ""
        self.asked: list[str] = []  # lines that ask whether they are traced
        self.fixed = {"use_cache": False} if takes_use_cache else {}

    @property
    def may_be_strict(self) -> bool:
        """Whether Dynamo may look at the Python of all its parts."""
        return not self.opaque and not self.has_mixers

    def attempt(self, inputs: CapturedInputs, name: str, way: Way) -> _Attempt:
        """One attempt: the graph, which is still to be confirmed."""
        calls = Calls(self, inputs)
        if not self.checked:  # before tracing: what writes behind torch's back can crash it
            known, self.written, self.changes = check_changes(self.model, calls, _CHECKED)
            # The model's Python may read what a layer leaves behind.
            self.once = self.once and not self.changes
            calls.known = dict(zip(_CHECKED, known, strict=True))
            self.checked = True
        others = _OTHERS if way != "export" else ()
        with unwritten() if way == "export" else nullcontext():
            traced, opaques, found = self._plain(inputs, name, way)
        limit = _max_seq_len(traced.program, found.graph_module)
        both = None if opaques or found.last else self._both_sides(traced, found, inputs, way)
        if both is not None:
            found, sizes, limit = both
            sizes = (*sizes, *others)
        else:
            sizes = (*sizes_to_try(traced), *others)
        used = {node.args[1] for node in found.graph_module.graph.nodes if node.target is opaque}
        captured = Captured(
            found.graph_module,
            found.inputs,
            found.out_spec,
            found.logits_index,
            name,
            (*self.reasons, *found.reasons),
            0.0,
            found.constants,
            limit,
            tuple(record for record in opaques if record.key in used),
            last=found.last,
            changing=frozenset((place.label, place.name) for place in self.changes or ()),
        )
        check_hidden_writes(self.written, captured.opaques)
        return _Attempt(captured, calls, sizes)

    def _plain(
        self, inputs: CapturedInputs, name: str, way: Way
    ) -> tuple[Traced, tuple[OpaqueModule, ...], Plain]:
        """The traced program and its graph; layer by layer where equal layers cannot be traced once."""
        while True:
            traced, opaques = self.export(inputs, name, way)
            try:
                found = plain(traced, inputs, opaques)
            except Exception as error:
                if traced.once is None:
                    raise
                log.debug("equal layers are not traced once: %s", error)
                self.once = False
                continue
            chosen = self._choosing(found.graph_module) if way == "export" else {}
            if not chosen:
                return traced, opaques, found
            names = ", ".join(path for path, _ in chosen.values())
            self.reasons.append(f"{name}: {next(iter(chosen.values()))[1]}: {names} will run as Python")
            self.opaque |= chosen

    def _choosing(self, graph_module: GraphModule) -> dict[nn.Module, tuple[str, str]]:
        """The part of the model that makes tensors of as many elements as values say, with all that are like it."""
        modules = {name: module for module, name in self.names.items() if name}
        for node in graph_module.graph.nodes:
            sized = isinstance(node.meta.get("val"), (Tensor, list, tuple)) and _of_values(node)
            if node.op != "call_function" or not sized or any(map(_of_values, node.all_input_nodes)):
                continue  # of numbers that are read (sizes of experts' parts), passes/dependence/experts.py knows
            module = modules.get(module_path(node))
            if module is not None and module not in self.opaque:
                return self._like(
                    module, f"how many elements {told(node)} gives depends on values", self.opaque
                )
        return {}

    def _like(
        self, module: nn.Module, reason: str, known: Mapping[nn.Module, object]
    ) -> dict[nn.Module, tuple[str, str]]:
        """A part of the model and all of its class that are traced so far, with why they run as Python."""
        like = [each for each in self.names if type(each) is type(module) and each not in known]
        return {each: (self.names[each], reason) for each in like}

    def _both_sides(
        self, traced: Traced, found: Plain, inputs: CapturedInputs, way: Way
    ) -> tuple[Plain, tuple[tuple[int, int], ...], int | None] | None:
        """One graph for the lengths on both sides of a threshold, sizes to try it at, and its limit; or None."""
        asked = threshold(traced)
        if asked is None or not worth_it(found.graph_module, asked):
            return None
        # Another number than that of sequences, or the two would share a symbol.
        length = asked.length + 6 if asked.below else next(n for n in (asked.length - 1, 2) if n != BATCH)
        try:
            with as_eager(self.model) if way == "export" else nullcontext():  # Dynamo knows the questions
                second = trace(
                    wrap(self.model, inputs, self.first, self.fixed),
                    inputs,
                    self.device,
                    way,
                    (BATCH, length),
                )
            other = plain(second, inputs, ())
        except (
            Exception
        ) as error:  # there is no other side: the model refuses such lengths, or needs a third graph
            log.debug("lengths from %s: %s", asked, error)
            return None
        sides = [(traced, found), (second, other)]
        below, above = sides if asked.below else sides[::-1]
        if threshold(below[0]) != Threshold(asked.length, True):
            return None
        sizes = (*sizes_to_try(below[0]), *sizes_to_try(above[0], asked.length))
        limit = _max_seq_len(above[0].program, above[1].graph_module)
        at = example(inputs, BATCH, SEQ, 2, self.device)
        joined = join(below[1].graph_module, above[1].graph_module, asked.length, at)
        if joined is None:
            return None
        around = [(2, asked.length + n) for n in (-1, 0, 1) if 0 < asked.length + n <= _LONGEST]
        return replace(below[1], graph_module=joined), (*sizes, *around), limit

    def export(
        self, inputs: CapturedInputs, name: str, way: Way = "export"
    ) -> tuple[Traced, tuple[OpaqueModule, ...]]:
        """One attempt; what Python it must not look into is found on the way."""
        wrapper = wrap(self.model, inputs, self.first, self.fixed)
        if way != "export":
            if self.asked:  # Dynamo answers itself
                raise CaptureError(
                    f"the forward asks whether it is traced, and may do something else then ({self.asked[0]}); what it "
                    "does without cannot be traced"
                )
            self.begin()
            with attributes_restored(self.model):
                return trace(wrapper, inputs, self.device, way), ()
        run = self._eager(wrapper, inputs)
        states = self._states(inputs, run)
        modules = {module: (self.names[module], "keeps recurrent state") for module in states} | self.opaque
        self.begin()
        while True:
            with attributes_restored(self.model):  # what runs before must not be what is traced
                observed = observe(list(modules), run) if modules else {}
            tracing = Tracing(modules, observed, states, lambda: wrapper.sizes)
            try:
                with attributes_restored(self.model), tracing.patched(), as_eager(self.model) as asked:
                    try:
                        once = Once.of(self.model) if self.once and not modules else None
                        traced = trace(wrapper, inputs, self.device, once=once)
                    finally:
                        self.asked = self.asked or asked
                break
            except Exception as error:
                if once is not None:
                    log.debug("equal layers are not traced once: %s", error)
                    self.once = False
                    continue
                found = self._culprits(error, modules)
                if not found:
                    raise
                self.reasons.append(
                    f"{name}: {first_line(error)}: {', '.join(path for path, _ in found.values())} "
                    "will run as Python"
                )
                self.opaque |= found
                modules |= found
        for record, number in tracing.made:
            try:
                known = settle(record, observed[record.module], number)
                record.example = Example.of(record, known[0])
                if record.state is not None:
                    prove(record, *known)
            except (StateRefused, CannotBeOpaque, ValueError) as refused:
                if record.state is None:
                    raise
                raise DetectionError(f"recurrent state cannot be carried: {refused}") from refused
        return traced, tuple(record for record, _ in tracing.made)

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
                states = find_states(
                    self.model, self._eager(cached, inputs), None if self.changes == () else run
                )
        except StateRefused as refused:
            self.state_problem, states = str(refused), {}
        except Exception as error:  # whatever the model raises; it matters only where tokens mix
            log.debug("no pass with the model's own cache", exc_info=True)
            problem = f"the model does not run with a cache of its own: {first_line(error)}"
            self.state_problem, states = problem, {}
        self.has_state = self.has_mixers = bool(states)
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
        return self._like(found[1], first_line(error), known)


class Calls:
    """The model's own forward, with the inputs that its graph has."""

    def __init__(self, route: _Route, inputs: CapturedInputs):
        self.model = route.model
        self.names, self.device = inputs, route.device
        self.wrapper = wrap(route.model, inputs, route.first, route.fixed)
        self.known: dict[tuple[int, int], Any] = {}  # results by sequences and tokens

    def inputs(self, batch: int, tokens: int, seed: int = 0) -> tuple[Tensor, ...]:
        return example(self.names, batch, tokens, min(2, tokens), self.device, seed)

    def __call__(self, inputs: tuple[Tensor, ...]) -> Any:
        with torch.no_grad():
            return self.wrapper(*inputs)


@dataclass(frozen=True)
class _Attempt:
    """A graph, and the sizes [sequences, tokens] at which it must give what the model gives."""

    captured: Captured
    calls: Calls
    sizes: Sequence[tuple[int, int]]

    def confirm(self, traced_under: str | None = None) -> None:
        """Compare at these sizes.

        traced_under: the attention implementation, where the model has another one now; None: it is the same

        Raises:
            CaptureError: the graph gives something else.
        """
        for batch, tokens in self.sizes:
            if self.captured.max_seq_len is not None and tokens > self.captured.max_seq_len:
                continue
            inputs = self.calls.inputs(batch, tokens)
            output = None if traced_under else self.calls.known.get((batch, tokens))
            if output is None:
                with attributes_restored(self.calls.model):
                    try:
                        output = self.calls(inputs)
                    except Exception as error:  # nothing to compare with: the model refuses this size itself
                        log.debug("%d x %d tokens: %s", batch, tokens, error)
                        continue
            problem = _differs(self.captured, inputs, output)
            if problem and traced_under:
                raise CaptureError(
                    f"the model computes something else under the attention implementation that it has ({problem}): "
                    f"load it with attn_implementation={traced_under!r} if that is what it shall compute"
                )
            if problem:
                raise CaptureError(
                    f"the graph does not compute what the model computes for {batch} x {tokens} tokens: {problem}."
                    " Remove Python control flow that depends on the exact batch or sequence length"
                )


def _differs(captured: Captured, inputs: tuple[Tensor, ...], output: Any) -> str:
    """How the graph's logits differ from the model's; empty where they are the same to rounding."""
    leaves = pytree.tree_leaves(output)
    constant = {index for index, _ in captured.constants}
    wanted = [leaf for index, leaf in enumerate(leaves) if index not in constant][captured.logits_index]
    if captured.last is not None:
        inputs = (*inputs, torch.tensor([inputs[0].shape[1] - 1], device=inputs[0].device))
    try:
        with torch.no_grad():
            found = Steps(captured.graph_module).run(*inputs)[captured.logits_index]
    except Exception as error:  # whatever an operator raises for a shape that it cannot take
        return first_line(error)
    if captured.last is not None and captured.last.flat:
        found = found[:, 0]
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"logits {found.dtype}{list(found.shape)}, the model's are {wanted.dtype}{list(wanted.shape)}"
    one, other = (x.double().nan_to_num(0.0, 0.0, 0.0) for x in (found, wanted))
    size = other.square().mean().sqrt().clamp(min=1e-30)
    distance = float((one - other).square().mean().sqrt() / size)
    allowed = 1e-4 if wanted.dtype in (torch.float32, torch.float64) else 3e-2
    return "" if distance <= allowed else f"the logits differ by {distance:.1e} of their size"


def _declined(model: nn.Module, first: str, size: tuple[int, int]) -> str:
    """What a model raises for token ids of this size, in a line; empty: nothing."""
    (ids,) = example(CapturedInputs(False, False), *size, 1, device_of(model))
    with eval_mode(model), attributes_restored(model), torch.no_grad(), as_the_caller():
        try:
            model(**{first: ids})
        except Exception as error:  # a model raises anything
            return first_line(error)
    return ""


def _of_values(node: Node) -> bool:
    """Whether what a node gives, or how many elements it has, are numbers that values in a tensor say."""
    return bool(free_unbacked_symbols(node.meta.get("val")))


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


def device_of(model: nn.Module) -> torch.device:
    """Where a model's first weight is."""
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


def _is_another(model: nn.Module, implementation: str | None) -> bool:
    """Whether the model has an attention implementation that runs anywhere, and it is not this one.

    The two are not always the same: where transformers leaves a mask out for SDPA, its flag says what it is, and that
    may be another one (PaliGemma without token types).
    """
    own = {config._attn_implementation for config in _configs(model)}
    return implementation is not None and own <= {"sdpa", "eager"} and own != {implementation}


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


def _max_seq_len(program: ExportedProgram, graph_module: GraphModule) -> int | None:
    input_ids = next(node for node in graph_module.graph.nodes if node.op == "placeholder")
    bound = program.range_constraints.get(expr(input_ids.meta["val"].shape[1]))
    if bound is None or not getattr(bound.upper, "is_Integer", False) or int(bound.upper) >= 2**31:
        return None
    return int(bound.upper)
