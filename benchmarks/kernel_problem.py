"""A case of `kernel_cases.py` as tensors: a site, a cache that is full of numbers, and the call that is measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from kernel_cases import Case
from kernel_peers import Dense
from torch import Tensor

from kvcompile.kernels import reference, scored
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import BufferSpec, CacheLayout, Paged, Scored
from kvcompile.layouts import symbols as sy
from kvcompile.recipe import load_recipe
from kvcompile.recipe.retention import Place
from kvcompile.types import BiasSpec, MaskSpec, ScoreSpec

_SOFTCAP = 30.0
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Problem:
    """A case on a device.

    copies: how many caches there are, so that the L2 cache holds none of them when its turn comes
    """

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype, room: int):
        self.case, self.device, self.dtype = case, device, dtype
        self.random = torch.Generator(device).manual_seed(7)
        self.layout = layout_of(case)
        score = {
            "": ScoreSpec(),
            "softcap": ScoreSpec(softcap=_SOFTCAP),
            "alibi": ScoreSpec(bias=BiasSpec("alibi")),
            "sinks": ScoreSpec(sinks=True),
        }[case.score]
        mask = MaskSpec("causal") if case.window is None else MaskSpec("sliding", case.window)
        share = "none" if case.append else "middle"
        self.site = SiteSpec(self.layout, case.dim**-0.5, mask, score, share=share, kernels="triton")
        queries, heads = case.heads
        self.q = self._normal(case.batch, queries, 1, case.dim)
        self.k, self.v = (self._normal(case.batch, heads, 1, case.dim) for _ in range(2))
        self.lengths = torch.tensor(case.lengths, device=device)
        self.positions = self.lengths[:, None] - 1
        self.sinks = self._normal(queries).float() if case.score == "sinks" else None
        self.bias = 2.0 ** -torch.linspace(1, 8, queries, device=device) if case.score == "alibi" else None
        self.table, pages = self._pages()
        copies = max(1, math.ceil(room / self.bytes))
        self.copies = [
            [self._filled(spec, pages if spec.paged else case.batch) for spec in self._specs()]
            for _ in range(copies)
        ]

    # ---- sizes

    @property
    def bytes(self) -> int:
        """Bytes that a call must read or write: the slots that are seen, the query, the result."""
        heads, dim = self.case.heads[1], self.case.dim
        sizes = {sy.H: heads, sy.D: dim, sy.Dv: dim, sy.P: self.dtype.itemsize}
        slot = float(self.layout.bytes_per_slot.subs(sizes))
        most = self.layout.slots(None) if self.layout.bounded else None
        window = self.case.window
        seen = sum(min(n, most or n, window or n) for n in self.case.lengths)
        return int(seen * slot) + 2 * self.q.nbytes

    def _specs(self) -> tuple[BufferSpec, ...]:
        _, heads = self.case.heads
        return self.layout.buffers(heads, self.case.dim, self.case.dim, self.dtype, max(self.case.lengths))

    # ---- contents

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random, device=self.device, dtype=torch.float32).to(
            self.dtype
        )

    def _pages(self) -> tuple[Tensor | None, int]:
        """Pages of the sequences, in no order."""
        placement = self.layout.placement
        if not isinstance(placement, Paged):
            return None, 0
        most = self.layout.slots(max(self.case.lengths))
        each = [-(-min(n, most) // placement.page_size) for n in self.case.lengths]
        order = 1 + torch.randperm(sum(each), generator=self.random, device=self.device)
        table = torch.zeros(self.case.batch, max(each), dtype=torch.int32, device=self.device)
        for row, own in enumerate(order.split(each)):
            table[row, : len(own)] = own
        return table, 1 + sum(each)

    def _filled(self, spec: BufferSpec, rows: int) -> Tensor:
        shape = (rows, *spec.shape)
        if spec.name == "slots.token":
            return self._tokens(shape)
        if spec.name == "slots.score":
            return torch.rand(shape, generator=self.random, device=self.device)
        if spec.name.endswith((".scale", ".minimum")):
            low, high = (0.005, 0.02) if spec.name.endswith("scale") else (-0.2, -0.1)
            drawn = torch.rand(shape, generator=self.random, device=self.device)
            return (low + (high - low) * drawn).to(spec.dtype)
        if spec.dtype in (torch.int8, torch.uint8):
            low = -127 if spec.dtype == torch.int8 else 0
            return torch.randint(
                low, low + 255, shape, generator=self.random, device=self.device, dtype=spec.dtype
            )
        made = torch.empty(shape, device=self.device, dtype=self.dtype if spec.dtype in _FP8 else spec.dtype)
        return made.normal_(generator=self.random).to(spec.dtype)

    def _tokens(self, shape: tuple[int, ...]) -> Tensor:
        """Distinct tokens that a sequence has seen, in its slots; those that are always kept among them."""
        retention = self.layout.retention
        assert isinstance(retention, Scored)
        found = torch.empty(shape, dtype=torch.int32, device=self.device)
        for row, seen in enumerate(self.case.lengths):
            fixed = torch.cat(
                [torch.arange(retention.sinks), torch.arange(seen - 1 - retention.recent, seen - 1)]
            )
            middle = torch.randperm(seen - 1 - len(fixed))[: shape[-1] - len(fixed)] + retention.sinks
            found[row] = torch.cat([fixed, middle]).to(self.device)
        return found

    # ---- what is measured

    def call(self, copy: int = 0) -> Callable[[], Tensor]:
        """Attention over one of the caches, by generated kernels."""
        from kvcompile.kernels.triton.attention import cached_attention

        buffers = self.copies[copy]
        return lambda: cached_attention(*self._arguments(buffers, self.site))

    def error(self) -> float:
        """Relative error of the first and the last sequence against the reference, on copies of their caches."""
        rows = sorted({0, self.case.batch - 1})
        few = self._rows(rows)
        plain = replace(self.site, kernels="reference")
        expected, made = (
            attend([buffer.clone() for buffer in self.copies[0]])
            for attend in (lambda b: few._reference(b, rows, plain), lambda b: self._whole(b)[rows])
        )
        return float((made.float() - expected.float()).norm() / expected.float().norm())

    def _whole(self, buffers: list[Tensor]) -> Tensor:
        from kvcompile.kernels.triton.attention import cached_attention

        result: Tensor = cached_attention(*self._arguments(buffers, self.site))
        return result

    def _rows(self, rows: list[int]) -> Problem:
        few = object.__new__(Problem)
        few.__dict__.update(self.__dict__)
        for name in ("q", "k", "v", "lengths", "positions"):
            setattr(few, name, getattr(self, name)[rows])
        few.table = None if self.table is None else self.table[rows]
        return few

    def _reference(self, buffers: list[Tensor], rows: list[int], site: SiteSpec) -> Tensor:
        own = [b if spec.paged else b[rows] for b, spec in zip(buffers, self._specs(), strict=True)]
        arguments = self._arguments(own, site)
        if isinstance(self.layout.retention, Scored):
            q, k, v, parts, positions, seen, rope, _, _, sinks, bias, _, table = arguments
            return scored.cached_attention(q, k, v, parts, positions, seen, rope, site, sinks, bias, table)
        return reference.cached_attention(*arguments)

    def _arguments(self, buffers: list[Tensor], site: SiteSpec) -> tuple[Any, ...]:
        span = max(self.case.lengths)
        seen = self.lengths - 1
        rows = (self.q, self.k, self.v, buffers, self.positions, seen, [], span, site)
        return (*rows, self.sinks, self.bias, None, self.table)

    # ---- for peers

    def dense(self, copy: int = 0) -> Dense:
        """The cache of a case in the model's dtype, as peers take it."""
        k, v = self.copies[copy]
        return Dense(self.q, k, v, self.lengths.to(torch.int32), self.site.sm_scale)


def layout_of(case: Case) -> CacheLayout:
    """The layout that a recipe with the case's `cache` gives."""
    recipe = load_recipe({"name": "bench", "cache": {key: dict(value) for key, value in case.cache.items()}})
    built: CacheLayout = recipe.cache_for(0, 1, "causal")[0].build(Place(tokens=max(case.lengths)))
    return built
