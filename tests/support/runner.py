"""The op fed as the runtime feeds it, chunk by chunk from an empty cache: the one driver of the tests of kernels.

What no token was written to must not matter: it is 77, not zero, or where it must not even be multiplied, NaN. Pages
stand in no order, among some of nobody, and a sequence has those of its own tokens only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvcompile.kernels.ops import cached_attention as ops
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import CacheLayout, Paged, Scored

_SPARE = 3  # pages of nobody


@dataclass(frozen=True)
class Ran:
    """Results [B, Hq, T, Dv], and the layer's buffers after the last chunk.

    held: where scores say what stays: the tokens [B, Hs, N] in the slots after each chunk, -1 for none; where pages are
        selected: those [B, Hkv, K] that the chunk's step read, -1 for none, or where it read all
    """

    out: Tensor
    buffers: list[Tensor]
    held: list[Tensor]


def run(
    spec: SiteSpec,
    qkv: Sequence[Tensor],
    chunks: Sequence[int],
    pads: Tensor,
    rope: Sequence[Tensor] = (),
    *,
    every: int = 1,
    seed: int = 0,
    scales: Mapping[str, Tensor] | None = None,
    unwritten: float = 77.0,
    **extra: Any,
) -> Ran:
    """`cached_attention` over the chunks, on q's device.

    q [B, Hq, T, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv], padding on the left.

    Args:
        pads: padding of each sequence, int64 [B].
        rope: [cos, sin] where keys are stored before it.
        every: the span that is read is a multiple of it.
        seed: of the order of pages.
        scales: calibrated ones, by the name of their buffer, a number per KV head.
        unwritten: what floats hold that no token was written to; integers hold 77.
        extra: as the op has them (sinks, bias), for all T; leaves: what `spec.score.mod` reads, of all T.
    """
    (batch, _, total, _), layout, device = qkv[0].shape, spec.layout, qkv[0].device
    limit, size = total + 2, layout.placement.page_size if isinstance(layout.placement, Paged) else 0
    table = shuffled(layout, batch, limit, seed).to(device) if size else torch.zeros(0)
    buffers = []
    for b in layout.buffers(qkv[1].shape[1], qkv[1].shape[3], qkv[2].shape[3], qkv[0].dtype, limit):
        own = replace(b, fill=tuple(scales[b.name].tolist())) if scales and b.name in scales else b
        rows = 1 + table.numel() + _SPARE if b.paged else batch
        fill = unwritten if b.dtype.is_floating_point else 77
        buffers.append(own.written(torch.full((rows, *b.shape), fill, dtype=b.dtype, device=device)))
    seq_lens, start = torch.zeros(batch, dtype=torch.int64, device=device), 0
    outs, held = [], []
    for count in chunks:
        part, end = slice(start, start + count), start + count
        positions = (seq_lens - (pads - start).clamp(0, count))[:, None] + torch.arange(count, device=device)
        span = min(limit, -(-end // every) * every)
        step = dict(extra)
        if spec.score.mod is not None and "leaves" in extra:
            kinds = spec.score.mod.leaves
            step["leaves"] = [
                _seen(x, kind, part, span) for kind, x in zip(kinds, extra["leaves"], strict=True)
            ]
        if size:
            step["page_table"] = known(layout, table, seq_lens, positions[:, -1] + 1)
        new = [x[:, :, part] for x in qkv]
        outs.append(
            ops.cached_attention(*new, buffers, positions, seq_lens, list(rope), span, spec.to_json(), **step)
        )
        seq_lens, start = positions[:, -1] + 1, end
        if layout.selection.selects:
            held.append(buffers[-1].long())
        elif isinstance(layout.retention, Scored):
            slot = torch.arange(buffers[-2].shape[2], device=device)
            held.append(torch.where(slot < seq_lens[:, None, None], buffers[-2].long(), -1))
    return Ran(torch.cat(outs, 2), buffers, held)


def _seen(leaf: Tensor, kind: str, part: slice, span: int) -> Tensor:
    """What one pass reads of a leaf [.., T or T, T, ..] of all tokens."""
    if kind == "table":
        return leaf
    if kind == "key":
        return leaf[:, :span]
    return leaf[:, part] if kind == "query" else leaf[:, part, :span]


def known(layout: CacheLayout, table: Tensor, seen: Tensor, ends: Tensor) -> Tensor:
    """The table [B, pages] of sequences that had `seen` tokens [B] and come to `ends` [B].

    Pages that no token has come to, and those that are given back, are 0.
    """
    assert isinstance(layout.placement, Paged)
    size = layout.placement.page_size
    place = torch.arange(table.shape[1], device=table.device)
    has = place * size < ends.clamp(0, layout.slots(table.shape[1] * size))[:, None]
    if layout.released is not None:
        gone = [layout.released.behind(max(0, count), size) for count in seen.tolist()]
        for row, own in zip(has, gone, strict=True):
            row[own.start : own.stop] = False
    return table.where(has, 0)


def shuffled(layout: CacheLayout, batch: int, tokens: int, seed: int = 0) -> Tensor:
    """A page table, int32 [batch, pages of a sequence], in no order; page 0 is nobody's."""
    assert isinstance(layout.placement, Paged)
    each = -(-layout.slots(tokens) // layout.placement.page_size)
    order = torch.randperm(batch * each + _SPARE, generator=torch.Generator().manual_seed(seed)) + 1
    return order[: batch * each].view(batch, each).int()
