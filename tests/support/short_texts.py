"""Texts that `optimize` verifies with are shorter where tests are of something else than verification.

Verification runs 400 tokens, and longer texts for three seconds more: of a tiny model, that takes longer than all the
rest, most of it in the oracle. Elsewhere its texts end behind the constants that tests give their layouts, and no
longer one follows, but where `thorough` meets a constant farther on. Tests of verification, and of what it must not let
through, have texts as users have them (`LONG` in tests/conftest.py).
"""

from __future__ import annotations

from dataclasses import replace

from kvcompile.verify import long

TOKENS = 140
_OWN = (long.MINIMUM, long.SECONDS["quick"], dict(long._BUDGETS))


def short(on: bool) -> None:
    """Short texts from here on, or texts as users have them."""
    minimum, seconds, budgets = _OWN
    long.MINIMUM = TOKENS if on else minimum
    long.SECONDS["quick"] = 0.0 if on else seconds
    long._BUDGETS.update(
        {effort: replace(own, least=TOKENS) if on else own for effort, own in budgets.items()}
    )
