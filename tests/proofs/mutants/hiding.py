"""Rules of passes/score_mod/hiding.py made wrong."""

# ruff: noqa: E501

from __future__ import annotations

from tests.proofs.classes import bounds, reaches
from tests.proofs.mutants.base import made

# fmt: off
HIDING = [
    *made(
        "hiding", (reaches, bounds,),
        ('if _high(value, LONGEST) <= HIDDEN:', 'if _high(value, _SHORT) <= HIDDEN:'),
        ('if _high(value, _SHORT) > HIDDEN:\n        return 0', 'if _high(value, _SHORT) > HIDDEN:\n        return _SHORT'),
        ('if _high(value, middle) <= HIDDEN else (low, middle)', 'if _high(value, middle) > HIDDEN else (low, middle)'),
        ('return _high(value, LONGEST) == -math.inf', 'return _high(value, LONGEST) <= HIDDEN'),
        ('return low > -_ANY and high < _ANY', 'return high < _ANY'),
        ('return low > -_ANY and high < _ANY', 'return True'),
        ('return -1.0, 1.0\n        if not', 'return 0.0, 0.0\n        if not'),
        ('return self._any(e) if ends is None else', 'return (0.0, 0.0) if ends is None else'),
        ('(float(ends.low), float(ends.high))', '(float(ends.low), 0.0)'),
        ('self._ranges = Ranges(longest)', 'self._ranges = Ranges(2)'),
        ('return _hull(*args[0], *args[1])', 'return args[0]'),
        ('return low + other_low, high + other_high', 'return low + other_low, high'),
        ('return low - other_high, high - other_low', 'return low - other_low, high - other_high'),
        ('return -high, -low', 'return low, high'),
        ('return min(low, other_low), min(high, other_high)', 'return max(low, other_low), min(high, other_high)'),
        ('return max(low, other_low), max(high, other_high)', 'return max(low, other_low), min(high, other_high)'),
        ('found = None if vague else _computed(e, args)', 'found = _computed(e, args)'),
        ('min(low * low, high * high)), max(low * low, high * high)', 'min(low * low, high * high)), high * high'),
        ('(0.0 if low <= 0 <= high else min(low * low, high * high))', 'min(low * low, high * high)'),
        ('_hull(low * other_low, low * other_high, high * other_low, high * other_high)', '_hull(low * other_low, high * other_high)'),
        ('if other_low > 0 or other_high < 0:', 'if other_low or other_high:'),
        ('_hull(low / other_low, low / other_high, high / other_low, high / other_high)', '_hull(low / other_low, high / other_high)'),
        ('min(abs(low), abs(high))), max(abs(low), abs(high))', 'min(abs(low), abs(high))), abs(high)'),
        ('(0.0 if low <= 0 <= high else min(abs(low), abs(high)))', 'min(abs(low), abs(high))'),
        ('        return -1.0, 1.0\n    if e.op in _RISING', '        return 0.0, 0.5\n    if e.op in _RISING'),
        ('"exp": math.exp,', '"exp": math.tanh,'),
        ('"exp2": lambda x: 2.0**x,', '"exp2": lambda x: 2.0 * x,'),
        ('"expm1": math.expm1,', '"expm1": math.tanh,'),
        ('"floor": math.floor,', '"floor": math.ceil,'),
        ('"sqrt": (0.0, math.sqrt)', '"sqrt": (0.0, math.log1p)'),
        ('"log": (0.0, math.log)', '"log": (0.0, math.log10)'),
        ('"log2": (0.0, math.log2)', '"log2": (0.0, math.log)'),
        ('"log10": (0.0, math.log10)', '"log10": (0.0, math.sqrt)'),
        ('"log1p": (-1.0, math.log1p)', '"log1p": (-1.0, math.tanh)'),
        ('if e.op in _FROM and low > _FROM[e.op][0]:', 'if e.op in _FROM and low >= 0 and high > 1:'),
        ('return 0.0, math.sqrt(high)', 'return 0.0, math.sqrt(high) / 2'),
        ('    return None\n\n\ndef _beyond', '    return low, high\n\n\ndef _beyond'),
        ('return min(ends), max(ends)', 'return min(ends), min(ends)'),
    ),
]
# fmt: on
