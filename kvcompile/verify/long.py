"""Long runs: the rewritten model directly against the original, over lengths that meet every constant.

    lossless   the cached graph, in pieces, with a cache that forgets and rounds nothing, against the original over
               the whole text, every row alone
    own sizes  where the plan forgets or rounds: its own groups, pages, residuals and budgets, at one site of each
               kind, against the oracle of its policy

The first run has at least `lengths.MINIMUM` tokens, whatever that costs; a large model on a CPU has one row then, else
there are two. After it, longer runs follow while they are expected to end within `SECONDS`. What they did not reach
is told in the check.

The budget of an error is the noise that the shorter checks have measured. A longer text may have more of it: where an
error is above, the noise of this very text is measured before anything is refused, and then the run is compared site
by site, so that the failure names the layer.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from kvcompile.errors import KVCompileError, VerificationError
from kvcompile.pipeline import Front, rewrite
from kvcompile.plan import Decision, Plan
from kvcompile.verify.cached import cached_run
from kvcompile.verify.compare import Check, allowed, compare, failure, relative
from kvcompile.verify.constants import constants
from kvcompile.verify.lengths import BEYOND, FARTHEST, MINIMUM, Budget, Constant, Schedule, schedule
from kvcompile.verify.oracle import explained, oracles, rope_tables
from kvcompile.verify.original import Asked, Subject, ask, first_line, settled
from kvcompile.verify.runs import REPORT, Run
from kvcompile.verify.shrink import as_long, as_lossless

log = logging.getLogger(__name__)
Effort = Literal["quick", "thorough"]

# Seconds of all long runs, but for the first, which is never left out. `quick` is paid by everybody who optimizes a
# model, and should cost less than capturing it does; `thorough` by those who ask for it, and wait for a compiler next.
SECONDS: dict[Effort, float] = {"quick": 2.0, "thorough": 60.0}
_BUDGETS: dict[Effort, Budget] = {
    "quick": Budget(FARTHEST + BEYOND, passes=12, runs=2),
    "thorough": Budget(FARTHEST + BEYOND, passes=40, runs=4),
}
_SMALL_MODEL = 50_000_000  # weights of a model that runs two rows on a CPU as well
_SCORES = 1 << 28  # scores of one layer at most, where a model makes a matrix of them
_TOLD = 4  # constants that a check names, if it did not reach them


@dataclass(frozen=True)
class Lengths:
    """What the runs of one plan are planned from."""

    constants: tuple[Constant, ...]
    limit: int | None
    chunk: int | None
    most: int  # tokens, by memory

    def schedule(self, budget: Budget) -> Schedule:
        return schedule(
            self.constants, self.limit, self.chunk, replace(budget, tokens=min(budget.tokens, self.most))
        )

    def missed(self, reached: int) -> list[Constant]:
        """Constants that no run reached, though texts do."""
        return list(schedule(self.constants, self.limit, None, Budget(max(reached, 2), least=2)).missed)


def lengths_of(subject: Subject, plan: Plan) -> Lengths:
    heads = max((d.num_qo_heads for d in plan.decisions), default=1)
    most = max(MINIMUM, math.isqrt(_SCORES // (heads * rows_of(subject))))
    limits = [limit for limit in (plan.limits.max_tokens, subject.limit) if limit is not None]
    return Lengths(
        constants(subject.front, plan, subject.numbers), min(limits, default=None), _chunk(plan), most
    )


def _chunk(plan: Plan) -> int | None:
    return None if plan.whole_prompts else plan.limits.prefill_chunk


def rows_of(subject: Subject) -> int:
    weights = sum(p.numel() for p in subject.model.parameters())
    return 2 if weights <= _SMALL_MODEL or subject.front.device.type != "cpu" else 1


def first_asked(subject: Subject, plan: Plan, mode: Effort) -> tuple[Subject, tuple[int, ...], Asked]:
    """The first run's pieces and what the original gives for it; the subject knows then what the original declines."""
    while True:
        budget = replace(_BUDGETS[mode], tokens=MINIMUM, runs=1)
        pieces = lengths_of(subject, plan).schedule(budget).runs[0]
        try:
            return subject, pieces, _asked(subject, pieces, 0)
        except KVCompileError:
            raise
        except Exception as error:  # a model raises anything; what is left is less every time
            found = settled(subject, sum(pieces), error)
            if (found.limit, found.told) == (subject.limit, subject.told):
                raise
            subject = found


def _asked(subject: Subject, pieces: Sequence[int], number: int) -> Asked:
    """The original over a text of these pieces; where rows may be padded, the second is: by more than a piece in the
    first run, by less in the others."""
    rows, tokens = rows_of(subject), sum(pieces)
    ids = subject.words.text(rows, tokens, seed=number).to(subject.front.device)
    pads = torch.zeros(rows, dtype=torch.int64, device=ids.device)
    if subject.front.ragged and rows > 1 and tokens > 8:
        pads[1] = min(pieces[0] + 3, tokens // 2) if number == 0 else 5
    return ask(subject, ids, pads, _ends(pieces))


def _ends(pieces: Sequence[int]) -> list[int]:
    ends, end = [], 0
    for size in pieces:
        end += size
        ends.append(end)
    return ends


def long_checks(
    subject: Subject, plan: Plan, mode: Effort, first: tuple[tuple[int, ...], Asked, Check], noise: float
) -> Iterator[Check]:
    """The first run, which was made already, and as many others as the time is for.

    noise: relative noise of the logits, as a short run measured it
    """
    pieces, asked, check = first
    lengths, last, found, spent = lengths_of(subject, plan), "", [check], check.seconds
    reached = sum(pieces)
    texts = {reached: asked}
    pace = spent / reached
    left = SECONDS[mode]
    farther = int(reached * math.sqrt(max(left / spent, 0.0)))
    budget = _BUDGETS[mode]
    planned = lengths.schedule(replace(budget, tokens=max(MINIMUM, min(budget.tokens, farther))))
    done = [pieces]
    for number, more in enumerate(planned.runs, 1):
        tokens = sum(more)
        expected = pace * tokens * max(tokens / reached, 1.0)
        if more == pieces or (tokens <= reached and set(more) == set(pieces)):
            continue
        if expected > left:
            last = f"{len(planned.runs) - len(done)} more runs for lack of time"
            break
        begun = time.perf_counter()
        try:
            if tokens not in texts:
                texts[tokens] = _asked(subject, more, number)
        except KVCompileError:
            raise
        except Exception as error:  # beyond what the model was made for
            subject = settled(subject, tokens, error)
            last = subject.told[-1]
            break
        found.append(lossless(subject, plan, more, texts[tokens], noise))
        seconds = time.perf_counter() - begun
        left -= seconds
        pace, reached = max(pace, seconds / tokens), max(reached, tokens)
        done.append(more)
    note = _told(subject, lengths.missed(reached), last, len(asked.ids))
    for check in found:
        yield replace(check, note=note)
    if not plan.lossless:
        yield from _own_sizes(subject, plan, mode, done, left)


def _own_sizes(
    subject: Subject, plan: Plan, mode: Effort, done: Sequence[tuple[int, ...]], left: float
) -> Iterator[Check]:
    """The plan's own layouts, over the longest text that was run already and, if there is time, over more.

    What a layout forgets, the original cannot: these runs may be longer than those that the original takes.
    """
    longest = max(done, key=sum)
    reached = sum(longest)
    check = own_sizes(subject, plan, longest)
    farther = int(reached * math.sqrt(max(left / check.seconds, 0.0)))
    near = tuple(c for c in constants(subject.front, plan, subject.numbers) if c.rank < 2)
    lengths = Lengths(near, plan.limits.max_tokens, _chunk(plan), FARTHEST + BEYOND)
    budget = replace(_BUDGETS[mode], tokens=min(max(farther, reached), FARTHEST + BEYOND))
    checks, pace = [check], check.seconds / reached**2
    for more in lengths.schedule(budget).runs:
        if more in (longest, *done) or pace * sum(more) ** 2 > left or sum(more) <= reached:
            continue
        checks.append(own_sizes(subject, plan, more))
        reached, left = sum(more), left - checks[-1].seconds
    note = _told(subject, lengths.missed(reached), "", rows_of(subject))
    yield from (replace(check, note=note) for check in checks)


def _told(subject: Subject, missed: Sequence[Constant], last: str, rows: int) -> str:
    parts = [f"{rows} row{'s' if rows > 1 else ''}", *subject.told]
    told = [constant for constant in missed if constant.rank < 2]
    if told:
        more = f" and {len(told) - _TOLD} more" if len(told) > _TOLD else ""
        parts.append(f"not reached: {', '.join(map(str, told[:_TOLD]))}{more}")
    if last and last not in parts:
        parts.append(f"left out: {last}" if not last.startswith("the original") else last)
    return "; ".join(parts)


def lossless(subject: Subject, plan: Plan, pieces: Sequence[int], asked: Asked, noise: float) -> Check:
    """The cached graph with a cache that forgets and rounds nothing, against the original."""
    started = time.perf_counter()
    front, tokens = subject.front, sum(pieces)
    exact = as_long(plan, tokens) if plan.lossless else as_lossless(plan, tokens)
    rewritten, tables = rewrite(front, exact)
    try:
        got = cached_run(front, exact, rewritten, tables, asked.ids, asked.pads, pieces, asked.keep)
    except (KVCompileError, torch.OutOfMemoryError):
        raise
    except Exception as problem:
        raise VerificationError(
            f"verification 'lossless' failed: the rewritten model does not run on {tokens:,} tokens in pieces of "
            f"{', '.join(map(str, pieces))}, and the original does: {first_line(problem)}. {REPORT}"
        ) from problem
    error, budget = relative(got.logits, asked.logits, _real(asked)), allowed(noise, asked.logits.dtype)
    if not error <= budget:
        named = rope_tables(front, exact, rewritten, tables)
        noise = _explained(subject, exact, named, pieces, asked, got)
        budget = allowed(noise, asked.logits.dtype)
    seconds = time.perf_counter() - started + asked.seconds
    return Check("lossless", tokens, error, budget, None, seconds, noise)


def _real(asked: Asked) -> Tensor:
    """Which of the logits are of real tokens [B, T or K]."""
    positions = torch.arange(asked.ids.shape[1], device=asked.ids.device)
    return (positions if asked.keep is None else asked.keep) >= asked.pads[:, None]


def _explained(
    subject: Subject,
    plan: Plan,
    tables: dict[int, list[Tensor]],
    pieces: Sequence[int],
    asked: Asked,
    got: Run,
) -> float:
    """The noise of this text, where it explains the error of `got`.

    Raises:
        VerificationError: it does not; names the first layer whose result differs.
    """
    started = time.perf_counter()
    oracle, noisy = oracles(subject.front, plan, tables, asked.ids, asked.pads, pieces, got.kept, asked.keep)
    real, dtype = _real(asked), asked.logits.dtype
    noise = max(relative(n.logits, oracle.logits, real) for n in noisy)
    error = relative(got.logits, asked.logits, real)
    if error <= allowed(noise, dtype):
        return noise
    arguments = (asked.pads, plan, started, asked.keep)
    # Which half of the way is wrong: what was detected of the model, or what was made of that.
    original = Run(asked.logits, ())
    moved = [Run(asked.logits + (n.logits - oracle.logits), ()) for n in noisy]
    compare("detection", Run(oracle.logits, ()), original, moved, *arguments)
    compare("lossless", got, oracle, noisy, *arguments)
    raise VerificationError(failure("lossless", None, error, allowed(noise, dtype), plan), None, error)


def own_sizes(subject: Subject, plan: Plan, pieces: Sequence[int]) -> Check:
    """The plan's own layouts at one site of each kind, against the oracle of its policy."""
    started = time.perf_counter()
    front, tokens = subject.front, sum(pieces)
    rows = rows_of(subject)
    ids = subject.words.text(rows, tokens, seed=1).to(front.device)
    pads = torch.zeros(rows, dtype=torch.int64, device=ids.device)
    if front.ragged and rows > 1 and tokens > 8:
        pads[1] = min(pieces[0] + 3, tokens // 2)
    return cache_check(
        "cache, own sizes", front, as_long(plan, tokens), pieces, ids, pads, started, kinds(plan)
    )


def cache_check(
    name: str,
    front: Front,
    plan: Plan,
    pieces: Sequence[int],
    ids: Tensor,
    pads: Tensor,
    started: float,
    sites: int | None = None,
) -> Check:
    """The cached graph against the oracle of its policy; sites: only the first of them. None: all."""
    rewritten, constants = rewrite(front, plan)
    tables = rope_tables(front, plan, rewritten, constants)

    def asked(kept: Mapping[int, Sequence[Tensor]], disturbed: int) -> tuple[Run, list[Run]]:
        return oracles(front, plan, tables, ids, pads, pieces, kept, sites=sites, disturbed=disturbed)

    # Oracles that follow no choice of the cached run are asked before it: its kernels may still be compiled.
    alone = all(decision.layout.followed is None for decision in plan.decisions)
    before = {1: asked({}, 1)} if alone else {}
    got = cached_run(front, plan, rewritten, constants, ids, pads, pieces, sites=sites)

    def check(disturbed: int) -> Check:
        oracle, noisy = before.get(disturbed) or asked(got.kept, disturbed)
        return compare(name, got, oracle, noisy, pads, plan, started)

    return explained(plan, check)


def program_chunks(front: Front, plan: Plan, first: Sequence[int], least: int = 0) -> tuple[int, ...]:
    """The pieces `first`, and more over the constants of the model's masks and of the plan, if those are farther.

    least: tokens in all
    """
    limits = [limit for limit in (plan.limits.max_tokens, front.max_tokens) if limit is not None]
    budget = Budget(MINIMUM, passes=16, runs=2, least=max(least, sum(first)))
    near = [constant for constant in constants(front, plan) if constant.rank < 2]
    near += [replace(c, value=2 * c.value) for c in near if c.rank == 1]  # the second group, page or window
    run = max(schedule(near, min(limits, default=None), None, budget).runs, key=sum)
    ends = [0, *_ends(first)]
    ends += [end for end in _ends(run) if end > ends[-1]]
    return tuple(after - before for before, after in pairwise(ends))


def kinds(plan: Plan) -> int:
    """How many sites there are up to the first one of the last kind that comes."""
    first: dict[object, int] = {}
    for place, decision in enumerate(plan.decisions):
        first.setdefault(_kind(decision), place)
    count = max(first.values(), default=0) + 1
    # Of sites that read one cache the last appends what a ring holds: all of them, then.
    while True:
        read = {decision.kv_source for decision in plan.decisions[:count]}
        more = max((i + 1 for i, d in enumerate(plan.decisions) if d.kv_source in read), default=count)
        if more <= count:
            return count
        count = more


def _kind(decision: Decision) -> tuple[object, ...]:
    """All that the arithmetic of a site's cache depends on."""
    sizes = (decision.num_qo_heads, decision.num_kv_heads, decision.head_dim, decision.v_head_dim)
    shared = decision.kv_source == decision.layer
    made = (decision.layout, decision.mask, decision.score, decision.kernels, decision.rotary_in_op)
    return (*sizes, shared, *made, decision.latent, decision.rerun, bool(decision.scales))
