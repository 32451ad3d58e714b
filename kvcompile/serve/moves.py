"""What a step does, as data: the scheduler decides it without a tensor, and the engine carries it out."""

from __future__ import annotations

from dataclasses import dataclass

from kvcompile.serve.pages import Key

Tables = tuple[tuple[int, ...], ...]  # pages of a text, by group


@dataclass(frozen=True)
class Copy:
    """A page that several texts have, or that is found by a key, is copied before one of them writes to it."""

    group: int
    source: int
    target: int


@dataclass(frozen=True)
class Out:
    """A text's pages and row go to the host."""

    text: int
    tables: Tables


@dataclass(frozen=True)
class In:
    """A text's pages and row come back from the host, the pages to others than they came from."""

    text: int
    tables: Tables


@dataclass(frozen=True)
class Drop:
    """A text has no row any more."""

    text: int


@dataclass(frozen=True)
class Down:
    """What a page holds is kept under a key, before another text writes to the page."""

    group: int
    page: int
    key: Key


@dataclass(frozen=True)
class Up:
    """What is kept under a key comes to a text's page, before anyone reads it."""

    text: int
    group: int
    page: int
    key: Key


@dataclass(frozen=True)
class Restore:
    """A text gets what a snapshot of its first tokens has.

    row:   the snapshot's key
    slots: keys of the slots in the order of tokens, piece by piece from the first token on
    pages: by group, the pages that the snapshot fills
    """

    text: int
    tokens: int
    row: Key
    slots: tuple[Key, ...]
    pages: Tables


Move = Copy | Out | In | Drop | Down | Up | Restore


@dataclass(frozen=True)
class Snapshot:
    """After a pass, what a text has of its first tokens in no page that others find is kept.

    start: of the last piece of slots in the order of tokens
    row, slots, pages: as `Restore` has them
    """

    text: int
    start: int
    tokens: int
    row: Key
    slots: tuple[Key, ...]
    pages: Tables


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, end) of a text; last: whether the next token is chosen after them."""

    text: int
    start: int
    end: int
    last: bool


@dataclass(frozen=True)
class StepPlan:
    """What a step does: moves one after the other, then one pass over `decodes`, then a pass for every chunk."""

    moves: tuple[Move, ...] = ()
    decodes: tuple[int, ...] = ()
    chunks: tuple[Chunk, ...] = ()

    @property
    def texts(self) -> tuple[int, ...]:
        return (*self.decodes, *(chunk.text for chunk in self.chunks))

    @property
    def moved(self) -> tuple[int, ...]:
        """Texts that moves are for, which have nothing if those fail."""
        return tuple(move.text for move in self.moves if isinstance(move, Out | In | Up | Restore))

    def __bool__(self) -> bool:
        return bool(self.moves or self.decodes or self.chunks)


@dataclass(frozen=True)
class Fork:
    """A text goes its own way from where another one is; moves: what happens to pages before."""

    source: int
    target: int
    moves: tuple[Move, ...]
