"""Appends and attends, by generated kernels, over the new tokens of several sequences in one row.

| sequences | launches |
|---|---|
| those that come first, of one new token each | as a step of one token: append, decode, combine |
| the others | as of many tokens, each launch once for all of them, in the packed dialect (`kernels/triton/packed.py`) |

Both take views of the row, so nothing is moved but the few results of the first. What is launched depends on shapes and
on the two numbers that come with a call: nothing asks the device how long a sequence is.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvcompile.kernels.packed import PackedInputs
from kvcompile.kernels.triton.host.attention import attend_many, cached_attention, call_of


def cached_attention_packed(x: PackedInputs) -> Tensor:
    """As `kvcompile::cached_attention_packed` promises, [1, Hq, T, Dv] with the heads of a token side by side."""
    first, span = x.num_decodes, x.rows.span
    ones = cached_attention(x.one_each(span)) if first else None
    out = x.empty() if first == x.sequences else _many(x)
    if ones is not None:
        out[0, :, :first] = ones[:, :, 0].transpose(0, 1)
    return out


def _many(x: PackedInputs) -> Tensor:
    """The sequences that do not come first; of the tokens of the others, anything."""
    rows = x.of_sequences(x.num_decodes)
    starts = x.query_start_loc[x.num_decodes :].to(torch.int64)
    call = replace(call_of(rows), starts=starts, longest=x.max_query_len)
    out, like = attend_many(call, rows), x.empty()
    # Values that were turned back stand otherwise.
    return out if out.stride() == like.stride() else like.copy_(out)
