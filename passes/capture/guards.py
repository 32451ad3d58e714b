"""What tracing took for granted about sizes, and the sizes at which that must be tried or is refused.

A graph is right for every number of sequences B and of tokens S for which its guards hold. A guard is either

    true for all sizes    equal sizes of two inputs, or nothing that fails at any size up to well beyond its constants
    about strides only    torch chose between a view and a copy; the values are the same
    a bound on S          from above: no longer sequences are allowed
    anything else         S is even, S > B, S >= 9, B > 1: where it fails, Python may have gone another way

For the last kind the sizes at which it fails are named. Where these are few, the graph is compared with the model at
each of them, which settles it. Where they are not, and the model's own code asked, the model is refused; where torch's
own code asked (to broadcast, to split), the smallest of them are compared. One token, and one sequence, are always
compared: tracing takes for granted that there are more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import sympy
from torch.export import ExportedProgram
from torch.utils._sympy.printers import PythonPrinter

from kvcompile.errors import CaptureError
from kvcompile.passes.capture.trace import Traced, guards_of, shape_env
from kvcompile.passes.graph import expr
from kvcompile.util.own_code import TORCH

# Where torch chooses between a view and a copy.
_STRIDES = TORCH + "_prims_common" + os.sep
_FEW = 48  # sizes that are all tried
_FURTHER = 4  # times the largest constant of a guard: so far its failures are looked for
_LEAST, _MOST = 1024, 1 << 17
_BATCHES = (2, 3, 5)  # numbers of sequences that guards are evaluated for
TOKENS = 5


@dataclass(frozen=True)
class Guard:
    """One assumption: `holds(b, s)`; `asked`: the source line; `own`: whether the model's Python asked."""

    text: str
    holds: Callable[[int, int], bool]
    asked: str
    own: bool
    reach: int  # look for failures up to so many tokens

    def failures(self, least: int, longest: int) -> Iterator[tuple[int, int]]:
        """Sizes at which it does not hold."""
        for tokens in range(least, min(self.reach, longest) + 1):
            for batch in _BATCHES:
                if not self.holds(batch, tokens):
                    yield batch, tokens


@dataclass(frozen=True)
class Threshold:
    """The model's own code asked whether there are `length` tokens. The graph is for fewer where it is `below`."""

    length: int
    below: bool


def threshold(traced: Traced) -> Threshold | None:
    """Where the model's own code goes another way for longer or shorter texts; None: it does not."""
    if not traced.own:
        return None
    roles, _ = _symbols(traced.program)
    size = next(symbol for symbol, role in roles.items() if role == "S")
    bound = traced.program.range_constraints.get(size)
    asked = {c for g in guards_of(traced.program) if id(g) in traced.own for c in g.expr.atoms(sympy.Integer)}
    if bound is None or not asked:
        return None
    lower, upper = bound.lower, bound.upper
    if getattr(upper, "is_Integer", False) and asked & {upper, upper + 1}:
        return Threshold(int(upper) + 1, True)
    if getattr(lower, "is_Integer", False) and int(lower) > 2 and asked & {lower, lower - 1}:
        return Threshold(int(lower), False)
    return None


def sizes_to_try(traced: Traced, least: int = 2) -> tuple[tuple[int, int], ...]:
    """(sequences, tokens) at which the graph must be compared with the model before it is believed.

    least: shorter texts are another graph's

    Raises:
        CaptureError: the graph is right for some sizes only, and these are no range.
    """
    found = [(1, TOKENS), (2, 1)]
    roles, longest = _symbols(traced.program)
    for guard in _guards(traced, roles):
        failing: list[tuple[int, int]] = []
        for size in guard.failures(least, longest):
            failing.append(size)
            if len(failing) > _FEW * len(_BATCHES):
                break
        many = len({tokens for _, tokens in failing}) > _FEW or any(
            tokens == min(guard.reach, longest) and longest > _FEW for _, tokens in failing
        )
        if failing and guard.own and many:
            batch, tokens = failing[0]
            raise CaptureError(
                f"the graph is right only where {guard.text} (B sequences of S tokens), because of {guard.asked};"
                f" {batch} x {tokens} is outside. Remove Python control flow that depends on the exact length"
            )
        found += failing[:3] if many else failing
    return tuple(dict.fromkeys(found))


def _symbols(program: ExportedProgram) -> tuple[dict[sympy.Symbol, str], int]:
    """What each size of an input is ("B", "S" or "K"), and the longest sequence.

    Raises:
        CaptureError: a size was specialised.
    """
    users = program.graph_signature.user_inputs
    inputs = [n for n in program.graph.nodes if n.op == "placeholder" and n.name in users]
    roles: dict[sympy.Symbol, str] = {}
    longest = _MOST
    for node in inputs:
        sizes = node.meta["val"].shape
        for size, role in zip(sizes, "BS" if len(sizes) == 2 else "K", strict=True):
            symbol = expr(size)
            if not symbol.is_Symbol:
                raise CaptureError(f"the size of {node.name} was specialised to {symbol}")
            if roles.setdefault(symbol, role) != role:
                raise CaptureError("the graph is right only for as many sequences as tokens")
            bound = program.range_constraints.get(symbol)
            if role == "S" and bound is not None and getattr(bound.upper, "is_Integer", False):
                longest = min(longest, int(bound.upper))
    return roles, longest


def _guards(traced: Traced, roles: dict[sympy.Symbol, str]) -> Iterator[Guard]:
    """All that is assumed, but for what needs no proof."""
    program = traced.program
    units = {role: sympy.Symbol(role, positive=True, integer=True) for role in "BSK"}
    known = {symbol: units[role] for symbol, role in roles.items()}
    same = shape_env(program).replacements
    known |= {old: new.xreplace(known) for old, new in same.items() if new.free_symbols <= set(known)}
    asked: dict[sympy.Symbol, tuple[str, bool]] = {}
    for guard in guards_of(program):
        location = guard.sloc.framework_loc
        file = location.filename if hasattr(location, "filename") else str(location)
        if file.startswith(_STRIDES):
            continue
        own = id(guard) in traced.own
        where = traced.own.get(id(guard)) or _shortened(str(guard.sloc))
        asked |= dict.fromkeys(guard.expr.free_symbols, (where, own))
        yield from _guard(guard.expr.xreplace(known), where, own)
    for symbol, role in roles.items():
        bound = program.range_constraints.get(symbol)
        lower = int(bound.lower) if bound is not None and getattr(bound.lower, "is_Integer", False) else 2
        if role != "K" and lower > 2:
            yield from _guard(sympy.Ge(units[role], lower), *asked.get(symbol, ("what was traced", False)))


def _guard(condition: sympy.Basic, asked: str, own: bool) -> Iterator[Guard]:
    if condition == sympy.true:
        return
    names = {str(symbol) for symbol in condition.free_symbols}
    text = PythonPrinter().doprint(condition)
    if not names <= {"B", "S"}:
        # How many logits are asked for is the caller's choice, and never decides what they are.
        if names & {"K"} and names <= {"B", "S", "K"} and not own:
            return
        raise CaptureError(f"the graph is right only where {text}, because of {asked}")
    code = compile(text, "guard", "eval")
    scope = {"math": __import__("math"), "min": min, "max": max}

    def holds(batch: int, tokens: int) -> bool:
        return bool(eval(code, scope, {"B": batch, "S": tokens}))

    constants = [abs(int(x)) for x in condition.atoms(sympy.Integer)]
    reach = min(_MOST, max(_LEAST, _FURTHER * max(constants, default=0)))
    yield Guard(text, holds, asked, own, reach)


def _shortened(asked: str) -> str:
    """`file.py:12 in forward` without folders."""
    text = asked.strip()
    head, _, rest = text.partition(" ")
    return f"{head.rsplit(os.sep, 1)[-1]} {rest}".strip()
