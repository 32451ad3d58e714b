"""From token ids [B, S] to states [B, S, W]: tables, and what happens to ids before them."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fuzz.expressions import Context
from tests.fuzz.parts import Rule


def table(c: Context, rows: int | None = None, name: str = "embedding") -> Tensor:
    """All layers share it: it belongs to the model."""
    spec = c.model.spec
    return c.model.weight(name, spec.vocab if rows is None else rows, spec.heads * spec.dim)


def plain(c: Context, ids: Tensor) -> Tensor:
    return F.embedding(ids, table(c))


def scaled(c: Context, ids: Tensor) -> Tensor:
    weight = table(c)
    return F.embedding(ids, weight) * weight.shape[1] ** 0.5


def indexed(c: Context, ids: Tensor) -> Tensor:
    return table(c)[ids]


def one_hot(c: Context, ids: Tensor) -> Tensor:
    return F.one_hot(ids, c.model.spec.vocab).to(c.model.dtype) @ table(c)


def two_tables(c: Context, ids: Tensor) -> Tensor:
    return F.embedding(ids, table(c)) + F.embedding(ids % 17, table(c, 17, "embedding_2"))


def split_table(c: Context, ids: Tensor, size: int) -> Tensor:
    """Ids below `size` have one table, the others another, as adaptive inputs have it."""
    low = F.embedding(ids.clamp(max=size - 1), table(c, size))
    high = F.embedding((ids - size).clamp(min=0), table(c, c.model.spec.vocab, "embedding_2"))
    return torch.where((ids < size)[..., None], low, high)


def clamped(c: Context, ids: Tensor, least: int) -> Tensor:
    return F.embedding(ids.clamp(max=c.model.spec.vocab - 1 - least), table(c))


def wrapped(c: Context, ids: Tensor, rows: int) -> Tensor:
    return F.embedding(ids % rows, table(c, rows))


def hashed(c: Context, ids: Tensor) -> Tensor:
    return F.embedding((ids * 2654435761 >> 3) % 53, table(c, 53)) + F.embedding(
        (ids * 40503 + 7) % 31, table(c, 31, "embedding_2")
    )


def replaced(c: Context, ids: Tensor) -> Tensor:
    """Special ids are replaced before the table is asked."""
    return F.embedding(torch.where(ids == c.model.spec.special.image, 0, ids), table(c))


def compared(c: Context, ids: Tensor) -> Tensor:
    """A state of its own for an image token."""
    own = c.model.weight("image", c.model.spec.heads * c.model.spec.dim)
    return torch.where((ids == c.model.spec.special.image)[..., None], own, F.embedding(ids, table(c)))


def padding_idx(c: Context, ids: Tensor) -> Tensor:
    return F.embedding(ids, table(c), padding_idx=c.model.spec.special.pad)


def types(c: Context, ids: Tensor) -> Tensor:
    """A type of token beside the id."""
    return F.embedding(ids, table(c)) + F.embedding((ids > 40).long(), table(c, 2, "embedding_2"))


def small(rng: Random) -> tuple[int]:
    return (rng.choice((3, 7, 20, 33)),)


EMBEDDINGS: dict[str, Rule] = {
    "plain": Rule(plain, weight=12),
    "scaled": Rule(scaled, weight=3),
    "indexed": Rule(indexed, weight=2),
    "one hot": Rule(one_hot, weight=1),
    "two tables": Rule(two_tables, weight=2),
    "split tables": Rule(split_table, small, 1),
    "clamped": Rule(clamped, small, 2),
    "wrapped": Rule(wrapped, lambda rng: (rng.choice((13, 29, 50)),), 2),
    "hashed": Rule(hashed, weight=2),
    "replaced": Rule(replaced, weight=2),
    "compared": Rule(compared, weight=2),
    "padding_idx": Rule(padding_idx, weight=1),
    "types": Rule(types, weight=1),
}
