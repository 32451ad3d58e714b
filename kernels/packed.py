"""PackedInputs: what one call of `kvcompile::cached_attention_packed` is given, and the calls that it stands for.

The new tokens of R sequences stand in one row, one sequence behind the other: those that have but one first, all of
whose tokens are a call of one new token, then a call of many for each of the others. Where something is computed
sequence by sequence, `in_parts` makes these calls, on views: nothing of a cache is copied for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from kvcompile.kernels.inputs import AttendInputs
from kvcompile.layouts import CacheLayout, InKeys

# Computes the call of one part; returns [B, Hq, S, Dv].
Attend = Callable[[AttendInputs], Tensor]


@dataclass(frozen=True)
class PackedInputs:
    """New vectors of R sequences in one row of T tokens, and what else a call of `AttendInputs` has.

    rows:            q [1, Hq, T, D], k, v and positions [1, T] likewise; seq_lens, page_table and the buffers that are
                     not in pages have R sequences
    query_start_loc: int32 or int64 [R + 1]: the tokens of sequence r are query_start_loc[r] .. query_start_loc[r + 1]
    num_decodes:     so many sequences come first and have one new token each
    max_query_len:   new tokens of one sequence, at most
    """

    rows: AttendInputs
    query_start_loc: Tensor
    num_decodes: int
    max_query_len: int

    @property
    def sequences(self) -> int:
        return self.query_start_loc.shape[0] - 1

    def empty(self) -> Tensor:
        """Memory for the result, [1, Hq, T, Dv], in which the heads of a token stand side by side."""
        return empty_result(self.rows.q, self.rows.v, self.rows.spec.layout)

    def one_each(self, span: int) -> AttendInputs:
        """The sequences that come first, as a call of one new token."""
        x, count = self.rows, self.num_decodes
        q, k, v = (each[0, :, :count].transpose(0, 1)[:, :, None] for each in (x.q, x.k, x.v))
        x = replace(x, q=q, k=k, v=v, positions=x.positions[0, :count, None])
        return _own(x, slice(0, count), span)

    def of_sequence(self, number: int, start: int, end: int, span: int) -> AttendInputs:
        """One sequence, whose tokens are start .. end."""
        x = self.rows
        q, k, v = (each[:, :, start:end] for each in (x.q, x.k, x.v))
        x = replace(x, q=q, k=k, v=v, positions=x.positions[:, start:end])
        return _own(x, slice(number, number + 1), span)

    def of_sequences(self, first: int) -> AttendInputs:
        """All tokens, with what the sequences from `first` on have of the cache."""
        return _own(self.rows, slice(first, None), self.rows.span)


def _own(x: AttendInputs, which: slice, span: int) -> AttendInputs:
    """The call with what some of the sequences have."""
    buffers = [
        buffer[which] if fixed else buffer
        for buffer, fixed in zip(x.buffers, fixed_parts(x.spec.layout), strict=True)
    ]
    table = None if x.page_table is None else x.page_table[which]
    return replace(x, buffers=buffers, seq_lens=x.seq_lens[which], page_table=table, span=span)


def empty_result(q: Tensor, v: Tensor, layout: CacheLayout) -> Tensor:
    """As `PackedInputs.empty`, of queries [1, Hq, T, D] and values [1, Hkv, T, Dv]."""
    channels = layout.values.channels if isinstance(layout.values, InKeys) else v.shape[3]
    return q.new_empty((1, q.shape[2], q.shape[1], channels)).transpose(1, 2)


def fixed_parts(layout: CacheLayout) -> list[bool]:
    """Of each buffer that holds vectors or their scales, whether every sequence has one of its own."""
    # Which parts a storage has does not depend on the dim.
    sides = [layout.keys.parts(128, torch.float32)]
    if not isinstance(layout.values, InKeys):
        sides.append(layout.values.parts(128, torch.float32))
    return [bool(part.fixed) for parts in sides for part in parts]


def in_parts(x: PackedInputs, attend: Attend) -> Tensor:
    """Append and attend by calls of `attend`: one for the sequences that come first, then one for each other.

    Returns [1, Hq, T, Dv] in q's dtype. The lengths are asked of the device that the tensors are on.

    Raises:
        ValueError: what is said of the sequences is not true of `query_start_loc`.
    """
    out, seen = x.empty(), x.rows.seq_lens.tolist()
    first = x.num_decodes
    pieces = list(_pieces(x))
    if first:
        found = attend(x.one_each(max(seen[:first]) + 1))
        out[0, :, :first] = found[:, :, 0].transpose(0, 1)
    for number, start, end in pieces:
        if start < end:
            span = seen[number] + end - start
            out[:, :, start:end] = attend(x.of_sequence(number, start, end, span))
    return out


def _pieces(x: PackedInputs) -> Iterator[tuple[int, int, int]]:
    """(sequence, its first token, behind its last) of those that do not come first."""
    starts, tokens = x.query_start_loc.tolist(), x.rows.q.shape[2]
    first, lengths = x.num_decodes, [b - a for a, b in pairwise(starts)]
    if starts[0] != 0 or starts[-1] != tokens or min(lengths) < 0 or max(lengths) > x.max_query_len:
        raise ValueError(
            f"query_start_loc: expected it to rise from 0 to the {tokens} tokens in steps of at most max_query_len = "
            f"{x.max_query_len}, got {starts}"
        )
    if starts[: first + 1] != list(range(first + 1)):
        raise ValueError(
            f"num_decodes: {first} sequences shall have one new token each, and query_start_loc is {starts}"
        )
    return ((number, starts[number], starts[number + 1]) for number in range(first, x.sequences))
