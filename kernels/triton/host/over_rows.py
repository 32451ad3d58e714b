"""Prompts over caches that keep more than codes of single tokens: all slots are decoded to rows, once for all queries.

Where the newest tokens stand in full beside their slots (KIVI, `residual`, `sinks`), which of a prompt's tokens are
read in full depends on the query: each sees those before it as a step does. So the new tokens are no numbers that all
queries read, as they are for `decoded_once.py`. Nor does a site write codes that reads another's cache. For both

    append        writes the new tokens as ever, groups of them as well
    decoded_rows  makes numbers of the slots of all tokens (`attend/decoded_rows.py`, option all)
    prefill       reads these (option rows), and of the rows in full what each query reads so

where `decoded_once.rows` says so, which is where that pays; else prefill reads slots as they stand. Of a graph that
leaves sizes open, both forms of prefill are launched, of which one ends at once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvcompile.kernels.triton.attend.decoded_rows import ALL
from kvcompile.kernels.triton.host import decoded_once, ops_prefill
from kvcompile.kernels.triton.host.call import Call, New, prefill
from kvcompile.kernels.triton.spec import ROWS
from kvcompile.layouts import Full, Storage

# Tiles of queries of a KV head, where a tile of keys is one group.
ONE_GROUP_TILES = 1


def attend(call: Call, new: New, span: Any) -> list[Tensor]:
    """As `prefill` without options, of new tokens that are in their slots.

    span: slots that hold tokens after the call, at most
    """
    count = decoded_once.rows(call, span, _least_tiles(call)) if _is_for(call) else 0
    if decoded_once.is_known(count) and not count:
        return prefill(call, new)
    made = call.kernels
    keys, values = decoded_once.as_rows(call, count, (ALL,))
    buffers = [
        part for side in zip((keys, values), _in_full(call), strict=True) for part in (side[0], *side[1])
    ]
    if decoded_once.is_known(count):
        return prefill(replace(call, buffers=buffers), new, (ROWS,))
    slots, numbers = made.config("prefill"), made.config("prefill", (ROWS,))
    in_full = made.in_full
    outs: list[Tensor] = ops_prefill.either(
        new.q,
        new.k if in_full else None,
        new.v if in_full else None,
        call.buffers,
        buffers,
        call.positions,
        call.sinks,
        call.bias,
        call.leaves,
        count,
        [slots.num_warps, slots.num_stages, numbers.num_warps, numbers.num_stages],
        made.spec("prefill", ("undecoded", *call.dialect, *call.whole)).to_json(),
        made.spec("prefill", ("decoded", *call.dialect, ROWS)).to_json(),
        call.page_table,
        call.starts,
        call.longest,
    )
    return outs


def _in_full(call: Call) -> tuple[list[Tensor], list[Tensor]]:
    """K's and V's rows in full, the last of a side's parts where it has any."""
    layout, parts = call.site.layout, call.buffers
    split = layout.num_key_parts
    sides = ((layout.keys, parts[:split]), (layout.values, parts[split:]))
    keys, values = (own[-1:] if side.residual or side.sinks else [] for side, own in sides)
    return keys, values


def _least_tiles(call: Call) -> int | None:
    """How many tiles of queries rows are made for, where that is less than for codes of single tokens.

    Keys in tiles of one group, whose scales multiply the queries (KIVI's 2 bits), are waited for in every turn:
    predicted of an H200, rows take less time from the first tile on.
    """
    case = call.kernels.case("prefill")
    return ONE_GROUP_TILES if call.site.layout.keys.channelwise and not case.affine else None


def _is_for(call: Call) -> bool:
    """Whether slots hold codes of all tokens, and are those of a sequence in their order.

    Not in float32, as for `decoded_once`; keys that turn when they are read have tiles of their own.
    """
    layout = call.site.layout
    if layout.in_keys or not isinstance(layout.retention, Full) or layout.selection.selects:
        return False
    if layout.rotates_on_read or call.q.dtype == torch.float32:
        return False
    return any(
        isinstance(side, Storage) and side.element.kind != "float" for side in (layout.keys, layout.values)
    )
