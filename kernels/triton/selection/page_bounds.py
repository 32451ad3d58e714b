"""Role page_bounds: the most that any key of a page can score with a step's queries (Quest, `layouts/selection/`).

    bound = max over the query heads of a group of  sum_c max(sm_scale q_c smallest_c, sm_scale q_c largest_c)

The page of the step's own token has the bound inf, pages behind it -inf: neither is read. The first program of a head
takes the new key into the summaries of that page, which no program reads as a page to be bounded.

Options: interpreted; q_fp32 (queries come in float32). spec.block_n: pages of a tile.
Launch: grid(spec, pages, batch). q [B, Hq, 1, D] and k [B, Hkv, 1, D] as attention gets them, after RoPE; positions
int64 [B, 1]; smallest and largest [B, Hkv, P, D] in the model's dtype, of which the new key's rows are written; bounds
float32 [B, Hkv, pages], written. Of padding (a negative position) no summary changes.
"""

from __future__ import annotations

import torch

from kvcompile.kernels.triton import helpers
from kvcompile.kernels.triton.append.encode.tile import power_of_two
from kvcompile.kernels.triton.params import KernelSource, Param, ScalarParam, TensorParam
from kvcompile.kernels.triton.render import rendered
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.layouts import TopPages

OPTIONS = {"interpreted", "q_fp32"}
_ELEMENTS = 4096  # of each of the two summaries that a program holds at once


def generate(spec: KernelSpec) -> KernelSource:
    """The kernel of a spec of role page_bounds.

    Raises:
        ValueError: the layout selects no pages, or an option is unknown.
    """
    if unknown := set(spec.options) - OPTIONS:
        raise ValueError(f"{spec.role} knows no options {sorted(unknown)}")
    selection = selection_of(spec)
    dtype = spec.torch_dtype
    params: tuple[Param, ...] = (
        TensorParam("q", torch.float32 if "q_fp32" in spec.options else dtype, 4),
        TensorParam("k", dtype, 4),
        TensorParam("positions", torch.int64, 2),
        TensorParam("smallest", dtype, 4),
        TensorParam("largest", dtype, 4),
        TensorParam("bounds", torch.float32, 3),
        ScalarParam("pages"),
    )
    text = rendered(
        "page_bounds.py.jinja",
        params=params,
        selection=selection,
        sm_scale=spec.site.sm_scale,
        group=spec.group,
        dim=spec.head_dim,
        channels=power_of_two(spec.head_dim),
        block=spec.block_n,
    )
    return KernelSource("page_bounds", params, helpers.module(text))


def grid(spec: KernelSpec, pages: int, batch: int) -> tuple[int, int, int]:
    return (pages + spec.block_n - 1) // spec.block_n, spec.num_kv_heads, batch


def block_n(head_dim: int) -> int:
    """Pages of a tile: as many as registers hold."""
    return _ELEMENTS // power_of_two(head_dim)


def selection_of(spec: KernelSpec) -> TopPages:
    """The selection of a role that only layouts which select pages have; raises as `generate`."""
    if not isinstance(spec.layout.selection, TopPages):
        raise ValueError(f"{spec.role} is for a selection of pages, not for {spec.layout}")
    return spec.layout.selection
