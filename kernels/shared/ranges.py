"""Between which numbers the integers of a carried expression lie: where 32 bits hold them, which may be negative.

What is known: positions are not negative, and kernels count slots in 32 bits; heads are few; of what a weight or a
float gives, only what its dtype holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Range = tuple[int, int]  # the least and the largest value

POSITIONS: Range = (0, 2**30)
HEADS: Range = (0, 2**16)
INT32: Range = (-(2**31), 2**31 - 1)
_MOST_SHIFT = 62


def of_dtype(dtype: torch.dtype) -> Range:
    if dtype is torch.bool:
        return 0, 1
    ends = torch.iinfo(dtype)
    return int(ends.min), int(ends.max)


def within(inner: Range, outer: Range) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def joined(*ranges: Range) -> Range:
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def of(op: str, args: Sequence[Range]) -> Range | None:
    """The range of an operator on integers that lie in `args`, without overflow; None: it is not computed here."""
    a, b = args[0], args[-1]
    match op:
        case "add":
            return a[0] + b[0], a[1] + b[1]
        case "sub":
            return a[0] - b[1], a[1] - b[0]
        case "mul":
            return _ends([x * y for x in a for y in b])
        case "neg":
            return -a[1], -a[0]
        case "abs":
            return (0 if a[0] <= 0 <= a[1] else min(map(abs, a))), max(map(abs, a))
        case "sign":
            return -1, 1
        case "min" | "max":
            choose = min if op == "min" else max
            return choose(a[0], b[0]), choose(a[1], b[1])
        case "floordiv" if b[0] > 0:
            return _ends([x // y for x in a for y in b])
        case "truncdiv" if b[0] > 0:
            return _ends([x // y if x >= 0 else -(-x // y) for x in a for y in b])
        case "mod" if b[0] > 0:
            return 0, b[1] - 1 if a[0] < 0 else min(a[1], b[1] - 1)
        case "shl" if 0 <= b[0] == b[1] <= _MOST_SHIFT:
            return a[0] << b[0], a[1] << b[0]
        case "shr" if 0 <= b[0] == b[1] <= _MOST_SHIFT:
            return a[0] >> b[0], a[1] >> b[0]
        case "bitnot":
            return -1 - a[1], -1 - a[0]
        case "and" | "or" | "xor":
            return _bits(op, a, b)
    return None


def _bits(op: str, a: Range, b: Range) -> Range:
    """Of operators bit by bit: as many bits as the operands have, and a sign where one of them may be negative."""
    if op == "and" and (a[0] >= 0 or b[0] >= 0):
        return 0, min(one[1] for one in (a, b) if one[0] >= 0)
    size = max((end if end >= 0 else -1 - end).bit_length() for end in (*a, *b))
    return (0 if min(a[0], b[0]) >= 0 else -(1 << size)), (1 << size) - 1


def _ends(values: Sequence[int]) -> Range:
    return min(values), max(values)
