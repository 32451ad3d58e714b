"""Defines what a step of the oracle asks a retention: which queries go together, what they see, what is noted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from kvcompile.kernels.oracle.choice import Choice
from kvcompile.layouts import Retention

R = TypeVar("R", bound=Retention)


class Pass(NamedTuple):
    """Some new tokens of one sequence: `tokens` of them from position `start`, in `columns` columns that came together.

    number: which pass it is of those that came
    """

    number: int
    columns: int
    start: int
    tokens: int


class View(NamedTuple):
    """What queries see: `tokens` at positions [K], of which each query sees those of `seen`, bool [Q, K] or [H, Q, K].

    query_places [Q] and places [K] are where queries and tokens count as standing.
    """

    tokens: Tensor
    seen: Tensor
    query_places: Tensor
    places: Tensor


@dataclass
class Hooks(ABC, Generic[R]):
    """One retention over one sequence, in the heads that keep the same tokens; it begins with nothing kept."""

    retention: R
    choices: list[Choice] = field(default_factory=list)

    def together(self, kv_heads: int) -> list[slice]:
        """The KV heads that keep the same tokens, each such group with hooks of its own."""
        return [slice(0, kv_heads)]

    @abstractmethod
    def passes(self, came: Sequence[Pass]) -> Sequence[Pass]:
        """The queries that are attended together, of tokens that came pass by pass."""

    @abstractmethod
    def view(self, one: Pass, queries: Tensor, shown: Tensor, held: Tensor | None) -> View:
        """What the queries at positions `queries` [Q] see; shown: what mask and selection show them, bool [.., Q, T].

        Raises:
            ValueError: the tokens in `held` [N] (-1: none) cannot have been kept.
        """

    def note(self, one: Pass, p: Tensor, held: Tensor | None) -> None:
        """Note what the weights p [H, Q, K] of a view say of its tokens.

        Raises:
            ValueError: as of `view`.
        """
