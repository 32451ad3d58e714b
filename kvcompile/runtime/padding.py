"""Padding: which columns of a call are no tokens, from its attention mask."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.errors import InputError
from kvcompile.runtime.cache import KVCache


def pads_of(cache: KVCache, input_ids: Tensor, mask: Tensor | None, ragged: bool) -> Tensor | None:
    """Padded tokens on the left of each row of this call, int64 [B], or None where there are none.

    Args:
        mask: [B, S] or [B, all tokens so far], 0 for padding; None: none.
        ragged: whether the model's sequences may start at different places.

    Raises:
        InputError: another shape, or padding that stands elsewhere.
    """
    if mask is None:
        return None
    device = input_ids.device
    batch, tokens = input_ids.shape
    total = cache.columns + tokens
    if not isinstance(mask, Tensor) or tuple(mask.shape) not in ((batch, tokens), (batch, total)):
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(f"attention_mask: expected [{batch}, {tokens}] or [{batch}, {total}], got {got}")
    mask = mask.to(device).bool()
    past = torch.arange(cache.columns, device=device)
    shown = past >= cache.columns - cache.seq_lens[:, None]
    if mask.shape[1] > tokens and not torch.equal(mask[:, :-tokens], shown):
        raise InputError(
            "attention_mask: of the tokens in the cache, it must hide those that were padding when they "
            "came, and no others; reset() forgets them all"
        )
    real = mask[:, -tokens:]
    if bool(real.all()):
        return None
    pads = (~real).sum(1)
    # On the left, and only before a sequence's first token.
    steps = torch.arange(tokens, device=device)
    on_the_left = bool((real == (steps >= pads[:, None])).all())
    started = cache.columns > 0 and bool(((pads > 0) & (cache.seq_lens > 0)).any())
    if not on_the_left or started:
        raise InputError(
            "attention_mask: padding must stand on the left of a sequence, before its first token "
            "(tokenizer.padding_side = 'left')"
        )
    if not ragged:
        raise InputError(
            "attention_mask: this model counts positions itself and not by position_ids alone, so its "
            "sequences cannot start at different places; pass sequences of one length without padding"
        )
    return pads
