"""The role columns: each key's share of the probabilities of many queries (`layouts/retention/scored.py`).

    columns[key] = sum over the queries that count of pool over heads of 2^(s - lse)

Prefill leaves each query's log-sum-exp, so probabilities need no second softmax; scores are computed once more, as
keeping them would take tokens x keys numbers a head. A program has a tile of keys and goes over the queries: those that
count are the last of a pass (`Scored.rows`), or all. Queries of one head are the rows of a product, since heads are
pooled query by query (their largest is no sum).

Options
    new           the keys are the new tokens; else those in the slots
    interpreted, one_bias, q_fp32   as for prefill
Launch: grid(spec, keys, batch). columns float32 [B, Hkv or 1, slots + tokens], its keys' part written.
"""

from __future__ import annotations

import torch

from kvcompile.kernels.triton import helpers
from kvcompile.kernels.triton.attend import keys
from kvcompile.kernels.triton.attend.context import Attend, unique
from kvcompile.kernels.triton.attend.qk import products
from kvcompile.kernels.triton.attend.queries import fixed_scale, queries
from kvcompile.kernels.triton.dead_lines import tidy
from kvcompile.kernels.triton.params import KernelSource, Param, ScalarParam, TensorParam
from kvcompile.kernels.triton.render import rendered
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.kernels.triton.tile import cache_positions, scores
from kvcompile.kernels.triton.tile.addressing import SlotArray
from kvcompile.layouts import Scored


def counted_from(retention: Scored, tokens: int) -> int:
    """The first query of a pass of `tokens` (a number or a symbol of one) that counts."""
    if retention.score == "last":
        return tokens - 1
    return torch.sym_max(tokens - retention.rows, 0) if retention.rows else 0


def grid(spec: KernelSpec, keys: int, batch: int) -> tuple[int, int, int]:
    """keys: slots, or new tokens."""
    return -(-keys // spec.block_n), spec.score_heads, batch


def generate(spec: KernelSpec) -> KernelSource:
    """The kernel of a spec of role columns.

    Raises:
        ValueError: the layout's retention does not go by scores.
    """
    retention = spec.layout.retention
    if not isinstance(retention, Scored):
        raise ValueError(f"columns are for a retention by scores, not {retention}")
    attend = Attend(spec)
    source = attend.new if "new" in spec.options else attend.cache
    params = _params(attend, source)
    part, rows = attend.keys, attend.full("keys")
    constants = part.constants() + cache_positions.prologue(spec, True)
    before = [*fixed_scale(attend, part), keys.inside(attend, source)]
    if attend.mixed or attend.needs_key or source.prefix:
        before += keys.positions(attend, source, True)
    if attend.needs_place:
        before += cache_positions.of_keys(spec, bool(source.prefix), True)
    before += source.located([part.group], True)
    before += rows.row_flags() if rows else []
    before += keys.loaded(attend, source, "keys", True)
    inner = [*queries(attend), *(rows.flags() if rows else []), *products(attend, True)]
    inner += scores.after(spec, attend.names, True)
    layer = retention.granularity == "layer"
    heads = spec.num_kv_heads * spec.group if layer else spec.group
    text = rendered(
        "columns.py.jinja",
        params=params,
        spec=spec,
        what="the new tokens" if source.prefix else "the slots",
        constants=constants,
        before=before,
        inner=inner,
        visible=keys.visible(attend, source),
        layer=layer,
        largest=retention.pooling == "max",
        factor=1.0 / heads if retention.pooling == "mean" else 1.0,
        slots=spec.layout.slots(None),
        new=bool(source.prefix),
    )
    return KernelSource("columns", params, helpers.module(tidy(text)))


def _params(attend: Attend, source: SlotArray) -> tuple[Param, ...]:
    spec, rows = attend.spec, attend.full("keys")
    found: list[Param] = [TensorParam("q", attend.q_dtype, 4), *source.params, *attend.keys.params(source)]
    found += [TensorParam("keys_scale", torch.float32)] if attend.keys.fixed_scale else []
    found += [TensorParam("positions", torch.int64, 2), TensorParam("lse", torch.float32)]
    found += rows.params if rows else ()
    found += scores.params(spec)
    found += () if source.prefix else attend.of_slots
    found += attend.tables
    found += [TensorParam("columns", torch.float32), ScalarParam("tokens"), ScalarParam("counted")]
    return unique(found)
