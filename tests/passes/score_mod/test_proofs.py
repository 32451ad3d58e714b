"""The proofs under attack: random expressions over positions, heads and tokens, in every dtype, at boundary values.

Each check draws an expression from its seed, and compares what is proved of it, what it is simplified to, or its class
with its values over all queries and keys of texts; it gives what is wrong, or None. Rules that are made wrong in
turn are found by them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from kvcompile.passes.score_mod import make, prove, ranges
from tests.proofs import claims, classes, heads, small, softmaxes, tables
from tests.proofs.broken import broken

Check = Callable[[int], "str | None"]

CHECKS: dict[str, tuple[Check, int]] = {
    "normal forms": (claims.normal, 120),
    "small": (small.smalls, 120),
    "ranges": (claims.ranges, 120),
    "terms": (claims.terms, 120),
    "proofs": (claims.proofs, 60),
    "functions": (claims.functions, 60),
    "some key": (claims.some, 40),
    "masks": (classes.masks, 60),
    "values": (classes.values, 80),
    "inputs": (classes.inputs, 40),
    "bounds": (classes.bounds, 80),
    "reaches": (classes.reaches, 40),
    "heads": (heads.heads, 40),
    "softmaxes": (softmaxes.softmaxes, 40),
    "tables": (tables.tables, 60),
    "limits": (tables.limits, 40),
}


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "_STEPS", 300_000)


def first_wrong(check: Check, seeds: range) -> str | None:
    for seed in seeds:
        found = check(seed)
        if found is not None:
            return f"seed {seed}: {found}"
    return None


@pytest.mark.parametrize("name", CHECKS)
def test_what_is_proved_holds(name: str) -> None:
    check, count = CHECKS[name]
    assert first_wrong(check, range(count // 2)) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_what_is_proved_holds_in_many_draws(name: str) -> None:
    check, count = CHECKS[name]
    assert first_wrong(check, range(count // 2, 40 * count)) is None


# A module, what is right in it and what is made of that, and the checks of which one must find it.
WRONG: dict[str, tuple[ModuleType, str, str, tuple[str, ...]]] = {
    "every float is exact": (
        ranges,
        "return within and self.most / self.step <= 2 ** _MANTISSA[dtype]",
        "return within",
        ("ranges", "proofs", "terms", "masks"),
    ),
    "a difference has the ends of a sum": (
        ranges,
        "return Exact(first.low - last.high, first.high - last.low, step)",
        "return Exact(first.low - last.low, first.high - last.high, step)",
        ("ranges",),
    ),
    "a negative number has the ends of the number": (
        ranges,
        "return Exact(-first.high, -first.low, first.step)",
        "return Exact(-first.low, -first.high, first.step)",
        ("ranges",),
    ),
    "bits that are turned keep their ends": (
        ranges,
        "return Exact(~ends[1], ~ends[0], 1)",
        "return Exact(ends[0], ends[1], 1)",
        ("ranges",),
    ),
    "no integer wraps": (
        prove,
        "return not wraps or self.exact(e) is not None",
        "return True",
        ("terms", "proofs", "masks"),
    ),
    "more than is at least": (
        prove,
        'return a == b if e.op == "eq" else a >= b if e.op == "ge" else a > b',
        'return a == b if e.op == "eq" else a >= b if e.op == "ge" else a >= b',
        ("proofs", "terms", "masks"),
    ),
    "division towards zero is division downwards": (
        prove,
        "return z3.If(args[0] >= 0, args[0] / z3.IntVal(by), -((-args[0]) / z3.IntVal(by)))",
        "return args[0] / z3.IntVal(by)",
        ("terms", "proofs"),
    ),
    "numbers do not count round": (
        make,
        "return (value - least) % size + least",
        "return value",
        ("proofs", "normal forms", "terms"),
    ),
}
# The first draws do not meet these.
BEGIN = {"numbers do not count round": 160}


@pytest.mark.parametrize("rule", WRONG)
def test_a_wrong_rule_is_found(rule: str) -> None:
    module, right, wrong, names = WRONG[rule]
    with broken(module, right, wrong):
        found = []
        for name in names:
            check, count = CHECKS[name]
            try:
                found.append(first_wrong(check, range(BEGIN.get(rule, 0), 4 * count)))
            except (RuntimeError, OverflowError, ValueError) as error:  # a number that no tensor holds
                found.append(str(error))
            if found[-1] is not None:
                return
    pytest.fail(f"none of {', '.join(names)} noticed that {rule}")
