"""The softmax of a tile and what it weighs: probabilities times values, onto sums that run over all tiles.

    highest = max(top, max s)   alpha = 2^(top - highest)   p = 2^(s - highest)
    total = total * alpha + sum p     acc = acc * alpha + p v

Scales of values multiply probabilities. What float16 has to hold is the product of both, so it is that which is at most
a constant: the scale joins the exponent,

    highest = max(top, max (s + log2 scale))     weight = 2^(s + log2 scale - highest)     p = weight / scale

and nothing but the score is compared over a tile. `scale` is the largest of a token's groups of channels; a token that
stands in full has 1. In float16, `top` is 12 less than the largest exponent: weights are at most 2^12, so that those
down to 2^-26 of the largest keep all their bits (`HEADROOM`); what runs on is relative to `top` anyway.

Where scales of groups stay in float16 (`Attend.narrow`), a weight is the product of two such numbers, and a tile's
probabilities are at most 2^15 by its largest scale, or by 1: no token has an exponent of its own. Down to 2^-29 of the
largest, times that scale, a probability keeps its bits, and so does a weight: of scales up to 1, all that float16 has.

A step's rows are few, and its warps share the slots: there the total is kept for each place of a tile (`summed_late`),
and is summed up once, behind the loops.
"""

from __future__ import annotations

from kvcompile.kernels.triton.attend import minima
from kvcompile.kernels.triton.attend.context import Attend
from kvcompile.kernels.triton.tile import dot_dtype, stacking
from kvcompile.kernels.triton.tile.residual import InFull

# Powers of two between the largest weight and 1: float16 has 2^16 above 1, and as many below it.
HEADROOM = 12
# Where scales are no part of the exponents: a probability, and it times its scale, are below 2^16.
NARROW_HEADROOM = 15
# Numbers that summed up late take registers: of a program's, so many at most.
_LATE = 2048
# Scales below are taken for it: what they scale is 0, or no scale could tell. float16 has no smaller one.
_SMALLEST = {"float16": 2.0**-24}
_SMALLEST_WIDE = 2.0**-80


def summed_late(attend: Attend) -> bool:
    """Whether rows are summed up behind the loops."""
    return not attend.many and attend.spec.block_m * attend.spec.block_n <= _LATE


def accumulators(attend: Attend) -> list[str]:
    """Lines before the loops: the running maximum and the sums."""
    values, m = attend.values, attend.spec.block_m
    sums = f"[{m}, {attend.spec.block_n}]" if summed_late(attend) else f"[{m}]"
    lines = [f"top = tl.full([{m}], -1.0e30, tl.float32)", f"total = tl.zeros({sums}, tl.float32)"]
    lines += [f"level = tl.full([{m}], -1.0e30, tl.float32)"] if "logits" in attend.spec.options else []
    rows = attend.rows
    lines += [f"acc{i} = tl.zeros([{rows}, {values.of.pieces[i].block}], tl.float32)" for i in values.indices]
    sums = f"[{rows}, {attend.spec.block_n}]" if summed_late(attend) else f"[{rows}]"
    return lines + [
        f"minima{p} = {minima.zeros(attend, g.groups) if attend.narrow(values.of) else f'tl.zeros({sums}, tl.float32)'}"
        for p, g in enumerate(values.scales)
        if g.minimum
    ]


def continued(attend: Attend) -> list[str]:
    """In place of `accumulators`, of floats: sums begin with a result over other tokens, and its log-sum-exp."""
    values = attend.values
    letter = values.of.letter
    lines = [
        "# Of a text that begins here nothing was written.",
        "there = real & (position > token)",
        f"row = {attend.row}",
        "top = tl.load(older_lse_ptr + row, mask=there, other=-1.0e30)",
        "total = tl.where(there, 1.0, 0.0)",
    ]
    for i in values.indices:
        piece = values.of.pieces[i]
        guard = "there[:, None]" + ("" if piece.whole else f" & ({letter}c{i} < {piece.stop})")
        at = f"older_ptr + row[:, None] * {values.channels} + {letter}c{i}"
        lines.append(f"acc{i} = tl.load({at}, mask={guard}, other=0.0)")
    return lines


def highest(attend: Attend, masked: bool) -> list[str]:
    """Lines that make the new maximum, `highest`, of `s`."""
    values = attend.values
    less = f" - {HEADROOM}.0" if values.dot == "float16" else ""
    if attend.narrow(values.of):
        log2 = "log2_of" if values.of.assembly else "tl.log2"
        lines = [f"v_power = {log2}(tl.maximum(tl.max(tl.max(v_scale, 1), 0).to(tl.float32), 1.0))"]
        less = f" + (v_power - {NARROW_HEADROOM}.0)"
    else:
        lines = _bounded(attend, masked) if values.normalized else []
    return [*lines, f"highest = tl.maximum(top, tl.max(s, 1){less})"]


def softmax(attend: Attend) -> list[str]:
    """Lines that make weights `w` and probabilities `p` of `s` and `highest`, and scale the sums down to that."""
    values = attend.values
    # Of a score that is no number as well.
    lines = ["moved = (highest != top).to(tl.int32)"] if attend.many_sums else []
    lines += [
        "alpha = tl.exp2(top - highest)",
        "p = tl.exp2(s - highest[:, None])",
        "top = highest",
    ]
    if _by_token(attend):
        lines += ["e = p", "p = p * v_unit"]
    lines.append(_summed(attend, "total", "p"))
    if attend.stack > 1:
        lines.append(f"alpha = {stacking.repeated('alpha', attend.stack, attend.spec.block_m)}")
    sums = [f"acc{i}" for i in values.indices]
    if attend.narrow(values.of):
        sums += [f"minima{place}" for place, group in enumerate(values.scales) if group.minimum]
    scaled = [f"{name} = {name} * alpha[:, None]" for name in sums]
    if attend.many_sums:
        # A factor of 1 leaves sums as they are, and few tiles have another: of scores in no order, the n-th is larger
        # than all before it with a probability of 1/n. To look takes a maximum of all rows, and a branch, in each tile.
        lines.append("if tl.max(moved, 0) > 0:")
        return [*lines, *(f"    {line}" for line in scaled)]
    return lines + scaled


def relative(attend: Attend, masked: bool) -> tuple[list[str], str]:
    """Between `highest` and `softmax`: lines that make `level` of the first scores; an expression, scores less that."""
    level = f"highest + {HEADROOM}.0" if attend.values.dot == "float16" else "highest"
    if attend.narrow(attend.values.of):
        level = f"highest + ({NARROW_HEADROOM}.0 - v_power)"
    # The exponent of a value's scale is in these scores, and is no part of what a query sees.
    less = f" - v_exponent{_wide(attend, masked)}" if _by_token(attend) else ""
    return [f"level = tl.where(level > -1.0e30, level, {level})"], f"s - level[:, None]{less}"


def _summed(attend: Attend, name: str, term: str) -> str:
    """The line that adds `term` [BLOCK_M, BLOCK_N] to a sum over all tiles."""
    if summed_late(attend):
        return f"{name} = {name} * alpha[:, None] + {term}"
    return f"{name} = {name} * alpha + tl.sum({term}, 1)"


def _in_full(attend: Attend, masked: bool) -> InFull | None:
    """Rows in full, whose values have no scale, where a tile may have some."""
    return attend.full("values" if attend.values.reader else "keys") if masked else None


def _wide(attend: Attend, masked: bool) -> str:
    """What makes `v_exponent` as wide as scores: nothing, where it has a number for each head."""
    return "" if attend.values.scales[0].groups > 1 or _in_full(attend, masked) else "[None, :]"


def _bounded(attend: Attend, masked: bool) -> list[str]:
    """Lines that add the exponent of a token's scale to its score; `v_unit` takes it away again."""
    values, rows, spec = attend.values, _in_full(attend, masked), attend.spec
    first = values.scales[0]
    bound, wide = str(first.scale), _wide(attend, masked)
    lines = []
    if first.groups > 1:
        # The largest of the sets of rows: a maximum over the blocks as they were loaded would load them once more.
        lines.append(f"v_scales = {_of_rows(attend, first.scale, first.groups)}")
        sets = f"tl.reshape(v_scales, [{attend.stack}, {spec.block_m}, {spec.block_n}])"
        bound = f"tl.max({sets}, 0)"
    for group in values.scales[1:]:
        bound = f"tl.maximum({bound}, {group.scale})"
    smallest = _SMALLEST.get(values.of.storage.scale.dtype, _SMALLEST_WIDE)
    log2 = "log2_of" if values.of.assembly else "tl.log2"
    lines.append(f"v_exponent = {log2}(tl.maximum({bound}, {smallest!r}))")
    if rows:
        spread = "" if first.groups > 1 else "[None, :]"
        lines.append(f"v_exponent = tl.where({rows.flag_of_scores}, 0.0, v_exponent{spread})")
    return [*lines, f"s = s + v_exponent{wide}", f"v_unit = tl.exp2(-v_exponent){wide}"]


def weigh(attend: Attend, masked: bool) -> list[str]:
    """Lines that add p v; of tiles that are not `masked`, none is read in full."""
    values, rows = attend.values, _in_full(attend, masked)
    lines: list[str] = []
    whole = "e" if _by_token(attend) else "p"
    if rows:
        flag = rows.flag_of_scores
        lines += [
            f"{whole}_full = tl.where({flag}, {whole}, 0.0)",
            f"{whole} = tl.where({flag}, 0.0, {whole})",
        ]
        if _by_token(attend):
            lines.append(f"p = tl.where({flag}, 0.0, p)")
    exact = dot_dtype.precision(values.dot)
    alone = len(values.scales) == values.scales[0].groups == 1 and values.of.storage.scale.dtype in _SMALLEST
    if attend.narrow(values.of):
        lines += _weighed_in_float16(attend)
    for place, group in enumerate(() if attend.narrow(values.of) else values.scales):
        scale, minimum = (_of_rows(attend, number, group.groups) for number in (group.scale, group.minimum))
        if minimum:
            if group.groups > 1:
                lines.append(f"v_minima = {minimum}")
                minimum = "v_minima"
            lines.append(_summed(attend, f"minima{place}", f"{_rows(attend, 'p')} * {minimum}"))
        weights = _rows(attend, whole)
        # Where a token has one scale, its weight has all of that.
        if group.scale and not (values.normalized and alone):
            own = "v_scales" if values.normalized and group.groups > 1 else scale
            weights = f"({_rows(attend, 'p')} * {own})"
        lines.append(f"w = {weights}.to(tl.{values.dot})")
        lines += [f"acc{i} = tl.dot(w, {values.name(i)}, acc{i}{exact})" for i in group.pieces]
    if rows:
        kind = dot_dtype.of_model(attend.spec)
        added = [f"w_full = {_rows(attend, f'{whole}_full')}.to(tl.{kind})"]
        # What is scaled at the end must not scale these.
        unit = f" / {values.of.side}_scale" if values.of.late_scale else ""
        for i in values.indices:
            product = f"tl.dot(w_full, {values.name(i)}_full{dot_dtype.precision(kind)})"
            power = values.of.power(i)
            owed = f" * {2.0**-power}" if power else ""
            added.append(f"acc{i} = acc{i} + {product}{owed}{unit}")
        if attend.late:
            added = [*rows.load(), *added]
        lines += rows.where_any(added) if attend.apart else added
    return lines


def _weighed_in_float16(attend: Attend) -> list[str]:
    """Lines that add p v, where probabilities take the scales of groups of channels in float16."""
    values = attend.values
    (group,) = values.scales
    assert group.scale is not None
    lines = ["w = p.to(tl.float16)", f"w = {_rows(attend, 'w')}"]
    if group.minimum:
        lines.append(minima.of_values(attend, 0, group.minimum, group.groups, "w"))
    lines.append(f"w = w * {_of_rows(attend, group.scale, group.groups)}")
    return [*lines, *(f"acc{i} = tl.dot(w, {values.name(i)}, acc{i})" for i in group.pieces)]


def _by_token(attend: Attend) -> bool:
    """Whether the exponent of a token's scale joins that of its score."""
    return attend.values.normalized and not attend.narrow(attend.values.of)


def _rows(attend: Attend, name: str) -> str:
    """An expression: a block of all heads and slots as rows of the products."""
    return stacking.repeated(name, attend.stack, attend.spec.block_m, attend.spec.block_n)


def _of_rows(attend: Attend, name: str | None, groups: int) -> str | None:
    """An expression: numbers of slots, of groups of channels where there are several, against rows of the products."""
    if name is None or groups == 1:
        return name and f"{name}[None, :]"
    return stacking.spread(name, groups, attend.rows, attend.spec.block_n)


def finish(attend: Attend) -> list[str]:
    """Lines after the loops that make `total` and `acc*` the sums of p and p v, in true units."""
    values, lines = attend.values, []
    if summed_late(attend):
        lines.append("total = tl.sum(total, 1)")
    for place, group in enumerate(values.scales):
        if group.minimum and attend.narrow(values.of):
            lines += minima.summed(attend, place, group.groups)
        elif group.minimum and summed_late(attend):
            lines.append(f"minima{place} = tl.sum(minima{place}, 1)")
    for place, group in enumerate(values.scales):
        for i in group.pieces:
            own = f"acc{i}"
            if power := values.of.power(i):
                own = f"{own} * {2.0**power}"
            if group.minimum:
                own = f"{own} + minima{place}[:, None]"
            if values.of.late_scale:
                own = f"{own} * {values.of.side}_scale"
            if own != f"acc{i}":
                lines.append(f"acc{i} = {own}")
    if attend.stack > 1:
        letter, m = values.of.letter, attend.spec.block_m
        count, width = attend.groups("values")
        for i in values.indices:
            mine = stacking.own(f"{letter}c{i}", count, width, attend.stack)
            sets = f"tl.reshape(acc{i}, [{attend.stack}, {m}, {values.of.pieces[i].block}])"
            lines.append(f"acc{i} = tl.sum(tl.where({mine}, {sets}, 0.0), 0)")
    return lines


def stores(attend: Attend, pointer: str, value: str, also: str = "") -> list[str]:
    """Lines that store each piece of the result; value: a template of what is stored; also: a further condition."""
    values = attend.values
    letter, lines = values.of.letter, []
    for i in values.indices:
        piece = values.of.pieces[i]
        guard = "real[:, None]" + also + ("" if piece.whole else f" & ({letter}c{i} < {piece.stop})")
        lines.append(f"tl.store({pointer} + {letter}c{i}, {value.format(f'acc{i}')}, mask={guard})")
    return lines
