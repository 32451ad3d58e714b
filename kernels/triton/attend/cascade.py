"""What sequences of a decode step have in common is read once for many of them (cascade).

Sequences whose tables begin with the same pages have the same keys and values there. A *bundle* is of such sequences,
in rows next to each other: the tiles that all of them have in common are in the list (`work_list.py`) once, as tiles of
its first sequence, and a program multiplies them with the queries of all. These are rows of its products one behind the
other, the query heads of a sequence, then those of the next; without a bundle they are padding, so they cost nothing.
Each sequence's parts of common tiles and of its own are joined as parts always are (Hydragen, Juravsky et al. 2024;
cascade inference of FlashInfer, Ye et al. 2024).

    line of tiles     b's own: those from `skipped` on      and of the first of a bundle: all, `common` of them for all
    segments          of each head of b: common tiles (if b is the first of its bundle), own tiles
    part              of segment r that program p has tiles of: p + r

Who has what in common is found on the device, by the append of the step (`append/common_pages.py`), which compares the
tables of neighbours: no argument of the op says it, a CUDA graph of a step stays right whoever comes and goes, and no
caller can say what is not so. `prefixes` int32 [B, 4] has of each sequence

    0  skipped   tokens that the first of its bundle reads for it
    1  common    tokens that it reads for its bundle, which is then itself the first
    2  place     in its bundle, from 0
    3  members   of its bundle

Both 0 and 1 are the same number for all of a bundle, or 0; a tile of which not all tokens are common is own. Every
sequence has a tile of its own: that of its new token.

Parts of common tiles have `block_m` rows, and so have all. What programs count in `arrivals` are tiles, not parts: a
head is done when all tiles of its sequence are, whoever read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.config import case_of, step_rows
from kvcompile.kernels.triton.params import TensorParam
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.layouts import Full, Paged

CASCADE = "cascade"
PREFIXES = TensorParam("prefixes", torch.int32)
NUMBERS = 4  # of a sequence
_alone: ContextVar[bool] = ContextVar("each sequence of a step reads its own pages", default=False)


def refusal(site: SiteSpec) -> str | None:
    """Why sequences cannot have common tiles in this layout, or None; it is decided without a device."""
    layout = site.layout
    if not isinstance(layout.placement, Paged):
        return "sequences have no pages in common: their slots are not in pages"
    if not isinstance(layout.retention, Full):
        return f"what a sequence sees of a common page is its own matter: {layout.retention}"
    if layout.selection.selects:
        return "each sequence chooses the pages that it reads"
    if layout.in_full:
        return "tokens stand in full beside the pages, each sequence's own"
    if site.mask.window is not None:
        return "a window begins where its query says, which is another place in each sequence"
    if site.score.bias is not None or site.score.mod is not None:
        return "scores depend on where a query is, which is another place in each sequence"
    if site.share not in ("none", "first"):
        return "the site whose cache this is writes the new tokens, and it alone compares tables"
    return None


def most(spec: KernelSpec) -> int:
    """Sequences of a bundle at most: as many as there are rows of products for; 1: there are no bundles."""
    return _fit(spec.block_m, spec.group)


def _fit(rows: int, group: int) -> int:
    fit = rows // group
    return 1 << (fit.bit_length() - 1) if fit > 1 else 1


def shares(spec: KernelSpec) -> bool:
    """Whether decode over a list has bundles."""
    return not _alone.get() and most(spec) > 1 and refusal(spec.site) is None


def told(site: SiteSpec, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype) -> str:
    """What a plan says of it, of layers in pages."""
    if not isinstance(site.layout.placement, Paged):
        return ""
    if reason := refusal(site):
        return f"each sequence of a step reads its own pages: {reason}"
    case = case_of("decode", site, *heads, *dims, dtype)
    fit = _fit(step_rows(case), case.rows)
    if fit > 1:
        return f"pages that sequences of a step have in common are read once for up to {fit} of them"
    taken = "groups of channels" if case.stack > 1 else "query heads of a KV head"
    return f"each sequence of a step reads its own pages: its {taken} take all rows of a product"


@contextmanager
def alone() -> Iterator[None]:
    """Each sequence reads its own pages, whatever others have: what there is to compare with."""
    before = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(before)
