"""The keys of a tile: in which slots they are, where they stand, who sees them, and their blocks.

inside [BLOCK_N]   which slots of the tile hold tokens
key    [BLOCK_N]   the positions of those tokens
k[i]   [BLOCK_N, W]   piece i of their channels, in the type of their products; k[i]_full of keys in full
"""

from __future__ import annotations

from kvcompile.kernels.triton.attend.context import Attend
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.kernels.triton.tile import block_bounds, cache_positions, dequantize
from kvcompile.kernels.triton.tile.addressing import SlotArray
from kvcompile.kernels.triton.tile.channel_blocks import paired
from kvcompile.kernels.triton.tile.symbolic import printed
from kvcompile.layouts import Scored, TopPages, Window
from kvcompile.layouts import symbols as sy
from kvcompile.specs import RotaryForm


def bounds(attend: Attend, source: SlotArray) -> block_bounds.Bounds:
    """Which tiles of the source are read, and which of them are seen whole."""
    spec = attend.spec
    if source.prefix:
        return block_bounds.ordered(spec, "first", "tokens", attend.mixed)
    if source.chosen:
        return block_bounds.chosen(spec, not _conditions(attend, source) and not attend.mixed)
    if attend.in_order:
        limit = "tl.maximum(first, 0)" if "older" in spec.options else ""
        return block_bounds.ordered(spec, "0", limit, attend.mixed)
    before = "tl.maximum(first, 0)" if attend.many else "tl.maximum(length, 0)"
    held = f"tl.minimum({before}, {spec.layout.slots(None)})"
    return block_bounds.unordered(spec, held, not _conditions(attend, source) and not attend.mixed)


def inside(attend: Attend, source: SlotArray) -> str:
    """The line that defines which slots of a tile hold tokens; new ones may begin with padding.

    Pages behind a window may have been given back: what their places in the table of pages name is of nobody, and may
    be no number, which a probability of 0 would not make 0.
    """
    if source.prefix:
        return "inside = (start + n < end) & (start + n >= -first)"
    released = attend.spec.layout.released
    if released is None:
        return "inside = start + n < end"
    kept = "(start + n >= low)"
    if released.sinks:
        kept = f"({kept} | (start + n < {released.sinks}))"
    return f"inside = (start + n < end) & {kept}"


def visible(attend: Attend, source: SlotArray) -> str:
    """An expression: which keys which queries see, broadcasts against [BLOCK_M, BLOCK_N]."""
    found = _conditions(attend, source)
    if attend.many:
        return " & ".join(["inside[None, :]", *found])
    return f"({' & '.join(['inside', *found])})[None, :]" if found else "inside[None, :]"


def _conditions(attend: Attend, source: SlotArray) -> list[str]:
    """What a query's position and a key's must fulfil, besides that the key is there."""
    spec = attend.spec
    query = "position[:, None]" if attend.many else "position"
    key = "key[None, :]" if attend.many else "key"
    if not attend.in_order and not source.prefix and not attend.many and _sees_all_held(spec):
        return []  # a ring holds what its retention shows, once the new token is in it
    by_score = isinstance(spec.layout.retention, Scored) and not source.prefix
    return block_bounds.conditions(spec, query, key, causal=attend.many and not by_score)


def _sees_all_held(spec: KernelSpec) -> bool:
    """Whether the site's mask hides no token that its retention keeps: of a window no longer than its own."""
    mask, retention = spec.site.mask, spec.layout.retention
    if mask.window is None:
        return True
    # A ring's slots have the positions behind `position - size`, by their numbers alone (`token_at`).
    return mask.kind == "sliding" and isinstance(retention, Window) and retention.size <= mask.window


def chosen(attend: Attend, source: SlotArray, masked: bool) -> list[str]:
    """The line that defines `slot`, where pages were chosen: tokens `start` .. of those pages, one behind the other."""
    if not source.chosen:
        return []
    selection, size = attend.spec.layout.selection, source.chosen
    assert isinstance(selection, TopPages)
    row = f"(batch * {source.num_kv_heads} + head) * {selection.pages}"
    at = "(start + n)" if source.scattered else "start"
    guard = ", mask=inside, other=0" if masked and source.scattered else ""
    return [f"slot = tl.load(pages_read_ptr + {row} + {at} // {size}{guard}) * {size} + {at} % {size}"]


def positions(attend: Attend, source: SlotArray, masked: bool) -> list[str]:
    """Lines that define `key`, where it can be told."""
    spec, retention = attend.spec, attend.spec.layout.retention
    if source.prefix:
        return ["key = first + start + n"]
    if attend.in_order:
        return [f"key = {source.each}"]
    if isinstance(retention, Scored):
        if not attend.needs_token:
            return []
        guard = ", mask=inside, other=-1" if masked else ""
        return [f"key = tl.load(slots_token_ptr + {cache_positions.row_of_slots(spec)} + start + n{guard})"]
    length = "tl.maximum(first, 0)" if attend.many else "length"
    return [f"key = {printed(spec.layout.token_at, {sy.slot: '(start + n)', sy.length: length})}"]


def loaded(attend: Attend, source: SlotArray, side: str, masked: bool) -> list[str]:
    """Lines that load the blocks of `side`, of values as well, and what multiplies them."""
    part = attend.keys if side == "keys" else attend.values.of
    rows = attend.full(side) if masked else None
    lines: list[str] = []
    if rows:
        # The settled form of what is read in full may not be there yet.
        lines = ["every = inside", f"inside = {rows.settled_flag()}"]
    lines += part.load_scales(source, masked, attend.narrow(part))
    if part.folded:
        lines += part.channel_scales(source)
    lines += dequantize.loaded(part, source, masked)
    if rows:
        lines += ["inside = every", *([] if attend.late else rows.load())]
    if side == "keys" and attend.rotary:
        lines += _turned(attend, attend.rotary, ["", "_full"] if rows else [""])
    return lines


def _turned(attend: Attend, form: RotaryForm, kinds: list[str]) -> list[str]:
    """Lines that turn the keys, of all `kinds`, to their place (kernels/shared/rope.py)."""
    place = "place" if attend.spec.layout.retention.in_cache else "key"
    lines = [f"turn = (tl.minimum(tl.maximum({place}, 0), table_rows - 1) * {form.rotary_dim})[:, None]"]
    pieces, kind = attend.keys.pieces, f"tl.{attend.keys.dot}"
    for a in range(0, paired(form.rotary_dim), 2):
        for index in (a, a + 1):
            channel = f"kc{index} - {form.start}" if form.start else f"kc{index}"
            guard = "" if pieces[index].whole else f", mask=kc{index} < {pieces[index].stop}, other=0.0"
            lines += [f"{t}{index} = tl.load({t}_ptr + turn + {channel}{guard})" for t in ("cos", "sin")]
        for kept in kinds:
            one, other = f"k{a}{kept}", f"k{a + 1}{kept}"
            lines += [
                f"a, b = {one}.to(tl.float32), {other}.to(tl.float32)",
                f"{one} = (a * cos{a} - b * sin{a}).to({kind})",
                f"{other} = (b * cos{a + 1} + a * sin{a + 1}).to({kind})",
            ]
    return lines
