"""The packed dialect: kernels over many new tokens of sequences that stand in one row, one behind the other.

    batch       the sequence, as everywhere: of its table, its calibrated scales
    tokens      its new tokens
    query_start where they begin in the row, int64: of q, k, v, positions and of all that is as long as the row

Launched for the longest of them: a program beyond the tokens of its sequence ends at once. What has a row of tokens
comes with stride 0 for sequences, so that nothing else of a kernel's text is another; its pointers are moved to where
the sequence begins. The length of the row is `row_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from kvcompile.kernels.triton.params import Param, ScalarParam, TensorParam

OPTION = "packed"
STARTS = TensorParam("query_start_loc", torch.int64)  # int64 [sequences + 1], dense
ROW_TOKENS = ScalarParam("row_tokens")
# Tensors [1, heads, tokens, ..] of the tokens of a row.
OF_TOKENS = ("q", "q_sinks", "q_out", "k", "k_out", "v", "v_out")


def prologue(params: Iterable[Param], work: str, also: Iterable[str] = ()) -> list[str]:
    """Lines that find the sequence's tokens, and move pointers there.

    Args:
        params: the kernel's.
        work: an expression of `tokens`: how much there is for the programs of a sequence; of the rest, each ends.
        also: names of others in `params` that have a row of tokens: the parts of an array of new ones.
    """
    lines = [
        "query_start = tl.load(query_start_loc_ptr + batch).to(tl.int64)",
        "tokens = (tl.load(query_start_loc_ptr + batch + 1) - query_start).to(tl.int32)",
        f"if {work}:",
        "    return",
    ]
    moved = {*OF_TOKENS, *also}
    for param in params:
        if not isinstance(param, TensorParam):
            continue
        name = param.name
        if name == "positions":
            lines.append("positions_ptr = positions_ptr + query_start")
        elif name in moved:
            # A number for each token is dense in its last dimension; a vector has a stride.
            far = "query_start" if param.rank == 3 else f"query_start * {name}_s2"
            lines.append(f"{name}_ptr = {name}_ptr + {far}")
    return lines


def launched(tensors: Mapping[str, Tensor], sequences: int, also: Iterable[str] = ()) -> dict[str, Tensor]:
    """`tensors` as a packed kernel takes them: what has a row of tokens with a stride of 0 for sequences."""
    of_row = {"positions", *OF_TOKENS, *also}
    return {
        name: tensor.expand(sequences, *tensor.shape[1:]) if name in of_row else tensor
        for name, tensor in tensors.items()
    }
