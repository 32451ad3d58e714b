"""The packed dialect: kernels over many new tokens of sequences that stand in one row, one behind the other.

    batch       the sequence, as everywhere: of its table, its calibrated scales
    tokens      its new tokens
    query_start where they begin in the row, int64: of q, k, v, positions and of all that is as long as the row
    query_place where they begin in an array of their codes of `room` tokens, int64: a multiple of 16, which a compiler
                sees, so that scales are seen to be aligned, and are copied ahead

Launched for the longest of them: a program beyond the tokens of its sequence ends at once. What has a row of tokens
comes with stride 0 for sequences, so that nothing else of a kernel's text is another; its pointers are moved to where
the sequence begins. The length of the row is `row_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from kvcompile.kernels.triton.params import Param, ScalarParam, TensorParam

OPTION = "packed"
STARTS = TensorParam("query_start_loc", torch.int64)  # int64 [sequences + 1], dense
ROW_TOKENS = ScalarParam("row_tokens")
# Tensors [1, heads, tokens, ..] of the tokens of a row.
OF_TOKENS = ("q", "q_sinks", "q_out", "k", "k_out", "v", "v_out")


def room(tokens: Any, sequences: Any) -> Any:
    """Tokens that an array of the codes of a row has room for: a multiple of 16.

    A sequence's place is behind the last token of the one before: 16 (end // 16 + 1) - 16 (start // 16) > end - start.
    """
    return (tokens // 16 + sequences) * 16


def prologue(params: Iterable[Param], work: str, also: Iterable[str] = ()) -> list[str]:
    """Lines that find the sequence's tokens, and move pointers there.

    Args:
        params: the kernel's.
        work: an expression of `tokens`: how much there is for the programs of a sequence; of the rest, each ends.
        also: names in `params` of the parts of an array of their codes.
    """
    lines = [
        "query_start = tl.load(query_start_loc_ptr + batch).to(tl.int64)",
        "tokens = (tl.load(query_start_loc_ptr + batch + 1) - query_start).to(tl.int32)",
        f"if {work}:",
        "    return",
    ]
    params, codes = tuple(params), {*also}
    if codes or any(param.names == ("new_16",) for param in params):
        lines.append("query_place = (query_start // 16 + batch) * 16")
    for param in params:
        if not isinstance(param, TensorParam):
            continue
        name = param.name
        if name == "positions":
            lines.append("positions_ptr = positions_ptr + query_start")
        elif name in OF_TOKENS or name in codes:
            begin = "query_place" if name in codes else "query_start"
            # A number for each token is dense in its last dimension; a vector has a stride.
            far = begin if param.rank == 3 else f"{begin} * {name}_s2"
            lines.append(f"{name}_ptr = {name}_ptr + {far}")
    return lines


def launched(tensors: Mapping[str, Tensor], sequences: int, also: Iterable[str] = ()) -> dict[str, Tensor]:
    """`tensors` as a packed kernel takes them: what has a row of tokens with a stride of 0 for sequences."""
    of_row = {"positions", *OF_TOKENS, *also}
    return {
        name: tensor.expand(sequences, *tensor.shape[1:]) if name in of_row else tensor
        for name, tensor in tensors.items()
    }
