"""What an engine gives back of layers with released windows, and how many bytes a text has there at a time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvcompile.util.console import format_bytes, format_layers

if TYPE_CHECKING:
    from kvcompile.plan import Plan


def released_notes(plan: Plan) -> tuple[str, ...]:
    """A sentence for each page table of such layers; none without any."""
    from kvcompile.layouts.sharing import sharing

    recomputes = sharing(decision.layout for decision in plan.decisions).recomputes
    notes = []
    for group in plan.page_groups:
        if group.released is None:
            continue
        layers = format_layers(group.layers)
        if not recomputes:
            notes.append(
                f"layers {layers}: an engine gives back no page before a text ends, since another layer cannot be "
                "computed again"
            )
            continue
        chunk = plan.limits.prefill_chunk
        most = min(group.released.most(chunk, group.page_size), group.pages_per_sequence)
        page = sum(
            math.prod(spec.shape) * spec.dtype.itemsize
            for decision in plan.decisions
            if decision.layer in group.layers
            for spec in decision.buffers(plan.torch_dtype, plan.limits.max_tokens)
            if spec.paged
        )
        notes.append(
            f"layers {layers}: an engine gives back pages behind the window, so that a text of any length has at most "
            f"{most} of {group.page_size} tokens there ({format_bytes(most * page)}, prompts in chunks of {chunk}); a "
            "module alone keeps them"
        )
    return tuple(notes)
