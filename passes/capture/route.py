"""One route of capture: exports of a model under one setting, from the first trace to a graph that can be confirmed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace

from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from kvcompile.errors import CaptureError, DetectionError
from kvcompile.kernels.ops.opaque import OpaqueModule, State, opaque
from kvcompile.passes.capture.as_eager import as_eager
from kvcompile.passes.capture.attempt import Attempt, Calls
from kvcompile.passes.capture.captured import Captured, limit_of
from kvcompile.passes.capture.changes import Place
from kvcompile.passes.capture.first_line import first_line
from kvcompile.passes.capture.guards import TOKENS, Threshold, sizes_to_try, threshold
from kvcompile.passes.capture.harmless import check_changes, check_hidden_writes
from kvcompile.passes.capture.inputs import CapturedInputs, device_of, example, wrap
from kvcompile.passes.capture.joined import join, worth_it
from kvcompile.passes.capture.opaque import CannotBeOpaque, Run, Tracing, innermost, observe, settle
from kvcompile.passes.capture.plain import Plain, plain
from kvcompile.passes.capture.settings import caching, configs
from kvcompile.passes.capture.step_proof import Example
from kvcompile.passes.capture.trace import BATCH, SEQ, Traced, Way, trace
from kvcompile.passes.capture.traced_once import Once
from kvcompile.passes.graph import module_path, told
from kvcompile.passes.graph_module import unwritten
from kvcompile.passes.recurrent.replay import prove
from kvcompile.passes.recurrent.state import StateRefused, attributes_restored, find_states
from kvcompile.passes.table import disabled

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
CHECKED = ((1, TOKENS), (1, SEQ))  # sizes at which it is seen what a forward changes
_OTHERS = ((2, 17), (4, 6))  # sizes at which a graph that Dynamo made is compared besides


class Route:
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
        self.has_state = takes_use_cache or any(hasattr(config, "use_cache") for config in configs(model))
        self.has_mixers = self.checked = False
        # Until it is known that equal layers must be traced one by one.
        self.once = not disabled("traced_once")
        self.written: tuple[Place, ...] = ()
        # What a forward without a cache changes, once it is known.
        self.changes: tuple[Place, ...] | None = None
        self.state_problem = ""
        self.asked: list[str] = []  # lines that ask whether they are traced
        self.fixed = {"use_cache": False} if takes_use_cache else {}

    @property
    def may_be_strict(self) -> bool:
        """Whether Dynamo may look at the Python of all its parts."""
        return not self.opaque and not self.has_mixers

    def attempt(self, inputs: CapturedInputs, name: str, way: Way) -> Attempt:
        """One attempt: the graph, which is still to be confirmed."""
        calls = Calls(self.model, inputs, self.first, self.fixed)
        if not self.checked:  # before tracing: what writes behind torch's back can crash it
            known, self.written, self.changes = check_changes(self.model, calls, CHECKED)
            # The model's Python may read what a layer leaves behind.
            self.once = self.once and not self.changes
            calls.known = dict(zip(CHECKED, known, strict=True))
            self.checked = True
        others = _OTHERS if way != "export" else ()
        with unwritten() if way == "export" else nullcontext():
            traced, opaques, found = self._plain(inputs, name, way)
        limit = limit_of(traced.program, found.graph_module)
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
        return Attempt(captured, calls, sizes)

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
        except Exception as error:
            # There is no other side: the model refuses such lengths, or needs a third graph.
            log.debug("lengths from %s: %s", asked, error)
            return None
        sides = [(traced, found), (second, other)]
        below, above = sides if asked.below else sides[::-1]
        if threshold(below[0]) != Threshold(asked.length, True):
            return None
        sizes = (*sizes_to_try(below[0]), *sizes_to_try(above[0], asked.length))
        limit = limit_of(above[0].program, above[1].graph_module)
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
            with caching(self.model):
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
