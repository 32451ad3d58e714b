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

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import torch
from torch import nn

from kvcompile.errors import CaptureError, ModelError
from kvcompile.passes.capture.captured import Captured
from kvcompile.passes.capture.first_line import first_line
from kvcompile.passes.capture.inputs import CapturedInputs, device_of
from kvcompile.passes.capture.route import CHECKED, Route
from kvcompile.passes.capture.settings import configured, eval_mode, implementations, is_another
from kvcompile.passes.capture.shown import Shown
from kvcompile.passes.capture.signature import declined, signature
from kvcompile.passes.capture.trace import BATCH, SEQ, WAYS
from kvcompile.passes.recurrent.state import attributes_restored
from kvcompile.passes.table import graph_pass

log = logging.getLogger(__name__)

_VARIANTS = tuple(CapturedInputs(*given) for given in product((True, False), repeat=2))  # in this order


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
    first, parameters = signature(model)
    reasons: list[str] = []
    shown = Shown(model, first, frozenset({"position_ids", "logits_to_keep"} & parameters), device_of(model))

    pending = [tracing]

    def begin() -> None:
        while pending:
            pending.pop()()

    def new_route() -> Route:
        return Route(model, first, "use_cache" in parameters, reasons, begin)

    with eval_mode(model), attributes_restored(model):
        route = new_route()
        for implementation, way, inputs in product(implementations(model, reasons), WAYS, _VARIANTS):
            if (way == "strict export" and not route.may_be_strict) or not shown.may_be(inputs):
                continue
            name = ", ".join([way, *([implementation] if implementation else []), *inputs.names])
            before, problem = tuple(reasons), None
            try:
                with configured(model, implementation), torch.no_grad():
                    attempt = route.attempt(inputs, name, way)
                begun = time.perf_counter()
                foresee(attempt.captured)
                beside += time.perf_counter() - begun
                with configured(model, implementation), torch.no_grad():
                    attempt.confirm()
                if is_another(model, implementation):  # which may compute something else
                    with configured(model, None), torch.no_grad():
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
    problems = [declined(model, first, size) for size in (*CHECKED, (BATCH, SEQ))]
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
