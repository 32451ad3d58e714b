"""Padding: which columns of a call are no tokens, from its attention mask."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.errors import InputError
from kvcompile.runtime.cache import KVCache


def check_dense(mask: Tensor, device: torch.device) -> None:
    """Refuse a mask whose values cannot be looked at.

    Raises:
        InputError: it is sparse, or elsewhere.
    """
    if mask.layout != torch.strided or mask.device.type not in ("cpu", device.type):
        raise InputError(
            f"attention_mask: expected a dense tensor on {device}, got {mask.layout} on {mask.device}"
        )


def check_prompt(cache: KVCache, prompt: Tensor, mask: Tensor | None, ragged: bool) -> None:
    """Refuse a mask that the first call after a reset would refuse, and rows that are padding and nothing else.

    Args:
        prompt: [B, S], of which only the shape counts; else as `pads_of`.

    Raises:
        InputError: as `pads_of`; also a row without a token.
    """
    pads = pads_of(cache, prompt, mask, ragged, anew=True)
    if pads is not None and bool((pads == prompt.shape[1]).any()):
        row = int((pads == prompt.shape[1]).nonzero()[0])
        raise InputError(f"attention_mask: row {row} is all padding; a prompt has one token at least")


def pads_of(
    cache: KVCache, input_ids: Tensor, mask: Tensor | None, ragged: bool, *, anew: bool = False
) -> Tensor | None:
    """Padded tokens on the left of each row of this call, int64 [B], or None where there are none.

    Args:
        mask: [B, S] or [B, all tokens so far], 0 for padding; None: none.
        ragged: whether the model's sequences may start at different places.
        anew: whether it is the first call after a reset that is yet to come.

    Raises:
        InputError: another shape, or padding that stands elsewhere.
    """
    if mask is None:
        return None
    device = input_ids.device
    batch, tokens = input_ids.shape
    columns = 0 if anew else cache.columns
    seen = torch.zeros(batch, dtype=torch.int64, device=device) if anew else cache.seq_lens
    total = columns + tokens
    if not isinstance(mask, Tensor) or tuple(mask.shape) not in ((batch, tokens), (batch, total)):
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(f"attention_mask: expected [{batch}, {tokens}] or [{batch}, {total}], got {got}")
    check_dense(mask, device)
    if bool(((mask != 0) & (mask != 1)).any()):
        raise InputError("attention_mask: expected 1 for tokens and 0 for padding, got other values")
    mask = mask.to(device).bool()
    if mask.shape[1] > tokens and not torch.equal(
        mask[:, :-tokens], torch.arange(columns, device=device) >= columns - seen[:, None]
    ):
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
    started = columns > 0 and bool(((pads > 0) & (seen > 0)).any())
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
