"""A rule of a proof made wrong: which text of which module becomes which, and the checks of which one must see it."""

from __future__ import annotations

from dataclasses import dataclass

from tests.proofs.claims import Check


@dataclass(frozen=True)
class Mutant:
    """`right` stands once in passes/score_mod/`module`.py."""

    module: str
    right: str
    wrong: str
    checks: tuple[Check, ...]

    def __str__(self) -> str:
        return f"{self.module}: {' '.join(self.wrong.split()) or 'without ' + self.right.strip()}"[:90]


def made(module: str, checks: tuple[Check, ...], *pairs: tuple[str, str]) -> list[Mutant]:
    """A mutant for each pair of what is right and what is made of that."""
    return [Mutant(module, right, wrong, checks) for right, wrong in pairs]
