"""Says which keys a query sees: by causality, by the model's own mask, by the retention."""

from __future__ import annotations

from torch import Tensor

from kvcompile.kernels.reference.symbolic import evaluate
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import symbols as sy


def visible(query: Tensor, key: Tensor, spec: SiteSpec) -> Tensor:
    """Which keys [B, 1, T] (positions, -1 for none) each query [B, S, 1] sees: bool [B, S, T]."""
    seen = (key >= 0) & (key <= query)
    if spec.mask.window is not None:
        if spec.mask.kind == "chunked":
            seen = seen & (key // spec.mask.window == query // spec.mask.window)
        else:
            seen = seen & (key > query - spec.mask.window)
    retention = spec.layout.retention
    if retention.window is not None:
        recent = key > query - retention.window
        seen = seen & (recent | (key < retention.sinks) if retention.sinks else recent)
    for shown in retention.shown:
        seen = seen & evaluate(shown, {sy.query: query.expand_as(seen), sy.key: key.expand_as(seen)})
    # A padding query sees everything, so that its softmax has something to sum to.
    return seen | (query < 0)
