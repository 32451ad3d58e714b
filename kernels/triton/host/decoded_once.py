"""Prompts over codes: each token is decoded once for all queries, the new ones and, where that pays, those before them.

Each tile of queries makes numbers of all codes that it reads, so that most are made once for each tile behind them. An
append that encodes new tokens knows what is read of them, and writes that as well, in the model's dtype (option
decoded of `append/append.py`): the numbers of the reference. Then attention is two launches,

    older        over the tokens before; of a text that begins with these tokens, nothing
    continued    over the new tokens, plain numbers, beginning with what the first found

which are one softmax: sums over disjoint sets of keys are joined by their log-sum-exp (Milakov and Gimelshein 2018).

The tokens before stand in slots as codes. `decoded_rows` makes rows of numbers of them (`attend/decoded_rows.py`), once
for all tiles of queries, and the first launch reads these. They are

    rows = slots before the new tokens, at most      if there are LEAST_TILES tiles of queries, and rows of both
                                                     sides take MOST bytes at most
           0                                         else: slots are read as they stand

a number, or an expression of symbols where a graph leaves sizes open: then both forms of the first launch are made, and
the one that the number is not for ends at once. Of a packed call there are as many rows as its longest sequence has
slots, for each. Slots of windows are read as they stand: few tiles of queries see a key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.attend import decoded_rows
from kvcompile.kernels.triton.host import ops_prefill, ops_rows
from kvcompile.kernels.triton.host.call import Call, New, append, as_kept, prefill, turned_back
from kvcompile.kernels.triton.host.site_kernels import kernels_of
from kvcompile.layouts import CacheLayout, Full, InKeys

# Tiles of queries of a KV head. Of fewer, to write rows and read them takes longer than to decode once for each, where
# programs fill a GPU: predicted of an H200, of int4 and int8 up to eighteen, of KIVI's 4 bits up to eight. Codes have
# cost more than predicted.
LEAST_TILES = 8
# Bytes of the rows of a call, which are freed behind its attention: so many are 8 sequences of 32k tokens with 8 heads
# of 128 channels, in 16 bits. A batch that fits by its codes shall not fail for numbers of them.
MOST = 1 << 30
_in_slots: ContextVar[bool] = ContextVar("tokens before a prompt are read as they stand", default=False)


@contextmanager
def read_in_slots() -> Iterator[None]:
    """The tokens before a prompt are read as they stand: for who has no form of a launch that makes rows of them."""
    before = _in_slots.set(True)
    try:
        yield
    finally:
        _in_slots.reset(before)


def is_for(call: Call) -> bool:
    """Whether a call's new tokens are attended to as numbers that were decoded once.

    Not in float32, whose products take longer than to make numbers of codes.
    """
    site = call.site
    written = site.share in ("none", "first") and not call.one
    return written and call.q.dtype != torch.float32 and _splits(site.layout)


def _splits(layout: CacheLayout) -> bool:
    """Whether slots hold codes of single tokens, as they come, of all tokens, before and after the new ones."""
    keys, values = layout.keys, layout.values
    if isinstance(values, InKeys) or not isinstance(layout.retention, Full) or layout.selection.selects:
        return False
    if layout.in_full or layout.rotates_on_read:
        return False
    if keys.channelwise or values.channelwise:
        return False
    return any(side.element.kind != "float" for side in (keys, values))


def attend(call: Call, span: Any) -> Tensor:
    """Writes the new tokens, and gives [B, Hq, S, Dv]. What was turned is read in the basis that it is in.

    span: slots that hold tokens after the call, at most
    """
    wanted = [*call.kernels.transforms(one=False), "k_out", "v_out", "decoded"]
    new = as_kept(call, wanted, append(call, wanted))
    behind = _plain(call, call.site, [])
    # Of a packed call some sequence may have one new token.
    least = call.q.shape[2] if call.starts is None else 1
    older = _older(call, new, rows(call, torch.sym_max(0, span - least)))
    (out,) = prefill(behind, new._replace(parts=[new.k, new.v]), ("continued",), older=older)
    return turned_back(call, out)


def rows(call: Call, held: Any, least_tiles: int | None = None) -> Any:
    """How many slots are decoded to rows: the `held` ones that may hold what is read, or none.

    An integer, or a symbol of one. Nothing here is a condition, which would be taken for all sizes: a factor is 1 where
    its condition holds, and else 0.

    least_tiles: of queries, for which rows are made; None: LEAST_TILES
    """
    made, site = call.kernels, call.site
    if _in_slots.get() or site.mask.window is not None:
        return 0
    batch, _, tokens, _ = call.q.shape
    if call.starts is not None:
        batch, tokens = call.starts.shape[0] - 1, call.longest
    tiles = LEAST_TILES if least_tiles is None else least_tiles
    least = max(1, tiles * made.config("prefill").block_m // made.group)
    tiled = torch.sym_min(1, tokens // least)
    row = made.num_kv_heads * (made.head_dim + made.v_head_dim) * call.q.element_size()
    fits = torch.sym_min(1, MOST // torch.sym_max(1, batch * held * row))
    return held * tiled * fits


def _older(call: Call, new: New, decoded: Any) -> Sequence[Tensor]:
    """The result over the tokens before, and its log-sum-exp; decoded: as `rows` says."""
    # Sink logits count once, with the new tokens.
    site = replace(call.site, score=replace(call.site.score, sinks=False))
    before = replace(_as(call, site), sinks=None)
    if is_known(decoded) and not decoded:
        return prefill(before, new, ("older", "lse"))
    numbers = replace(_plain(call, site, as_rows(call, decoded)), sinks=None)
    if is_known(decoded):
        return prefill(numbers, new, ("older", "lse"))
    codes, plain = before.kernels, numbers.kernels
    of_slots = codes.spec("prefill", ("older", "lse", "undecoded", *call.dialect, *before.whole))
    of_rows = plain.spec("prefill", ("older", "lse", "decoded", *call.dialect))
    own, other = codes.config("prefill"), plain.config("prefill")
    outs: list[Tensor] = ops_prefill.either(
        new.q,
        None,
        None,
        before.buffers,
        numbers.buffers,
        call.positions,
        None,
        call.bias,
        call.leaves,
        decoded,
        [own.num_warps, own.num_stages, other.num_warps, other.num_stages],
        of_slots.to_json(),
        of_rows.to_json(),
        call.page_table,
        call.starts,
        call.longest,
    )
    return outs


def as_rows(call: Call, count: Any, options: Sequence[str] = ()) -> list[Tensor]:
    """Rows of keys and of values, [B, Hkv, count, ..], of slots that hold codes. options: of role decoded_rows"""
    made = call.kernels
    spec = made.spec("decoded_rows", (*options, *call.dialect))
    spec = replace(spec, block_n=decoded_rows.block_n(made.head_dim, made.v_head_dim))
    found: list[Tensor] = ops_rows.decoded_rows(
        call.buffers, call.positions, count, spec.to_json(), call.page_table, call.starts
    )
    return found


def is_known(decoded: Any) -> bool:
    """Whether no graph leaves it open."""
    return isinstance(decoded, int)


def _plain(call: Call, site: SiteSpec, buffers: list[Tensor]) -> Call:
    """The call over numbers in the model's dtype."""
    return replace(_as(call, replace(site, layout=CacheLayout())), buffers=buffers, page_table=None)


def _as(call: Call, site: SiteSpec) -> Call:
    """The call by the kernels of another site of the same heads."""
    made = call.kernels
    heads, dims = (made.num_qo_heads, made.num_kv_heads), (made.head_dim, made.v_head_dim)
    return replace(call, kernels=kernels_of(site, heads, dims, made.dtype, made.device, made.one_bias))
