"""Teacher-forced perplexity, and how far a cache's distributions are from those of the full cache.

    perplexity = exp(-1/n sum_t log q(x_t | x_<t))
    KL         = 1/n sum_t sum_v p(v | x_<t) log(p(v | x_<t) / q(v | x_<t))     in nats; p: full cache, q: recipe
    agreement  = 1/n sum_t [argmax p = argmax q]

over the n scored tokens behind the prompt (techniques of Xiao et al. 2023, section 4.1; KL as llama.cpp's
`perplexity --kl-divergence`). Every x_t is the text's own token, whatever the model would have said.

Exact KL needs all of both distributions. Storing the full cache's would take n x V numbers (600 MB for 3,072 tokens
of 49,152), so both models read the text side by side and only one piece of logits of each is there at a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcompile.report.quality.feed import feed
from kvcompile.report.quality.report import Memory, PerplexityScore, Segment
from kvcompile.report.quality.settings import CHUNK
from kvcompile.runtime.module import CachedModel

SEGMENT = 512  # scored tokens that share one mean in `segments`
_ROWS = 64  # positions whose distributions are in float64 at once


@dataclass
class _Sums:
    """Per scored token, float64 [n] in pieces."""

    nll: list[Tensor] = field(default_factory=list)
    kl: list[Tensor] = field(default_factory=list)
    same: list[Tensor] = field(default_factory=list)

    def add(self, own: Tensor, full: Tensor | None, targets: Tensor) -> None:
        for rows in range(0, len(targets), _ROWS):
            piece = slice(rows, rows + _ROWS)
            nll, kl, same = compare(own[piece], None if full is None else full[piece], targets[piece])
            self.nll.append(nll)
            self.kl.append(kl)
            self.same.append(same)


def perplexity(
    fast: CachedModel,
    full: CachedModel | None,
    ids: Tensor,
    prompt: int,
    step: int,
    memory: Callable[[CachedModel], Memory],
    tell: Callable[[int, int], None],
) -> PerplexityScore:
    """Score the tokens of `ids` from position `prompt` on.

    Args:
        fast: the recipe's module; its cache is emptied first.
        full: the full cache's module, which reads the same text; None: `fast` itself is the full cache.
        ids: int64 [1, prompt + n]; the last token is predicted and not fed.
        step: tokens that `fast` gets at a time behind the prompt.
        memory: reads the size of the cache at the end.
        tell: called with (scored, n).
    """
    started = time.perf_counter()
    models = [fast] if full is None else [fast, full]
    count = ids.shape[1] - prompt
    sums = _Sums()
    for model in models:
        model.reset()
    done = 0
    for start, stop in _pieces(prompt, ids.shape[1] - 1):
        # Only the last token of the prompt predicts one that is scored. A prompt comes at once.
        first = start == 0
        keep = 1 if first else None
        own = feed(fast, ids[:, start:stop], stop if first else step, keep)
        other = None if full is None else feed(full, ids[:, start:stop], stop - start, keep)
        targets = ids[0, stop + 1 - len(own) : stop + 1]
        sums.add(own, other, targets)
        done += len(own)
        tell(done, count)
    nll, kl, same = (torch.cat(part) for part in (sums.nll, sums.kl, sums.same))
    mean = float(nll.mean())
    return PerplexityScore(
        tokens=count,
        perplexity=math.exp(mean),
        nll=mean,
        kl=float(kl.mean()),
        agreement=float(same.mean()),
        step=step,
        memory=memory(fast),
        segments=tuple(
            Segment(prompt + at, len(part), float(part.mean()), float(kl[at : at + SEGMENT].mean()))
            for at, part in ((at, nll[at : at + SEGMENT]) for at in range(0, count, SEGMENT))
        ),
        seconds=time.perf_counter() - started,
    )


def compare(own: Tensor, full: Tensor | None, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(nll, kl, same) float64 [n] of logits [n, V] (`full` None: equal to `own`) and int64 [n] targets."""
    log_q = own.double().log_softmax(-1)
    nll = -log_q.gather(1, targets[:, None])[:, 0]
    if full is None:
        return nll, torch.zeros_like(nll), torch.ones_like(nll)
    log_p = full.double().log_softmax(-1)
    # p = 0 has no part in the sum: 0 x log 0 is 0.
    kl = torch.where(log_p.isneginf(), 0.0, log_p.exp() * (log_p - log_q)).sum(-1)
    same = own.argmax(-1) == full.argmax(-1)
    return nll, kl, same.double()


def _pieces(prompt: int, fed: int) -> Iterator[tuple[int, int]]:
    """The prompt, then what follows in pieces."""
    yield 0, prompt
    for start in range(prompt, fed, CHUNK):
        yield start, min(start + CHUNK, fed)
