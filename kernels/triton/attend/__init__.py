"""Attention over slots: the roles decode (one query per sequence, a share of the slots) and prefill (many queries).

    s = f(q k)    p = 2^(s - top)    total = sum p    acc = sum p v      over tiles of slots, top the running maximum

The query heads of a group are rows of one product with a key (GQA-packed); of many queries, all of a tile's. Decode is
split over programs (flash decoding, Dao et al. 2023): each writes acc, top and total of its share of the tiles, and
`combine` joins them. Its grid depends on no length: a program reads the sequences' lengths and takes its share
(`work_list.py`).

| file | what it prints |
|---|---|
| `context.py` | the arguments; it says who takes part: readers, sources, rows in full |
| `work_list.py` | which tiles a program of decode takes |
| `cascade.py` | which of them it takes for several sequences |
| `queries.py` | before the loops |
| `keys.py`, `qk.py`, `softmax_pv.py` | of a tile: its keys, their scores, what these weigh |

Options of the two roles
    logits        decode: scores in base 2 are stored for `score` (`retention/score.py`): [B, Hkv, group, slots], less
                  the level of their tile, which is stored as well, float32 [B, Hkv, group, tiles]
    listed        decode: a program takes its share of the tiles of all sequences (`work_list.py`), else of one
    cascade       decode over a list: tiles that sequences have in common are read once for these (`cascade.py`)
    joined        decode over a list: the last program of a head joins its parts, and no `combine` is launched
    scored        decode that joins, with option logits: that program adds the shares of the head's slots to `score`
                  (`retention/score.py`), and no `score` is launched
    lse           prefill: the log-sum-exp in base 2 of each query is stored, [B, Hq, tokens] float32, for `columns`
    slots16       the slots of a sequence are a multiple of 16, and come divided by it (`slots_16`), so that Triton sees
                  that rows of scales are aligned and copies them ahead
    chosen        decode: the slots are those of the pages in `pages_read`, int32 [B, Hkv, K] (`layouts/selection/`)
    packed        prefill: the tokens of all sequences stand in one row, `out` as well, [row_tokens, Hq, Dv]
    new           prefill: the new tokens are not in the slots; they come as a source of their own
    older         prefill: of the slots those before the new tokens are read, and `out` is float32; nothing is written
                  where there are none
    decoded, undecoded   prefill: with option older, nothing is read or written where the argument `decoded` is 0, or is
                  not 0 (`host/decoded_once.py`)
    continued     prefill: only the new tokens are read; sums begin with what option `older` gave: `older`, `older_lse`
    interpreted   see `dots.py`
    one_bias      the site's bias has one head
    q_fp32        queries come in float32

Keys that are stored before RoPE (`layout.rotates_on_read`) turn when they are read; queries come turned, and once more
as `q_sinks` where they turn at other places toward sinks (`places.py`).
"""

from __future__ import annotations

from typing import Any

from kvcompile.kernels.triton import helpers, packed
from kvcompile.kernels.triton.attend import cascade, keys, work_list
from kvcompile.kernels.triton.attend.combine import turns, weighed
from kvcompile.kernels.triton.attend.context import Attend
from kvcompile.kernels.triton.attend.qk import products
from kvcompile.kernels.triton.attend.queries import constants, fixed_scale, queries
from kvcompile.kernels.triton.attend.softmax_pv import (
    accumulators,
    continued,
    finish,
    highest,
    relative,
    softmax,
    stores,
    weigh,
)
from kvcompile.kernels.triton.dead_lines import tidy
from kvcompile.kernels.triton.params import KernelSource
from kvcompile.kernels.triton.render import rendered
from kvcompile.kernels.triton.retention import score
from kvcompile.kernels.triton.retention.score import SCORED, logits_dtype
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.kernels.triton.tile import cache_positions, scores
from kvcompile.kernels.triton.tile.addressing import SlotArray
from kvcompile.layouts import CacheLayout, InKeys


def needs_stages(role: str, layout: CacheLayout) -> bool:
    """Whether the text of the main loop says how many stages its pipeline has (`KernelSpec.stages`).

    Triton copies ahead what a product needs; all that a tile loads, if the loop itself has a number of stages. Minima
    of values are summed up, and no product needs them.
    """
    return role == "decode" and not isinstance(layout.values, InKeys) and layout.values.of_slots.scale.minimum


def generate(spec: KernelSpec) -> KernelSource:
    """The kernel of `spec`, role decode or prefill."""
    attend = Attend(spec)
    params = attend.params()
    listed = work_list.LISTED in spec.options
    loops: list[dict[str, Any]] = []
    for source in attend.sources:
        bounds = keys.bounds(attend, source)
        loops.append(
            {
                "what": "the new tokens" if source.prefix else "the cache",
                "bounds": bounds,
                "plain": tile(attend, source, False) if bounds.plain else [],
                "masked": tile(attend, source, True),
            }
        )
    # Beside tokens in full in the same tile no register is left for where a search began: it begins anew.
    anew = attend.mixed and not attend.apart
    name = f"{spec.role}_attention"
    scale = [line for part in attend.readers for line in fixed_scale(attend, part)]
    text = rendered(
        "attend.py.jinja",
        name=name,
        params=params,
        spec=spec,
        many=attend.many,
        below=below(spec) if attend.many else "",
        packed=packed.prologue(params, f"{below(spec)} >= tokens * {spec.group}") if attend.packed else [],
        row_tiles=work_list.row_tiles(spec),
        listed=listed,
        cascade=attend.cascade,
        joined=work_list.JOINED in spec.options,
        join=join(spec) if work_list.JOINED in spec.options else "",
        lse=attend.leaves_lse,
        scored=_scored(spec),
        tiles_of=work_list.tiles_of(loops[0]["bounds"].lines) if listed else "",
        rows=work_list.heads(spec),
        members=work_list.members(spec),
        at_once=work_list.AT_ONCE,
        anew=anew,
        looked_at=work_list.AT_ONCE if anew else work_list.LOOKED_AT,
        options=spec.options,
        query_row=attend.row,
        queries=[*constants(attend), *scale, *queries(attend)],
        accumulators=(continued if "continued" in spec.options else accumulators)(attend),
        loops=loops,
        finish=finish(attend),
        partial=stores(
            attend, "partial_ptr + row[:, None]", "{}", "" if listed else " & (total > 0.0)[:, None]"
        ),
        out=stores(attend, "out_ptr + row[:, None]", "({} / total[:, None])"),
        log2e=scores.LOG2E,
        rescale=[f"acc{i} = acc{i} * tl.exp2(top - highest)[:, None]" for i in attend.values.indices],
        out_dim=attend.values.channels,
        mixed=attend.mixed,
        edges_wait=attend.edges_wait,
        stages=spec.stages,
        tiles=-(-spec.layout.slots(None) // spec.block_n) if "logits" in spec.options else 0,
    )
    return KernelSource(name, params, helpers.module(tidy(text)))


def below(spec: KernelSpec) -> str:
    """An expression: the rows of queries before those of a program of role prefill.

    Programs begin in the order of their numbers. The last queries see most keys, so they come first: what begins last,
    while others have nothing left to do, is short (longest processing time first; Graham 1969).
    """
    return f"(tl.num_programs(0) - 1 - tl.program_id(0)) * {spec.block_m}"


def join(spec: KernelSpec) -> str:
    """The function of a kernel's file that joins the parts of a head (`templates/join.jinja`)."""
    dim = weighed(spec)
    rows, block = work_list.power_above(work_list.joined_heads(spec)), work_list.power_above(dim)
    return rendered(
        "join.jinja",
        spec=spec,
        dim=dim,
        rows=rows,
        block=block,
        members=work_list.members(spec),
        row_tiles=work_list.row_tiles(spec),
        cascade=cascade.CASCADE in spec.options,
        segments=2 * work_list.heads(spec),
        at_once=work_list.together(spec, dim),
        sinks=spec.site.score.sinks,
        lse=Attend(spec).leaves_lse,
        scored=SCORED in spec.options,
        log2e=scores.LOG2E,
        turned=helpers.hadamard("out", rows, block, dim) if turns(spec) else "",
        stored=helpers.stored("out", spec.dtype, "interpreted" in spec.options),
    ).rstrip()


def _scored(spec: KernelSpec) -> str:
    """The function of a kernel's file that adds the shares of a head (`templates/scored.jinja`), if it is asked for."""
    rows = work_list.power_above(work_list.joined_heads(spec))
    return score.function(spec, rows) if SCORED in spec.options else ""


def tile(attend: Attend, source: SlotArray, masked: bool) -> list[str]:
    """Lines of one tile, `start` its first slot. masked: some slots are not seen, or read in full."""
    spec = attend.spec
    lines = [keys.inside(attend, source)] if masked else []
    lines += keys.chosen(attend, source, masked)
    if masked or attend.needs_key:
        lines += keys.positions(attend, source, masked)
    if attend.needs_place:
        lines += cache_positions.of_keys(spec, bool(source.prefix), masked)
    lines += source.located([part.group for part in attend.readers], masked)
    if masked:
        for rows in filter(None, map(attend.full, ("keys", "values"))):
            lines += [*rows.flags(), *rows.row_flags()]
    lines += keys.loaded(attend, source, "keys", masked)
    lines += products(attend, masked)
    lines += scores.after(spec, attend.names, masked)
    if masked:
        lines.append(f's = tl.where({keys.visible(attend, source)}, s, float("-inf"))')
    loaded = keys.loaded(attend, source, "values", masked) if attend.values.reader is not None else []
    # What is stored before values are read takes no registers beside them; of some, the level asks for their scales.
    before, after = (
        ([], loaded) if "logits" in spec.options and not attend.values.normalized else (loaded, [])
    )
    lines += [*before, *highest(attend, masked)]
    if "logits" in spec.options:
        lines += _logits(attend, source, masked)
    return [*lines, *after, *softmax(attend), *weigh(attend, masked)]


def _logits(attend: Attend, source: SlotArray, masked: bool) -> list[str]:
    """Lines that store the scores of a tile, less the level of this program's tiles.

    They are read once more soon, when many more bytes of keys and values have gone by: the L2 cache is asked to keep
    them (`evict_last`), so that memory neither takes nor gives them.
    """
    spec = attend.spec
    row = f"((batch * {spec.num_kv_heads} + head) * {spec.group} + m)"
    inside = f"real[:, None] & (start + n < {source.slots})[None, :]"
    at = f"logits_ptr + {row}[:, None] * {source.slots} + (start + n)[None, :]"
    dtype = str(logits_dtype(spec)).removeprefix("torch.")
    lines, own = relative(attend, masked)
    return [*lines, f'tl.store({at}, ({own}).to(tl.{dtype}), mask={inside}, eviction_policy="evict_last")']
