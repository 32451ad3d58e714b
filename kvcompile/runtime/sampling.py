"""The next token of each sequence from its logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from inspect import signature
from numbers import Integral, Real
from typing import TypeGuard

import torch
from torch import Tensor

from kvcompile.errors import InputError


def check_sampling(max_new_tokens: object, do_sample: object, temperature: object, top_k: object) -> int:
    """Refuse what means nothing; the number of new tokens.

    Raises:
        InputError: a missing or impossible max_new_tokens, an impossible temperature or top_k.
    """
    if not _whole(max_new_tokens) or max_new_tokens < 1:
        raise InputError(f"max_new_tokens: expected a whole number of at least 1, got {max_new_tokens!r}")
    if do_sample and not (isinstance(temperature, Real) and 0 < float(temperature) < math.inf):
        raise InputError(
            f"temperature: expected more than 0 and finite, got {temperature!r}; do_sample=False is greedy"
        )
    if top_k is not None and not (_whole(top_k) and top_k >= 1):
        raise InputError(f"top_k: expected a whole number of at least 1, got {top_k!r}")
    return int(max_new_tokens)


def check_ends(eos_token_id: object, most: int | None = None) -> tuple[int, ...]:
    """The tokens that end a row: one, or a list or tensor of some; `most`: how many there may be.

    Raises:
        InputError: something else.
    """
    given = eos_token_id.tolist() if isinstance(eos_token_id, Tensor) else eos_token_id
    several = list(given) if isinstance(given, (list, tuple)) else [given]
    found = tuple(int(token) for token in several if _whole(token))
    if len(found) < len(several) or (most is not None and len(found) != most):
        what = "a token id" if most == 1 else "a token id, or a list of some"
        raise InputError(f"eos_token_id: expected {what}, got {eos_token_id!r}")
    return found


def check_names(others: Mapping[str, object], generate: Callable[..., object]) -> None:
    """Refuse arguments that a `generate` without transformers does not have.

    Args:
        others: what was given by names that it does not have.

    Raises:
        InputError: there is one.
    """
    if others:
        name, value = next(iter(others.items()))
        known = [own.name for own in signature(generate).parameters.values() if own.kind is own.KEYWORD_ONLY]
        raise InputError(f"{name}={value!r}: this generate() takes {', '.join(known)}")


def _whole(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)  # also NumPy's


def pick(
    logits: Tensor, do_sample: bool, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """The next token of each row of logits [B, V]: int64 [B, 1]; greedy, or drawn from the `top_k` likeliest."""
    if not do_sample:
        return logits.argmax(-1, keepdim=True)
    # The likeliest has 0, so that no temperature makes infinities of it.
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, torch.finfo(logits.dtype).tiny)
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)
