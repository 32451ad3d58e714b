"""Defines the ops of the roles that read the cache. Each carries its KernelSpec as a text, and launches that kernel.

| op | role | returns |
|---|---|---|
| triton_decode | decode | partial results of each split, and logits where a retention goes by scores |
| triton_combine | combine | the output, and the log-sum-exp where it is asked for |
| triton_prefill | prefill | the output, and the log-sum-exp where it is asked for |
| triton_either | prefill, twice | what one of both gives: over slots, or over rows that were made of them |
| triton_columns | columns | each key's share of the probabilities |

They are `torch.library.triton_op`s: Inductor and AOTInductor see the launches, and plan the memory of what is between
them. In Triton's interpreter they run on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvcompile.kernels.triton import packed
from kvcompile.kernels.triton.attend import cascade, work_list
from kvcompile.kernels.triton.attend.combine import pieces, weighed
from kvcompile.kernels.triton.host.launch import launch
from kvcompile.kernels.triton.host.source import Kernel, kernel_of
from kvcompile.kernels.triton.retention import score_sums as columns_role
from kvcompile.kernels.triton.retention.score import SCORED, logits_dtype
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.kernels.triton.tile import expression


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
    given |= {**_tables(rope), **parts_of(kernel, buffers)}
    given |= _leaves(kernel, leaves)
    sizes = _sizes(kernel, buffers, bias, rope) | _leaf_sizes(kernel, leaves) | {"batches": batch}
    _launch(kernel, grid, given, sizes, num_warps, num_stages)
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
    _launch(kernel, (own.num_qo_heads, batch, pieces(own)), given, sizes, num_warps, num_stages)
    return list(outs.values())


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
        **_tables(rope),
        **parts_of(kernel, buffers),
        **parts_of(kernel, new, "new_"),
        **_leaves(kernel, leaves),
    }
    sizes = _sizes(kernel, buffers, bias, rope) | _leaf_sizes(kernel, leaves) | _new_sizes(new)
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
        given |= {"page_table": page_table, **parts_of(kernel, parts), **_leaves(kernel, leaves)}
        sizes = _sizes(kernel, parts, bias, []) | _leaf_sizes(kernel, leaves) | {"decoded": decoded}
        _launch_many(kernel, q, query_start_loc, max_query_len, given, sizes, (warps, stages))
    return _as_returned(own, outs)


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
    _launch(kernel, (tiles, own.num_kv_heads, batch), given, sizes, *launched)


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
        given |= {**_tables(rope), **parts_of(kernel, buffers), **parts_of(kernel, new, "new_")}
        given |= _leaves(kernel, leaves)
        sizes = _sizes(kernel, buffers, bias, rope) | _leaf_sizes(kernel, leaves)
        sizes |= {"tokens": tokens, "counted": counted} | _new_sizes(new)
        _launch(kernel, columns_role.grid(kernel.spec, keys, batch), given, sizes, num_warps, num_stages)
    return sums


def _launch(
    kernel: Kernel,
    grid: tuple[int, ...],
    given: Mapping[str, Tensor | None],
    sizes: Mapping[str, int],
    num_warps: int,
    num_stages: int,
) -> None:
    """Of what is there, what the kernel takes; `launch` finds what is missing."""
    wanted = {param.name for param in kernel.source.params}
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None and name in wanted}
    own = {name: size for name, size in sizes.items() if name in wanted}
    launch(kernel, grid, tensors, own, num_warps=num_warps, num_stages=num_stages)


def parts_of(kernel: Kernel, buffers: list[Tensor], prefix: str = "") -> dict[str, Any]:
    """Buffers by the names of their parts. Those with rows of their own are the cache's alone."""
    spec, found = kernel.spec, []
    dtype = spec.torch_dtype
    for side, storage, dim in (
        ("keys", spec.as_read.keys, spec.head_dim),
        ("values", spec.as_read.values, spec.v_head_dim),
    ):
        parts = [part for part in storage.parts(dim, dtype) if not (prefix and part.fixed)]
        found += [f"{prefix}{side}_{part.name}" for part in parts]
    return dict(zip(found, buffers, strict=False)) if buffers else {}


def _tables(rope: list[Tensor]) -> dict[str, Tensor]:
    return dict(zip(("cos", "sin"), rope, strict=False))


def _leaves(kernel: Kernel, leaves: list[Tensor]) -> dict[str, Tensor]:
    return {f"leaf{number}": leaf for number, leaf in _numbered(kernel, leaves)}


def _leaf_sizes(kernel: Kernel, leaves: list[Tensor]) -> dict[str, int]:
    return {
        f"leaf{n}_n{dim}": size
        for n, leaf in _numbered(kernel, leaves)
        for dim, size in enumerate(leaf.shape)
    }


def _numbered(kernel: Kernel, leaves: list[Tensor]) -> list[tuple[int, Tensor]]:
    """The leaf tensors by the numbers that the site's expression gives them."""
    mod = kernel.spec.site.score.mod
    numbers = [] if mod is None else sorted(expression.tensors(mod).found)
    return list(zip(numbers, leaves, strict=True))


def slots_of(spec: KernelSpec, buffers: Sequence[Tensor]) -> int:
    """Slots of a sequence in dense buffers."""
    slots, layout = buffers[0].shape[2], spec.as_read
    every = layout.keys.parts(spec.head_dim, spec.torch_dtype)[0].every
    if every > 1:
        # A row of a group holds several slots, the last of them not all: the least count rounds to all others.
        slots = slots * every
        if not layout.in_keys:
            own = layout.values.parts(spec.v_head_dim, spec.torch_dtype)[0].every
            slots = torch.sym_min(slots, buffers[layout.num_key_parts].shape[2] * own)
    return slots


def _new_sizes(new: list[Tensor]) -> dict[str, int]:
    """How long arrays of new tokens' codes are."""
    return {"new_16": new[0].shape[2] // 16} if new else {}


def _sizes(kernel: Kernel, buffers: list[Tensor], bias: Tensor | None, rope: list[Tensor]) -> dict[str, int]:
    spec, sizes = kernel.spec, dict[str, int]()
    if buffers:
        slots = slots_of(spec, buffers)
        sizes = {"slots": slots, "slots_16": slots // 16}
    if bias is not None:
        sizes["reach"] = bias.shape[-1]
    if rope:
        sizes["table_rows"] = rope[0].shape[0]
    return sizes
