"""One text on its way through an engine, as the scheduler knows it, and the rules that it goes by."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvcompile.serve.pages import Key
from kvcompile.serve.prefix import Chain


class State(StrEnum):
    """Where a text is."""

    WAITING = "waiting"  # has nothing in the cache
    RUNNING = "running"  # has a row and pages
    SWAPPED = "swapped"  # waits, and what it had in the cache is on the host


@dataclass
class Text:
    """One text on its way.

    order:    its age and its place among the texts of one request: what is smaller goes first
    tokens:   prompt and what came after it; the last may not be computed yet
    most:     tokens that it has in the cache at most
    root:     the key before its first page
    computed: tokens in the cache
    whole:    of these, the first that were computed in whole chunks
    tables:   its pages, by group
    leader:   the text of the same prompt that computes it, while this one waits to be forked from it
    """

    id: int
    order: tuple[int, int]
    tokens: list[int]
    most: int
    root: Key
    leader: int | None = None
    state: State = State.WAITING
    computed: int = 0
    whole: int = 0
    fresh: bool = False  # whether it has computed nothing since it came in
    in_chunk: bool = False  # whether its pass in this step is a chunk
    tables: list[list[int]] = field(default_factory=list)
    chains: dict[int, Chain] = field(default_factory=dict)
    snapshots: Chain | None = None
    registered: list[int] = field(default_factory=list)
    prompt: int = 0  # tokens of its prompt
    cached: int | None = None  # tokens that the prefix cache had when it first came in
    preemptions: int = 0
    lost: int = 0  # tokens that it had in the cache when it last gave up its pages to be computed again
    recomputed: int = 0
    swapped: int = 0  # bytes

    @property
    def left(self) -> int:
        """Tokens that are still to be computed before the next one can be chosen."""
        return len(self.tokens) - self.computed


@dataclass(frozen=True)
class Rules:
    """What the scheduler goes by.

    rows:       texts that run at a time
    chunk:      tokens of a chunk, and of all chunks of a step together
    whole:      whether a prompt comes in one piece
    shares:     whether texts share their prefixes
    until:      tokens up to which a prefix needs no snapshot; None: however many, 0: it always does
    in_order:   whether snapshots have slots in the order of tokens, which are kept piece by piece
    chunks:     whether only what was computed in whole chunks is shared
    aligned:    a shared prefix ends at a multiple of so many tokens
    recomputes: whether a text may lose its cache and compute it again; else it has its pages until it ends
    watermark:  share of the pages that stays available when a text comes in beside others
    page_bytes, row_bytes: of a page of each group over all its layers, and of what else a text has
    host_bytes: room on the host for texts that give up their pages, and then for evicted pages
    """

    rows: int
    chunk: int
    whole: bool = False
    shares: bool = False
    until: int | None = None
    in_order: bool = False
    chunks: bool = False
    aligned: int = 1
    recomputes: bool = True
    watermark: float = 0.01
    page_bytes: tuple[int, ...] = ()
    row_bytes: int = 0
    host_bytes: int = 0

    def needs_snapshot(self, tokens: int) -> bool:
        """Whether a prefix of so many tokens is not all in pages."""
        return self.until is not None and tokens > self.until
