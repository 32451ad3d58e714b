"""The packed form of an optimized module: one pass over the new tokens of several sequences, in one row.

Weights are read once for all of them. It is made from the module's own regions (`compile/packed.py`) when it is first
asked for, and compiled when it first runs: who does not use it pays nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcompile.compile.executor import Executor
from kvcompile.compile.inductor import ShapeClass
from kvcompile.compile.packed import packed
from kvcompile.compile.sizes import Number, Symbolic
from kvcompile.errors import PlanError
from kvcompile.layouts.packing import unpacked
from kvcompile.plan import INDUCTOR, Plan
from kvcompile.runtime.cache import SPAN_STEP
from kvcompile.runtime.program import Program
from kvcompile.util.serial import TRACING

if TYPE_CHECKING:
    from kvcompile.runtime.module import CachedModel


def refusal(plan: Plan, program: Program) -> str | None:
    """Why tokens of several sequences cannot take a pass in one row, or None."""
    if plan.backend != INDUCTOR:
        return f"{plan.backend} compiles this program, and knows no packed steps"
    if plan.devices:
        return "the model's layers are on several devices"
    if program.stage is not None:
        return "each stage has a part of the layers alone"
    if program.takes_past_length:
        return "the model counts positions by the length of a batch, and not by position ids"
    if not program.ragged:
        return "the model counts positions itself, so its sequences are of one length"
    if program.states:
        return "the model carries a state from token to token, in no page"
    for decision in plan.decisions:
        own = _own(decision.mask_rows, decision.rerun, decision.score.mod) or unpacked(decision.layout)
        if own is not None:
            return f"layer {decision.layer}: {own}"
    return None


def _own(mask_rows: Sequence[object], rerun: bool, mod: Any) -> str | None:
    """What a site's scores have against it, or None."""
    if mask_rows:
        return "its mask keeps something of every token, in no page"
    if rerun:
        return "a part of its mask is computed for all queries and keys of a batch"
    if mod is not None and any(kind != "table" for kind in mod.leaves):
        return "its scores read tensors of all queries and keys of a batch"
    return None


class PackedProgram:
    """Runs a module's regions over the tokens of several sequences."""

    def __init__(self, module: CachedModel):
        """
        Raises:
            PlanError: the module has no packed form.
        """
        reason = refusal(module.plan, module.program)
        if reason is not None:
            raise PlanError(f"no packed step: {reason}")
        self.module = module
        try:
            regions = packed(module.executor.regions)
        except ValueError as error:
            raise PlanError(f"no packed step: {error}") from error
        # Captured steps have shapes of their own, which a packed step has not: it always runs region by region.
        self.executor = Executor(regions, module.executor.mode)
        span = module.cache.span
        self._shapes = ShapeClass(
            batch_is_one=True,
            tokens_is_one=False,
            keep_is_one=not module.program.takes_logits_to_keep,
            span=0 if span > SPAN_STEP else max(span, 1),
        )

    def run(self, ids: Sequence[Sequence[int]], seen: Sequence[int], buffers: dict[str, Tensor]) -> Tensor:
        """The logits [R, V] after the last new token of each sequence; its tokens are appended to `buffers`.

        Nothing is checked, and nobody else may run meanwhile (`CachedModel.turns`).

        Args:
            ids: the new tokens of two or more sequences; at best, those with one come first.
            seen: tokens that each has in the buffers.
            buffers: pools, and for each sequence a row of what is in none (its tables among that).
        """
        module, program, device = self.module, self.module.program, self.module.device
        lengths = [len(own) for own in ids]
        decodes = next((i for i, length in enumerate(lengths) if length != 1), len(lengths))
        starts = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
        rows = [torch.arange(first, first + count) for first, count in zip(seen, lengths, strict=True)]
        tokens = torch.tensor([token for own in ids for token in own], dtype=torch.int64)[None]
        positions = torch.cat(rows)[None].to(device)
        longest = max(first + count for first, count in zip(seen, lengths, strict=True))
        inputs: dict[str, Any] = {
            "input_ids": tokens.to(device),
            "positions": positions,
            "seq_lens": torch.tensor(list(seen), dtype=torch.int64).to(device),
            "query_start_loc": starts.to(device),
            "num_decodes": decodes,
            "max_query_len": max(lengths),
            "span": min(module.cache.span, -(-longest // SPAN_STEP) * SPAN_STEP),
        }
        if program.takes_position_ids:
            inputs["position_ids"] = positions
        last = starts[1:].to(device) - 1
        if program.takes_logits_to_keep:
            inputs["logits_to_keep"] = last
        self.prepare()
        outputs = self.executor.run(self._shapes, inputs | program.constants | buffers)
        logits: Tensor = outputs[program.logits]
        return logits[0] if program.takes_logits_to_keep else logits[0, last]

    def prepare(self) -> None:
        """Compile what a packed step needs, unless that is done."""
        module, program = self.module, self.module.program
        device = module.device
        if not self.executor.compiled or self._shapes in self.executor.programs:
            return
        examples: dict[str, Any] = {
            "input_ids": Symbolic(("batch", "tokens"), torch.int64, device),
            "position_ids": Symbolic(("batch", "tokens"), torch.int64, device),
            "positions": Symbolic(("batch", "tokens"), torch.int64, device),
            "seq_lens": Symbolic(("sequences",), torch.int64, device),
            "query_start_loc": Symbolic(("starts",), torch.int64, device),
            "logits_to_keep": Symbolic(("keep",), torch.int64, device),
            "num_decodes": Number("decodes"),
            "max_query_len": Number("longest"),
            "span": Number("span"),
            **program.constants,
        }
        for name, (shape, dtype, place) in module.cache.shapes().items():
            own = tuple("sequences" if size == "batch" else size for size in shape)
            examples[name] = Symbolic(own, dtype, place)
        with TRACING:
            self.executor.prepare(self._shapes, examples)
