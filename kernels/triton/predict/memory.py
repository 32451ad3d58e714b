"""Bytes that launches move to and from memory: each once, as if the L2 cache kept what several programs read.

Of attention these are the slots that are seen (codes, scales, tables of pages), queries, partial results and outputs;
of roles that write or forget, their tensors, of which those of the cache count by the slots that are written.
"""

from __future__ import annotations

from kvcompile.kernels.triton.append.common_pages import LEAST
from kvcompile.kernels.triton.attend import cascade
from kvcompile.kernels.triton.predict.recorded import Made, Shape
from kvcompile.kernels.triton.tools.synthetic_cache import seen_bytes
from kvcompile.layouts import Paged, TopPages
from kvcompile.layouts import symbols as sy

_PAGE = 4  # bytes of a page's number
_TABLES = ("cos", "sin", "page_table", "slots_token", "slots_place", "positions", "sinks")
_BOTH = ("score", "columns")  # read, and written
# Of an append that looks for a slot: all of them are read, one of a head written.
_NOTES = (
    "slots_token",
    "slots_score",
)
_SLOTS = ("keys_", "values_")
_PARTS = ("partial", "sums")


def seen(shape: Shape, length: int) -> int:
    """Slots that the newest query of a sequence of `length` tokens reads."""
    layout, selection = shape.site.layout, shape.site.layout.selection
    most = layout.slots(None) if layout.bounded else length
    found = min(length, most, shape.site.mask.window or length)
    return min(found, selection.tokens) if isinstance(selection, TopPages) and shape.tokens == 1 else found


def common_slots(shape: Shape) -> int:
    """Slots of whole pages that all sequences have in common, which are before the newest token of each."""
    placement = shape.site.layout.placement
    if not isinstance(placement, Paged) or shape.tokens > 1:
        return 0
    found = min(shape.prefix, min(shape.lengths) - 1) // placement.page_size * placement.page_size
    return found if found >= LEAST else 0


def slot_bytes(shape: Shape) -> float:
    """Bytes of the key and the value in one slot of one KV head, scales and a part of the table of pages included."""
    layout, (dim, v_dim), wide = shape.site.layout, shape.dims, {sy.P: shape.dtype.itemsize}
    page = _PAGE / layout.placement.page_size if isinstance(layout.placement, Paged) else 0.0
    both = layout.keys.bytes_per_vector(sy.D) + layout.values.bytes_per_vector(sy.Dv)
    return float(both.subs({sy.D: dim, sy.Dv: v_dim, **wide})) + page


def case_bytes(shape: Shape) -> int:
    """Bytes that attention must read or write, as benchmarks count them: slots that are seen, queries, results."""
    slots = seen_bytes(shape.site, shape.heads[1], shape.dims, shape.lengths, shape.dtype)
    vectors = len(shape.lengths) * shape.heads[0] * shape.tokens * shape.dtype.itemsize
    return slots + vectors * sum(shape.dims)


def cache_bytes(shape: Shape) -> float:
    """Bytes of the cache that attention of the newest tokens reads."""
    return sum(seen(shape, length) for length in shape.lengths) * slot_bytes(shape) * shape.heads[1]


def other_bytes(made: Made, shape: Shape) -> float:
    """Bytes of a launch besides the slots that attention reads."""
    own = made.bytes
    rows = _rows(made, shape)
    read = _NOTES if made.spec.role == "append" else ()
    found: float = sum(
        size * (2 if name in _BOTH else rows if name in _PARTS else 1)
        for name, size in own.items()
        if name in read or not (name.startswith((*_SLOTS, "new_")) or name in _TABLES)
    )
    if made.spec.role in ("append", "group"):
        tokens = shape.tokens if made.spec.role == "append" else max(1, made.spec.layout.keys.group)
        found += len(shape.lengths) * tokens * slot_bytes(shape) * shape.heads[1]
    return found


def _rows(made: Made, shape: Shape) -> float:
    """Of the rows of a decode step's parts, what is written: of own tiles a sequence's, of common ones a bundle's."""
    spec = made.spec
    if cascade.CASCADE not in spec.options:
        return 1.0
    sequences = len(shape.lengths)
    bundles = -(-sequences // cascade.most(spec)) if common_slots(shape) else 0
    return (sequences * spec.group / spec.block_m + bundles) / (sequences + bundles)
