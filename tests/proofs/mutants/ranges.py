"""Rules of passes/score_mod/ranges.py made wrong."""

# ruff: noqa: E501

from __future__ import annotations

from tests.proofs.claims import ranges
from tests.proofs.mutants.base import made

# fmt: off
RANGES = [
    *made(
        "ranges", (ranges,),
        ('torch.float64: 53', 'torch.float64: 54'),
        ('torch.float32: 24', 'torch.float32: 25'),
        ('torch.float16: 11', 'torch.float16: 12'),
        ('ends.min <= self.low and self.high <= ends.max', 'self.high <= ends.max'),
        ('ends.min <= self.low and self.high <= ends.max', 'ends.min <= self.low'),
        ('self.step >= torch.finfo(dtype).smallest_normal and ', ''),
        (' and self.most <= torch.finfo(dtype).max', ''),
        ('within and self.most / self.step <= 2 ** _MANTISSA[dtype]', 'within'),
        ('max(self.high, -self.high, self.low, -self.low)', 'max(self.high, -self.high)'),
        ('found is not None and found.fits(e.dtype)', 'found is not None'),
        ('min(a.low, b.low), max(a.high, b.high), min(a.step, b.step)', 'a.low, max(a.high, b.high), min(a.step, b.step)'),
        ('min(a.low, b.low), max(a.high, b.high), min(a.step, b.step)', 'min(a.low, b.low), b.high, min(a.step, b.step)'),
        ('min(a.low, b.low), max(a.high, b.high), min(a.step, b.step)', 'min(a.low, b.low), max(a.high, b.high), b.step'),
        ('if not known or len(known) < len(e.args):', 'if not known:'),
        ('low += min(factor * part.low, factor * part.high)', 'low += factor * part.low'),
        ('high += max(factor * part.low, factor * part.high)', 'high += factor * part.high'),
        ('end // by if e.op == "floordiv" else math.trunc(Fraction(end, by))', 'end // abs(by) if e.op == "floordiv" else math.trunc(Fraction(end, by))'),
        ('Exact(min(whole), max(whole), 1)', 'Exact(whole[0], whole[1], 1)'),
        ('Exact(min(by + 1, 0), max(by - 1, 0), 1)', 'Exact(0, abs(by) - 1, 1)'),
        ('Exact(min(by + 1, 0), max(by - 1, 0), 1)', 'Exact(min(by + 1, 0), max(by - 2, 0), 1)'),
        ('first.low * 2**by, first.high * 2**by', 'first.low, first.high * 2**by'),
        ('first.low * 2**by, first.high * 2**by', 'first.low * 2**by, first.high'),
        ('ends[0] >> by, ends[1] >> by', '0, ends[1] >> by'),
        ('return Exact(0, by, 1)', 'return Exact(0, by - 1, 1)'),
        ('int(end).bit_length() for part in parts for', 'int(end).bit_length() - 1 for part in parts for'),
        ('signed = any(part.low < 0 for part in parts)', 'signed = all(part.low < 0 for part in parts)'),
        ('Exact(~ends[1], ~ends[0], 1)', 'Exact(-ends[1], -ends[0], 1)'),
        ('step = min(first.step, last.step)', 'step = first.step'),
        ('first.low + last.low, first.high + last.high', 'first.low - last.low, first.high + last.high'),
        ('first.low + last.low, first.high + last.high', 'first.low + last.low, first.high'),
        ('first.low - last.high, first.high - last.low', 'first.low - last.low, first.high - last.low'),
        ('Exact(-first.high, -first.low, first.step)', 'Exact(first.low, first.high, first.step)'),
        ('Exact(0, first.most, first.step)', 'Exact(0, first.high, first.step)'),
        ('Exact(min(ends), max(ends), first.step * last.step)', 'Exact(ends[0], ends[3], first.step * last.step)'),
        ('Exact(min(ends), max(ends), first.step * last.step)', 'Exact(min(ends), max(ends), step)'),
        (' and _is_power(last.low):', ' and last.low:'),
        ('"mod" if last.low == last.high and last.low > 0', '"mod" if last.low == last.high and last.low'),
        ('return Exact(0, last.low, step)', 'return Exact(0, last.low, 1)'),
        ('min(first.low, last.low), min(first.high, last.high)', 'max(first.low, last.low), min(first.high, last.high)'),
        ('max(first.low, last.low), max(first.high, last.high)', 'max(first.low, last.low), min(first.high, last.high)'),
        ('e.value == 0 and math.copysign(1.0, e.value) < 0', 'False'),
        ('case "abs" | "exp" |', 'case "abs" | "neg" | "exp" |'),
        ('case "abs" | "exp" |', 'case "abs" | "mul" | "exp" |'),
        ('return negative_zero(e.args[0])\n        case "where":', 'return False\n        case "where":'),
        ('any(negative_zero(arg) for arg in e.args[1:])', 'all(negative_zero(arg) for arg in e.args[1:])'),
    ),
]
# fmt: on
