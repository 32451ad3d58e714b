"""The scheduler without a model: whatever comes, every text reads what it has written, and nobody waits for ever.

A shadow carries out the plans (`tests/support/serving_shadow.py`): what a text reads of another's, or of its own before
or after it should, is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvcompile.errors import LimitError
from kvcompile.layouts.pages import Released as Behind
from kvcompile.serve.lookup import Lookup, _There
from kvcompile.serve.moves import Down, Fork, Out, Snapshot, StepPlan
from kvcompile.serve.pages import Group, Key, Pages
from kvcompile.serve.prefix import Chain, root
from kvcompile.serve.schedule import Scheduler
from kvcompile.serve.texts import Rules, Text
from kvcompile.serve.tiers import Tier
from tests.support.serving_pages import check
from tests.support.serving_shadow import Fake, Shadow

COMMON = (0, 1, 2, 2, 1, 0, 0, 1, 1, 2, 0, 2, 1, 1, 0, 2)
prompts = st.builds(
    lambda kept, more: [*COMMON[:kept], *more],
    st.integers(0, len(COMMON)),
    st.lists(st.integers(0, 2), min_size=1, max_size=5),
)


class Served(RuleBasedStateMachine):
    """Texts over three tokens, so that prefixes are often the same; a token is chosen by the text before it."""

    groups: tuple[Group, ...] = (Group(4, 64, 12),)
    goes_by = Rules(rows=3, chunk=6, shares=True, page_bytes=(1,), watermark=0.0)
    room = 0  # things that a store below has room for
    reads = 0  # steps that go by while these are read
    unsettled = 0

    def __init__(self) -> None:
        super().__init__()
        below = Fake(self.room, bool(self.room), bool(self.room), steps=self.reads)
        self.scheduler = Scheduler(self.groups, self.goes_by, below)
        self.shadow = Shadow(self.groups, self.goes_by, below, self.unsettled)
        self.number = 0
        self.said: list[list[int]] = []  # texts that came to their end
        self.wanted: dict[int, int] = {}
        self.steps = 0

    @precondition(lambda self: self.said)
    @rule(which=st.integers(0, 100), more=st.integers(1, 6))
    def go_on(self, which: int, more: int) -> None:
        """The next turn of a talk."""
        self.submit([*self.said[which % len(self.said)], 1], more, 1, "a")

    @rule(prompt=prompts, more=st.integers(1, 12), texts=st.integers(1, 3), salt=st.sampled_from("aab"))
    def come(self, prompt: list[int], more: int, texts: int, salt: str) -> None:
        self.submit(prompt, more, texts, salt)

    def submit(self, prompt: list[int], more: int, texts: int, salt: str) -> None:
        most = len(prompt) + more - 1
        try:
            self.scheduler.check(len(prompt), most)
        except LimitError:
            assert any(g.most(0, most, self.goes_by.chunk) > g.pages for g in self.groups)
            return
        first = self.number
        for index in range(texts):
            leader = first if index else None
            own = Text(self.number, (first, index), list(prompt), most, root("x", salt), leader=leader)
            self.scheduler.add(own)
            self.wanted[self.number] = len(prompt) + more
            self.number += 1

    @rule()
    def step(self) -> None:
        oldest = next(iter([*self.scheduler.running, *self.scheduler.waiting]), None)
        before = oldest.computed if oldest else 0
        plan = self.scheduler.plan()
        waits = self.shadow.below.reading and not plan.texts
        assert bool(plan.texts) == bool(self.scheduler.texts) or waits, "somebody can always go on"
        assert not waits or not self.scheduler.running, "those that run do not wait for files"
        self.shadow.carry_out(self.scheduler, plan)
        self.shadow.below.release()
        self.shadow.below.left = max(self.shadow.below.left - 1, 0)
        if oldest is not None and not waits:
            assert oldest.computed > before and oldest.id in plan.texts, (
                "the oldest that runs goes on in every step"
            )
        ready = [*plan.decodes, *(chunk.text for chunk in plan.chunks if chunk.last)]
        forks = [f for c in plan.chunks if c.last for f in self.shadow.fork(self.scheduler, c.text)]
        for id in (*ready, *forks):
            text = self.scheduler.texts[id]
            assert text.left == 0
            self.scheduler.chosen(id, (sum(text.tokens) * 7 + len(text.tokens) + id) % 3)
            if len(text.tokens) >= self.wanted[id]:
                self.said.append(list(text.tokens[:24]))
                self.end(id)

    def end(self, id: int) -> None:
        self.scheduler.end(id)
        self.shadow.rows.pop(id, None)
        assert len(self.shadow.rows) <= self.scheduler.rules.rows

    @precondition(lambda self: self.scheduler.texts)
    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        ids = sorted(self.scheduler.texts)
        self.end(ids[which % len(ids)])

    @precondition(lambda self: self.scheduler.texts)
    @rule(done=st.integers(0, 6))
    def fail(self, done: int) -> None:
        """A step's moves break off; so do the texts that they are for, as in the engine."""
        plan = self.scheduler.plan()
        if not plan.moves:  # nothing that could fail
            self.shadow.carry_out(self.scheduler, plan)
            for id in (*plan.decodes, *(chunk.text for chunk in plan.chunks if chunk.last)):
                self.end(id)
            return
        self.shadow.move(plan.moves[: min(done, len(plan.moves) - 1)])
        self.shadow.below.release()
        for id in {*plan.texts, *plan.moved}:
            self.end(id)

    @precondition(lambda self: self.shadow.below.items)
    @rule(which=st.integers(0, 100), damage=st.booleans())
    def lose(self, which: int, damage: bool) -> None:
        """A store below loses something, or finds it damaged later."""
        below = self.shadow.below
        key = list(below.items)[which % len(below.items)]
        if damage:
            below.damaged.add(key)
        else:
            del below.items[key]

    @invariant()
    def holds(self) -> None:
        check(self.scheduler)
        assert not self.shadow.below.reading or self.scheduler.waiting, "nobody waits for what is read"

    def teardown(self) -> None:
        for _ in range(3000):  # every step brings the oldest further
            if not self.scheduler.texts:
                break
            self.step()
            check(self.scheduler)
        assert not self.scheduler.texts, "every text comes to its end"
        assert all(pages.held == 0 for pages in self.scheduler.pages)


class Swapped(Served):
    goes_by = replace(Served.goes_by, host_bytes=7, shares=False)


class Ringed(Served):
    """A window in pages beside layers that keep every token."""

    groups = (Group(4, 64, 14), Group(4, 12, 8, sinks=3))
    goes_by = replace(Served.goes_by, until=12, page_bytes=(1, 1), host_bytes=10)


class Aligned(Served):
    """What is found has been computed in the same pieces."""

    goes_by = replace(Served.goes_by, aligned=6, chunks=True, watermark=0.2)


class Kept(Served):
    """Texts that cannot be computed again."""

    goes_by = replace(Served.goes_by, recomputes=False, shares=False)


class Rowed(Served):
    """Nothing in pages."""

    groups = ()
    goes_by = replace(Served.goes_by, shares=False, page_bytes=(), whole=True)


class Lowered(Served):
    """Evicted pages go to a store below."""

    room = 9


class LoweredRing(Ringed):
    """And snapshots of what has gone round."""

    room = 14


class Read(Lowered):
    """And come from files, which takes its time."""

    reads = 2


class ReadRing(LoweredRing):
    reads = 1


class Settling(Served):
    """The newest tokens in full beside, and pages that get theirs late."""

    groups = (Group(4, 64, 14, unsettled=3),)
    goes_by = replace(Served.goes_by, until=0, host_bytes=7, chunk=4)
    room = 12


class Pieced(Served):
    """Nothing in pages: slots in the order of tokens, which settle late, and a state."""

    groups = ()
    goes_by = replace(Served.goes_by, until=0, page_bytes=(), in_order=True, chunk=4)
    room = 12
    unsettled = 3


class Scored(Served):
    """Chosen by scores: what a text has depends on the pieces that it came in."""

    groups = (Group(4, 8, 9, scored=True),)
    goes_by = replace(Served.goes_by, until=0, chunks=True, aligned=4, chunk=4, recomputes=False)
    room = 12


class Summed(Scored):
    """Pages that steps do not read as prompts do, with summaries beside."""

    groups = (Group(4, 64, 24),)
    goes_by = replace(Scored.goes_by, in_order=True)


class Released(Served):
    """A window that gives back its pages beside layers that keep every token."""

    groups = (Group(4, 64, 14), Group(4, 64, 8, released=Behind(3, 7)))
    goes_by = replace(Served.goes_by, page_bytes=(1, 1))


class ReleasedAlone(Served):
    """Texts of 40 tokens in five pages."""

    groups = (Group(4, 64, 5, released=Behind(0, 6)),)


class ReleasedSwapped(Released):
    goes_by = replace(Released.goes_by, host_bytes=12, shares=False)


class ReleasedLowered(Released):
    goes_by = replace(Released.goes_by, host_bytes=6)
    room = 12


class ReleasedSettling(Served):
    """And the newest tokens in full beside."""

    groups = (Group(4, 64, 9, unsettled=3, released=Behind(5, 6)),)
    goes_by = replace(Served.goes_by, until=0, host_bytes=7, chunk=4, aligned=4)
    room = 12


QUICK = settings(max_examples=50, stateful_step_count=30, deadline=None)
UNSHRUNK = settings(
    QUICK,
    max_examples=3000,
    phases=[Phase.generate],
    database=None,
    derandomize=True,
    report_multiple_bugs=False,  # one is enough
)
CASES = [
    *(Served, Swapped, Ringed, Aligned, Kept, Rowed, Lowered, LoweredRing, Read, ReadRing, Settling),
    *(Pieced, Scored, Summed),
    *(Released, ReleasedAlone, ReleasedSwapped, ReleasedLowered, ReleasedSettling),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.lower())
def test_whatever_comes(case: type[Served]) -> None:
    run_state_machine_as_test(case, settings=QUICK)  # type: ignore[no-untyped-call]


def _no_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pages, "references", lambda self, page: min(self._references[page], 1))


def _found_early(patch: pytest.MonkeyPatch) -> None:
    """A page is found before the pass that fills it."""
    inner = Scheduler.plan

    def plan(self: Scheduler) -> StepPlan:
        made = inner(self)
        for chunk in made.chunks:
            text = self.texts[chunk.text]
            before, size = text.computed, self.pages[0].group.page_size
            self.computed(text.id, min(len(text.tokens), (chunk.end // size + 1) * size))
            text.computed = before
        return made

    patch.setattr(Scheduler, "plan", plan)


def _freed_early(patch: pytest.MonkeyPatch) -> None:
    """A text that waits for its next token has already given back its last page."""
    inner = Scheduler.computed

    def computed(self: Scheduler, id: int, end: int) -> None:
        inner(self, id, end)
        for pages, table in zip(self.pages, self.texts[id].tables, strict=True):
            if len(table) > 1:
                pages.release(table[-1:])
                pages._references[table[-1]] += 1
                pages._nobodys[table[-1]] = None

    patch.setattr(Scheduler, "computed", computed)


def _forked_late(patch: pytest.MonkeyPatch) -> None:
    """A text that was computed again, with what came after its prompt, is forked as if it were its prompt."""
    inner = Scheduler.fork

    def fork(self: Scheduler, id: int) -> list[Fork]:
        self.texts[id].prompt = self.texts[id].computed
        return inner(self, id)

    patch.setattr(Scheduler, "fork", fork)


def _ring_once(patch: pytest.MonkeyPatch) -> None:
    """What goes round is taken for what is written once."""
    inner = Group.written
    patch.setattr(Group, "written", lambda self, *at: inner(replace(self, sinks=None), *at))


def _drops_before_out(patch: pytest.MonkeyPatch) -> None:
    inner = Scheduler.plan

    def plan(self: Scheduler) -> StepPlan:
        made = inner(self)
        return replace(made, moves=tuple(sorted(made.moves, key=lambda move: isinstance(move, Out))))

    patch.setattr(Scheduler, "plan", plan)


def _down_late(patch: pytest.MonkeyPatch) -> None:
    """A page goes down after others have come to it."""
    inner = Scheduler.plan

    def plan(self: Scheduler) -> StepPlan:
        made = inner(self)
        return replace(made, moves=tuple(sorted(made.moves, key=lambda move: isinstance(move, Down))))

    patch.setattr(Scheduler, "plan", plan)


def _down_after_the_pass(patch: pytest.MonkeyPatch) -> None:
    inner = Shadow.carry_out

    def carry_out(self: Shadow, scheduler: Scheduler, plan: StepPlan) -> None:
        late = [move for move in plan.moves if isinstance(move, Down)]
        inner(self, scheduler, replace(plan, moves=tuple(move for move in plan.moves if move not in late)))
        self.move(late)

    patch.setattr(Shadow, "carry_out", carry_out)


def _kept_before_the_pass(patch: pytest.MonkeyPatch) -> None:
    """A snapshot is made of what is there before the chunk that it ends with."""

    def compute(self: Shadow, scheduler: Scheduler, text: Text, end: int, alone: bool) -> None:
        before = self.rows.get(text.id)
        kept = None if before is None else replace(before, slots=dict(before.slots))
        inner(self, scheduler, text, end, alone)
        if kept is not None and text.snapshots is not None and end % scheduler._lookup.unit == 0:
            row, _ = scheduler._lookup.snapshot(text, end)
            if row in self.below.items:
                self.below.items[row] = (kept.fixed, self.below.items[row][1])

    inner = Shadow.compute
    patch.setattr(Shadow, "compute", compute)


def _of_another_length(patch: pytest.MonkeyPatch) -> None:
    """The snapshot of a longer prefix of the same text stands in for that of a shorter one."""
    inner = Lookup.find

    def find(self: Lookup, text: Text, below: bool) -> Any:
        hit = inner(self, text, below)
        if hit.row is None or hit.tokens <= self.unit:
            return hit
        return replace(hit, row=self.snapshot(text, hit.tokens - self.unit)[0])

    patch.setattr(Lookup, "find", find)


def _without_salt(patch: pytest.MonkeyPatch) -> None:
    inner = Lookup.snapshot

    def snapshot(self: Lookup, text: Text, tokens: int) -> Any:
        if text.snapshots is None:
            text.snapshots = Chain(b"", self.unit)
        return inner(self, text, tokens)

    patch.setattr(Lookup, "snapshot", snapshot)


def _without_group(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lookup, "key_below", lambda self, group, key: key)


def _settled_at_once(patch: pytest.MonkeyPatch) -> None:
    """Pages are found before their last tokens have settled."""
    inner = Group.findable
    patch.setattr(Group, "findable", lambda self, tokens: inner(replace(self, unsettled=0), tokens))


def _settles_unseen(patch: pytest.MonkeyPatch) -> None:
    inner = Group.written
    patch.setattr(Group, "written", lambda self, *at: inner(replace(self, unsettled=0), *at))


def _in_any_pieces(patch: pytest.MonkeyPatch) -> None:
    """What steps have computed is found as if it had come in chunks."""
    inner = Scheduler.computed

    def computed(self: Scheduler, id: int, end: int) -> Snapshot | None:
        text = self.texts[id]
        text.whole = end
        return inner(self, id, end)

    patch.setattr(Scheduler, "computed", computed)


def _damaged_is_taken(patch: pytest.MonkeyPatch) -> None:
    def fetch(self: Fake, pages: Any, snapshots: Any) -> Tier:
        for key in (*pages, *snapshots):
            self.at_hand[key] = ({}, [[{}] * 9] * 9) if key in self.damaged else self.items[key]
        return "host"

    patch.setattr(Fake, "fetch", fetch)


def _found_before_it_came_up(patch: pytest.MonkeyPatch) -> None:
    """A page is found while its move may still fail."""
    inner = Scheduler._take_pages

    def take(self: Scheduler, text: Text, hit: Any, moves: Any) -> None:
        inner(self, text, hit, moves)
        for number, pages in enumerate(self.pages):
            keys: list[Key] = self._lookup.keys(text, pages.group, len(hit.pages[number]))
            for page, key in zip(text.tables[number], keys, strict=False):
                pages.register(page, key)

    patch.setattr(Scheduler, "_take_pages", take)


def _moved_texts_go_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepPlan, "moved", ())


def _released_early(patch: pytest.MonkeyPatch) -> None:
    """A page is given back of which the next token sees one."""
    inner = Behind.behind

    def behind(self: Behind, tokens: int, page_size: int) -> range:
        return inner(self, tokens + 1, page_size)

    patch.setattr(Behind, "behind", behind)


def _sinks_released(patch: pytest.MonkeyPatch) -> None:
    """The last page of the sinks is not only theirs, and goes."""
    inner = Behind.behind

    def behind(self: Behind, tokens: int, page_size: int) -> range:
        return inner(replace(self, sinks=self.sinks // page_size * page_size), tokens, page_size)

    patch.setattr(Behind, "behind", behind)


def _sinks_not_looked_for(patch: pytest.MonkeyPatch) -> None:
    """A prefix is found without the page of the sinks."""
    inner = _There.__init__

    def init(self: _There, *of: Any) -> None:
        inner(self, *of)
        if self._group.released is not None:
            self._group = replace(self._group, released=replace(self._group.released, sinks=0))

    patch.setattr(_There, "__init__", init)


def _holes_are_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("kvcompile.serve.pages.HOLE", -1)


def _holes_are_swapped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Group, "filled", lambda self, tokens: list(range(self.pages_for(tokens))))


BREAKS = [
    (_no_copies, Served),
    (_found_early, Served),
    (_freed_early, Served),
    (_forked_late, Served),
    (_ring_once, Ringed),
    (_drops_before_out, Swapped),
    (_down_late, Lowered),
    (_down_after_the_pass, Lowered),
    (_kept_before_the_pass, Pieced),
    (_of_another_length, Pieced),
    (_without_salt, Pieced),
    (_without_group, LoweredRing),
    (_settled_at_once, Settling),
    (_settles_unseen, Settling),
    (_in_any_pieces, Aligned),
    pytest.param(_in_any_pieces, Summed, marks=pytest.mark.slow),  # as above, found late
    (_damaged_is_taken, Lowered),
    (_released_early, Released),
    (_sinks_released, Released),
    (_sinks_not_looked_for, Released),
    (_holes_are_held, Released),
    (_holes_are_swapped, ReleasedSwapped),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("broken", "case"), BREAKS, ids=lambda x: getattr(x, "__name__", None))
def test_what_is_broken_is_seen(broken: object, case: type[Served], monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)  # type: ignore[operator]
    with pytest.raises(BaseException):  # noqa: B017  # hypothesis gathers what was raised
        run_state_machine_as_test(case, settings=UNSHRUNK)  # type: ignore[no-untyped-call]


def _broken_off(done: int) -> None:
    """Pages come up for a text whose first chunk has no room in the step, and the moves break off."""
    machine, begins = Lowered(), list(COMMON)
    machine.submit([*begins, 0], 1, 1, "a")
    machine.teardown()
    machine.submit([2] * 45, 1, 1, "a")  # takes all pages: what was found goes down
    machine.teardown()
    assert machine.shadow.below.items and not machine.scheduler.texts
    machine.submit([1] * 5, 1, 1, "a")
    machine.submit([*begins, 1, 1, 1, 1, 1, 1], 2, 1, "a")
    machine.fail(done)
    assert machine.number == 4
    for _ in range(2):
        machine.submit([*begins, 1, 1, 1, 1, 1, 1], 2, 1, "a")
        machine.teardown()


@pytest.mark.parametrize("done", [0, 1, 2, 3])
def test_moves_that_break_off_leave_nothing_behind(done: int) -> None:
    _broken_off(done)


@pytest.mark.parametrize("broken", [_found_before_it_came_up, _moved_texts_go_on], ids=lambda x: x.__name__)
def test_what_moves_that_broke_off_leave_behind_is_seen(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    with pytest.raises(AssertionError, match="reads another's slot"):
        _broken_off(0)


@pytest.mark.parametrize(("salt", "cached"), [("a", 8), ("b", 0)])
def test_a_prefix_is_found_by_those_of_its_salt_only(salt: str, cached: int) -> None:
    scheduler = Scheduler((Group(4, 64, 12),), Served.goes_by)
    shadow, prompt = Shadow((scheduler.pages[0].group,), scheduler.rules, Fake(0)), list(range(9))
    for number, own in enumerate(("a", salt)):
        scheduler.add(Text(number, (number, 0), list(prompt), 9, root("x", own)))
        while number in scheduler.texts:
            plan = scheduler.plan()
            shadow.carry_out(scheduler, plan)
            if plan.decodes or any(chunk.last for chunk in plan.chunks):
                found = scheduler.texts[number].cached
                scheduler.end(number)
    assert found == cached


def test_pages_are_found_once_nothing_of_them_is_written_again() -> None:
    plain, late = Group(4, 64, 9), Group(4, 64, 9, unsettled=3)
    ring, scored = Group(4, 12, 9, sinks=3), Group(4, 12, 9, scored=True)
    assert [plain.findable(n) for n in (3, 4, 8, 11, 12)] == [0, 1, 2, 2, 3]
    assert [late.findable(n) for n in (1, 4, 6, 7, 8, 10, 11)] == [0, 0, 0, 1, 1, 1, 2]
    assert [ring.findable(n) for n in (11, 12, 13)] == [2, 3, 0] and scored.findable(8) == 0
    for tokens in range(40):
        assert all(place >= late.findable(tokens) for place in late.written(tokens, tokens + 5))
