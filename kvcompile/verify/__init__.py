"""Translation validation: the rewritten graph against the original, before anybody trusts it.

Short runs are compared site by site, and measure by how much two correct ways may differ:

    detection  the canonical graph, one full-sequence attention per site, against the original model; left out where
               the next one measures the same, and only to name the half that failed
    cache      the cached graph in several passes (a prompt, single tokens, chunks; ragged where the model can),
               with the plan's budgets made small so that every ring wraps and every budget is met within a few
               tokens, against the oracle of the same policy (kernels/oracle/attention.py)

Long runs (`long.py`) are planned (`lengths.py`) from the constants that positions and lengths can meet in graph and
plan (`constants.py`), over texts with the ids that the model treats apart (`ids.py`):

    lossless   the cached graph, forgetting and rounding nothing, against the original
    own sizes  the plan's own groups, pages and budgets at one site of each kind, against the oracle

`thorough` adds a text that comes token by token, longer passes and more of them, the budgets as they are in all
layers, and (in `optimize`) the compiled program.

An error is the RMS over a site's outputs (or the logits), relative to their RMS. Its budget is measured, not
chosen: how far the same outputs move in the oracle when every q, k, v and attention result is disturbed by a few
units in the last place, which is what two correct orders of summation do.

Which of two nearly equal scores is the lowest, rounding may decide, and a token that stays or goes is no rounding. So
the oracles keep what the cached run kept, and it is checked that each of its choices was right but for rounding: by
how much the scores move in the disturbed oracles.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from kvcompile.errors import ModelError, VerificationError
from kvcompile.original.checks import not_finite
from kvcompile.passes.graph import target_name
from kvcompile.pipeline import Front, absorbed, rewrite
from kvcompile.plan import Plan
from kvcompile.recipe.schema import VerifyMode
from kvcompile.util.threads import threads_that_pay
from kvcompile.verify.cached import Kept
from kvcompile.verify.compare import Check, compare
from kvcompile.verify.ids import vocabulary
from kvcompile.verify.lengths import MINIMUM
from kvcompile.verify.long import (
    Effort,
    cache_check,
    first_asked,
    long_checks,
    lossless,
    program_chunks,
    rows_of,
)
from kvcompile.verify.oracle import explained, oracles, rope_tables
from kvcompile.verify.original import Subject
from kvcompile.verify.runs import Run, chosen, fit, original_logits, pieces, probe
from kvcompile.verify.shrink import SMALL_TOKENS, as_long, as_lossless, shrink

log = logging.getLogger(__name__)
_QUICK_CHUNKS = (9, 1, 1, 6, 1)  # over the edge of a small ring in a prompt, in single tokens, in a chunk
_CHUNKS = (13, 1, 1, 7, 1, 1, 1, 9, 1)
_ALONE = 13  # single tokens from an empty cache on, until every small budget is full


def verify(model: nn.Module, front: Front, plan: Plan, mode: VerifyMode) -> tuple[Check, ...]:
    """Compare; returns what was measured.

    Raises:
        VerificationError: some comparison exceeds its budget; names the first layer that does, and the error.
        ModelError: the model gives no logits of every token, or runs on nothing that could be compared; or it has
            weights that are not finite.
        LimitError: there is no memory for the plan's own budgets.
    """
    if mode == "off":
        return ()
    try:
        with threads_that_pay(model):
            return _verified(model, absorbed(front, plan), plan, mode)
    except VerificationError as error:
        problem = not_finite(model)
        if problem is not None:
            raise ModelError(
                f"the model's weights are not finite: {problem}; nothing can be verified"
            ) from error
        told = _of_ties(front, plan)
        if not told:
            raise
        raise VerificationError(f"{error}. {told}", error.layer, error.error) from error


def _of_ties(front: Front, plan: Plan) -> str:
    """What may be the cause where a model chooses, in half precision: a choice between equals is no rounding.

    Which of two experts has the larger score, one unit in the last place may decide (JetMoE in float16: 0.3496 and
    0.3496), and then a vector comes from another expert. The oracle makes its own choices, as the original does.
    """
    chooses = any(target_name(node) == "topk" for node in front.canonical.graph.nodes)
    if not chooses or plan.torch_dtype == torch.float32:
        return ""
    return (
        "The model chooses by a topk (experts, or tokens), and in half precision rounding decides between near ties: "
        "optimize it in float32 once, and where that passes, take verify: off"
    )


def _verified(model: nn.Module, front: Front, plan: Plan, mode: Effort) -> tuple[Check, ...]:
    subject = Subject(model, front, vocabulary(front, model), front.max_tokens)
    with threads_that_pay(model, MINIMUM):
        subject, pieces_, asked = first_asked(subject, plan, mode)
    chunks: tuple[int, ...] = _QUICK_CHUNKS if mode == "quick" else _CHUNKS
    checks = []
    # A plan that forgets and rounds nothing is compared with the original itself, and its oracle is the lossless one.
    if mode == "thorough" or not plan.lossless:
        rows = 2 if mode == "thorough" else rows_of(subject)
        checks.append(_check_detection(subject, plan, sum(chunks), rows))
    first: Check | VerificationError | None = None
    if not plan.lossless:  # none of the plan's kernels runs in it, which may still be compiled
        try:
            with threads_that_pay(model, MINIMUM):
                first = lossless(subject, plan, pieces_, asked, checks[0].noise)
        except VerificationError as error:  # the next comparison is the better one to name the layer
            first = error
    checks.append(_check_cache("cache, small budgets", subject, shrink(plan), chunks))
    if isinstance(first, VerificationError):
        raise first
    with threads_that_pay(model, MINIMUM):
        first = first or lossless(subject, plan, pieces_, asked, checks[0].noise)
        checks += long_checks(subject, plan, mode, (pieces_, asked, first), checks[0].noise)
    if mode == "thorough":
        # Prompts fill small budgets at once; what a step does while they are not full, only such a text tells.
        alone = (1,) * _ALONE
        checks.append(_check_cache("cache, token by token", subject, shrink(plan), alone))
        slots = [d.layout.slots(SMALL_TOKENS) for d in plan.decisions if d.layout.bounded]
        residuals = [d.layout.residual for d in plan.decisions]
        # One pass up to the edge of the largest ring, then over it in chunks and single tokens.
        edge = max([*slots, *residuals, SMALL_TOKENS])
        limit = plan.limits.max_tokens
        edge = edge if limit is None else min(edge, limit - sum(_CHUNKS))
        chunks = (*pieces(max(edge - 6, 2), plan.limits.prefill_chunk), *_CHUNKS)
        checks.append(_check_cache("cache, the plan's budgets", subject, as_long(plan, sum(chunks)), chunks))
    for check in checks:
        log.info("verify %s", check)
    return tuple(checks)


def check_program(
    step: Callable[[Tensor, Tensor | None], Tensor],
    front: Front,
    plan: Plan,
    chunks: Sequence[int] | None = None,
    buffers: Callable[[], Mapping[str, Tensor]] | None = None,
    name: str = "compiled program",
) -> Check:
    """The emitted program against the oracle: `step(input_ids, attention_mask) -> logits`, called chunk by chunk.

    It may run on another device than the model.

    chunks: how many tokens come together; None: as the plan's own groups, pages, windows and budgets want it
    buffers: the program's caches by the names of its placeholders; needed where a retention goes by scores.
    """
    front = absorbed(front, plan)
    started = time.perf_counter()
    chunks = fit(chunks or program_chunks(front, plan, _CHUNKS), plan.limits.max_tokens)
    if not plan.whole_prompts:  # the program would cut them itself, which scores depend on
        chunks = [size for chunk in chunks for size in pieces(chunk, plan.limits.prefill_chunk)]
    ids, pads = probe(front, sum(chunks))
    # The last sequence is the padded one, where the model takes padding.
    ids, pads = ids[-plan.limits.max_batch :], pads[-plan.limits.max_batch :]
    rewritten, constants = rewrite(front, plan)
    mask = torch.arange(ids.shape[1], device=ids.device) >= pads[:, None]
    outs, start = [], 0
    kept = Kept(plan, rewritten)
    for size in chunks:
        part = slice(start, start + size)
        logits = step(ids[:, part], mask[:, part].long() if bool(pads.any()) else None)
        outs.append(chosen(logits.to(ids.device), ids[:, part], None))
        start += size
        if buffers is not None:
            kept.note(buffers(), start - pads)
    got = Run(torch.cat(outs, dim=1), (), kept.by_layer)
    tables = rope_tables(front, plan, rewritten, constants)

    def check(disturbed: int) -> Check:
        oracle, noisy = oracles(front, plan, tables, ids, pads, chunks, got.kept, disturbed=disturbed)
        bare = Run(oracle.logits, (), choices=oracle.choices)
        noise = [Run(n.logits, (), choices=n.choices) for n in noisy]
        return compare(name, got, bare, noise, pads, plan, started)

    return explained(plan, check)


def _check_detection(subject: Subject, plan: Plan, tokens: int, rows: int) -> Check:
    started = time.perf_counter()
    front = subject.front
    ids, _ = probe(front, tokens if subject.limit is None else min(tokens, subject.limit), subject.words)
    ids, pads = ids[:rows], torch.zeros(rows, dtype=torch.int64, device=ids.device)
    oracle, noisy = oracles(front, as_lossless(plan), {}, ids, pads)
    original = Run(original_logits(subject.model, front, ids), ())
    moved = [Run(_shift(original, oracle, n), ()) for n in noisy]
    return compare("detection", Run(oracle.logits, ()), original, moved, pads, plan, started)


def _check_cache(name: str, subject: Subject, plan: Plan, chunks: Sequence[int]) -> Check:
    started = time.perf_counter()
    chunks = fit(chunks, plan.limits.max_tokens)
    ids, pads = probe(subject.front, sum(chunks), subject.words)
    return cache_check(name, subject.front, plan, chunks, ids, pads, started)


def _shift(original: Run, oracle: Run, noisy: Run) -> Tensor:
    """The disturbed oracle, moved to where the original stands."""
    return original.logits + (noisy.logits - oracle.logits)


__all__ = ["Check", "check_program", "verify"]
