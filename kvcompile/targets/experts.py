"""Products of tokens with their experts' matrices, in words that every target has.

transformers sorts the tokens of a mixture of experts by expert and calls an op of its own, a loop over experts with
sizes that depend on the tokens. An exported graph has no such loop: here each token gathers its expert's matrix, which
in a decode step reads what the loop reads. In a prompt every token has its copy: `runtime.prefill_chunk` bounds them.
"""

from __future__ import annotations

import torch
from torch import Tensor

NAME = "transformers.grouped_mm_fallback.default"


def grouped_product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """x [N, K], sorted by expert; weight [E, K, M]; offsets int [E]: where each expert's tokens end -> [N, M]."""
    row = torch.arange(x.shape[0], device=x.device)
    expert = (row[:, None] >= offsets[None]).to(torch.int64).sum(1).clamp(max=weight.shape[0] - 1)
    out: Tensor = torch.matmul(x[:, None], weight.index_select(0, expert)).squeeze(1)
    return out
