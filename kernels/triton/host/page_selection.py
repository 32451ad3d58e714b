"""Chooses the pages that a step reads by generated kernels (`layouts/selection/top_pages.py`).

| new tokens | launches |
|---|---|
| one | append, page_bounds, (a sort per head, by PyTorch), decode over the pages that were chosen, combine |
| many | append, prefill: all is read, and PyTorch takes the new keys into the summaries |

Where the tokens that a step may read are known to be few enough, it reads all of them by the kernels of a layout that
has no selection; the bounds are not asked for then.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvcompile.kernels.shared import page_summaries
from kvcompile.kernels.shared.rope import rotate
from kvcompile.kernels.triton.host import ops_pages
from kvcompile.kernels.triton.host.call import Call
from kvcompile.kernels.triton.selection import page_bounds as bounds_role
from kvcompile.layouts import TopPages


def select(call: Call, span: int) -> Tensor | None:
    """The pages that a step reads, int32 [B, Hkv, K], ascending, those without tokens last; None: all are read.

    The new keys are in the summaries then. span: as `AttendInputs` has it
    """
    selection = call.site.layout.selection
    assert isinstance(selection, TopPages)
    smallest, largest, read = call.notes
    q, k = call.q, call.k
    if call.site.rotates_on_append:
        q, k = (rotate(x, call.positions, *call.rope, form=call.site.rotary) for x in (q, k))
    page = None
    if not call.one or (isinstance(span, int) and span <= selection.tokens):
        page_summaries.summarise(selection, k, call.positions, smallest, largest)
    else:
        made = call.kernels
        spec = made.spec("page_bounds", ("q_fp32",) if q.dtype != made.dtype else ())
        spec = replace(spec, block_n=bounds_role.block_n(made.head_dim))
        pages = (span + selection.page_size - 1) // selection.page_size
        bounds = ops_pages.page_bounds(q, k, call.positions, smallest, largest, pages, spec.to_json())
        page = page_summaries.highest(selection, bounds)
    page_summaries.note(read, page, call.positions, selection)
    return None if page is None else read
