"""Positions: where their numbers come from, and what is made of them (learned, sinusoids, RoPE, none)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fuzz.expressions import Context
from tests.fuzz.parts import Rule

Source = Callable[[Context, Tensor | None], Tensor]


@dataclass(frozen=True)
class Places:
    """added: to the states [.., S, W]; rotate: of queries and keys [B, H, S, D]; numbers: [B, S] or [S]"""

    added: Tensor | None = None
    rotate: Callable[[Tensor], Tensor] | None = None
    numbers: Tensor | None = None


def arange(c: Context, given: Tensor | None) -> Tensor:
    return torch.arange(c.n) if given is None else given


def restarted(c: Context, given: Tensor | None) -> Tensor:
    return c.since()


def halves(dtype: torch.dtype) -> Source:
    return lambda c, given: torch.arange(c.n, dtype=dtype)


# Number sources [S] or [B, S], and whether a cache can hold them.
SOURCES: dict[str, tuple[Source, float, bool | None]] = {
    "arange": (arange, 12, True),
    "arange [1, S]": (lambda c, given: torch.arange(c.n).unsqueeze(0), 3, True),
    "arange [B, S]": (lambda c, given: torch.arange(c.n).expand(c.ids.shape[0], -1), 2, True),
    "ones": (lambda c, given: torch.ones_like(c.ids).cumsum(1) - 1, 2, True),
    "ones, cumsum(-1)": (lambda c, given: torch.ones(c.n, dtype=torch.long).cumsum(-1) - 1, 1, True),
    "no padding": (lambda c, given: counted(c), 2, True),
    "len": (lambda c, given: torch.arange(len(c.ids[0])), 2, None),
    "list": (lambda c, given: torch.tensor(list(range(c.ids.shape[1]))), 0.5, None),
    "from 2": (lambda c, given: torch.arange(2, c.n + 2), 1, True),
    "bfloat16": (halves(torch.bfloat16), 1, None),
    "float16": (halves(torch.float16), 1, None),
    "float32": (halves(torch.float32), 2, True),
    "clamped": (lambda c, given: torch.arange(c.n).clamp(max=200), 1, True),
    "wrapped": (lambda c, given: torch.arange(c.n) % 128, 1, True),
    "halved": (lambda c, given: torch.arange(c.n) // 2, 1, True),
    "steps of 2": (lambda c, given: torch.arange(0, 2 * c.n, 2) % 700, 1, None),
    "reversed": (lambda c, given: torch.arange(c.n - 1, -1, -1), 1, None),
    "flipped": (lambda c, given: torch.arange(c.n).flip(0), 1, None),
    "of the length": (lambda c, given: torch.arange(c.n) * 100 // c.n, 1, False),
    "restart at SEP": (restarted, 1, None),
    "counted documents": (lambda c, given: c.doc() * 3 % 100, 1, None),
    "counted ids": (lambda c, given: (c.ids > 20).cumsum(1) % 128, 1, None),
    "ids": (lambda c, given: c.ids, 0.5, True),
    "late": (
        lambda c, given: torch.where(torch.arange(c.n) < 100, torch.arange(c.n), torch.arange(c.n) // 2 + 50),
        1,
        True,
    ),
}


def counted(c: Context) -> Tensor:
    """As RoBERTa: the number of tokens up to here that are no padding, 0 for padding."""
    real = c.ids.ne(c.model.spec.special.pad).int()
    return (real.cumsum(1).type_as(real) * real).long()


def none(c: Context, given: Tensor | None) -> Places:
    return Places()


def learned(c: Context, given: Tensor | None, source: str) -> Places:
    index = SOURCES[source][0](c, given)
    table = c.model.weight("places", c.model.longest + 3, width(c))
    return Places(F.embedding(index.long(), table), None, index)


def sliced(c: Context, given: Tensor | None, start: int) -> Places:
    table = c.model.weight("places", c.model.longest + 3, width(c))
    return Places(table[start : start + c.n])


def sliced_buffer(c: Context, given: Tensor | None) -> Places:
    size = c.model.longest
    angle = torch.arange(size)[:, None] * 10.0 ** -torch.linspace(0, 3, width(c))
    return Places(c.model.constant("sinusoids", angle.sin().to(c.model.dtype))[None, : c.n])


def sinusoid(c: Context, given: Tensor | None, source: str) -> Places:
    index = SOURCES[source][0](c, given)
    rate = 10.0 ** -torch.linspace(0, 3, width(c) // 2, dtype=c.model.dtype)
    angle = index.to(c.model.dtype)[..., None] * rate
    return Places(torch.cat([angle.sin(), angle.cos()], -1), None, index)


def angles(c: Context, index: Tensor, dim: int, base: float, half: torch.dtype | None = None) -> Tensor:
    """[1 or B, 1, S, D / 2]"""
    rate = base ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    rate = rate if half is None else rate.to(half)
    angle = index[..., None] * rate if half is not None else index.float()[..., None] * rate
    return angle[None, None] if angle.dim() == 2 else angle[:, None]


def rope_half(c: Context, given: Tensor | None, source: str, base: float, part: float = 1.0) -> Places:
    index = SOURCES[source][0](c, given)
    dim = int(c.model.spec.dim * part)
    angle = angles(c, index, dim, base)
    cos, sin = (torch.cat([t, t], -1).to(c.model.dtype) for t in (angle.cos(), angle.sin()))

    def rotate(t: Tensor) -> Tensor:
        turned, rest = t[..., :dim], t[..., dim:]
        first, second = turned.chunk(2, -1)
        turned = turned * cos + torch.cat([-second, first], -1) * sin
        return turned if part == 1.0 else torch.cat([turned, rest], -1)

    return Places(None, rotate, index)


def rope_interleaved(c: Context, given: Tensor | None, source: str, base: float) -> Places:
    index = SOURCES[source][0](c, given)
    angle = angles(c, index, c.model.spec.dim, base)
    cos, sin = angle.cos().to(c.model.dtype), angle.sin().to(c.model.dtype)

    def rotate(t: Tensor) -> Tensor:
        even, odd = t[..., ::2], t[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

    return Places(None, rotate, index)


def rope_complex(c: Context, given: Tensor | None, source: str, base: float) -> Places:
    index = SOURCES[source][0](c, given)
    angle = angles(c, index, c.model.spec.dim, base)
    turn = torch.polar(torch.ones_like(angle), angle)

    def rotate(t: Tensor) -> Tensor:
        pairs = torch.view_as_complex(t.float().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2).to(t.dtype)

    return Places(None, rotate, index)


def rope_table(c: Context, given: Tensor | None, base: float) -> Places:
    """cos and sin in buffers, of which the first S rows are taken."""
    angle = angles(c, torch.arange(c.model.longest), c.model.spec.dim, base)[0, 0]
    cos = c.model.constant("cos", torch.cat([angle, angle], -1).cos().to(c.model.dtype))[: c.n]
    sin = c.model.constant("sin", torch.cat([angle, angle], -1).sin().to(c.model.dtype))[: c.n]

    def rotate(t: Tensor) -> Tensor:
        first, second = t.chunk(2, -1)
        return t * cos + torch.cat([-second, first], -1) * sin

    return Places(None, rotate)


def rope_by_length(c: Context, given: Tensor | None, limit: int) -> Places:
    """The base grows with the length of the text."""
    base = 10000.0 * max(1.0, (c.n + 0.0) / limit)
    index = torch.arange(c.n)
    rate = torch.pow(
        torch.full((), 1.0) * base, -(torch.arange(0, c.model.spec.dim, 2).float() / c.model.spec.dim)
    )
    angle = (index[:, None] * rate)[None, None]
    cos, sin = angle.cos().to(c.model.dtype), angle.sin().to(c.model.dtype)

    def rotate(t: Tensor) -> Tensor:
        first, second = t.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    return Places(None, rotate, index)


def rope_by_content(c: Context, given: Tensor | None) -> Places:
    """Angles counted by a gate of each token."""
    step = F.embedding(c.ids, c.model.weight("steps", c.model.spec.vocab, 1)).sigmoid()[..., 0]
    return turned_by(c, step.cumsum(1))


def turned_by(c: Context, numbers: Tensor) -> Places:
    angle = angles(c, numbers, c.model.spec.dim, 100.0)
    cos, sin = angle.cos().to(c.model.dtype), angle.sin().to(c.model.dtype)

    def rotate(t: Tensor) -> Tensor:
        first, second = t.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    return Places(None, rotate)


def width(c: Context) -> int:
    return c.model.spec.heads * c.model.spec.dim


def rule(kind: Callable[..., Places], source: str, weight: float, *more: tuple[float, ...]) -> Rule:
    _, often, held = SOURCES[source]
    return Rule(kind, lambda rng: (source, *(rng.choice(values) for values in more)), weight * often, held)


BASES = (100.0, 10000.0, 500000.0)
POSITIONS: dict[str, Rule] = {
    **{f"learned, {source}": rule(learned, source, 2) for source in SOURCES},
    **{f"sinusoid, {source}": rule(sinusoid, source, 1) for source in SOURCES},
    **{f"rope half, {source}": rule(rope_half, source, 3, BASES) for source in SOURCES},
    **{
        f"rope half of the channels, {source}": rule(rope_half, source, 0.5, BASES, (0.5,))
        for source in SOURCES
    },
    **{f"rope interleaved, {source}": rule(rope_interleaved, source, 1, BASES) for source in SOURCES},
    **{f"rope complex, {source}": rule(rope_complex, source, 0.5, BASES) for source in SOURCES},
    "rope, a table": Rule(rope_table, lambda rng: (rng.choice(BASES),), 8),
    "rope, by the length": Rule(rope_by_length, lambda rng: (rng.choice((64, 128, 256)),), 5, None),
    "rope, by content": Rule(rope_by_content, weight=5, held=None),
    "learned, a slice": Rule(sliced, lambda rng: (rng.choice((0, 0, 2)),), 10),
    "sinusoid, a slice": Rule(sliced_buffer, weight=6),
    "none": Rule(none, weight=15),
}
