"""The way from a model to a rewritten graph: capture, detect, canonicalize, plan, insert the cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from kvcompile.errors import ModelError
from kvcompile.passes.base import PassReport
from kvcompile.passes.canonicalize import canonicalize
from kvcompile.passes.capture import Captured, capture
from kvcompile.passes.detect import Detection, detect
from kvcompile.passes.evaluate import evaluate
from kvcompile.passes.insert_cache import Rewritten, insert_cache
from kvcompile.passes.positions import offset_positions
from kvcompile.plan import Plan, make_plan
from kvcompile.recipe import Recipe
from kvcompile.types import AttentionSite, NoMatch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Front:
    """A model as the compiler sees it: one graph with one `kvcompile::attention` per site."""

    captured: Captured
    detection: Detection
    canonical: GraphModule
    sites: tuple[AttentionSite, ...]
    takes_past_length: bool
    reports: tuple[PassReport, ...]
    max_tokens: int | None  # what the model was made for, where that is known
    device: torch.device


@dataclass(frozen=True)
class Analysis:
    """What `explain` tells of a model and a recipe."""

    plan: Plan
    misses: tuple[NoMatch, ...]
    route: str
    reasons: tuple[str, ...]
    capture_seconds: float
    detect_seconds: float


def understand(model: nn.Module) -> Front:
    """Capture the model, find its attention sites and make the graph canonical; the model is left as it was.

    Raises:
        ModelError: no decoder, no attention, or blocks that were not recognised (see its subclasses).
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"expected a torch.nn.Module, got {type(model).__name__}")
    captured = capture(model)
    detection = detect(captured)
    canonical = canonicalize(captured, detection)
    moved = offset_positions(canonical)
    tensors = [*model.parameters(), *model.buffers()]
    return Front(
        captured,
        detection,
        moved.graph_module,
        moved.sites,
        moved.past_length,
        (canonical.report, moved.report),
        _max_tokens(model, captured),
        tensors[0].device if tensors else torch.device("cpu"),
    )


def analyze(model: nn.Module, recipe: Recipe) -> Analysis:
    """What `recipe` would do to `model`, without doing it.

    Raises:
        ModelError, PlanError: as `understand` and `make_plan`.
    """
    front = understand(model)
    return analysis_of(front, plan_for(front, recipe))


def plan_for(front: Front, recipe: Recipe) -> Plan:
    """The plan of a recipe for an understood model."""
    table = front.captured.max_seq_len
    return make_plan(front.sites, recipe, front.sites[0].dtype, front.max_tokens, table)


def analysis_of(front: Front, plan: Plan) -> Analysis:
    captured, detection = front.captured, front.detection
    return Analysis(
        plan, detection.misses, captured.route, captured.reasons, captured.seconds, detection.seconds
    )


def rewrite(front: Front, plan: Plan) -> tuple[Rewritten, dict[str, Tensor]]:
    """The cached graph of a plan, and the values of its constant placeholders (rope tables)."""
    rewritten = insert_cache(front.canonical, front.sites, plan)
    budgets = [
        decision.layout.retention.sinks + (decision.layout.retention.window or 0)
        for decision in plan.decisions
        if decision.layout.retention.in_cache
    ]
    constants: dict[str, Tensor] = {}
    count = max(budgets, default=0) + plan.limits.prefill_chunk + 1
    for table in rewritten.ropes:
        # Tabulated with the model's own graph: whatever scaling its embedding has is in the table.
        values = evaluate(front.canonical, [table.cos, table.sin], example_inputs(front, 1, count))
        for name, value in zip((table.cos_name, table.sin_name), values, strict=True):
            constants[name] = value.reshape(-1, *value.shape[-2:])[0].contiguous()
    return rewritten, constants


def example_inputs(front: Front, batch: int, tokens: int) -> dict[str, Any]:
    """Placeholder values of the canonical graph for sequences that start at position 0."""
    device = front.device
    inputs: dict[str, Any] = {"input_ids": torch.zeros(batch, tokens, dtype=torch.int64, device=device)}
    if front.captured.inputs.position_ids:
        inputs["position_ids"] = torch.arange(tokens, device=device).expand(batch, tokens).contiguous()
    if front.captured.inputs.logits_to_keep:
        inputs["logits_to_keep"] = torch.arange(tokens, device=device)
    if front.takes_past_length:
        inputs["past_length"] = torch.zeros((), dtype=torch.int64, device=device)
    return inputs


def _max_tokens(model: nn.Module, captured: Captured) -> int | None:
    if captured.max_seq_len is not None:
        return captured.max_seq_len
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    limit = getattr(text, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None
