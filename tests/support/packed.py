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
from kvcompile.kernels.spec import Share
from kvcompile.layouts import AllTokens, InKeys, Paged
from kvcompile.layouts.packing import unpacked
from tests.support.runner import known, shuffled
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
    released = case.layout.retention.window is not None and pick((False, True))
    placement = Paged(pick((8, 16, 24, 32)), released=released)
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


def run(
    one: Packed, kernels: str, unwritten: float = 77.0, shares: Sequence[Share] = ("none",)
) -> tuple[list[Tensor], list[Tensor]]:
    """Results of all steps, packed and of each sequence alone, [1, Hq, T, Dv] each; the pools must be the same.

    shares: the places of the sites that read the cache, one after the other in every step

    Raises:
        AssertionError: the cache has other bits.
    """
    case, seen = one.case, torch.zeros(len(one.case.pads), dtype=torch.int64)
    table = shuffled(case.layout, len(seen), LIMIT + 2, case.seed)
    caches = [_buffers(case, table, unwritten) for _ in range(2)]
    results: tuple[list[Tensor], list[Tensor]] = ([], [])
    for step, first in zip(one.steps, one.decodes, strict=True):
        given = _Given(case, step, seen.clone(), table, first)
        for share in shares:
            spec = replace(case.site, kernels=kernels, share=share).to_json()
            results[0].append(given.packed(caches[0], spec))
            results[1].append(given.alone(caches[1], spec))
        seen[given.who] = given.ends
        for a, b in zip(*([_bits(x) for x in cache] for cache in caches), strict=True):
            assert torch.equal(a[1:], b[1:]), "other bits in the pools"  # page 0 is nobody's
    return results


class _Given:
    """What the sequences of a step are given; seen, table: of all sequences; first: how many come first."""

    def __init__(self, case: Case, step: Step, seen: Tensor, table: Tensor, first: int):
        self.case, self.first = case, first
        self.who, self.sizes = (torch.tensor(numbers) for numbers in zip(*step, strict=True))
        self.seen = seen[self.who]
        self.ends = self.seen + self.sizes
        self.tables = known(case.layout, table[self.who], self.seen, self.ends)
        self.parts = [slice(a, b) for a, b in zip(self.seen.tolist(), self.ends.tolist(), strict=True)]

    def packed(self, buffers: list[Tensor], spec: str) -> Tensor:
        case, places = self.case, list(zip(self.who.tolist(), self.parts, strict=True))
        new = [torch.cat([x[n : n + 1, :, part] for n, part in places], 2) for x in case.qkv()]
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), self.sizes.cumsum(0)])
        return cached_attention_packed(
            *new,
            _rows(case, buffers, self.who),
            torch.cat([torch.arange(part.start, part.stop) for part in self.parts])[None],
            bounds.int() if case.seed % 2 else bounds,
            self.seen,
            case.rope(),
            self.first,
            int(self.sizes.max()),
            int(self.ends.max()),
            spec,
            page_table=self.tables,
            **case.extra(),
        )

    def alone(self, buffers: list[Tensor], spec: str) -> Tensor:
        case, outs = self.case, []
        for row, (number, part) in enumerate(zip(self.who.tolist(), self.parts, strict=True)):
            if part.start == part.stop:
                continue
            outs.append(
                alone.cached_attention(
                    *(x[number : number + 1, :, part] for x in case.qkv()),
                    _rows(case, buffers, self.who[row : row + 1]),
                    torch.arange(part.start, part.stop)[None],
                    self.seen[row : row + 1],
                    case.rope(),
                    part.stop,
                    spec,
                    page_table=self.tables[row : row + 1],
                    **case.extra(),
                )
            )
        return torch.cat(outs, 2)


def check(
    one: Packed,
    kernels: str,
    *,
    exact: bool = False,
    unwritten: float = 77.0,
    shares: Sequence[Share] = ("none",),
) -> None:
    """A packed step gives what each sequence gives alone; exact: bit for bit.

    Raises:
        AssertionError: it does not.
    """
    for number, (got, wanted) in enumerate(zip(*run(one, kernels, unwritten, shares), strict=True)):
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


def _bits(x: Tensor) -> Tensor:
    return x.contiguous()[..., None].view(torch.uint8).flatten(1)
