"""The scheduler without a model: whatever comes, every text reads what it has written, and nobody waits for ever.

A shadow carries out the plans: a slot holds the tokens up to the one that was written to it. So a page that was shared
by the wrong text, freed too early, found too early, or written while others have it, is seen by whoever reads it next.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

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
from kvcompile.serve import schedule
from kvcompile.serve.pages import Group, Pages
from kvcompile.serve.prefix import root
from kvcompile.serve.schedule import Copy, Drop, In, Out, Rules, Scheduler, StepPlan, Text
from tests.support.serving_pages import check

Held = tuple[int, ...]  # the tokens of a text up to the one in a slot


@dataclass
class Shadow:
    """Pages and rows that hold what was written to them; `groups` as the scheduler has them."""

    groups: tuple[Group, ...]
    slots: list[dict[int, dict[int, Held]]] = field(default_factory=list)  # by group: page -> offset -> held
    rows: dict[int, Held] = field(default_factory=dict)
    host: dict[int, tuple[list[list[dict[int, Held]]], Held]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = [{} for _ in self.groups]

    def slot(self, group: Group, position: int) -> int:
        if position < group.slots:
            return position
        assert group.sinks is not None
        return group.sinks + (position - group.sinks) % (group.slots - group.sinks)

    def carry_out(self, scheduler: Scheduler, plan: StepPlan) -> None:
        for move in plan.moves:
            match move:
                case Copy(group, source, target):
                    self.slots[group][target] = dict(self.slots[group].get(source, {}))
                case Drop(text):
                    self.rows.pop(text, None)
                case Out(text, tables):
                    self.host[text] = (
                        [[dict(self.slots[g].get(page, {})) for page in t] for g, t in enumerate(tables)],
                        self.rows[text],
                    )
                case In(text, tables):
                    pages, row = self.host.pop(text)
                    self.rows[text] = row
                    for number, (table, kept) in enumerate(zip(tables, pages, strict=True)):
                        for page, held in zip(table, kept, strict=False):
                            self.slots[number][page] = held
        for id in plan.decodes:
            self.compute(scheduler, scheduler.texts[id], len(scheduler.texts[id].tokens))
        for chunk in plan.chunks:
            assert chunk.start == scheduler.texts[chunk.text].computed
            self.compute(scheduler, scheduler.texts[chunk.text], chunk.end)

    def compute(self, scheduler: Scheduler, text: Text, end: int) -> None:
        """Read all that the tokens up to `end` may see, and write theirs."""
        start, tokens = text.computed, tuple(text.tokens)
        row = self.rows.get(text.id, tokens[:start])  # a row that begins with a prefix holds nothing of it
        assert row == tokens[:start], "another text's row, or an older one"
        self.rows[text.id] = tokens[:end]
        for number, group in enumerate(self.groups):
            pages, table = scheduler.pages[number], text.tables[number]
            assert 0 not in table and len(set(table)) == len(table)
            for position in range(start):
                if group.sinks is not None and group.sinks <= position < start - (group.slots - group.sinks):
                    continue
                slot = self.slot(group, position)
                held = self.slots[number][table[slot // group.page_size]][slot % group.page_size]
                assert held == tokens[: position + 1], f"text {text.id} reads another's slot {slot}"
            for position in range(start, end):
                slot = self.slot(group, position)
                page = table[slot // group.page_size]
                assert pages.references(page) == 1 and pages.key(page) is None, "written while others have it"
                self.slots[number].setdefault(page, {})[slot % group.page_size] = tokens[: position + 1]
        scheduler.computed(text.id, end)

    def fork(self, scheduler: Scheduler, id: int) -> list[int]:
        found = []
        for fork in scheduler.fork(id):
            for copy in fork.copies:
                self.slots[copy.group][copy.target] = dict(self.slots[copy.group].get(copy.source, {}))
            self.rows[fork.target] = self.rows[fork.source]
            found.append(fork.target)
        return found


class Served(RuleBasedStateMachine):
    """Texts over three tokens, so that prefixes are often the same; a token is chosen by the text before it."""

    groups: tuple[Group, ...] = (Group(4, 64, 12),)
    goes_by = Rules(rows=3, chunk=6, until=None, page_bytes=(1,), watermark=0.0)

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(self.groups, self.goes_by)
        self.shadow = Shadow(self.groups)
        self.number = 0
        self.wanted: dict[int, int] = {}
        self.steps = 0

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=20),
        more=st.integers(1, 12),
        texts=st.integers(1, 3),
        salt=st.sampled_from("ab"),
    )
    def submit(self, prompt: list[int], more: int, texts: int, salt: str) -> None:
        most = len(prompt) + more - 1
        try:
            self.scheduler.check(len(prompt), most)
        except LimitError:
            assert any(g.pages_for(most) > g.pages for g in self.groups)
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
        assert bool(plan.texts) == bool(self.scheduler.texts), "somebody can always go on"
        self.shadow.carry_out(self.scheduler, plan)
        if oldest is not None:
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

    @invariant()
    def holds(self) -> None:
        check(self.scheduler)

    def teardown(self) -> None:
        for _ in range(300):
            if not self.scheduler.texts:
                break
            self.step()
            check(self.scheduler)
        assert not self.scheduler.texts, "every text comes to its end"
        assert all(pages.held == 0 for pages in self.scheduler.pages)


class Swapped(Served):
    goes_by = replace(Served.goes_by, host_bytes=7, until=0)


class Ringed(Served):
    """A window in pages beside layers that keep every token."""

    groups = (Group(4, 64, 14), Group(4, 12, 8, sinks=3))
    goes_by = replace(Served.goes_by, until=12, page_bytes=(1, 1), host_bytes=10)


class Aligned(Served):
    goes_by = replace(Served.goes_by, aligned=6, watermark=0.2)


class Kept(Served):
    """Texts that cannot be computed again."""

    goes_by = replace(Served.goes_by, recomputes=False, until=0)


class Rowed(Served):
    """Nothing in pages."""

    groups = ()
    goes_by = replace(Served.goes_by, until=0, page_bytes=(), whole=True)


QUICK = settings(max_examples=80, stateful_step_count=30, deadline=None)
UNSHRUNK = settings(QUICK, max_examples=3000, phases=[Phase.generate], database=None, derandomize=True)
CASES = [Served, Swapped, Ringed, Aligned, Kept, Rowed]


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

    def fork(self: Scheduler, id: int) -> list[schedule.Fork]:
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


BREAKS = [
    (_no_copies, Served),
    (_found_early, Served),
    (_freed_early, Served),
    (_forked_late, Served),
    (_ring_once, Ringed),
    (_drops_before_out, Swapped),
]


@pytest.mark.parametrize(("broken", "case"), BREAKS, ids=lambda x: getattr(x, "__name__", None))
def test_what_is_broken_is_seen(broken: object, case: type[Served], monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)  # type: ignore[operator]
    with pytest.raises(BaseException):  # noqa: B017  # hypothesis gathers what was raised
        run_state_machine_as_test(case, settings=UNSHRUNK)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(("salt", "cached"), [("a", 8), ("b", 0)])
def test_a_prefix_is_found_by_those_of_its_salt_only(salt: str, cached: int) -> None:
    scheduler = Scheduler((Group(4, 64, 12),), Served.goes_by)
    shadow, prompt = Shadow(scheduler.pages and (scheduler.pages[0].group,)), list(range(9))
    for number, own in enumerate(("a", salt)):
        scheduler.add(Text(number, (number, 0), list(prompt), 9, root("x", own)))
        while number in scheduler.texts:
            plan = scheduler.plan()
            shadow.carry_out(scheduler, plan)
            if plan.decodes or any(chunk.last for chunk in plan.chunks):
                found = scheduler.texts[number].cached
                scheduler.end(number)
    assert found == cached
