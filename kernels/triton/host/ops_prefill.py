"""Defines the ops of the roles that read the cache for many queries, as those of a step in `ops_attend.py`.

| op | role | returns |
|---|---|---|
| triton_prefill | prefill | the output, and the log-sum-exp where it is asked for |
| triton_either | prefill, twice | what one of both gives: over slots, or over rows that were made of them |
| triton_columns | columns | each key's share of the probabilities |
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvcompile.kernels.triton import packed
from kvcompile.kernels.triton.attend.combine import weighed
from kvcompile.kernels.triton.host.ops_arguments import (
    launch_wanted,
    leaf_sizes,
    leaves_of,
    new_sizes,
    parts_of,
    sizes_of,
    tables_of,
)
from kvcompile.kernels.triton.host.source import Kernel, kernel_of
from kvcompile.kernels.triton.retention import score_sums as columns_role
from kvcompile.kernels.triton.spec import KernelSpec


@torch.library.triton_op("kvcompile::triton_prefill", mutates_args={})
def prefill(
    q: Tensor,
    q_sinks: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    buffers: list[Tensor],
    new: list[Tensor],
    positions: Tensor,
    sinks: Tensor | None,
    bias: Tensor | None,
    leaves: list[Tensor],
    rope: list[Tensor],
    page_table: Tensor | None,
    token: Tensor | None,
    place: Tensor | None,
    num_warps: int,
    num_stages: int,
    spec: str,
    query_start_loc: Tensor | None = None,
    max_query_len: int = 0,
    older: Tensor | None = None,
    older_lse: Tensor | None = None,
) -> list[Tensor]:
    """Many queries against the slots and, with option new, against the tokens of the pass; see `attend/`.

    Args:
        q, q_sinks: [B, Hq, S, D]; k, v: [B, Hkv, S, D] in the basis of the storage, where some stand in full.
        new: the parts of the new tokens, as `buffers` has those of the slots, dense, of S tokens, and without option
            continued of so many more that they are a multiple of 16; packed, of `packed.room` tokens.
        positions: int64 [B, S]; the others as for `decode` and `combine`.
        query_start_loc, max_query_len: with option packed: int64 [B + 1], and a number. q, positions and new parts have
            one row then, [1, .., S, ..], and so has `out`; tokens of no sequence have anything in it.
        older, older_lse: with option continued: what option older gave of the same queries, as it gave it.

    Returns:
        out [B, Hq, S, Dv] (of turned values still turned; packed: the heads of a token side by side), and with option
        lse, float32 [B, Hq, S] in base 2. With option older, out is float32, and both are anything of a sequence that
        has no tokens before the new ones; packed, they are [S, Hq, Dv] and [S, Hq].
    """
    kernel = kernel_of(spec)
    outs = _results(kernel.spec, q)
    given = {"q": q, "q_sinks": q_sinks, "k": k, "v": v, "positions": positions, "sinks": sinks, "bias": bias}
    given |= {"page_table": page_table, "slots_token": token, "slots_place": place, **outs}
    given |= {"older": older, "older_lse": older_lse}
    given |= {
        **tables_of(rope),
        **parts_of(kernel, buffers),
        **parts_of(kernel, new, "new_"),
        **leaves_of(kernel, leaves),
    }
    sizes = sizes_of(kernel, buffers, bias, rope) | leaf_sizes(kernel, leaves) | new_sizes(new)
    _launch_many(kernel, q, query_start_loc, max_query_len, given, sizes, (num_warps, num_stages))
    return _as_returned(kernel.spec, outs)


@torch.library.triton_op("kvcompile::triton_either", mutates_args={})
def either(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    buffers: list[Tensor],
    rows: list[Tensor],
    positions: Tensor,
    sinks: Tensor | None,
    bias: Tensor | None,
    leaves: list[Tensor],
    decoded: int,
    launched: list[int],
    of_slots: str,
    of_rows: str,
    page_table: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = 0,
) -> list[Tensor]:
    """As `prefill` over slots or over rows of numbers, as `decoded` says: the other launch ends at once.

    Args:
        rows: as `buffers`, of what `triton_decoded_rows` gave of these; decoded: how many, 0: slots are read.
        launched: warps and stages of the launch over slots, then those of that over rows.
        of_slots, of_rows: the specs of both, of the same results; the others as for `prefill`.
    """
    own = kernel_of(of_slots).spec
    outs = _results(own, q)
    for spec, parts, (warps, stages) in (
        (of_slots, buffers, launched[:2]),
        (of_rows, rows, launched[2:]),
    ):
        kernel = kernel_of(spec)
        given = {"q": q, "k": k, "v": v, "positions": positions, "sinks": sinks, "bias": bias, **outs}
        given |= {"page_table": page_table, **parts_of(kernel, parts), **leaves_of(kernel, leaves)}
        sizes = sizes_of(kernel, parts, bias, []) | leaf_sizes(kernel, leaves) | {"decoded": decoded}
        _launch_many(kernel, q, query_start_loc, max_query_len, given, sizes, (warps, stages))
    return _as_returned(own, outs)


@torch.library.triton_op("kvcompile::triton_columns", mutates_args={})
def columns(
    q: Tensor,
    k: Tensor | None,
    lse: Tensor,
    buffers: list[Tensor],
    new: list[Tensor],
    positions: Tensor,
    bias: Tensor | None,
    leaves: list[Tensor],
    rope: list[Tensor],
    page_table: Tensor | None,
    token: Tensor | None,
    place: Tensor | None,
    num_warps: int,
    num_stages: int,
    of_slots: str,
    of_new: str,
) -> Tensor:
    """Each key's share of the probabilities of many queries, float32 [B, Hkv or 1, slots + S]; see
    `retention/score_sums.py`.

    Args:
        lse: float32 [B, Hq, S], base 2, of `prefill`; the others as there.
        of_slots, of_new: the specs for the keys in slots and for the new ones.
    """
    batch, _, tokens, _ = q.shape
    own = kernel_of(of_slots).spec
    retention = own.layout.retention
    slots = own.layout.slots(None)
    counted = columns_role.counted_from(retention, tokens)  # type: ignore[arg-type]
    sums = q.new_empty((batch, own.score_heads, slots + tokens), dtype=torch.float32)
    for spec, keys in ((of_slots, slots), (of_new, tokens)):
        kernel = kernel_of(spec)
        given = {"q": q, "k": k, "lse": lse, "positions": positions, "bias": bias, "columns": sums}
        given |= {"page_table": page_table, "slots_token": token, "slots_place": place}
        given |= {**tables_of(rope), **parts_of(kernel, buffers), **parts_of(kernel, new, "new_")}
        given |= leaves_of(kernel, leaves)
        sizes = sizes_of(kernel, buffers, bias, rope) | leaf_sizes(kernel, leaves)
        sizes |= {"tokens": tokens, "counted": counted} | new_sizes(new)
        launch_wanted(
            kernel, columns_role.grid(kernel.spec, keys, batch), given, sizes, num_warps, num_stages
        )
    return sums


def _launch_many(
    kernel: Kernel,
    q: Tensor,
    query_start_loc: Tensor | None,
    max_query_len: int,
    given: Mapping[str, Tensor | None],
    sizes: Mapping[str, int],
    launched: tuple[int, int],
) -> None:
    """A launch of role prefill. launched: warps and stages; the others as `prefill` has them"""
    own = kernel.spec
    batch, _, tokens, _ = q.shape
    longest = tokens
    if query_start_loc is not None:
        batch, longest = query_start_loc.shape[0] - 1, max_query_len
        there = {name: tensor for name, tensor in given.items() if tensor is not None}
        given = packed.launched(there, batch) | {"query_start_loc": query_start_loc}
    tiles = (longest * own.group + own.block_m - 1) // own.block_m
    sizes = {**sizes, "tokens": tokens, "row_tokens": tokens}
    launch_wanted(kernel, (tiles, own.num_kv_heads, batch), given, sizes, *launched)


def _results(own: KernelSpec, q: Tensor) -> dict[str, Tensor]:
    """What a kernel of role prefill writes for queries [B, Hq, S, D]."""
    batch, _, tokens, _ = q.shape
    dtype = torch.float32 if "older" in own.options else own.torch_dtype
    rows: tuple[int, ...] = (batch, own.num_qo_heads, tokens)
    if packed.OPTION in own.options:
        rows = (tokens, own.num_qo_heads)
    outs = {"out": q.new_empty((*rows, weighed(own)), dtype=dtype)}
    if "lse" in own.options:
        outs["lse"] = q.new_empty(rows, dtype=torch.float32)
    return outs


def _as_returned(own: KernelSpec, outs: Mapping[str, Tensor]) -> list[Tensor]:
    """What `prefill` gives of the results."""
    if packed.OPTION in own.options and "older" not in own.options:
        return [outs["out"].transpose(0, 1)[None]]
    return list(outs.values())
