"""Packed steps over one pool against the same tokens of each sequence alone, by `cached_attention`.

Both have the same pools and tables. What no token was written to is 77, or NaN where it must not even be multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from kvcompile.kernels.ops import cached_attention as alone
from kvcompile.kernels.ops.cached_attention_packed import cached_attention_packed
from kvcompile.layouts import AllTokens, InKeys, Paged
from kvcompile.layouts.packing import unpacked
from tests.support.runner import shuffled
from tests.support.triton_attention import LIMIT, STORAGES, Case, Pick, case_of

Step = tuple[
    tuple[int, int], ...
]  # (sequence, new tokens): those that have one and come first, then the others


@dataclass(frozen=True)
class Packed:
    """A site, and the steps in which sequences come to it.

    decodes: of each step, how many sequences are said to come first
    case: its `pads` say no more than how many sequences there are, its `chunks` how many tokens each can have
    """

    case: Case
    steps: tuple[Step, ...]
    decodes: tuple[int, ...]


def packed_case(pick: Pick, kernels: str = "reference") -> Case:
    """Any site that a packed step goes through."""
    case = case_of(pick, False, kernels)
    storages = [s for s in STORAGES if not (s.residual or s.sinks or s.channelwise)]
    if kernels != "cpp" and case.layout.rotates_on_read:  # no kernel turns keys back twice
        storages = [s for s in storages if not s.hadamard]
    keys = pick([s for s in storages if not s.check(case.dims[0])])
    values = case.layout.values
    if not isinstance(values, InKeys):
        values = pick([s for s in storages if not s.check(case.dims[1])])
    placement = Paged(pick((8, 16, 24, 32)))
    layout = replace(case.layout, keys=keys, values=values, placement=placement, selection=AllTokens())
    assert layout.check() is None and unpacked(layout) is None
    case = replace(case, layout=layout)
    if case.carried is not None and any(kind != "table" for kind in case.carried.mod.leaves):
        case = replace(case, carried=None)
    return replace(case, chunks=(LIMIT,), pads=(0,) * pick((2, 3, 5)))


@st.composite
def packed(draw: st.DrawFn, kernels: str = "reference") -> Packed:
    """Any site, and any steps: sequences that are not in a step wait."""
    case = packed_case(lambda options: draw(st.sampled_from(options)), kernels)
    return schedule(case, lambda low, high: draw(st.integers(low, high)))


def schedule(case: Case, between: Any) -> Packed:
    """Steps in which all sequences get tokens, some up to the limit; `between` gives a number of a range."""
    seen, steps, decodes = [0] * len(case.pads), [], []
    for _ in range(between(2, 5)):
        new = {}
        for number, tokens in enumerate(seen):
            room = LIMIT - tokens
            size = between(0, 4)  # none, one, or a chunk
            if size and room:
                new[number] = 1 if size < 3 else between(1, min(room, 13))
        if not new:
            continue
        ones = [number for number, count in new.items() if count == 1]
        first = ones[: between(0, len(ones))]
        others = [number for number in new if number not in first]
        if between(0, 4) == 4:  # a sequence without a token
            others += [number for number in range(len(seen)) if number not in new][:1]
            new |= {number: 0 for number in others if number not in new}
        steps.append(tuple((number, new[number]) for number in (*first, *others)))
        decodes.append(len(first))
        for number, count in new.items():
            seen[number] += count
    return Packed(case, tuple(steps), tuple(decodes))


def run(one: Packed, kernels: str, unwritten: float = 77.0) -> tuple[list[Tensor], list[Tensor]]:
    """Results of all steps, packed and of each sequence alone, [1, Hq, T, Dv] each; the pools must be the same.

    Raises:
        AssertionError: the cache has other bits.
    """
    case = one.case
    q, k, v = case.qkv()
    site, layout = replace(case.site, kernels=kernels), case.layout
    count, limit = len(case.pads), LIMIT + 2
    table = shuffled(layout, count, limit, case.seed)
    found: list[list[Tensor]] = []
    caches = [_buffers(case, table, unwritten) for _ in range(2)]
    starts = torch.zeros(count, dtype=torch.int64)
    results: tuple[list[Tensor], list[Tensor]] = ([], [])
    extra = case.extra()
    for step, first in zip(one.steps, one.decodes, strict=True):
        who = torch.tensor([number for number, _ in step])
        sizes = torch.tensor([size for _, size in step])
        seen = starts[who]
        own = [table[number : number + 1] for number in who]
        parts = [(number, slice(int(starts[number]), int(starts[number]) + size)) for number, size in step]
        new = [torch.cat([x[number : number + 1, :, part] for number, part in parts], 2) for x in (q, k, v)]
        at = torch.cat([torch.arange(part.start, part.stop) for _, part in parts])[None]
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        ends = seen + sizes
        tables = _known(layout, torch.cat(own), ends)
        results[0].append(
            cached_attention_packed(
                *new,
                _rows(case, caches[0], who),
                at,
                bounds.int() if case.seed % 2 else bounds,
                seen,
                case.rope(),
                first,
                int(sizes.max()),
                int(ends.max()),
                site.to_json(),
                page_table=tables,
                **extra,
            )
        )
        outs = []
        for row, (number, part) in enumerate(parts):
            if part.start == part.stop:
                continue
            outs.append(
                alone.cached_attention(
                    *(x[number : number + 1, :, part] for x in (q, k, v)),
                    _rows(case, caches[1], who[row : row + 1]),
                    torch.arange(part.start, part.stop)[None],
                    seen[row : row + 1],
                    case.rope(),
                    int(ends[row]),
                    site.to_json(),
                    page_table=tables[row : row + 1],
                    **extra,
                )
            )
        results[1].append(torch.cat(outs, 2))
        starts[who] = ends
        found = [[_bits(x) for x in cache] for cache in caches]
        for a, b in zip(*found, strict=True):
            assert torch.equal(a[1:], b[1:]), "other bits in the pools"  # page 0 is nobody's
    return results


def check(one: Packed, kernels: str, *, exact: bool = False, unwritten: float = 77.0) -> None:
    """A packed step gives what each sequence gives alone; exact: bit for bit.

    Raises:
        AssertionError: it does not.
    """
    for number, (got, wanted) in enumerate(zip(*run(one, kernels, unwritten), strict=True)):
        assert bool(got.isfinite().all()), f"step {number}: not finite"
        if exact:
            assert torch.equal(got, wanted), f"step {number}: other bits"
            continue
        # Sums in another order, of values as large as the vectors' own; the result is rounded to its dtype.
        largest = max(float(x.float().abs().max()) for x in one.case.qkv()[1:])
        limit = (torch.finfo(one.case.dtype).eps + 64 * torch.finfo(torch.float32).eps) * largest
        off = float((got.double() - wanted.double()).abs().max())
        assert off <= limit, f"step {number}: off by {off:.2e}, {limit:.2e} allowed"


def _buffers(case: Case, table: Tensor, unwritten: float) -> list[Tensor]:
    """The site's pools, and a row for each sequence of what is in no page."""
    scales, found = case.scales(), []
    sizes = case.layout.buffers(case.heads[1], *case.dims, case.dtype, LIMIT + 2)
    for spec in sizes:
        own = replace(spec, fill=tuple(scales[spec.name].tolist())) if spec.name in scales else spec
        rows = int(table.max()) + 2 if spec.paged else len(case.pads)
        fill = unwritten if spec.dtype.is_floating_point else 77
        found.append(own.written(torch.full((rows, *spec.shape), fill, dtype=spec.dtype)))
    return found


def _rows(case: Case, buffers: Sequence[Tensor], who: Tensor) -> list[Tensor]:
    """The buffers, those in no page of these sequences alone."""
    sizes = case.layout.buffers(case.heads[1], *case.dims, case.dtype, LIMIT + 2)
    return [x if spec.paged else x[who] for spec, x in zip(sizes, buffers, strict=True)]


def _known(layout: Any, table: Tensor, lengths: Tensor) -> Tensor:
    """Tables with the pages of so many tokens alone."""
    size = layout.placement.page_size
    held = lengths.clamp(max=layout.slots(LIMIT + 2))
    return table.where(torch.arange(table.shape[1]) * size < held[:, None], 0)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous()[..., None].view(torch.uint8).flatten(1)
