"""Which texts run in the next step, on which pages: decided without a tensor, carried out by the engine.

A step is one pass of one token for every text that has but one left to compute, and chunks of prompts beside it.
Everything goes by age, the oldest first:

    running   takes its next token, or chunk; where no page is left for it, the newest gives its own up
    waiting   comes in when its whole prompt has pages, what the prefix cache holds of it counted off; while what a
              store of files has of it is read, those that run go on

The oldest running text is never made to give up its pages, so that every text that fits alone comes to its end.
Chunks end at multiples of `chunk` tokens whoever runs beside: a text is computed in the same pieces every time.

Sources: Kwon et al. 2023, section 4.5 (preemption); Agrawal et al. 2024 (chunks of prompts beside decodes).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcompile.errors import LimitError
from kvcompile.serve.lookup import Hit, Lookup
from kvcompile.serve.moves import (
    Chunk,
    Copy,
    Down,
    Drop,
    Fork,
    In,
    Move,
    Out,
    Restore,
    Snapshot,
    StepPlan,
    Tables,
    Up,
)
from kvcompile.serve.pages import HOLE, Group, Key, Pages
from kvcompile.serve.texts import Rules, State, Text
from kvcompile.serve.tiers import Below, Tier, Tiers

_READS = 3  # times that files are read for one text while others go on; then they wait


@dataclass
class _Step:
    """A plan on its way; spent: tokens of its chunks."""

    moves: list[Move] = field(default_factory=list)
    decodes: list[int] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    spent: int = 0


class Scheduler:
    """All texts of an engine, and the pages of every group."""

    def __init__(self, groups: Sequence[Group], rules: Rules, below: Below | None = None):
        """below: where evicted pages and snapshots are; None: nowhere"""
        self.rules = rules
        self.pages = tuple(Pages(group) for group in groups)
        self.texts: dict[int, Text] = {}
        self.found: dict[Tier, int] = {"device": 0, "host": 0, "store": 0}  # tokens of prefixes
        self._below: Below = below or Tiers()
        self._lookup = Lookup(self.pages, rules, self._below)
        self._on_host: dict[int, int] = {}  # bytes of each text that is there
        self._reads: tuple[int, int] | None = (
            None  # the text that files are read for, and how often they were
        )
        self.preemptions = self.recomputed = self.swapped = 0

    # ---- what comes and goes

    def check(self, prompt: int, most: int) -> None:
        """Refuse a text that could never run.

        Raises:
            LimitError: even alone it lacks pages.
        """
        for pages in self.pages:
            group, wanted = pages.group, pages.group.most(0, most, self.rules.chunk)
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
        if self._reads is not None and self._reads[0] == id:
            self._reads = None
            self._below.forget()
        self._give_back(text)
        self._came_back(id)

    def begin_again(self) -> None:
        """A plan, or a note of what was done, did not come to its end: all texts have ended, and all pages are free.

        What was found by a key is forgotten, as no plan says what has become of it.
        """
        self.texts.clear()
        for pages in self.pages:
            pages.clear()
        self._on_host.clear()
        self._below.limit(self._host_room)
        self._reads = None
        self._below.forget()

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
        self._below.release()
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
        text.in_chunk = text.left > 1
        if not text.in_chunk:
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
        if not back and self._below.reading:
            return False
        found = (self._lookup.nothing(text.computed), None) if back else self._found(text, bool(others))
        if found is None or (back and not self._fits(text, found[0], bool(others))):
            return False
        hit, tier = found
        self._take_pages(text, hit, moves)
        if back:
            moves.append(In(text.id, self._filled(text)))
            self._came_back(text.id)
        else:
            if text.cached is None and tier is not None:
                text.cached = hit.tokens
                self.found[tier] += hit.tokens
            again = max(text.lost - hit.tokens, 0)  # what is found was not lost
            text.lost, text.recomputed = 0, text.recomputed + again
            self.recomputed += again
            text.computed = text.whole = hit.tokens
        text.state, text.fresh = State.RUNNING, not back
        return True

    def _found(self, text: Text, beside: bool) -> tuple[Hit, Tier] | None:
        """What is there of a text that comes in, at hand for the next moves; None: there are no pages for the rest, or
        it is being read.

        beside: whether other texts run
        """
        for below in (True, True, False):  # what turns out not to be whole is not found again
            hit = self._lookup.find(text, below)
            if not self._fits(text, hit, beside):
                return None
            if not hit.up and not hit.snapshot:
                return hit, "device"
            if not self._begun(text, hit):
                return None
            tier = self._below.fetch(hit.up, hit.snapshot)
            if tier is not None:
                return hit, tier
        raise AssertionError("what is looked up here alone needs nothing from below")

    def _begun(self, text: Text, hit: Hit) -> bool:
        """Whether what a prefix needs from below is there by now."""
        times = self._reads[1] if self._reads is not None and self._reads[0] == text.id else 0
        # Others may take pages of the prefix meanwhile, so that more of it is to be read: not for ever.
        if times < _READS and not self._below.begin(hit.up, hit.snapshot):
            self._reads = (text.id, times + 1)
            return False
        self._reads = None
        return True

    def _fits(self, text: Text, hit: Hit, beside: bool) -> bool:
        """Whether the whole text has pages, what is there counted off."""
        holds = len(text.tokens) if self.rules.recomputes else text.most
        for number, pages in enumerate(self.pages):
            held = hit.held(number)
            others = sum(page is not None and pages.references(page) > 0 for page in held)
            left = pages.available - pages.group.most(hit.tokens, holds, self.rules.chunk, others)
            left -= self._copied(pages, held, hit.tokens, len(text.tokens)) + self._promised(number)
            if left < (math.ceil(self.rules.watermark * pages.group.pages) if beside else 0):
                return False
        return True

    def _promised(self, number: int) -> int:
        """Pages that running texts were let in with and do not have yet.

        Where pages are given back, a text takes the others as it comes to them.
        """
        group = self.pages[number].group
        if group.released is None:
            return 0
        lacking = 0
        for text in self.running:
            has = len(text.tables[number]) - len(group.behind(text.computed))
            lacking += max(0, group.most(text.computed, len(text.tokens), self.rules.chunk) - has)
        return lacking

    def _copied(self, pages: Pages, held: Sequence[int | None], start: int, end: int) -> int:
        """Pages of a prefix that others hold, too, and that are copied on the way from `start` to `end`."""
        written = [place for place in pages.group.written(start, end) if place < len(held)]
        return sum((page := held[place]) is not None and pages.references(page) > 0 for place in written)

    def _take_pages(self, text: Text, hit: Hit, moves: list[Move]) -> None:
        """Pages for the whole text: those that are there, and others, of which some get what is kept below."""
        holds = len(text.tokens) if self.rules.recomputes else text.most
        for number, pages in enumerate(self.pages):
            table, held = text.tables[number], hit.held(number)
            gone = pages.group.behind(hit.tokens)
            # A text whose pages are given back takes the others as it comes to them.
            taken = pages.group.pages_for(holds if pages.group.released is None else hit.tokens)
            for page in held:
                if page is not None:
                    pages.hold(page)
            for page, key in hit.pages[number]:
                if page is None:
                    page = self._take(number, moves)
                    moves.append(Up(text.id, number, page, key))
                table.append(page)
            while len(table) < taken:
                table.append(HOLE if len(table) in gone else self._take(number, moves))
            # What comes up is found here once a pass has followed it.
            text.registered[number] = held.index(None) if None in held else len(held)
        if hit.row is not None:
            moves.append(Restore(text.id, hit.tokens, hit.row, hit.slots, self._partial(text, hit.tokens)))

    def _take(self, number: int, moves: list[Move]) -> int:
        """A page of a group, which others may have written: what is found on it goes down first."""
        page, key = self.pages[number].take()
        if key is not None and self._below.takes_pages:
            key = self._lookup.key_below(number, key)
            if not self._below.lookup(key):
                moves.append(Down(number, page, key))
        return page

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
                table.append(self._take(number, moves))
            for place in pages.group.written(text.computed, end):
                page = table[place]
                if pages.references(page) > 1:
                    table[place] = self._take(number, moves)
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
        filled = self._filled(text)
        size = self.rules.row_bytes + sum(
            len(own) * each for own, each in zip(filled, self.rules.page_bytes, strict=True)
        )
        # One that has computed nothing since it came in has what it found, which may be found again.
        if text.computed and not text.fresh and size <= self._host_room:
            moves.append(Out(text.id, filled))
            self._on_host[text.id] = size
            self._below.limit(self._host_room)
            text.swapped += size
            self.swapped += size
            text.state = State.SWAPPED
        else:
            text.lost, text.computed, text.whole = text.computed, 0, 0
            text.state = State.WAITING
        moves.append(Drop(text.id))
        self._give_back(text)

    def key_below(self, group: int, key: Key) -> Key:
        """The key of a page in a store below, which has pages of all groups."""
        return self._lookup.key_below(group, key)

    def _came_back(self, id: int) -> None:
        """A text has nothing on the host any more."""
        if self._on_host.pop(id, None) is not None:
            self._below.limit(self._host_room)

    @property
    def _host_room(self) -> int:
        """Bytes on the host beside the texts that are there."""
        return self.rules.host_bytes - sum(self._on_host.values())

    def _give_back(self, text: Text) -> None:
        for pages, table in zip(self.pages, text.tables, strict=True):
            pages.release(table)
            table.clear()
        text.registered = [0] * len(self.pages)

    # ---- what a step has done

    def computed(self, id: int, end: int) -> Snapshot | None:
        """Tokens of a text up to `end` are in the cache now: its full pages are found from now on, and what a snapshot
        is to be made of is returned."""
        text = self.texts[id]
        start, text.computed, text.fresh = text.computed, end, False
        if text.in_chunk and text.whole == start and end - start == self.rules.chunk:
            text.whole = end
        snapshot = self._register(text, end) if self.rules.shares else None
        for pages, table in zip(self.pages, text.tables, strict=True):
            for place in range(pages.group.behind(start).stop, pages.group.behind(end).stop):
                pages.release([table[place]])
                table[place] = HOLE
        return snapshot

    def _register(self, text: Text, end: int) -> Snapshot | None:
        until = text.whole if self.rules.chunks else end
        for number, pages in enumerate(self.pages):
            table = text.tables[number]
            count = min(pages.group.findable(end), pages.group.findable(until))
            keys = self._lookup.keys(text, pages.group, count)
            for place in range(text.registered[number], count):
                if table[place] != HOLE:
                    pages.register(table[place], keys[place])
            text.registered[number] = max(count, text.registered[number])
        return self._snapshot(text, end) if text.in_chunk and until == end else None

    def _snapshot(self, text: Text, end: int) -> Snapshot | None:
        """What is to be kept of a text whose chunk ended here; None: nothing, or it is kept."""
        unit = self._lookup.unit
        if not self._below.takes_snapshots or end % unit or not self.rules.needs_snapshot(end):
            return None
        row, slots = self._lookup.snapshot(text, end)
        if all(self._below.lookup(key) for key in (row, *slots[-1:])):
            return None
        return Snapshot(text.id, end - unit, end, row, slots, self._partial(text, end))

    def _filled(self, text: Text) -> Tables:
        """The pages that hold something of a text."""
        return tuple(
            tuple(table[place] for place in pages.group.filled(text.computed))
            for table, pages in zip(text.tables, self.pages, strict=True)
        )

    def _partial(self, text: Text, tokens: int) -> Tables:
        """Of the pages that hold something of a text's first tokens, those that are found by no key."""
        return tuple(
            tuple(table[place] for place in own.group.filled(tokens) if place >= own.group.findable(tokens))
            for table, own in zip(text.tables, self.pages, strict=True)
        )

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
            moves: list[Move] = []
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
                    own = [self._take(number, moves) for _ in range(wanted[number])]
                    moves += [Copy(number, a, b) for a, b in zip(table, own, strict=False)]
                    tables.append(own)
            text.tables, text.computed, text.leader = tables, source.computed, None
            text.registered, text.state = list(source.registered), State.RUNNING
            text.whole, text.cached = source.whole, source.computed
            forks.append(Fork(id, text.id, tuple(moves)))
        return forks
