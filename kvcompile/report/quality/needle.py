"""Needle retrieval: whether a cache still has the number that a question asks for. Exact digits, greedily.

The prompt comes as prompts do. The words that the answer begins with come behind it as the model's own would, so a
retention that scores by the last queries of a prompt does not see them. They are a question too, though: with the
question before the text, a cache that keeps all is asked again at the end.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvcompile.report.quality.feed import feed
from kvcompile.report.quality.haystack import Needle
from kvcompile.report.quality.report import Memory, NeedleAnswer, NeedleScore
from kvcompile.runtime.module import CachedModel


def retrieval(
    fast: CachedModel,
    tokenizer: Any,
    asked: tuple[Needle, ...],
    tokens: int,
    ask: str,
    memory: Callable[[CachedModel], Memory],
    tell: Callable[[int, int], None],
) -> NeedleScore:
    """Ask for every needle of `asked`; the cache is emptied before each. `tell`: called with (asked, in all)."""
    started = time.perf_counter()
    answers = []
    for number, needle in enumerate(asked):
        text = answer(fast, tokenizer, needle)
        found = found_in(text, needle.number)
        answers.append(NeedleAnswer(needle.depth, needle.behind, needle.number, text.strip(), found))
        tell(number + 1, len(asked))
    return NeedleScore(tokens, ask, tuple(answers), memory(fast), time.perf_counter() - started)


def answer(fast: CachedModel, tokenizer: Any, needle: Needle) -> str:
    """What the model says behind the words that its answer begins with."""

    def of(ids: Sequence[int]) -> Tensor:
        return torch.tensor([ids], dtype=torch.int64, device=fast.device)

    fast.reset()
    feed(fast, of(needle.prompt), len(needle.prompt), keep=1)
    step = len(needle.lead) if fast.plan.chunk_invariant else 1
    logits = feed(fast, of(needle.lead), step, keep=1)
    said: list[int] = []
    text = ""
    # Until a whole number stands there, or nothing more comes.
    while len(said) < needle.room and not re.search(r"\d\D", text):
        if said:
            logits = feed(fast, of(said[-1:]), 1)
        said.append(int(logits[-1].argmax()))
        if said[-1] == tokenizer.eos_token_id:
            break
        text = tokenizer.decode(said, skip_special_tokens=True)
    return text


def found_in(text: str, number: str) -> bool:
    """Whether the first digits of the answer are the number, no more and no fewer."""
    digits = re.search(r"\d+", text)
    return digits is not None and digits[0] == number
