"""Rules of passes/score_mod/make.py made wrong."""

# ruff: noqa: E501

from __future__ import annotations

from tests.proofs.claims import normal
from tests.proofs.mutants.base import made
from tests.proofs.small import smalls

# fmt: off
MAKE = [
    *made(
        "make", (normal,),
        ('op in ("floordiv", "mod") and args[1].is_const and args[1].value == 1', 'op in ("floordiv", "mod") and args[1].is_const and args[1].value == 2'),
        ('return args[0] if op == "floordiv" else const(0, dtype)', 'return args[0]'),
        ('if op in ("min", "max") and args[0] is args[1]:', 'if op in ("min", "max") and args[0].op == args[1].op:'),
        ('return not_(_BOOLEAN["xor"](*args))', 'return _BOOLEAN["xor"](*args)'),
        ('(other.value == 1 if op == "mul" else _nothing(other, one))', '(other.value == 0 if op == "mul" else _nothing(other, one))'),
        ('return make("neg", other.dtype, other)', 'return other'),
        ('if op == "div" and args[1].is_const and args[1].value == 1:', 'if op == "div" and args[1].is_const and args[1].value in (1, -1):'),
        ('return a.args[0] if a.op == "not" else Expr("not"', 'return a if a.op == "not" else Expr("not"'),
        ('if part is not TRUE and part not in found:', 'if part is not FALSE and not found:'),
        ('if part is TRUE or not_(part) in found:\n                return TRUE', 'if part is TRUE or not_(part) in found:\n                return FALSE'),
        ('if part is not FALSE and part not in found:', 'if part is not FALSE and not found:'),
        ('if one is FALSE:\n            return other', 'if one is FALSE:\n            return not_(other)'),
        ('if one is TRUE:\n            return not_(other)', 'if one is TRUE:\n            return other'),
        ('return where(condition.args[0], no, yes)', 'return where(condition.args[0], yes, no)'),
        ('return e.value[0], dict(zip(e.args, e.value[1:], strict=True))', 'return 0, dict(zip(e.args, e.value[1:], strict=True))'),
        ('terms[0][1] == 1 and not offset', 'not offset'),
        ('terms[0][1] == 1 and not offset', 'terms[0][1] == 1'),
        ('return (value - least) % size + least', 'return (value - least) % size'),
        ('return offset * one.value, {term', 'return offset, {term'),
        ('{term: factor * one.value for', '{term: factor + one.value for'),
        ('return -offset, {term: -factor', 'return -offset, {term: factor'),
        ('sign = 1 if op == "add" else -1', 'sign = 1'),
        ('factors.get(term, 0) + sign * factor', 'sign * factor'),
        ('return offset + sign * more, factors', 'return offset + more, factors'),
        ('if not all(_is_whole(side) for side in (linear(a), linear(b), found)):', 'if False:'),
        ('op, offset = "ge", offset - 1', 'op, offset = "ge", offset'),
        ('offset == 0 if op == "eq" else offset >= 0', 'offset == 0 if op == "eq" else offset > 0'),
        ('{term: factor // common for term', '{term: factor for term'),
        ('(a, integer(-(op == "ge")))', '(a, b)'),
        ('abs(by) * ranges.most(term)', 'ranges.most(term)'),
    ),
    *made(
        "make", (smalls,),
        ('return where(one.args[0], make("mul", dtype, one.args[1], other), const(0, dtype))', 'return where(one.args[0], const(0, dtype), make("mul", dtype, one.args[1], other))'),
        ('(branch if arg is chosen[0] else arg for arg in args)) for branch in (yes, no)', '(branch if arg is chosen[0] else arg for arg in args)) for branch in (no, yes)'),
        ('(other.value == 1 if op == "mul" else _nothing(other, one))', '(other.value == 1 if op == "mul" else other.value == 0)'),
        ('if op == "neg" and args[0].op == "neg":\n        return args[0].args[0]', 'if op == "neg" and args[0].op == "neg":\n        return args[0]'),
        ('_nothing(const(-args[1].value, args[1].dtype), args[0])', 'args[1].value == 0'),
        ('(negative_zero(zero) or not negative_zero(e) or ', '(True or '),
        ('return FALSE if a.value else TRUE\n    return a.args[0]', 'return TRUE if a.value else FALSE\n    return a.args[0]'),
        ('if part is FALSE or not_(part) in found:\n                return FALSE', 'if part is FALSE or not_(part) in found:\n                return TRUE'),
        ('return FALSE if a is b else Expr("xor"', 'return TRUE if a is b else Expr("xor"'),
        ('return yes if condition.value else no', 'return no if condition.value else yes'),
        ('or_(and_(condition, yes), and_(not_(condition), no))', 'or_(and_(condition, yes), no)'),
        ('yes = yes.args[1]', 'yes = yes.args[2]'),
        ('no = no.args[2]', 'no = no.args[1]'),
        ('return -offset, {term: -factor', 'return offset, {term: -factor'),
        ('if offset % common:\n            return FALSE', 'if offset % common == 1:\n            return FALSE'),
        ('    else:\n        offset //= common', '    else:\n        offset = -(-offset // common)'),
        ('return where(e, const(1, dtype), const(0, dtype))', 'return where(e, const(0, dtype), const(1, dtype))'),
        ('where(e.args[0], cast(e.args[1], dtype), cast(e.args[2], dtype))', 'where(e.args[0], cast(e.args[2], dtype), cast(e.args[1], dtype))'),
        ('return not_(compare("eq", e, const(0, e.dtype)))', 'return compare("eq", e, const(0, e.dtype))'),
        ('return not_(make("eq", torch.bool, e, const(0, e.dtype)))', 'return make("gt", torch.bool, e, const(0, e.dtype))'),
    ),
]
# fmt: on
