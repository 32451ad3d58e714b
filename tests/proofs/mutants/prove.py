"""Rules of passes/score_mod/prove.py made wrong."""

# ruff: noqa: E501

from __future__ import annotations

from tests.proofs.claims import decided, functions, proofs, some, terms
from tests.proofs.mutants.base import made

# fmt: off
PROVE = [
    *made(
        "prove", (terms,),
        ('return not wraps or self.exact(e) is not None', 'return True'),
        ('"sum", ', ''),
        ('"mul", "neg", "shl", "cast", "abs")', '"neg", "shl", "cast", "abs")'),
        ('"mul", "neg", "shl", "cast", "abs")', '"mul", "neg", "cast", "abs")'),
        ('"mul", "neg", "shl", "cast", "abs")', '"mul", "neg", "shl", "abs")'),
        ('z3.IntVal(e.value[0]),', 'z3.IntVal(0),'),
        ('*(factor * arg for factor', '*(arg for factor'),
        ('"add": lambda: args[0] + args[1]', '"add": lambda: args[0] - args[1]'),
        ('"sub": lambda: args[0] - args[1]', '"sub": lambda: args[1] - args[0]'),
        ('"mul": lambda: args[0] * args[1]', '"mul": lambda: args[0] + args[1]'),
        ('"neg": lambda: -args[0]', '"neg": lambda: args[0]'),
        ('"floordiv" if by is not None and by > 0', '"floordiv" if by'),
        ('return args[0] / z3.IntVal(by)\n', 'return args[0] / z3.IntVal(by + 1)\n'),
        ('z3.If(args[0] >= 0, args[0] / z3.IntVal(by), -((-args[0]) / z3.IntVal(by)))', 'args[0] / z3.IntVal(by)'),
        ('"mod" if by is not None and by > 0', '"mod" if by'),
        ('return args[0] % z3.IntVal(by)\n', 'return args[0] - args[0] / z3.IntVal(by)\n'),
        ('return args[0] / z3.IntVal(2**by)', 'return args[0] / z3.IntVal(2 * by + 1)'),
        ('return args[0] * z3.IntVal(2**by)', 'return args[0] * z3.IntVal(2 * by)'),
        ('and by >= 0 and not by & (by + 1)', 'and by >= 0'),
        ('return args[0] % z3.IntVal(by + 1)', 'return args[0] % z3.IntVal(by + 2)'),
        ('return args[0] * args[1] if any(arg.is_const for arg in e.args) else None\n            case "div"', 'return args[0] + args[1] if any(arg.is_const for arg in e.args) else None\n            case "div"'),
        ('return args[0] / args[1]\n', 'return args[1] / args[0]\n'),
        ('return z3.ToReal(z3.ToInt(args[0]))', 'return z3.ToReal(z3.ToInt(args[0]) + 1)'),
        ('return a == b if e.op == "eq" else a >= b if', 'return a == b if e.op == "eq" else a > b if'),
        ('return z3.And(*args)', 'return z3.Or(*args)'),
        ('return z3.Or(*args)', 'return z3.And(*args)'),
        ('return z3.Not(args[0])', 'return args[0]'),
        ('return z3.Xor(args[0], args[1])', 'return args[0] == args[1]'),
        ('return z3.If(args[0], args[1], args[2])', 'return z3.If(args[0], args[2], args[1])'),
        ('return z3.IntVal(e.value)', 'return z3.IntVal(e.value + 1)'),
        ('z3.RealVal(z3.Q(*float(e.value).as_integer_ratio()))', 'z3.RealVal(round(e.value))'),
    ),
    *made(
        "prove", (proofs,),
        ('self.q >= 0,', 'self.q >= 1,'),
        ('self.k >= 0,\n            self.n', 'self.k >= 1,\n            self.n'),
        ('self.n <= LONGEST,', 'self.n <= 64,'),
        ('self.q < self.n,', 'self.q < self.k,'),
        ('self.k < self.n,', 'self.k < self.q,'),
        ('self.h < num_heads,', 'self.h < num_heads - 1,'),
        ('self.h >= 0,', 'self.h >= 1,'),
        ('return bool(claim.value)', 'return True'),
        ('self._known[key] = self.counterexample(claim, *given) is None', 'self._known[key] = True'),
        ('return self.holds(not_(claim), *given)', 'return not self.holds(claim, *given)'),
        ('*(self.term(e) for e in given), z3.Not', '*(z3.Not(self.term(e)) for e in given), z3.Not'),
        ('z3.Not(self.term(claim)))\n        found = ', 'self.term(claim))\n        found = '),
    ),
    *made(
        "prove", (functions,),
        ('"query": [self.q]', '"query": [self.k]'),
        ('"key": [self.k]', '"key": [self.q]'),
        ('[*places, *map(self.term, e.args)]', 'places'),
        ('if any(self._signed(arg) for arg in e.args) else', 'if False else'),
        ('f"{e.op} {next(self._alone)}", e, [self.q, self.n, self.h, self.b, self.nb, self.r]', 'f"{e.op}", e, [self.term(e.args[0])]'),
        ('f"{e.op} {next(self._alone)}", e, [self.q, self.n', 'f"{e.op}", e, [self.q, self.n'),
    ),
    *made(
        "prove", (some,),
        ('z3.Implies(past, z3.Not(self.term(seen)))', 'z3.Implies(past, self.term(seen))'),
        ('self._known[key] = solver.check() == z3.unsat', 'self._known[key] = solver.check() == z3.sat'),
    ),
    *made(
        "prove", (decided,),
        ('if self.holds(claim):\n            return TRUE', 'if self.holds(claim):\n            return FALSE'),
        ('return FALSE if self.never(claim) else claim', 'return claim if self.never(claim) else TRUE'),
    ),
]
# fmt: on
