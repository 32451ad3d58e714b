"""Part of append: the slot of each new token, and where in a page it is.

    slot = layout.address(pos)           page = table[slot // page_size], slot mod page_size of it

Of many tokens in a ring, several want one slot: only the last of each is written, as no order of writes can be relied
on. These are the sinks and the last `window` tokens.

Where scores say which tokens stay, one new token takes the slot that `retention/evict.py` finds, `given`; those of many
are given to the launch.
"""

from __future__ import annotations

import sympy
import torch

from kvcompile.kernels.triton.append.encode.tile import Tile
from kvcompile.kernels.triton.params import Param, TensorParam
from kvcompile.kernels.triton.retention import evict
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.kernels.triton.tile.symbolic import printed
from kvcompile.layouts import CacheLayout, Paged, Ring, Scored
from kvcompile.layouts import symbols as sy
from kvcompile.layouts.pages import offset, page_index

# Where it is used, padding has been left out.
_REAL = sympy.Symbol("pos", integer=True, nonnegative=True)


def params(spec: KernelSpec) -> tuple[Param, ...]:
    found: list[Param] = []
    layout = spec.layout
    if "staged" in spec.options:
        return ()
    if evicts(spec):
        found += evict.PARAMS
    elif isinstance(layout.retention, Scored):
        found.append(TensorParam("slots", torch.int32, 3))
    if isinstance(layout.placement, Paged):
        found.append(TensorParam("page_table", torch.int32, 2))
    return tuple(found)


def evicts(spec: KernelSpec) -> bool:
    """Whether an append finds the slots of its tokens by their scores."""
    return isinstance(spec.layout.retention, Scored) and "one" in spec.options


def first(spec: KernelSpec) -> str:
    """The entry of a part's first dimension that a token is in: its sequence, or its page."""
    paged = isinstance(spec.layout.placement, Paged) and "staged" not in spec.options
    return "page" if paged else "batch"


def of_tokens(spec: KernelSpec, tile: Tile) -> list[str]:
    """Statements that define, of tokens at `pos`, the row `slot` int64 in `first`, and which are `kept`.

    tile: of the vectors that go there; where its rows are heads, `slot` is [1]
    """
    layout = spec.layout
    if "staged" in spec.options:
        return ["kept = real", "slot = token.to(tl.int64)"]
    lines = []
    if evicts(spec):
        lines += ["slot = given", f"kept = {tile.among('real')}"]
    elif isinstance(layout.retention, Scored):
        score_head = " + head * slots_s1" if layout.retention.granularity == "kv_head" else ""
        at = f"slots_ptr + batch * slots_s0{score_head} + token"
        lines += [f"slot = tl.load({at}, mask=real, other=-1)", "kept = slot >= 0"]
    else:
        lines.append(f"slot = {_bare(printed(layout.address.subs(sy.pos, _REAL), {_REAL: 'pos'}))}")
        lines.append(f"kept = {tile.among(kept(layout, 'one' in spec.options))}")
    if isinstance(layout.placement, Paged):
        size = layout.placement.page_size
        entry, row = (printed(f(size).subs(sy.slot, _REAL), {_REAL: "slot"}) for f in (page_index, offset))
        lines.append(
            f"page = tl.load(page_table_ptr + batch * page_table_s0 + {entry}, "
            f"mask={'real' if tile.several else 'kept'}, other=0).to(tl.int64)"
        )
        lines.append(f"slot = {_bare(row)}")
    return [*lines, "slot = slot.to(tl.int64)"]


def kept(layout: CacheLayout, one: bool) -> str:
    """Which tokens at `pos` get their slot, of new ones up to position `last`."""
    if one or not isinstance(layout.logical, Ring):
        return "real"
    retention = layout.retention
    newest = f"pos > last - {retention.window}"
    return f"real & ((pos < {retention.sinks}) | ({newest}))" if retention.sinks else f"real & ({newest})"


def _bare(expression: str) -> str:
    """Without the parentheses around all of a sum or remainder."""
    inner = expression[1:-1]
    return inner if expression.startswith("(") and "(" not in inner and ")" not in inner else expression
