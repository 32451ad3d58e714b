"""Defines the ops of the roles that read the cache for a step. Each carries its KernelSpec as a text, and launches that
kernel.

| op | role | returns |
|---|---|---|
| triton_decode | decode | partial results of each split, and logits where a retention goes by scores |
| triton_combine | combine | the output, and the log-sum-exp where it is asked for |

They are `torch.library.triton_op`s: Inductor and AOTInductor see the launches, and plan the memory of what is between
them. In Triton's interpreter they run on CPU tensors. Those of prompts are in `ops_prefill.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels.triton.attend import cascade, work_list
from kvcompile.kernels.triton.attend.combine import pieces, weighed
from kvcompile.kernels.triton.host.ops_arguments import (
    launch_wanted,
    leaf_sizes,
    leaves_of,
    parts_of,
    sizes_of,
    tables_of,
)
from kvcompile.kernels.triton.host.source import kernel_of
from kvcompile.kernels.triton.retention.score import SCORED, logits_dtype


@torch.library.triton_op("kvcompile::triton_decode", mutates_args={"arrivals", "score"})
def decode(
    q: Tensor,
    buffers: list[Tensor],
    positions: Tensor,
    bias: Tensor | None,
    leaves: list[Tensor],
    rope: list[Tensor],
    page_table: Tensor | None,
    token: Tensor | None,
    place: Tensor | None,
    pages: Tensor | None,
    sinks: Tensor | None,
    arrivals: Tensor | None,
    score: Tensor | None,
    splits: int,
    num_warps: int,
    num_stages: int,
    spec: str,
    prefixes: Tensor | None = None,
) -> list[Tensor]:
    """One query per sequence against the slots, shared out over `splits` programs a head; see `attend/`.

    Args:
        q: [B, Hq, 1, D], as the stored keys are met (after RoPE, turned).
        buffers: the site's, K's parts, then V's.
        positions: int64 [B, 1].
        bias: float32, what `ScoreSpec.bias` says; rope: [cos, sin] float32 where keys turn when they are read.
        leaves: what `ScoreSpec.mod` reads, those that the kernels take, dense, truth values as bytes.
        page_table: int32 [B, pages]; token, place: int32 [B, Hkv or 1, slots], where the spec has them.
        pages: int32 [B, Hkv, K], with option chosen.
        sinks, arrivals: with option joined: float32 [Hq], where the site has sink logits; int32 [B, Hq], zeros.
        score: with option scored: float32 [B, Hkv, slots], to which shares are added.
        splits: with option listed, all programs.
        prefixes: with option cascade: int32 [B, 4], what sequences have in common (`attend/cascade.py`).

    Returns:
        partial float32 [B, Hkv, splits, G, Dv] (anything where the total is 0), sums float32 [B, Hkv, splits, G, 2]
        (top and total), and with option logits, logits [B, Hkv, G, slots] and levels float32 [B, Hkv, G, tiles]
        (`retention/score.py`). With option listed, partial [parts, M, Dv]
        and sums [parts, M, 2] of M heads, then spans int32 [B, R, 2] (`attend/work_list.py`; anything of padding). With
        option joined what `combine` returns, and then logits and levels; with option scored, the output alone. With
        option cascade M is all rows of a tile, and spans are [B, 2 R, 2]: of common and of own tiles.
    """
    kernel = kernel_of(spec)
    own = kernel.spec
    batch, heads, group = q.shape[0], own.num_kv_heads, own.group
    listed, shared = work_list.LISTED in own.options, cascade.CASCADE in own.options
    segments = work_list.heads(own) * (2 if shared else 1)
    shape: tuple[int, ...] = (batch, heads, splits, group)
    grid = (splits, work_list.heads(own), batch)
    if listed:
        shape = (splits + batch * segments, work_list.members(own))  # one is never written
        grid = (splits, 1, 1)
    outs = {
        "partial": q.new_empty((*shape, weighed(own)), dtype=torch.float32),
        "sums": q.new_empty((*shape, 2), dtype=torch.float32),
    }
    joined, scored = work_list.JOINED in own.options, SCORED in own.options
    parts = outs
    if joined:
        outs = {"out": q.new_empty((batch, own.num_qo_heads, 1, own.v_head_dim), dtype=own.torch_dtype)}
        if "logits" in own.options and not scored:
            outs["lse"] = q.new_empty((batch, own.num_qo_heads), dtype=torch.float32)
    spans = {"spans": q.new_empty((batch, segments, 2), dtype=torch.int32)} if listed else {}
    if not joined:
        outs |= spans
    seen = {}
    if "logits" in own.options:
        # Of slots that hold nothing yet nothing is written, and nobody asks.
        slots = own.layout.slots(None)
        seen["logits"] = q.new_empty((batch, heads, group, slots), dtype=logits_dtype(own))
        tiles = -(-slots // own.block_n)
        seen["levels"] = q.new_empty((batch, heads, group, tiles), dtype=torch.float32)
    if not scored:
        outs |= seen
    given = {"q": q, "positions": positions, "bias": bias, "page_table": page_table, **parts, **seen, **outs}
    given |= {"slots_token": token, "slots_place": place, "pages_read": pages, "score": score}
    given |= {"sinks": sinks, "arrivals": arrivals, "prefixes": prefixes, **spans}
    given |= {**tables_of(rope), **parts_of(kernel, buffers)}
    given |= leaves_of(kernel, leaves)
    sizes = sizes_of(kernel, buffers, bias, rope) | leaf_sizes(kernel, leaves) | {"batches": batch}
    launch_wanted(kernel, grid, given, sizes, num_warps, num_stages)
    return list(outs.values())


@torch.library.triton_op("kvcompile::triton_combine", mutates_args={})
def combine(
    partial: Tensor,
    sums: Tensor,
    spans: Tensor | None,
    positions: Tensor | None,
    sinks: Tensor | None,
    num_warps: int,
    num_stages: int,
    spec: str,
    prefixes: Tensor | None = None,
) -> list[Tensor]:
    """The parts of a decode step joined: out [B, Hq, 1, Dv], and with option lse, float32 [B, Hq] in base 2.

    spans, positions: with option listed, as of `decode`; prefixes: with option cascade, as there
    sinks: float32 [Hq], where the site has sink logits
    """
    kernel = kernel_of(spec)
    own = kernel.spec
    batch = partial.shape[0] if spans is None else spans.shape[0]
    out = partial.new_empty((batch, own.num_qo_heads, 1, own.v_head_dim), dtype=own.torch_dtype)
    outs = {"out": out}
    if "lse" in own.options:
        outs["lse"] = partial.new_empty((batch, own.num_qo_heads))
    given = {"partial": partial, "sums": sums, "spans": spans, "positions": positions, "sinks": sinks, **outs}
    given["prefixes"] = prefixes
    sizes = {} if spans is not None else {"splits": partial.shape[2]}
    launch_wanted(kernel, (own.num_qo_heads, batch, pieces(own)), given, sizes, num_warps, num_stages)
    return list(outs.values())
