"""What the original computes of texts of several lengths, and the longest that it computes alike."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tests.coverage.sizes import LONGEST

ALIKE = 1e-4  # relative RMS error of what is the same but for rounding


@dataclass(frozen=True)
class Original:
    """What a model computes of texts of several lengths.

    logits: of whole texts, by their length
    end:    the longest text, where a longer one fails or changes what tokens before were; None: none was found
    fails:  whether a longer one fails
    """

    logits: dict[int, Tensor]
    end: int | None = None
    fails: bool = False

    def up_to(self, tokens: int | None) -> Original:
        """The same of texts of no more tokens."""
        if tokens is None:
            return self
        return replace(self, logits={n: logits for n, logits in self.logits.items() if n <= tokens})


def text(rows: int = 2, tokens: int = LONGEST) -> Tensor:
    """Ids [rows, tokens] int64, without those that mean the start, the end or padding."""
    return torch.randint(3, 61, (rows, tokens), generator=torch.Generator().manual_seed(5))


def original(model: nn.Module, ids: Tensor, lengths: Sequence[int]) -> Original:
    """Runs the model on texts of these lengths, without a cache, and looks for where they end.

    Raises:
        Exception: whatever the model raises for the shortest of them.
    """
    first, *others = sorted(lengths)
    logits = {first: whole(model, ids[:, :first])}
    good, bad, fails = first, 0, False

    def holds(length: int) -> bool:
        nonlocal fails
        try:
            found = whole(model, ids[:, :length])
        except Exception:  # a table that ends raises anything
            fails = True
            return False
        fails = False
        if not all(error(found[:, :n], logits[n]) <= ALIKE for n in logits if n <= length):
            return False
        logits[length] = found
        return True

    for length in others:
        if not holds(length):
            bad = length
            break
        good = length
    if not bad:
        return Original(logits)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    holds(good - 1)
    holds(good + 1)
    return Original(logits, good, fails)


def whole(model: nn.Module, ids: Tensor) -> Tensor:
    """Of a model that has seen no other text: some remember how long one was."""
    with torch.no_grad():
        logits: Tensor = deepcopy(model)(ids, use_cache=False).logits
    return logits


def error(found: Tensor, right: Tensor) -> float:
    """Relative RMS error; infinite where shapes differ."""
    if found.shape != right.shape:
        return float("inf")
    return float((found - right).double().square().mean().sqrt() / right.double().square().mean().sqrt())
