"""Translation validation: the rewritten graph against the original, before anybody trusts it.

Two comparisons prove the two halves of the way:

    detection  the canonical graph, one full-sequence attention per site, against the original model
    cache      the cached graph in several passes (a prompt, single tokens, chunks; ragged where the model can),
               with the plan's budgets made small so that every ring wraps and every budget is met within a few
               tokens, against the oracle of the same policy (kernels/policy.py)

`thorough` adds longer passes, the budgets as they are, a plan that forgets and rounds nothing directly against
the original, and (in `optimize`) the compiled program.

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

from kvcompile.pipeline import Front, absorbed, rewrite
from kvcompile.plan import Plan
from kvcompile.recipe.schema import VerifyMode
from kvcompile.verify.cached import Kept, cached_run
from kvcompile.verify.compare import Check, compare
from kvcompile.verify.oracle import oracles, rope_tables
from kvcompile.verify.runs import Run, fit, original_logits, pieces, probe
from kvcompile.verify.shrink import SMALL_TOKENS, as_lossless, shrink

log = logging.getLogger(__name__)
_QUICK_CHUNKS = (9, 1, 1, 6, 1)  # over the edge of a small ring in a prompt, in single tokens, in a chunk
_CHUNKS = (13, 1, 1, 7, 1, 1, 1, 9, 1)


def verify(model: nn.Module, front: Front, plan: Plan, mode: VerifyMode) -> tuple[Check, ...]:
    """Compare; returns what was measured.

    Raises:
        VerificationError: some comparison exceeds its budget; names the first layer that does, and the error.
    """
    if mode == "off":
        return ()
    front = absorbed(front, plan)
    chunks: tuple[int, ...] = _QUICK_CHUNKS if mode == "quick" else _CHUNKS
    checks = [_check_detection(model, front, plan, sum(chunks))]
    checks.append(_check_cache("cache, small budgets", front, shrink(plan), chunks))
    if mode == "thorough":
        if plan.lossless:
            checks.append(_check_lossless(model, front, plan, chunks))
        slots = [d.layout.slots(SMALL_TOKENS) for d in plan.decisions if d.layout.bounded]
        residuals = [d.layout.residual for d in plan.decisions]
        # One pass up to the edge of the largest ring, then over it in chunks and single tokens.
        edge = max([*slots, *residuals, SMALL_TOKENS])
        limit = plan.limits.max_tokens
        edge = edge if limit is None else min(edge, limit - sum(_CHUNKS))
        chunks = (*pieces(max(edge - 6, 2), plan.limits.prefill_chunk), *_CHUNKS)
        checks.append(_check_cache("cache, the plan's budgets", front, plan, chunks))
    for check in checks:
        log.info("verify %s", check)
    return tuple(checks)


def check_program(
    step: Callable[[Tensor, Tensor | None], Tensor],
    front: Front,
    plan: Plan,
    chunks: Sequence[int] = _CHUNKS,
    buffers: Callable[[], Mapping[str, Tensor]] | None = None,
    name: str = "compiled program",
) -> Check:
    """The emitted program against the oracle: `step(input_ids, attention_mask) -> logits`, called chunk by chunk.

    It may run on another device than the model.

    buffers: the program's caches by the names of its placeholders; needed where a retention goes by scores.
    """
    front = absorbed(front, plan)
    started = time.perf_counter()
    chunks = fit(chunks, plan.limits.max_tokens)
    if not plan.whole_prompts:  # the program would cut them itself, which scores depend on
        chunks = [size for chunk in chunks for size in pieces(chunk, plan.limits.prefill_chunk)]
    ids, pads = probe(front, sum(chunks))
    rewritten, constants = rewrite(front, plan)
    mask = torch.arange(ids.shape[1], device=ids.device) >= pads[:, None]
    outs, start = [], 0
    kept = Kept(plan, rewritten)
    for size in chunks:
        part = slice(start, start + size)
        logits = step(ids[:, part], mask[:, part].long() if bool(pads.any()) else None)
        outs.append(logits.to(ids.device))
        start += size
        if buffers is not None:
            kept.note(buffers(), start - pads)
    got = Run(torch.cat(outs, dim=1), (), kept.by_layer)
    oracle, noisy = oracles(
        front, plan, rope_tables(front, plan, rewritten, constants), ids, pads, chunks, got.kept
    )
    bare = Run(oracle.logits, (), choices=oracle.choices)
    noise = [Run(n.logits, (), choices=n.choices) for n in noisy]
    return compare(name, got, bare, noise, pads, plan, started)


def _check_detection(model: nn.Module, front: Front, plan: Plan, tokens: int) -> Check:
    started = time.perf_counter()
    ids, _ = probe(front, tokens if front.max_tokens is None else min(tokens, front.max_tokens))
    pads = torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
    lossless = as_lossless(plan)
    oracle, noisy = oracles(front, lossless, {}, ids, pads)
    original = Run(original_logits(model, front, ids), ())
    return compare(
        "detection",
        Run(oracle.logits, ()),
        original,
        [Run(_shift(original, oracle, n), ()) for n in noisy],
        pads,
        plan,
        started,
    )


def _check_lossless(model: nn.Module, front: Front, plan: Plan, chunks: Sequence[int]) -> Check:
    started = time.perf_counter()
    limit = plan.limits.max_tokens
    chunks = fit(chunks, limit)
    ids, _ = probe(front, sum(chunks))
    pads = torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
    rewritten, constants = rewrite(front, plan)
    oracle, noisy = oracles(front, plan, {}, ids, pads)
    original = Run(original_logits(model, front, ids), ())
    got = cached_run(front, plan, rewritten, constants, ids, pads, chunks)
    return compare(
        "lossless",
        Run(got.logits, ()),
        original,
        [Run(_shift(original, oracle, n), ()) for n in noisy],
        pads,
        plan,
        started,
    )


def _check_cache(name: str, front: Front, plan: Plan, chunks: Sequence[int]) -> Check:
    started = time.perf_counter()
    chunks = fit(chunks, plan.limits.max_tokens)
    ids, pads = probe(front, sum(chunks))
    rewritten, constants = rewrite(front, plan)
    got = cached_run(front, plan, rewritten, constants, ids, pads, chunks)
    tables = rope_tables(front, plan, rewritten, constants)
    oracle, noisy = oracles(front, plan, tables, ids, pads, chunks, got.kept)
    return compare(name, got, oracle, noisy, pads, plan, started)


def _shift(original: Run, oracle: Run, noisy: Run) -> Tensor:
    """The disturbed oracle, moved to where the original stands."""
    return original.logits + (noisy.logits - oracle.logits)


__all__ = ["Check", "check_program", "verify"]
