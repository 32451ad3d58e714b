"""Each rule of the proofs made wrong in turn: the checks of `tests/passes/score_mod/test_proofs.py` find it."""

from __future__ import annotations

from importlib import import_module

import pytest

from kvcompile.passes.score_mod import prove
from tests.proofs.broken import broken
from tests.proofs.mutants import MUTANTS
from tests.proofs.mutants.base import Mutant

_SEEDS = 400


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_wrong_rule_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "_STEPS", 300_000)
    module = import_module(f"kvcompile.passes.score_mod.{mutant.module}")
    with broken(module, mutant.right, mutant.wrong):
        assert any(_sees(mutant, seed) for seed in range(_SEEDS))


def _sees(mutant: Mutant, seed: int) -> bool:
    try:
        return any(check(seed) is not None for check in mutant.checks)
    except Exception:  # what is wrong may be no number, or no program at all
        return True


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_what_is_made_wrong_is_there(mutant: Mutant) -> None:
    module = import_module(f"kvcompile.passes.score_mod.{mutant.module}")
    with broken(module, mutant.right, mutant.wrong):
        pass
