"""The softmax of a tile and what it weighs: probabilities times values, onto sums that run over all tiles.

    highest = max(top, max s)   alpha = 2^(top - highest)   p = 2^(s - highest)
    total = total * alpha + sum p     acc = acc * alpha + p v

Scales of values multiply probabilities. In float16 they are divided by the largest seen so far (`largest`), which is
put back at the end; minima are summed up for themselves.
"""

from __future__ import annotations

from kvcompile.kernels.triton.attend.context import Attend
from kvcompile.kernels.triton.tile import dot_dtype


def accumulators(attend: Attend) -> list[str]:
    """Lines before the loops: the running maximum and the sums."""
    values, m = attend.values, attend.spec.block_m
    lines = [f"top = tl.full([{m}], -1.0e30, tl.float32)", f"total = tl.zeros([{m}], tl.float32)"]
    lines += [f"acc{i} = tl.zeros([{m}, {values.of.pieces[i].block}], tl.float32)" for i in values.indices]
    lines += [f"minima{p} = tl.zeros([{m}], tl.float32)" for p, g in enumerate(values.scales) if g.minimum]
    return [*lines, "largest = 1.0e-30"] if values.normalized else lines


def softmax(attend: Attend) -> list[str]:
    """Lines that make probabilities `p` of `s`, and scale the sums down to the new maximum."""
    values = attend.values
    lines = [
        "highest = tl.maximum(top, tl.max(s, 1))",
        "alpha = tl.exp2(top - highest)",
        "p = tl.exp2(s - highest[:, None])",
        "total = total * alpha + tl.sum(p, 1)",
        "top = highest",
    ]
    for place, group in enumerate(values.scales):
        if group.minimum:
            lines.append(f"minima{place} = minima{place} * alpha")
    if values.normalized:
        largest = f"tl.max({values.scales[0].scale}, 0)"
        for group in values.scales[1:]:
            largest = f"tl.maximum({largest}, tl.max({group.scale}, 0))"
        lines += [
            f"larger = tl.maximum(largest, {largest})",
            "alpha = alpha * (largest / larger)",
            "largest = larger",
            "unit = 1.0 / largest",
        ]
    lines += [f"acc{i} = acc{i} * alpha[:, None]" for i in values.indices]
    return lines


def weigh(attend: Attend, masked: bool) -> list[str]:
    """Lines that add p v; of tiles that are not `masked`, none is read in full."""
    values = attend.values
    rows = attend.full("values" if values.reader else "keys") if masked else None
    lines: list[str] = []
    if rows:
        flag = rows.flag_of_scores
        lines += [f"p_full = tl.where({flag}, p, 0.0)", f"p = tl.where({flag}, 0.0, p)"]
    exact = dot_dtype.precision(values.dot)
    for place, group in enumerate(values.scales):
        if group.minimum:
            lines.append(f"minima{place} = minima{place} + tl.sum(p * {group.minimum}[None, :], 1)")
        weights = "p"
        if group.scale:
            scale = f"({group.scale} * unit)" if values.normalized else group.scale
            weights = f"(p * {scale}[None, :])"
        lines.append(f"w = {weights}.to(tl.{values.dot})")
        lines += [f"acc{i} = tl.dot(w, {values.name(i)}, acc{i}{exact})" for i in group.pieces]
    if rows:
        kind = dot_dtype.of_model(attend.spec)
        lines.append(f"w = p_full.to(tl.{kind})")
        # What is scaled at the end must not scale these.
        unit = " * unit" if values.normalized else ""
        unit += f" / {values.of.side}_scale" if values.of.late_scale else ""
        for i in values.indices:
            product = f"tl.dot(w, {values.name(i)}_full{dot_dtype.precision(kind)})"
            lines.append(f"acc{i} = acc{i} + {product}{unit}")
    return lines


def finish(attend: Attend) -> list[str]:
    """Lines after the loops that make `acc*` the sums of p v, in true units."""
    values, lines = attend.values, []
    for place, group in enumerate(values.scales):
        for i in group.pieces:
            own = f"acc{i}"
            if values.normalized:
                own = f"{own} * largest"
            if group.minimum:
                own = f"{own} + minima{place}[:, None]"
            if values.of.late_scale:
                own = f"{own} * {values.of.side}_scale"
            if own != f"acc{i}":
                lines.append(f"acc{i} = {own}")
    return lines


def stores(attend: Attend, pointer: str, value: str) -> list[str]:
    """Lines that store each piece of the result; `value` is a template of what is stored."""
    values = attend.values
    letter, lines = values.of.letter, []
    for i in values.indices:
        piece = values.of.pieces[i]
        guard = "real[:, None]" + ("" if piece.whole else f" & ({letter}c{i} < {piece.stop})")
        lines.append(f"tl.store({pointer} + {letter}c{i}, {value.format(f'acc{i}')}, mask={guard})")
    return lines
