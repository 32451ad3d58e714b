"""The scores of a tile: products of queries with keys, times all that was kept out of them, as `s` [BLOCK_M, BLOCK_N].

    s = factor * norm * sum over groups of channels of (q k) * scale + q_sum * minimum

Keys in full have products of their own (`f`), which take the place of the others where they are read so.
"""

from __future__ import annotations

from kvcompile.kernels.triton.attend import minima
from kvcompile.kernels.triton.attend.context import Attend
from kvcompile.kernels.triton.attend.queries import in_full
from kvcompile.kernels.triton.spec import DotType
from kvcompile.kernels.triton.tile import dot_dtype, scores, stacking
from kvcompile.kernels.triton.tile.residual import InFull


def products(attend: Attend, masked: bool) -> list[str]:
    """Lines that define `s`, times `scores.factor`; of tiles that are not `masked`, none is read in full."""
    spec, keys = attend.spec, attend.keys
    lines: list[str] = []
    for place, group in enumerate(keys.scales()):
        name = "s" if place == 0 else "t"
        first = "q_lowest" if keys.from_lowest else None
        for count, index in enumerate(group.pieces):
            left = f"q{index}"
            if keys.folded:
                left = f"(q{index} * k_scale{index}).to(tl.{keys.dot})"
            lines.append(f"{name} = {_dot(left, f'k{index}', name if count else first, keys.dot)}")
        numbers = {}
        for part, number in (("scale", group.scale), ("minimum", group.minimum)):
            if number is None or (part == "minimum" and attend.narrow(keys)):
                continue
            numbers[part] = f"{number}[None, :]"
            if group.groups > 1:
                lines.append(
                    f"{number}s = {stacking.spread(number, group.groups, attend.rows, spec.block_n)}"
                )
                numbers[part] = f"{number}s"
        if group.scale:
            lines.append(f"{name} = {name} * {numbers['scale']}")
        if group.minimum and attend.narrow(keys):
            lines += minima.of_scores(attend, group.minimum, group.groups)
        elif group.minimum:
            lines.append(f"{name} = {name} + q_sum{place}[:, None] * {numbers['minimum']}")
        if place:
            lines.append("s = s + t")
    if keys.folded:
        zero = " + ".join(f"tl.sum(q{i} * k_minimum{i}, 1)" for i in range(len(keys.pieces)))
        lines.append(f"s = s + ({zero})[:, None]")
    if attend.stack > 1:
        lines.append(f"s = {stacking.summed('s', attend.stack, spec.block_m, spec.block_n)}")
    late = " * keys_scale" if keys.late_scale else ""
    if attend.normalized:
        lines.append(f"s = s * row_scale[:, None]{late}")
    else:
        factor = repr(scores.factor(spec))
        lines.append(f"s = s * {f'({factor}{late})' if late else factor}")
    rows = attend.full("keys") if masked else None
    if rows:
        own = _products(len(rows.pieces), "f", "_full", "_full", dot_dtype.of_model(spec))
        if attend.stack > 1:
            own.append(f"f = {stacking.summed('f', attend.stack, spec.block_m, spec.block_n)}")
        own.append(f"s = tl.where({rows.flag_of_scores}, f * {scores.factor(spec)!r}, s)")
        if attend.late:
            own = [*rows.load(), *own]
        lines += rows.where_any([*in_full(attend, rows), *own]) if attend.apart else own
    return [*lines, *_toward_sinks(attend, rows)] if masked and attend.two_queries else lines


def _toward_sinks(attend: Attend, rows: InFull | None) -> list[str]:
    """Lines that replace the scores of sinks by those of queries that turned at their place toward sinks."""
    lines = _products(len(attend.keys.pieces), "f", "_sinks", "", attend.keys.dot)
    if rows:
        lines += _products(len(rows.pieces), "g", "_sinks", "_full", attend.keys.dot)
        lines.append(f"f = tl.where({rows.flag}, g, f)")
    sinks = attend.spec.layout.retention.sinks
    lines.append(f"s = tl.where((key < {sinks})[None, :], f * {scores.factor(attend.spec)!r}, s)")
    return lines


def _products(pieces: int, name: str, of_queries: str, of_keys: str, kind: DotType) -> list[str]:
    """Lines that define `name` as products of whole numbers, of queries and keys with these endings."""
    return [
        f"{name} = {_dot(f'q{i}{of_queries}', f'k{i}{of_keys}', name if i else None, kind)}"
        for i in range(pieces)
    ]


def _dot(queries: str, keys: str, onto: str | None, kind: DotType) -> str:
    return (
        f"tl.dot({queries}, tl.trans({keys}){'' if onto is None else f', {onto}'}{dot_dtype.precision(kind)})"
    )
