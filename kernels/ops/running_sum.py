"""Running sums along the sequence: what position ids made from the tokens are counted with.

    running_sum(x)[b, i] = x[b, 0] + .. + x[b, i]

A model that counts its tokens (those that are no padding, say) makes positions this way. With a cache, the sum of
the tokens before is a state of one number per sequence. Columns on the left of a row that are no tokens of it (negative
positions) count nothing: the sum starts at the row's first token, as it does where the row runs alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

LIBRARY = torch.library.Library("kvcompile", "FRAGMENT")
LIBRARY.define("running_sum(Tensor x, str key) -> Tensor")
LIBRARY.define("cached_running_sum(Tensor x, Tensor(a!) total, Tensor seq_lens, Tensor positions) -> Tensor")


def _running_sum(x: Tensor, key: str) -> Tensor:
    """x [B, S] of whole sequences, integers -> int64 [B, S]; key: names the place in the model."""
    return x.cumsum(1, dtype=torch.int64)


def cached_running_sum_function(x: Tensor, total: Tensor, seq_lens: Tensor, positions: Tensor) -> Tensor:
    """The sums at the new tokens, int64 [B, S].

    Args:
        x: [B, S], integers of the new tokens.
        total: int64 [B], the sum of the tokens before, updated in place.
        seq_lens: int64 [B], how many tokens each row has seen.
        positions: int64 [B, S], of the new tokens in their rows; negative for padding.
    """
    before = torch.where(seq_lens > 0, total, 0)  # what stands there before the first token means nothing
    counted = torch.where(positions >= 0, x.to(torch.int64), 0)
    sums = before[:, None] + counted.cumsum(1, dtype=torch.int64)
    total.copy_(sums[:, -1])
    # Padding counts as a first token would: what is made of it (a place in a table) must exist.
    return torch.where(positions >= 0, sums, before[:, None] + x.to(torch.int64))


LIBRARY.impl("running_sum", _running_sum, "CompositeImplicitAutograd")
LIBRARY.impl("cached_running_sum", cached_running_sum_function, "CompositeImplicitAutograd")
running_sum = torch.ops.kvcompile.running_sum.default
cached_running_sum = torch.ops.kvcompile.cached_running_sum.default
