"""The next token of each sequence from its logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvcompile.errors import InputError


def check_sampling(max_new_tokens: int, do_sample: bool, temperature: float, top_k: int | None) -> None:
    """Refuse what means nothing.

    Raises:
        InputError: an impossible max_new_tokens, temperature or top_k.
    """
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens: expected at least 1, got {max_new_tokens}")
    if do_sample and not 0 < temperature < math.inf:
        raise InputError(
            f"temperature: expected more than 0 and finite, got {temperature}; do_sample=False is greedy"
        )
    if top_k is not None and top_k < 1:
        raise InputError(f"top_k: expected at least 1, got {top_k}")


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
