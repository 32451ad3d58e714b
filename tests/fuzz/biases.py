"""Biases: what is added to scores, as an expression of shape that broadcasts to [B, H, S, S]."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from torch import Tensor

from tests.fuzz.expressions import Context
from tests.fuzz.masks import filled
from tests.fuzz.parts import NONE, Rule

T5 = (
    "torch.where(d < 16, d, 16 + ((d.clamp(min=1).float() / 16).log() / math.log(8) * 15).long().clamp(max=15))"
    ".clamp(min=0)"
)


def added(c: Context, text: str) -> Tensor:
    return c.of(text).to(c.model.dtype)


def one_of(*texts: str) -> Callable[[Random], tuple[str]]:
    return lambda rng: (filled(rng, rng.choice(texts)),)


BIASES: dict[str, Rule] = {
    NONE.name: Rule(lambda c: None, weight=10),
    "written": Rule(added, weight=0, held=None),  # by hand, in a test
    "alibi": Rule(
        added,
        one_of(
            "-c.slopes() * d",
            "c.slopes() * (j - i)",
            "c.slopes() * j",
            "-c.slopes() * d.abs()",
            "-c.heads(0.5, 0.1, 0.02, 0.0) * d",
            "c.slopes() * (j - n + 1)",
            "torch.arange(0, -n, -1)[:, None] * 0.0 + c.slopes() * torch.arange(1 - n, 1)",
        ),
        4,
    ),
    "decay": Rule(
        added,
        one_of(
            "-torch.log1p(d.clamp(min=0).float())",
            "-d * d * 1e-4",
            "torch.cos(d * 0.1)",
            "-c.slopes() * d.clamp(min=0).float().sqrt()",
            "-c.weight('decay', c.heads_count, 1, 1).abs() * torch.log(1 + d.abs() * 0.5)",
            "-c.slopes() * d.clamp(max=W)",
        ),
        2,
    ),
    "buckets": Rule(
        added,
        one_of(
            f"c.table(32, {T5})",
            "c.table(32, d.clamp(min=0) >> 7)",
            "c.table(64, (d.clamp(min=0) // 64).clamp(max=63))",
            "c.table(32, (d // 20).clamp(0, 31))",
            "c.table(16, (d.clamp(min=1).float().log2() * 1.5).long().clamp(0, 15))",
            "c.table(1024, d.clamp(0, 1023))",
            "c.table(257, d.clamp(-128, 128) + 128)",
            "c.table(96, (d + 95).clamp(95, 190) - 95)",
        ),
        4,
    ),
    "hinge": Rule(
        added,
        one_of(
            "-F.relu(d - W) * 0.05",
            "-F.relu(d.float() - 3000.0)",
            "-(d - W).clamp(min=0) * 0.1",
            "-F.softplus(d - W.0) * 0.02",
            "torch.where(d > W, -3.0, 0.0)",
            "(d == W) * 5.0",
            "(d > K) * -2.0",
        ),
        3,
    ),
    "by place": Rule(
        added,
        one_of(
            "(j == 0) * 2.0",
            "((i > W) & (j < 10)) * 3.0",
            "(j % N == 0) * 1.5",
            "torch.sin(j * 0.05) * 2",
            "(i // W == j // W) * 1.0",
            "d / (i + 1.0) * -4.0",
            "(i % 3 - j % 5) * 0.3",
        ),
        3,
    ),
    "by key's place": Rule(
        added, one_of("c.weight('key', c.model.longest)[:n]", "c.weight('key2', c.model.longest)[j]"), 2
    ),
    "table of pairs": Rule(
        added, one_of("c.weight('pairs', c.heads_count, c.model.longest, c.model.longest)[:, :n, :n]"), 0.5
    ),
    "by key": Rule(
        added,
        one_of("c.at_k(c.linear('bias', c.heads_count))", "c.at_k(F.softplus(c.linear('bias', 1)[..., 0]))"),
        2,
    ),
    "by id": Rule(
        added,
        one_of(
            "c.at_k(c.weight('ids', c.model.spec.vocab)[ids])",
            "c.at_k(c.hidden()) * -2.0",
            "(c.at_q(ids) == c.at_k(ids)) * 1.5",
            "c.at_q(c.hidden()) * (d > W) * -4.0",
        ),
        2,
        None,
    ),
    "by query": Rule(
        added,
        one_of(
            "-c.at_q(c.linear('slope', c.heads_count).sigmoid()) * d * 0.1",
            "-c.at_q(c.linear('slope', 1)[..., 0].exp()) * F.relu(d - W)",
        ),
        1,
        None,
    ),
    "by pair of activations": Rule(
        added, one_of("c.at_q(c.linear('a', c.heads_count)) * c.at_k(c.linear('b', c.heads_count))"), 1, None
    ),
    "counted gates": Rule(  # a forgetting transformer
        added,
        one_of(
            "c.at_q(F.logsigmoid(c.linear('gate', c.heads_count)).cumsum(1))"
            " - c.at_k(F.logsigmoid(c.linear('gate', c.heads_count)).cumsum(1))"
        ),
        1,
        None,
    ),
    "rounded": Rule(
        added,
        one_of(
            "-d.bfloat16() * 0.01",
            "-(i.bfloat16() - j.bfloat16()) * 0.02",
            "-(d.half() * 0.01)",
            "torch.floor(d * 0.1) * -0.1",
            "d.to(torch.int8) * 0.01",
            "c.slopes().bfloat16() * (j - i).bfloat16()",
        ),
        1,
        None,
    ),
    "by length": Rule(added, one_of("d / n * -3.0", "(j - n + 1) * 0.01", "(d > n // 2) * -2.0"), 1, None),
}
