"""Which slots a tile of queries reads, and in which of them every key is seen: the bounds of an attention loop.

Queries at positions near .. far share the tile. Slots of an ordered source stand in the order of tokens, slot j is the
token at origin + j; those of a ring, or of a retention by scores, stand in any order. Tiles of slots are counted in the
order in which they are read: those of the sinks first (where a window hides what follows them), then those from the
first that any of the queries sees:

    tile = count + (count < sink_tiles ? 0 : shift)

Of them, plain_from .. plain_to - 1 are seen whole, by every query of the tile: they need no mask.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.kernels.triton.tile.symbolic import printed
from kvcompile.layouts import InKeys, TopPages
from kvcompile.layouts import symbols as sy


@dataclass(frozen=True)
class Bounds:
    """Lines that define tiles, sink_tiles, shift, plain_from, plain_to, and `end`, the slots that hold tokens.

    plain: whether any tile can be plain; else the last two are not defined
    """

    lines: tuple[str, ...]
    sinks: bool
    plain: bool


def lows(spec: KernelSpec, query: str) -> list[str]:
    """Expressions: the first position that a query at `query` sees, by each of the windows there are."""
    found = []
    mask, retention = spec.site.mask, spec.layout.retention
    if mask.window is not None and mask.kind == "chunked":
        found.append(f"({query} // {mask.window} * {mask.window})")
    elif mask.window is not None:
        found.append(f"({query} - {mask.window - 1})")
    if retention.window is not None:
        found.append(f"({query} - {retention.window - 1})")
    return found


def conditions(spec: KernelSpec, query: str, key: str, causal: bool) -> list[str]:
    """Expressions that all must hold for a query to see a key; both broadcast against each other."""
    found = [f"({key} <= {query})"] if causal else []
    mask, retention = spec.site.mask, spec.layout.retention
    if mask.window is not None and mask.kind == "chunked":
        found.append(f"({key} // {mask.window} == {query} // {mask.window})")
    elif mask.window is not None:
        found.append(f"({key} > {query} - {mask.window})")
    if retention.window is not None:
        recent = f"({key} > {query} - {retention.window})"
        found.append(f"({recent} | ({key} < {retention.sinks}))" if retention.sinks else recent)
    return found


def ordered(spec: KernelSpec, origin: str, limit: str, full: bool) -> Bounds:
    """Of slots in the order of tokens from position `origin` on, `limit` of them ("" for as many as positions say).

    full: some keys or values are read in full from elsewhere, which plain tiles never are
    """
    n, sinks = spec.block_n, spec.layout.retention.sinks
    back = "" if origin == "0" else f" - {origin}"
    below = lows(spec, "near")
    lines = [f"end = far + 1{back}"]
    if limit:
        lines.append(f"end = tl.minimum(end, {limit})")
    start = "0" if origin == "0" else f"tl.maximum(-{origin}, 0)"  # of the first slot that is no padding
    # Whether tiles may begin later than at the first slot.
    shifts = bool(below) or origin != "0"
    shift, far_low = "", start
    has_sinks = bool(sinks and below)
    if shifts:
        shift = " - shift"
        lines.append(f"low = {start}")
    if below:
        # A window of the site hides the sinks of the retention as well: then their tiles are read for nothing.
        lines[-1] = f"low = tl.maximum({_max(below)}{back}, {start})"
        lines.append(f"far_low = tl.maximum({_max(lows(spec, 'far'))}{back}, {start})")
        far_low = "far_low"
    reached = f"(tl.maximum(end, 0) + {n - 1}) // {n}"
    if has_sinks:
        own = f"tl.maximum(tl.minimum({sinks}{back}, end), 0)"
        lines.append(f"sink_tiles = ({own} + {n - 1}) // {n}")
        lines.append(f"shift = tl.maximum(low // {n}, sink_tiles) - sink_tiles")
        lines.append(f"tiles = tl.maximum({reached} - shift, sink_tiles)")
    elif shifts:
        lines.append(f"shift = low // {n}")
        lines.append(f"tiles = tl.maximum({reached} - shift, 0)")
    else:
        lines.append(f"tiles = {reached}")
    # Where tiles are shifted this is behind those of the sinks: they are low // n - shift of them.
    lines.append(f"plain_from = ({far_low} + {n - 1}) // {n} - shift" if shifts else "plain_from = 0")
    lines.append(f"plain_end = near + 1{back}")
    if limit:
        lines.append(f"plain_end = tl.minimum(plain_end, {limit})")
    if full:
        first = max(in_full(spec, side)[0] for side in ("keys", "values"))
        if first:
            lines.append(
                f"plain_from = tl.maximum(plain_from, tl.maximum({first}{back} + {n - 1}, 0) // {n}{shift})"
            )
        for side in ("keys", "values"):
            settled = in_full(spec, side)[1]
            if settled is not None:
                lines.append(
                    f"plain_end = tl.minimum(plain_end, {settled.replace('{}', 'tl.maximum(near + 1, 0)')}{back})"
                )
    lines.append(f"plain_to = tl.maximum(plain_end, 0) // {n}{shift}")
    return Bounds(tuple(lines), has_sinks, True)


def unordered(spec: KernelSpec, held: str, plain: bool) -> Bounds:
    """Of slots in any order, of which the first `held` hold tokens. plain: every query sees all of them."""
    n = spec.block_n
    lines = [f"end = {held}", f"tiles = (end + {n - 1}) // {n}"]
    if plain:
        lines += ["plain_from = 0", f"plain_to = end // {n}"]
    return Bounds(tuple(lines), False, plain)


def chosen(spec: KernelSpec, plain: bool) -> Bounds:
    """Of the tokens of chosen pages, one page behind the other; the last of them is the newest, and may not be full."""
    selection = spec.layout.selection
    assert isinstance(selection, TopPages)
    size = selection.page_size
    older = f"tl.minimum(position // {size}, {selection.pages - 1})"
    return unordered(spec, f"tl.where(position < 0, 0, {older} * {size} + position % {size} + 1)", plain)


def in_full(spec: KernelSpec, side: str) -> tuple[int, str | None]:
    """First tokens that are read in full, and the first position of the newest that are, of a length `{}`."""
    kept = spec.layout.keys if side == "keys" else spec.layout.values
    if isinstance(kept, InKeys) or not kept.residual:
        return kept.sinks, None
    return kept.sinks, printed(kept.quantized_tokens, {sy.length: "{}"})


def _max(terms: list[str]) -> str:
    return terms[0] if len(terms) == 1 else f"tl.maximum({', '.join(terms)})"
