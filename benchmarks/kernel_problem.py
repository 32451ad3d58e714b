"""A case of `kernel_cases.py` as a sample: what is measured, and whether it gives what the reference gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from kernel_cases import Case
from kernel_peers import Dense
from torch import Tensor

from kvcompile.kernels.reference import attention as reference
from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.host import ops_write
from kvcompile.kernels.triton.host.attention import cached_attention
from kvcompile.kernels.triton.host.site_kernels import kernels_of
from kvcompile.kernels.triton.tools.synthetic_cache import Sample, sample
from kvcompile.layouts import CacheLayout
from kvcompile.recipe import load_recipe
from kvcompile.recipe.retention import LayerContext
from kvcompile.specs import BiasSpec, MaskSpec, RotaryForm, ScoreSpec

_SCORES = {
    "": ScoreSpec(),
    "softcap": ScoreSpec(softcap=30.0),
    "alibi": ScoreSpec(bias=BiasSpec("alibi")),
    "sinks": ScoreSpec(sinks=True),
}


def problem_of(case: Case, device: torch.device, dtype: torch.dtype, room: int) -> Sample:
    """The case's site with full caches; room: see `sample`. Attention alone, unless the case appends."""
    mask = MaskSpec("causal") if case.window is None else MaskSpec("sliding", case.window)
    share = "none" if case.append else "middle"
    site = SiteSpec(layout_of(case), case.dim**-0.5, mask, _SCORES[case.score], share=share, kernels="triton")
    return sample(site, case.heads, (case.dim, case.dim), case.lengths, dtype, device, room, case.new)


def layout_of(case: Case) -> CacheLayout:
    """The layout that a recipe with the case's `cache` gives."""
    recipe = load_recipe({"name": "bench", "cache": {key: dict(value) for key, value in case.cache.items()}})
    built: CacheLayout = recipe.cache_for(0, 1, "causal")[0].build(LayerContext(tokens=max(case.lengths)))
    return built


def call_of(problem: Sample, cache: int = 0) -> Callable[[], Tensor]:
    """Attention over one of the caches, by generated kernels."""
    x = problem.inputs(cache)
    return lambda: cached_attention(x)


def append_of(problem: Sample) -> Callable[[], object]:
    """The append kernel by itself: RoPE on queries and keys, encoding, and the write of the new token."""
    dims, device = problem.dims, problem.q.device
    site = replace(problem.site, rotary=RotaryForm("half", 0, dims[0]), share="none", kernels="reference")
    made = kernels_of(site, problem.heads, dims, problem.q.dtype, device, False)
    spec = made.appends(("one", "rope", "q_out"), len(problem.lengths)).to_json()
    turns = torch.rand(max(problem.lengths), dims[0], device=device)
    rope, buffers = [turns.cos(), turns.sin()], problem.caches[0]
    return lambda: ops_write.append(
        problem.q, problem.k, problem.v, buffers, problem.positions, rope, None, problem.table, spec
    )


def error_of(problem: Sample) -> float:
    """Relative error of the first and the last sequence against the reference; nothing of the sample changes."""
    rows = sorted({0, len(problem.lengths) - 1})
    made = cached_attention(_with(problem, [buffer.clone() for buffer in problem.caches[0]]).inputs(0))[rows]
    heads, layout = problem.heads[1], problem.site.layout
    specs = layout.buffers(heads, *problem.dims, problem.q.dtype, max(problem.lengths))
    pairs = zip(problem.caches[0], specs, strict=True)
    few = _with(problem, [buffer.clone() if spec.paged else buffer[rows] for buffer, spec in pairs])
    few = replace(
        few,
        lengths=tuple(problem.lengths[row] for row in rows),
        q=problem.q[rows],
        k=problem.k[rows],
        v=problem.v[rows],
        positions=problem.positions[rows],
        table=None if problem.table is None else problem.table[rows],
    )
    site = replace(problem.site, kernels="reference")
    expected = reference.cached_attention(few.inputs(0, site))
    return float((made.float() - expected.float()).norm() / expected.float().norm())


def dense_of(problem: Sample, cache: int = 0) -> Dense:
    """A cache in the model's dtype, as peers take it."""
    k, v = problem.caches[cache]
    return Dense(problem.q, k, v, problem.positions[:, 0].to(torch.int32) + 1, problem.site.sm_scale)


def _with(problem: Sample, buffers: list[Tensor]) -> Sample:
    return replace(problem, caches=(buffers,))
