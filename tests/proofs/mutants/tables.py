"""Rules of passes/score_mod/tables.py made wrong."""

# ruff: noqa: E501

from __future__ import annotations

from tests.proofs.mutants.base import made
from tests.proofs.tables import limits, tables

# fmt: off
TABLES = [
    *made(
        "tables", (tables,),
        ('held = held.select(len(left), place.value)', 'held = held.select(len(left), 0)'),
        ('bool((held == held.reshape(-1)[0]).all())', 'bool((held == held.reshape(-1)[0]).any())'),
        ('table = held.movedim((rows[0], columns[0]), (0, 1))', 'table = held'),
        ('or not bool(((table == shown) | (table == hidden)).all()):', 'or False:'),
        ('yes, no = (const(x.item(), table.dtype) for x in (shown, hidden))', 'yes, no = (const(x.item(), table.dtype) for x in (hidden, shown))'),
        ('for shown, polarity in ((tables, True), (~tables, False)):', 'for shown, polarity in ((tables, True), (~tables, True)):'),
        ('if not bool((shown & ~past).any()):\n                    claim', 'if True:\n                    claim'),
        ('if bool((shown | ~own).all()):\n                        claim', 'if True:\n                        claim'),
        ('past, own = j <= i, j == i', 'past, own = j <= i + 1, j == i'),
        ('if not bool((tables[~shown] == most).all()):', 'if False:'),
        ('closed_form(shown[0], row, column) if bool((shown == shown[:1]).all()) else None', 'closed_form(shown[0], row, column)'),
        ('if not bool((shown & ~past).any()):\n            seen', 'if True:\n            seen'),
        ('    if torch.equal(shown, past):\n', '    if bool(shown[past].all()):\n'),
        ('    if torch.equal(shown, past):\n', '    if not bool(shown[~past].any()):\n'),
        ('if band and torch.equal(shown, past & (i - j < band)):', 'if band and bool(shown[past & (i - j < band)].all()):'),
        ('if band and torch.equal(shown, past & (i - j < band)):', 'if band:'),
        ('lt(make("sub", torch.int64, row, column), integer(band))', 'le(make("sub", torch.int64, row, column), integer(band))'),
        ('if 0 < chunk < height and torch.equal(shown, past & (i // chunk == j // chunk)):', 'if 0 < chunk < height:'),
        ('return and_(le(column, row), make("eq", torch.bool, *parts))', 'return make("eq", torch.bool, *parts)'),
    ),
    *made(
        "tables", (limits,),
        ('inside = and_(inside, le(integer(-size), place))', 'inside = inside'),
        ('and_(inside, le(integer(-size), place))', 'le(integer(-size), place)'),
        ('inside = lt(place, integer(size))', 'inside = le(place, integer(size))'),
        ('            if prover.holds(inside):\n', '            if not prover.never(inside):\n'),
        ('if bound > 0 and prover.holds(inside, le(N, integer(bound))):', 'if bound > 0:'),
        ('(middle, high) if prover.holds(inside, le(N, integer(middle)))', '(middle, high) if prover.holds(inside, lt(N, integer(middle)))'),
    ),
]
# fmt: on
