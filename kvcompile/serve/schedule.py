"""Which texts run in the next step, on which pages: decided without a tensor, carried out by the engine.

A step is one pass of one token for every text that has but one left to compute, and chunks of prompts beside it.
Everything goes by age, the oldest first:

    running   takes its next token, or chunk; where no page is left for it, the newest gives its own up
    waiting   comes in when its whole prompt has pages, what the prefix cache holds of it counted off

The oldest running text is never made to give up its pages, so that every text that fits alone comes to its end.
Chunks end at multiples of `chunk` tokens whoever runs beside: a text is computed in the same pieces every time.

Sources: Kwon et al. 2023, section 4.5 (preemption); Agrawal et al. 2024 (chunks of prompts beside decodes).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvcompile.errors import LimitError
from kvcompile.serve.pages import Group, Key, Pages
from kvcompile.serve.prefix import Chain

Tables = tuple[tuple[int, ...], ...]  # pages of a text, by group


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
    tables: list[list[int]] = field(default_factory=list)
    chains: dict[int, Chain] = field(default_factory=dict)
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


Move = Copy | Out | In | Drop


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

    def __bool__(self) -> bool:
        return bool(self.moves or self.decodes or self.chunks)


@dataclass(frozen=True)
class Fork:
    """A text goes its own way from where another one is; copies: pages that it gets of its own."""

    source: int
    target: int
    copies: tuple[Copy, ...]


@dataclass(frozen=True)
class Rules:
    """What the scheduler goes by.

    rows:       texts that run at a time
    chunk:      tokens of a chunk, and of all chunks of a step together
    whole:      whether a prompt comes in one piece
    until:      tokens of a prefix that texts may share; None: any number; 0: none
    aligned:    a shared prefix ends at a multiple of so many tokens
    recomputes: whether a text may lose its cache and compute it again; else it has its pages until it ends
    watermark:  share of the pages that stays available when a text comes in beside others
    page_bytes, row_bytes: of a page of each group over all its layers, and of what else a text has
    host_bytes: room on the host for texts that give up their pages
    """

    rows: int
    chunk: int
    whole: bool = False
    until: int | None = 0
    aligned: int = 1
    recomputes: bool = True
    watermark: float = 0.01
    page_bytes: tuple[int, ...] = ()
    row_bytes: int = 0
    host_bytes: int = 0


@dataclass
class _Step:
    """A plan on its way; spent: tokens of its chunks."""

    moves: list[Move] = field(default_factory=list)
    decodes: list[int] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    spent: int = 0


class Scheduler:
    """All texts of an engine, and the pages of every group."""

    def __init__(self, groups: Sequence[Group], rules: Rules):
        self.rules = rules
        self.pages = tuple(Pages(group) for group in groups)
        self.texts: dict[int, Text] = {}
        self._on_host: dict[int, int] = {}  # bytes of each text that is there
        self.preemptions = self.recomputed = self.swapped = 0

    # ---- what comes and goes

    def check(self, prompt: int, most: int) -> None:
        """Refuse a text that could never run.

        Raises:
            LimitError: even alone it lacks pages.
        """
        for pages in self.pages:
            group, wanted = pages.group, pages.group.pages_for(most)
            if wanted > group.pages:
                raise LimitError(
                    f"a prompt of {prompt:,} tokens that may come to {most:,} needs {wanted:,} pages of "
                    f"{group.page_size} tokens, and the engine has {group.pages:,}: give the engine more memory, or "
                    "ask for fewer tokens"
                )

    def add(self, text: Text) -> None:
        """A text waits from now on; `check` has let it in."""
        text.tables = [[] for _ in self.pages]
        text.registered = [0] * len(self.pages)
        text.prompt = text.prompt or len(text.tokens)
        self.texts[text.id] = text

    def end(self, id: int) -> None:
        """A text has ended, and has no row any more: its pages are given back, those with a key may be found again."""
        text = self.texts.pop(id)
        self._give_back(text)
        self._on_host.pop(id, None)

    def _of(self, *states: State) -> list[Text]:
        return sorted((t for t in self.texts.values() if t.state in states), key=lambda t: t.order)

    @property
    def running(self) -> list[Text]:
        """Texts with a row, the oldest first."""
        return self._of(State.RUNNING)

    @property
    def waiting(self) -> list[Text]:
        """Texts without, the oldest first."""
        return self._of(State.WAITING, State.SWAPPED)

    # ---- the next step

    def plan(self) -> StepPlan:
        """What the next step does; pages are taken as if it were done."""
        step = _Step()
        for text in self.running:
            if text.state is State.RUNNING:  # else it has given way to an older one
                self._go_on(text, step)
        for text in self.waiting:
            if step.spent >= self.rules.chunk or not self._admit(text, step.moves):
                break
            if text.state is State.RUNNING:  # else it waits for the text that computes its prompt
                self._go_on(text, step)
        return StepPlan(tuple(step.moves), tuple(step.decodes), tuple(step.chunks))

    def _go_on(self, text: Text, step: _Step) -> None:
        """A running text takes its next token, or a chunk where the step has tokens left for it."""
        end = self._next_end(text)
        size = end - text.computed
        if text.left > 1 and step.spent and step.spent + size > self.rules.chunk:
            return
        if not self._make_room(text, end, step.moves):
            return
        if text.left == 1:
            step.decodes.append(text.id)
        else:
            step.spent += size
            step.chunks.append(Chunk(text.id, text.computed, end, end == len(text.tokens)))

    def _next_end(self, text: Text) -> int:
        """Where the next piece of a text ends."""
        size = self.rules.chunk
        if self.rules.whole:
            return len(text.tokens)
        return min(len(text.tokens), (text.computed // size + 1) * size)

    def _admit(self, text: Text, moves: list[Move]) -> bool:
        """Let a text in, if it has a row and pages; True where the next one may be looked at."""
        if text.leader is not None:
            leader = self.texts.get(text.leader)
            if leader is not None and len(leader.tokens) == leader.prompt:
                return True
            text.leader = None
        others = self.running
        if len(others) >= self.rules.rows:
            return False
        back = text.state is State.SWAPPED
        hit, found = (text.computed, [[] for _ in self.pages]) if back else self._lookup(text)
        holds = len(text.tokens) if self.rules.recomputes else text.most
        for pages, shared in zip(self.pages, found, strict=True):
            idle = sum(not pages.references(page) for page in shared)
            left = pages.available - idle - (pages.group.pages_for(holds) - len(shared))
            left -= self._copied(pages, shared, hit, len(text.tokens))
            if left < (math.ceil(self.rules.watermark * pages.group.pages) if others else 0):
                return False
        for pages, shared, table in zip(self.pages, found, text.tables, strict=True):
            for page in shared:
                pages.hold(page)
            table.extend(shared)
            while len(table) < pages.group.pages_for(holds):
                table.append(pages.take())
        text.registered = [len(shared) for shared in found]
        if back:
            moves.append(In(text.id, _frozen(text.tables)))
            self._on_host.pop(text.id)
        else:
            text.cached = hit if text.cached is None else text.cached
            again = max(text.lost - hit, 0)  # what is found was not lost
            text.lost, text.recomputed = 0, text.recomputed + again
            self.recomputed += again
            text.computed = hit
        text.state = State.RUNNING
        return True

    def _copied(self, pages: Pages, shared: Sequence[int], start: int, end: int) -> int:
        """Pages of a prefix that others hold, too, and that are copied on the way from `start` to `end`."""
        return sum(
            place < len(shared) and pages.references(shared[place]) > 0
            for place in pages.group.written(start, end)
        )

    def _lookup(self, text: Text) -> tuple[int, list[list[int]]]:
        """How many tokens of a text are in the prefix cache, of every group, and on which pages."""
        none: list[list[int]] = [[] for _ in self.pages]
        if self.rules.until == 0 or not self.pages:
            return 0, none
        most = len(text.tokens) - 1  # one is left, after which the next is chosen
        if self.rules.until is not None:
            most = min(most, self.rules.until)
        found: list[list[int]] = []
        for pages in self.pages:
            own: list[int] = []
            for key in self._chain(text, pages).upto(text.tokens, most // pages.group.page_size):
                page = pages.find(key)
                if page is None:
                    break
                own.append(page)
            found.append(own)
            most = min(most, len(own) * pages.group.page_size)
        unit = math.lcm(self.rules.aligned, *(pages.group.page_size for pages in self.pages))
        hit = most // unit * unit
        if not hit:
            return 0, none
        return hit, [
            own[: hit // pages.group.page_size] for own, pages in zip(found, self.pages, strict=True)
        ]

    def _chain(self, text: Text, pages: Pages) -> Chain:
        size = pages.group.page_size
        return text.chains.setdefault(size, Chain(text.root, size))

    def _make_room(self, text: Text, end: int, moves: list[Move]) -> bool:
        """Pages for tokens up to `end` that this text alone may write to; False: it has given up its own."""
        while any(self._lacking(text, number, end) > 0 for number in range(len(self.pages))):
            victim = self.running[-1]
            assert victim.order >= text.order and self.rules.recomputes, "the oldest has room"
            self._preempt(victim, moves)
            if victim is text:
                return False
        for number, pages in enumerate(self.pages):
            table = text.tables[number]
            while len(table) < pages.group.pages_for(end):
                table.append(pages.take())
            for place in pages.group.written(text.computed, end):
                page = table[place]
                if pages.references(page) > 1:
                    table[place] = pages.take()
                    moves.append(Copy(number, page, table[place]))
                    pages.release([page])
                else:
                    pages.forget(page)
        return True

    def _lacking(self, text: Text, number: int, end: int) -> int:
        pages, table = self.pages[number], text.tables[number]
        more = pages.group.pages_for(end) - len(table)
        copied = sum(
            place < len(table) and pages.references(table[place]) > 1
            for place in pages.group.written(text.computed, end)
        )
        return max(more, 0) + copied - pages.available

    def _preempt(self, text: Text, moves: list[Move]) -> None:
        """Take a text's pages: to the host where there is room, else they are computed again."""
        text.preemptions += 1
        self.preemptions += 1
        size = self.rules.row_bytes + sum(
            len(table) * each for table, each in zip(text.tables, self.rules.page_bytes, strict=True)
        )
        if text.computed and size + sum(self._on_host.values()) <= self.rules.host_bytes:
            moves.append(Out(text.id, _frozen(text.tables)))
            self._on_host[text.id] = size
            text.swapped += size
            self.swapped += size
            text.state = State.SWAPPED
        else:
            text.lost, text.computed = text.computed, 0
            text.state = State.WAITING
        moves.append(Drop(text.id))
        self._give_back(text)

    def _give_back(self, text: Text) -> None:
        for pages, table in zip(self.pages, text.tables, strict=True):
            pages.release(table)
            table.clear()
        text.registered = [0] * len(self.pages)

    # ---- what a step has done

    def computed(self, id: int, end: int) -> None:
        """Tokens of a text up to `end` are in the cache now; its full pages are found from now on."""
        text = self.texts[id]
        text.computed = end
        for number, pages in enumerate(self.pages):
            group, until = pages.group, self.rules.until
            if until is not None and end > until:  # what went round holds other tokens
                continue
            full = end // group.page_size
            keys = self._chain(text, pages).upto(text.tokens, full)
            for place in range(text.registered[number], full):
                pages.register(text.tables[number][place], keys[place])
            text.registered[number] = max(full, text.registered[number])

    def chosen(self, id: int, token: int) -> None:
        """The next token of a text, all of whose others are computed."""
        self.texts[id].tokens.append(token)

    def fork(self, id: int) -> list[Fork]:
        """Texts of the same prompt that go on from this one's, which is computed; what has no room stays waiting."""
        source = self.texts[id]
        forks: list[Fork] = []
        if source.computed != source.prompt:  # it was computed again, with what came after
            return forks
        for text in self.waiting:
            if text.leader != id:
                continue
            if len(self.running) >= self.rules.rows:
                break
            copies: list[Copy] = []
            tables: list[list[int]] = []
            shared = [self.rules.recomputes and not pages.group.scored for pages in self.pages]
            wanted = [
                0 if own else pages.group.pages_for(text.most)
                for own, pages in zip(shared, self.pages, strict=True)
            ]
            if any(pages.available < count for pages, count in zip(self.pages, wanted, strict=True)):
                break
            for number, pages in enumerate(self.pages):
                table = source.tables[number]
                if shared[number]:
                    for page in table:
                        pages.hold(page)
                    tables.append(list(table))
                else:
                    own = [pages.take() for _ in range(wanted[number])]
                    copies += [Copy(number, a, b) for a, b in zip(table, own, strict=False)]
                    tables.append(own)
            text.tables, text.computed, text.leader = tables, source.computed, None
            text.registered, text.state = list(source.registered), State.RUNNING
            text.cached = source.computed
            forks.append(Fork(id, text.id, tuple(copies)))
        return forks


def _frozen(tables: Iterable[Iterable[int]]) -> Tables:
    return tuple(tuple(table) for table in tables)
