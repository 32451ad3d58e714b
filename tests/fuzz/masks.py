"""Masks: conditions over i, j, h and ids under a causal base, in many spellings, and some that show the future.

A rule's arguments are the mask's text; `make` only evaluates it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

from torch import Tensor

from tests.fuzz.expressions import Context
from tests.fuzz.parts import Rule, far, number, spelled

CAUSAL = (
    "i >= j",
    "j <= i",
    "d >= 0",
    "~(j > i)",
    "j < i + 1",
    "c.tril()",
    "torch.ones(n, n, dtype=torch.bool).tril()",
    "torch.ones(n, n).triu(1) == 0",
    "(i - j).sign() >= 0",
    "i.float() >= j.float()",
    "torch.logical_not(torch.lt(i, j))",
    "i - j > -1",
)


def shown(c: Context, text: str) -> Tensor:
    return c.of(text)


def causal(rng: Random) -> str:
    return rng.choices(CAUSAL, [6] + [1] * (len(CAUSAL) - 1))[0]


def under(*conditions: str, own: float = 0.75) -> Callable[[Random], tuple[str]]:
    """Texts of one of the conditions and the causal base; most of them keep the token itself.

    In a condition, K is a constant in any spelling, N a plain one, and W a plain one beyond a short probe.
    """

    def draw(rng: Random) -> tuple[str]:
        text = filled(rng, rng.choice(conditions))
        kept = (
            f"({causal(rng)}) & (({text}) | (d == 0))"
            if rng.random() < own
            else f"({causal(rng)}) & ({text})"
        )
        return (kept,)

    return draw


def filled(rng: Random, text: str) -> str:
    """The text with a number for each K (in any spelling), N and W (beyond a short probe)."""

    def drawn(found: re.Match[str]) -> str:
        if found[0] == "K":
            return spelled(rng, number(rng))
        return str(number(rng) if found[0] == "N" else far(rng))

    return re.sub(r"\b[KNW]\b", drawn, text)


def alone(*texts: str) -> Callable[[Random], tuple[str]]:
    """Texts with no causal base of their own."""
    return lambda rng: (filled(rng, rng.choice(texts)),)


def both(rng: Random) -> tuple[str]:
    """Two rules at once."""
    first, second = (ORDINARY[rng.choice(sorted(ORDINARY))].draw(rng)[0] for _ in range(2))
    return (f"({first}) & (({second}) | (d == 0))",)


ORDINARY: dict[str, Rule] = {
    "window": Rule(
        shown,
        under(
            "d < K", "d <= K", "j > i - K", "i < j + K", "K > d", "d - K < 0", "-d > -N", "~(d >= K)", own=0.0
        ),
        5,
    ),
    "window, otherwise": Rule(
        shown,
        under(
            "d < N.5",
            "d.float() / 2 < N",
            "d * 2 < N",
            "d * d < N * N",
            "d ** 2 < N * N",
            "(d >> 6) < 2",
            "d.abs() < K",
            "(i - K).clamp(min=0) <= j",
            "d < c.buf(N) + 1",
            "d.clamp(max=N) < N",
            "d + 0.5 < K",
            "(d / W) < 1",
            "d.double().sqrt() < 9.5",
            "i * 1.0 - j * 1.0 < K",
            "torch.ones_like(d).cumsum(-1) > i - K",
        ),
        4,
    ),
    "window per head": Rule(
        shown,
        under(
            "d < c.heads(N, N, W, N)",
            "(h % 2 == 0) | (d < K)",
            "d < (h + 1) * N",
            "d < 2 ** (h + 4)",
            "(h < 2) | (d < W)",
            "d <= h * 37",
            own=0.9,
        ),
        2,
    ),
    "chunks": Rule(
        shown,
        under(
            "i // K == j // K",
            "i // N == j // N",
            "(i >> 6) == (j >> 6)",
            "i - i % N <= j",
            "(i ^ j) < 64",
            "(i / 64).floor() == (j / 64).floor()",
            "i // 128 == j // 128",
            "torch.div(i, 96, rounding_mode='floor') == torch.div(j, 96, rounding_mode='floor')",
        ),
        3,
    ),
    "neighbouring chunks": Rule(
        shown,
        under(
            "i // 64 - j // 64 < 2",
            "i // 50 - j // 50 <= 1",
            "(i // 100 == j // 100) | (i // 100 == j // 100 + 1)",
        ),
        2,
    ),
    "dilated": Rule(
        shown,
        under(
            "d % 4 == 0", "(d % N == 0) | (d < K)", "i % 8 == j % 8", "d.remainder(16) == 0", "(d & 3) == 0"
        ),
        2,
    ),
    "sinks and window": Rule(
        shown, under("(j < 4) | (d < K)", "(d < W) | (j < N)", "(d <= K) | (j == 0)"), 2
    ),
    "hides a prefix": Rule(
        shown,
        under("(j >= K) | (i < 300)", "(i < N) | (j >= 20)", "(j > W) | (d < 16)", "(i < W) | (j > 0)"),
        2,
    ),
    "begins late": Rule(
        shown,
        under(
            "(d < N) | (i < W)", "(i < W) | (d < 5)", "d < 40 + (i >= W) * 3", "(i // W < 1) | (j % 2 == 0)"
        ),
        2,
    ),
    "strided": Rule(shown, under("(d < N) | (j % 32 == 31)", "(i // 64 == j // 64) | (j % 64 >= 60)")),
    "powers": Rule(
        shown, under("(d & (d - 1)) == 0", "(d < 8) | ((d & (d - 1)) == 0)", "d.float().log2() % 1 == 0")
    ),
    "products": Rule(
        shown,
        under(
            "i * j % 7 != 1",
            "(i + j) % 5 != 0",
            "3 * i - 2 * j < W * 2",
            "(i * 7919 + j * 104729) % 97 > 5",
            "(i - N) * (j - N) >= 0",
            "i * i - j * j < 90000",
            "(i % 100) >= (j % 100)",
            "i * 2 - j < 2 * W",
        ),
        2,
    ),
    "table": Rule(
        shown,
        under(
            "c.bits(512, d.clamp(0, 511))",
            "c.bits(1024, j)",
            "c.bits(256, d.clamp(0, 255))",
            "c.bits(40, d % 40)",
        ),
        2,
    ),
}

# Where arithmetic is not that of whole numbers: rounding, overflow, signs. Some of these show the future, far away.
ARITHMETIC: dict[str, Rule] = {
    "rounded": Rule(
        shown,
        under(
            "d.bfloat16() < W",
            "d.half() < W.5",
            "i.bfloat16() - j.bfloat16() < W",
            "torch.floor(i * 0.1) == torch.floor(j * 0.1)",
            "(i / 49).long() == (j / 49).long()",
            "(i * (1 / 49)).floor() == (j * (1 / 49)).floor()",
            "i.bfloat16() // 64 == j.bfloat16() // 64",
            "(i / 3 * 3 - j).floor() < W",
            "torch.round(d / 64) < 2",
            "d.float().sqrt().floor() < 10",
        ),
        2,
        None,
    ),
    "overflowing": Rule(
        shown,
        under(
            "d.to(torch.int8) < 50",
            "d.byte() < 100",
            "(i * 40 - j * 40).to(torch.int16) >= 0",
            "(d.int() << 25) >= 0",
        ),
        1,
        None,
    ),
    "causal, rounded": Rule(
        shown,
        alone(
            "i.bfloat16() >= j.bfloat16()",
            "(i / 4).half() >= (j / 4).half()",
            "i.half() * 8 >= j.half() * 8",
            "d.bfloat16() + 0.0 > -1",
            "(i.float() * 1e7).int() >= (j.float() * 1e7).int()",
            "i.to(torch.int8) >= j.to(torch.int8)",
        ),
        1,
        None,
    ),
    "of negative numbers": Rule(
        shown,
        under(
            "(j - i) % 4 == 0",
            "torch.fmod(j - i, 4) == 0",
            "(j - i) // 64 > -2",
            "torch.div(j - i, 64, rounding_mode='trunc') > -2",
            "((j - i) >> 6) >= -2",
            "((j - i) & 3) == 0",
            "(j - i).remainder(100) < 60",
            "torch.fmod(j - i, 100) > -60",
        ),
        2,
    ),
}

BOOLEANS: dict[str, Rule] = {
    "booleans as numbers": Rule(
        shown,
        alone(
            "(i >= j).int() * (d < K).int() > 0",
            "(i >= j).long() + (d < W).long() == 2",
            "(i >= j) ^ (d >= W)",
            "torch.logical_xor(i >= j, d > W)",
            "torch.stack([i >= j, d < W]).all(0)",
            "~torch.stack([i < j, d > W]).any(0)",
            "(i >= j).float() * (1.0 - (d > W).float()) > 0.5",
            "torch.where(i < j, False, d < W)",
            "torch.minimum((i >= j).int(), (d < W).int()).bool()",
            "torch.maximum(j - i, d - W) <= 0",
            "(i >= j).masked_fill(d > W, False)",
            "(d.clamp(0, W) == d)",
            "((i >= j) == (d < W)) & (i >= j)",
        ),
        3,
    ),
    "triangles": Rule(
        shown,
        alone(
            "torch.ones(n, n).tril().triu(-W) > 0",
            "torch.ones(n, n).tril() - torch.ones(n, n).tril(-W) > 0",
            "torch.tril(d < W)",
            "torch.ones(n, n, dtype=torch.bool).triu(-W) & c.tril()",
            "torch.eye(n).cumsum(0) > 0",
            "torch.ones(n, n).cumsum(0) >= torch.ones(n, n).cumsum(1)",
            "torch.full((n, n), -1.0).triu(1) == 0",
            "c.tril() & ~c.tril(-100)",
            "c.tril().clone() & (d < W)",
            "F.pad(torch.ones(n, n).tril(), (1, 0))[:, 1:] > 0",
        ),
        2,
    ),
    "not itself": Rule(
        shown, alone("(i > j) | ((i == 0) & (j == 0))", "(d >= 3) | ((i < 3) & (d >= 0))"), 1, None
    ),
    "sees nothing": Rule(
        shown, under("d > 3", "(i < W) | (d > 500)", "j > W", "(j % 64 != 0) | (i > 64)", own=0.0), 1, None
    ),
    "learned window": Rule(
        shown,
        under(
            "d < c.weight('window', c.heads_count, 1, 1).abs() * 100 + 20",
            "d <= c.weight('reach', 1).exp() * 60",
        ),
        1,
    ),
}

BY_IDS: dict[str, Rule] = {
    "documents": Rule(
        shown,
        under(
            "c.at_q(c.doc()) == c.at_k(c.doc())",
            "c.at_q(c.doc_after()) == c.at_k(c.doc_after())",
            "c.at_q(c.doc()) - c.at_k(c.doc()) < 2",
            "~(c.at_q(c.doc()) != c.at_k(c.doc()))",
        ),
        3,
    ),
    "hidden keys": Rule(
        shown,
        under(
            "~c.at_k(c.hidden())",
            "c.at_k(ids) != c.model.spec.special.hidden",
            "c.at_k(ids < c.model.spec.vocab - 6)",
            "c.at_k(ids % 13 != 4)",
            "~torch.isin(c.at_k(ids), torch.tensor([7, 19, 33, 52]))",
        ),
        2,
    ),
    "queries by id": Rule(
        shown,
        under(
            "~c.at_q(c.hidden()) | (d < 9)",
            "c.at_q(ids) >= c.at_k(ids) - 50",
            "c.at_q(ids) != c.at_k(ids)",
            "(c.at_q(ids) > 30) | (d < W)",
            own=0.95,
        ),
        1,
        None,
    ),
    "since the separator": Rule(
        shown,
        under("d <= c.at_q(c.since())", "c.at_k(c.since()) < 5", "(c.at_k(c.since()) == 0) | (d < W)"),
        1,
        None,
    ),
}

LENGTH: dict[str, Rule] = {
    "by length": Rule(
        shown,
        under("d < n // 2", "j < n - 5", "(n < 300) | (d < 50)", "d < max(n - 400, 30)", "i + n > j * 2"),
        1,
        None,
    ),
}

FUTURE: dict[str, Rule] = {
    "bidirectional": Rule(
        shown, alone("d == d", "d.abs() < K", "i // 64 == j // 64", "(h == 0) | (i >= j)"), 1, False
    ),
    "prefix, both ways": Rule(
        shown, alone("(i >= j) | (j < 40)", "(i >= j) | ((i < W) & (j < W))", "j <= i.clamp(min=N)"), 1, None
    ),
    "one too many": Rule(
        shown,
        alone("d >= -1", "j <= i + 2", "c.tril(1)", "(i >= j) | ((i == W) & (j == i + 3))", "i - j > -2"),
        1,
        None,
    ),
    "blocks, both ways": Rule(
        shown,
        alone(
            "i // 32 >= j // 32",
            "i // 128 >= j // 128",
            "(i | 7) >= j",
            "(i >> 5) >= (j >> 5)",
            "i + 5 - i % 6 >= j",
        ),
        1,
        None,
    ),
    "images, both ways": Rule(
        shown,
        alone(
            "(i >= j) | ((c.at_q(c.span()) == c.at_k(c.span())) & c.at_q(c.image()))",
            "(i >= j) | (c.at_q(c.image()) & c.at_k(c.image()))",
        ),
        1,
        None,
    ),
    "shown by id": Rule(
        shown, alone("(i >= j) | c.at_k(c.hidden())", "(i >= j) | (c.at_q(ids) == c.at_k(ids))"), 1, None
    ),
}

MASKS: dict[str, Rule] = {
    "written": Rule(shown, weight=0, held=None),  # by hand, in a test
    "causal": Rule(shown, lambda rng: (causal(rng),), 6),
    **ORDINARY,
    "two at once": Rule(shown, both, 3),
    **ARITHMETIC,
    **BOOLEANS,
    **BY_IDS,
    **LENGTH,
    **FUTURE,
}
