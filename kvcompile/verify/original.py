"""The original model asked for its logits: what it declines, by length or by ids, is found out and told."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from kvcompile.errors import KVCompileError, ModelError
from kvcompile.pipeline import Front
from kvcompile.verify.constants import of_model
from kvcompile.verify.ids import Vocabulary
from kvcompile.verify.lengths import Constant
from kvcompile.verify.runs import original_logits

_KEPT = 1 << 22  # numbers of logits that are compared in full
_POSITIONS = 64  # whose logits are compared, where there are more
_RUNS = 16  # of a model that gives the last token's logits


@dataclass(frozen=True)
class Subject:
    """What may be asked of the original.

    words: ids that it takes; limit: tokens that it takes, None: not known; told: what it declined
    """

    model: nn.Module
    front: Front
    words: Vocabulary
    limit: int | None
    told: tuple[str, ...] = ()

    @cached_property
    def numbers(self) -> tuple[Constant, ...]:
        """The constants of its graph."""
        return of_model(self.front)


@dataclass(frozen=True)
class Asked:
    """A text and what the original gives for it.

    ids [B, T]; pads [B]; keep: positions [K] whose logits there are, None: all; logits [B, T or K, V]
    """

    ids: Tensor
    pads: Tensor
    keep: Tensor | None
    logits: Tensor
    seconds: float


def ask(subject: Subject, ids: Tensor, pads: Tensor, ends: list[int]) -> Asked:
    """The original's logits; of every token, or of some and of those before each of `ends`, where they are many.

    Raises:
        Exception: whatever the original raises.
        ModelError: what comes out is no logits of every token.
    """
    started = time.perf_counter()
    keep = _kept(subject, ids, ends)
    logits = original_logits(subject.model, subject.front, ids, keep, pads)
    return Asked(ids, pads, keep, logits, time.perf_counter() - started)


def _kept(subject: Subject, ids: Tensor, ends: list[int]) -> Tensor | None:
    last = subject.front.captured.last is not None  # each position is a run of its own
    if ids.numel() * len(subject.words.taken) <= _KEPT and not last:
        return None
    tokens = ids.shape[1]
    some = torch.linspace(0, tokens - 1, _RUNS if last else _POSITIONS).long().tolist()
    return torch.tensor(sorted({*some, *(end - 1 for end in ends)}), device=ids.device)


def settled(subject: Subject, tokens: int, problem: Exception) -> Subject:
    """What the original takes of `tokens` tokens, where it did not take a text of them and raised `problem`.

    Raises:
        ModelError: it takes nothing.
    """
    first = subject.words.taken[:1]
    longest, why = _longest(subject, first, tokens)
    if longest == 0:
        raise ModelError(
            f"the model itself does not run on 2 tokens, so that nothing can be verified: {why}"
        ) from problem
    told = list(subject.told)
    if longest < tokens:
        told.append(f"the original takes no more than {longest:,} tokens: {why}")
    for words, left_out in _fewer(subject.words):
        problem_now = _declines(subject, words.text(2, longest))
        if problem_now is None:
            if left_out:
                told.append(f"the original declines {left_out}: {first_line(problem)}")
            return replace(subject, words=words, limit=longest, told=tuple(told))
    raise ModelError(
        f"the model itself does not run on {longest:,} tokens of any ids that were tried, so that nothing can be "
        f"verified: {first_line(problem)}"
    ) from problem


def _longest(subject: Subject, word: Tensor, tokens: int) -> tuple[int, str]:
    """The most tokens that the original takes, all of them the same, up to `tokens`; 0: not even two. And why."""
    why = _declines(subject, word.expand(1, tokens))
    if why is None:
        return tokens, ""
    if tokens <= 2 or (shortest := _declines(subject, word.expand(1, 2))) is not None:
        return 0, why if tokens <= 2 else str(shortest)
    low, high = 2, tokens
    while high - low > 1:
        middle = (low + high) // 2
        found = _declines(subject, word.expand(1, middle))
        low, high, why = (middle, high, why) if found is None else (low, middle, found)
    return low, why


def _fewer(words: Vocabulary) -> Iterator[tuple[Vocabulary, str]]:
    yield words, ""
    yield Vocabulary(words.taken), f"some of the ids {', '.join(map(str, words.special))}"
    size = int(words.taken.max()) + 1
    while size > 2:
        size //= 2
        fewer = words.below(size)
        if len(fewer.taken):
            yield fewer, f"some ids from {size:,} on"


def _declines(subject: Subject, ids: Tensor) -> str | None:
    """Why the original does not run on ids [B, T], in a line; None: it does."""
    try:
        end = torch.tensor([ids.shape[1] - 1]) if subject.front.captured.last is not None else None
        original_logits(subject.model, subject.front, ids.contiguous().to(subject.front.device), end)
    except KVCompileError:
        raise
    except Exception as error:  # a model raises anything
        return first_line(error)
    return None


def first_line(error: BaseException) -> str:
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
