"""What a scheduler's plans do, without a model: pages and rows that hold what was written to them.

A slot holds whose it is: the group, the root, the tokens up to the one that was written to it, and where results depend
on them, the pieces that these came in. So a page that was shared by the wrong text, freed too early, found too early,
written while others have it, or brought back as another one, is seen by whoever reads it next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvcompile.serve.moves import Copy, Down, Drop, In, Move, Out, Restore, Snapshot, StepPlan, Up
from kvcompile.serve.pages import Group, Key
from kvcompile.serve.schedule import Scheduler
from kvcompile.serve.texts import Rules, Text
from kvcompile.serve.tiers import Tier

Piece = tuple[int, int, bool]  # of a text: start, end, whether it came alone
Held = tuple[Any, ...]
SPOILED: Held = ("written later",)


@dataclass
class Fake:
    """A store below that has room for a few things; what is damaged turns out so when it is fetched.

    steps: how many go by while it is read, 0: none
    """

    room: int
    takes_pages: bool = True
    takes_snapshots: bool = True
    items: OrderedDict[Key, Any] = field(default_factory=OrderedDict)
    damaged: set[Key] = field(default_factory=set)
    at_hand: dict[Key, Any] = field(default_factory=dict)
    steps: int = 0
    begun: frozenset[Key] = frozenset()
    left: int = 0

    @property
    def reading(self) -> bool:
        return self.left > 0

    def begin(self, pages: Iterable[Key], snapshots: Iterable[Key]) -> bool:
        assert not self.reading, "what is being read is waited for"
        wanted = frozenset((*pages, *snapshots))
        if self.steps and not wanted <= self.begun:
            self.left = self.steps
        self.begun = wanted
        return not self.reading

    def forget(self) -> None:
        self.begun, self.left = frozenset(), 0

    def lookup(self, key: Key) -> bool:
        return key in self.items

    def fetch(self, pages: Iterable[Key], snapshots: Iterable[Key]) -> Tier | None:
        for key in (*pages, *snapshots):
            if key not in self.items or key in self.damaged:
                self.items.pop(key, None)
                self.damaged.discard(key)
                return None
            self.items.move_to_end(key)
            self.at_hand[key] = self.items[key]
        return "host"

    def limit(self, room: int) -> None:
        while len(self.items) > self.room:
            self.items.popitem(last=False)

    def release(self) -> None:
        self.at_hand.clear()

    def store(self, key: Key, held: Any) -> None:
        self.items[key] = held
        self.limit(self.room)


@dataclass
class Row:
    """What a text has in its row: what changes with every token, and slots in the order of tokens."""

    fixed: Held
    slots: dict[int, Held] = field(default_factory=dict)


@dataclass
class Shadow:
    """Pages and rows; `groups` and `rules` as the scheduler has them.

    unsettled: newest tokens whose slots in the order of tokens, in a row, are written later
    """

    groups: tuple[Group, ...]
    rules: Rules
    below: Fake
    unsettled: int = 0
    slots: list[dict[int, dict[int, Held]]] = field(default_factory=list)  # by group: page -> offset -> held
    rows: dict[int, Row] = field(default_factory=dict)
    pieces: dict[int, tuple[Piece, ...]] = field(default_factory=dict)
    host: dict[int, tuple[list[list[dict[int, Held]]], Row]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = [{} for _ in self.groups]

    def slot(self, group: Group, position: int) -> int:
        if position < group.slots:
            return position
        assert group.sinks is not None
        return group.sinks + (position - group.sinks) % (group.slots - group.sinks)

    def move(self, moves: Iterable[Move]) -> None:
        for move in moves:
            match move:
                case Copy(group, source, target):
                    self.slots[group][target] = dict(self.slots[group].get(source, {}))
                case Drop(text):
                    self.rows.pop(text, None)
                case Out(text, tables):
                    assert all(map(all, tables)), "nobody's page goes to the host"
                    self.host[text] = (
                        [[dict(self.slots[g].get(page, {})) for page in t] for g, t in enumerate(tables)],
                        self.rows[text],
                    )
                case In(text, tables):
                    pages, row = self.host.pop(text)
                    self.rows[text] = row
                    for number, (table, kept) in enumerate(zip(tables, pages, strict=True)):
                        for page, held in zip(table, kept, strict=True):
                            self.slots[number][page] = held
                case Down(group, page, key):
                    self.below.store(key, dict(self.slots[group][page]))
                case Up(_, group, page, key):
                    self.slots[group][page] = dict(self.below.at_hand[key])
                case Restore(text, _, row, slots, pages):
                    assert all(map(all, pages)), "nobody's page is filled"
                    fixed, filled = self.below.at_hand[row]
                    self.rows[text] = Row(fixed)
                    for key in slots:
                        self.rows[text].slots.update(self.below.at_hand[key])
                    for number, (table, kept) in enumerate(zip(pages, filled, strict=True)):
                        for page, held in zip(table, kept, strict=True):
                            self.slots[number][page] = dict(held)

    def keep(self, snapshot: Snapshot) -> None:
        row = self.rows[snapshot.text]
        filled = [[dict(self.slots[g][page]) for page in own] for g, own in enumerate(snapshot.pages)]
        self.below.store(snapshot.row, (row.fixed, filled))
        for key in snapshot.slots[-1:]:
            begin = max(snapshot.start - self.unsettled, 0)
            self.below.store(key, {place: row.slots[place] for place in range(begin, snapshot.tokens)})

    def carry_out(self, scheduler: Scheduler, plan: StepPlan) -> None:
        self.move(plan.moves)
        for id in plan.decodes:
            self.compute(scheduler, scheduler.texts[id], len(scheduler.texts[id].tokens), alone=False)
        for chunk in plan.chunks:
            assert chunk.start == scheduler.texts[chunk.text].computed
            self.compute(scheduler, scheduler.texts[chunk.text], chunk.end, alone=True)

    def held(self, text: Text, number: int, position: int) -> Held:
        """What a slot has of a text that is at least so long."""
        pieces = self.pieces[text.id] if self.rules.chunks else ()
        begun = tuple(piece for piece in pieces if piece[0] <= position)
        return number, text.root, tuple(text.tokens[: position + 1]), begun

    def compute(self, scheduler: Scheduler, text: Text, end: int, alone: bool) -> None:
        """Read all that the tokens up to `end` may see, and write theirs."""
        start, size = text.computed, self.rules.chunk
        if text.id not in self.rows:  # it comes in, without a snapshot: its row holds nothing of it
            assert not start or not self.rules.needs_snapshot(start), "a row without what it needs"
            self.rows[text.id] = Row(())
        row = self.rows[text.id]
        if text.id not in self.pieces or (start and row.fixed == ()) or not start:
            self.pieces[text.id] = tuple((at, at + size, True) for at in range(0, start, size))
        if start and self.rules.until == 0:
            if self.pieces[text.id][-1][1] != start:  # it was computed again, and has come in with a snapshot
                self.pieces[text.id] = tuple((at, at + size, True) for at in range(0, start, size))
            assert row.fixed == self.held(text, -1, start - 1), "another text's row, or an older one"
        for number, group in enumerate(self.groups):
            self._read(text, number, group, start)
        if self.rules.in_order:
            for place in range(max(start - self.unsettled, 0)):
                assert row.slots[place] == self.held(text, -1, place), f"another text's slot {place}"
        self.pieces[text.id] = (*self.pieces[text.id], (start, end, alone))
        row.fixed = self.held(text, -1, end - 1)
        for number, group in enumerate(self.groups):
            self._write(scheduler, text, number, group, start, end)
        if self.rules.in_order:
            for place in range(max(start - self.unsettled, 0), end):
                settled = place < end - self.unsettled
                row.slots[place] = self.held(text, -1, place) if settled else SPOILED
        self.done(scheduler, text, end)

    def done(self, scheduler: Scheduler, text: Text, end: int) -> None:
        snapshot = scheduler.computed(text.id, end)
        if snapshot is not None:
            self.keep(snapshot)

    def _read(self, text: Text, number: int, group: Group, start: int) -> None:
        table = text.tables[number]
        has = [page for page in table if page]
        assert len(set(has)) == len(has)
        assert {place for place, page in enumerate(table) if not page} == set(group.behind(start))
        if group.scored and start > group.slots:  # scores have chosen: every slot depends on all of the text
            for slot in range(group.slots):
                held = self.slots[number][table[slot // group.page_size]][slot % group.page_size]
                assert held == self.held(text, number, start - 1), (
                    f"text {text.id} reads another's slot {slot}"
                )
            return
        for position in range(max(start - group.unsettled, 0)):
            if group.sinks is not None and group.sinks <= position < start - (group.slots - group.sinks):
                continue
            if (own := group.released) is not None and own.sinks <= position <= start - own.window:
                continue  # what no query from `start` on sees
            slot = self.slot(group, position)
            held = self.slots[number][table[slot // group.page_size]][slot % group.page_size]
            assert held == self.held(text, number, position), f"text {text.id} reads another's slot {slot}"

    def _write(
        self, scheduler: Scheduler, text: Text, number: int, group: Group, start: int, end: int
    ) -> None:
        pages, table = scheduler.pages[number], text.tables[number]
        chosen = group.scored and end > group.slots
        for position in range(group.slots if chosen else 0) or range(max(start - group.unsettled, 0), end):
            slot = position if chosen else self.slot(group, position)
            page = table[slot // group.page_size]
            assert pages.references(page) == 1 and pages.key(page) is None, "written while others have it"
            held = self.held(text, number, end - 1 if chosen else position)
            settled = chosen or position < end - group.unsettled
            self.slots[number].setdefault(page, {})[slot % group.page_size] = held if settled else SPOILED

    def fork(self, scheduler: Scheduler, id: int) -> list[int]:
        found = []
        for fork in scheduler.fork(id):
            self.move(fork.moves)
            source = self.rows[fork.source]
            self.rows[fork.target] = Row(source.fixed, dict(source.slots))
            self.pieces[fork.target] = self.pieces[fork.source]
            found.append(fork.target)
        return found
