"""A prompt in as many passes as its tokens take, each of at most so many, as even as can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Step = Callable[[Tensor, Tensor | None, int], Sequence[Tensor]]


def in_passes(
    input_ids: Tensor, pads: Tensor | None, keep: int | None, most: int | None, step: Step
) -> list[Tensor]:
    """Run `step` over tokens [B, S]; returns its outputs [B, K, ...] for the last `keep` tokens (None: all).

    Args:
        pads: padded tokens on the left of each row, int64 [B], or None.
        most: tokens in one pass; None: all of them.
        step: called as step(tokens, pads, kept), with how many last tokens of the pass are kept; may be 0.
    """
    tokens = input_ids.shape[1]
    count = 1 if most is None else math.ceil(tokens / most)
    wanted = tokens if keep is None else min(keep, tokens)
    pieces: list[Sequence[Tensor]] = []
    for number in range(count):
        start, end = tokens * number // count, tokens * (number + 1) // count
        kept = max(0, min(end - start, wanted - (tokens - end)))
        own = None if pads is None else (pads - start).clamp(0, end - start)
        outputs = step(input_ids[:, start:end].contiguous(), own, kept)
        if kept:
            pieces.append(outputs)
    if len(pieces) == 1:
        return list(pieces[0])
    return [torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True)]
