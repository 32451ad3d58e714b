"""Windows that give back their pages: what stays, what a prefix needs, and long texts in few pages.

`test_schedule.py` has any order of events, `test_numerics.py` and `test_shared_bits.py` have the tensors.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcompile
from kvcompile.errors import LimitError
from kvcompile.layouts.pages import Released
from kvcompile.runtime.module import CachedModel
from kvcompile.serve import Sampling
from kvcompile.serve.lookup import Lookup
from kvcompile.serve.pages import HOLE, Group, Pages
from kvcompile.serve.prefix import root
from kvcompile.serve.schedule import Scheduler
from kvcompile.serve.texts import Rules, Text
from kvcompile.serve.tiers import Tiers
from kvcompile.verify.compare import allowed
from tests.serve.test_numerics import OWN, RECIPES, error, noise
from tests.support.models import tiny_hf
from tests.support.serving import Stepped, alone
from tests.support.serving_shadow import Fake, Shadow

SIZE = 8
sizes = {"sinks": st.integers(0, 20), "window": st.integers(1, 30), "page_size": st.integers(1, 9)}


@given(**sizes, tokens=st.integers(0, 120))
def test_pages_are_behind_a_window_once_no_token_of_theirs_is_seen(
    sinks: int, window: int, page_size: int, tokens: int
) -> None:
    """The next query is at `tokens`, and sees what is less than a window before it."""
    gone = {
        page
        for page in range(tokens // page_size + 1)
        if all(
            sinks <= position <= tokens - window
            for position in range(page * page_size, (page + 1) * page_size)
        )
    }
    assert set(Released(sinks, window).behind(tokens, page_size)) == gone


@given(**sizes, chunk=st.integers(1, 20))
def test_no_text_has_more_pages_than_it_is_let_in_with(
    sinks: int, window: int, page_size: int, chunk: int
) -> None:
    released = Released(sinks, window)
    group = Group(page_size, 10_000, 1, released=released)
    has = [
        group.pages_for(start + chunk) - len(group.behind(start))
        for start in range(sinks + window + 2 * page_size, sinks + window + 4 * page_size)
    ]
    assert max(has) == released.most(chunk, page_size) == group.most(0, 10_000, chunk)
    for end in range(1, 150, 7):
        ends = [*range(0, end, chunk), end]
        most = max(group.pages_for(b) - len(group.behind(a)) for a, b in itertools.pairwise(ends))
        assert most <= group.most(0, end, chunk) <= group.pages_for(end)


@settings(max_examples=300)
@given(
    sinks=st.integers(0, 9),
    window=st.integers(2, 20),
    tokens=st.integers(1, 60),
    missing=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 14)), max_size=5),
    aligned=st.sampled_from([1, 6]),
)
def test_a_prefix_is_the_longest_of_which_all_is_there_that_is_read(
    sinks: int, window: int, tokens: int, missing: list[tuple[int, int]], aligned: int
) -> None:
    groups = (Group(4, 64, 20), Group(4, 64, 20, released=Released(sinks, window)))
    pages, rules = tuple(map(Pages, groups)), Rules(rows=1, chunk=6, shares=True, aligned=aligned)
    lookup, text = Lookup(pages, rules, Tiers()), Text(0, (0, 0), list(range(tokens)), tokens, root("x"))
    there: tuple[dict[int, int], ...] = ({}, {})
    for number, own in enumerate(pages):
        for place, key in enumerate(lookup.keys(text, own.group, tokens // 4)):
            page, _ = own.take()
            if (number, place) not in missing:
                own.register(page, key)
                there[number][place] = page

    def needs(number: int, length: int) -> set[int]:
        """By position: who comes after `length` tokens sees the sinks, and what is within the window."""
        seen = [p for p in range(length) if not number or p < sinks or p > length - window]
        return {position // 4 for position in seen}

    step = 4 if aligned == 1 else 12
    wanted = [
        length
        for length in range(0, tokens, step)
        if all(needs(number, length) <= there[number].keys() for number in (0, 1))
    ]
    hit = lookup.find(text, below=False)
    assert hit.tokens == max(wanted)
    for number in (0, 1):
        held = {place: page for place, page in enumerate(hit.held(number)) if page != HOLE}
        assert held == {place: there[number][place] for place in needs(number, hit.tokens)}


def _ran(scheduler: Scheduler, most: int = 400) -> int:
    """Run until all texts have come to their end; how many ran together at most."""
    shadow, together = Shadow(tuple(p.group for p in scheduler.pages), scheduler.rules, Fake(0)), 0
    for _ in range(most):
        if not scheduler.texts:
            return together
        plan = scheduler.plan()
        together = max(together, len(scheduler.running))
        shadow.carry_out(scheduler, plan)
        for id in (*plan.decodes, *(chunk.text for chunk in plan.chunks if chunk.last)):
            text = scheduler.texts[id]
            scheduler.chosen(id, id)
            if len(text.tokens) > text.most:
                scheduler.end(id)
    raise AssertionError("it does not come to its end")


def test_texts_are_let_in_by_what_they_need_at_a_time() -> None:
    """Six pages each, in chunks of 8 behind a window of 9, whatever their length: three of them fit 20."""
    rules = Rules(rows=4, chunk=8, watermark=0.0)
    scheduler = Scheduler((Group(4, 1000, 20, released=Released(2, 9)),), rules)
    assert scheduler.pages[0].group.most(0, 1000, 8) == 6
    for number in range(4):
        scheduler.check(300, 320)
        scheduler.add(Text(number, (number, 0), [number] * 300, 320, root("x")))
    assert _ran(scheduler) == 3 and scheduler.preemptions == 0
    assert scheduler.pages[0].held == 0
    few = Scheduler((Group(4, 1000, 5, released=Released(2, 9)),), rules)
    few.check(1, 16)  # which come one by one
    with pytest.raises(LimitError, match="needs 6 pages of 4 tokens, and the engine has 5"):
        few.check(300, 320)


def small(kind: str, recipe: str | dict[str, Any], **more: Any) -> CachedModel:
    given = {"max_tokens": 600, "max_batch": 4, "prefill_chunk": 16, "verify": "off"} | more
    return kvcompile.optimize(
        tiny_hf(kind, max_position_embeddings=600), recipe, compile={"mode": "none"}, **given
    )


def test_a_long_text_runs_in_a_pool_far_smaller_than_its_length() -> None:
    """500 tokens, which fill 63 pages, on seven."""
    fast = small("mistral", RECIPES[OWN])
    draw = random.Random(3)
    prompt = [draw.randrange(3, 61) for _ in range(400)]
    page = sum(
        spec.dtype.itemsize * torch.Size(spec.shape).numel()
        for decision in fast.plan.decisions
        for spec in decision.buffers(torch.float32, 600)
    )
    with Stepped(fast, max_sequences=1, memory=8 * page + 600) as engine:
        (group,) = engine._scheduler.pages
        assert group.group.pages == 7 < group.group.pages_for(500) / 8
        handle = engine.submit(prompt, Sampling(max_tokens=100, ignore_eos=True))
        result = engine.finish([handle])[0]
        assert result.usage.preemptions == 0
        own = torch.stack([engine.logits[handle.id, 0, i] for i in range(100)])
        expected = alone(fast, [*prompt, *result.tokens[:-1]], 400, 16, False)
        budget = allowed(noise(fast, [prompt[:40]] * 4), torch.float32)
        assert error(own[None], expected[None]) <= budget
        # The next turn of the talk finds the last pages of this one, though the first have gone.
        again = engine.submit([*prompt, *result.tokens, 5, 6], Sampling(max_tokens=2, ignore_eos=True))
        assert engine.finish([again])[0].usage.cached_tokens == 496


def test_layers_of_other_windows_have_tables_of_their_own() -> None:
    def windowed(size: int) -> dict[str, Any]:
        placement = {"kind": "paged", "page_size": 8, "released": True}
        return {"retention": {"kind": "window", "size": size}, "placement": placement}

    recipe = {"cache": windowed(9), "layers": [{"where": {"index": 1}, "cache": windowed(17)}]}
    groups = small("llama", recipe).plan.page_groups
    assert [(group.layers, group.released) for group in groups] == [
        ((0,), Released(0, 9)),
        ((1,), Released(0, 17)),
    ]
    assert len(small("llama", {"cache": windowed(9)}).plan.page_groups) == 1


def test_texts_that_cannot_be_computed_again_keep_their_pages() -> None:
    """Beside pages that are read by their summaries, nobody waits for a page in the middle of a text."""
    recipe = {
        "cache": {
            "placement": {"kind": "paged", "page_size": 8},
            "selection": {"kind": "top_pages", "page_size": 8, "pages": 2, "dense_layers": 0},
        },
        "layers": [
            {
                "where": {"index": 0},
                "cache": {
                    "selection": {"kind": "full"},
                    "retention": {"kind": "window", "size": 9},
                    "placement": {"kind": "paged", "page_size": 8, "released": True},
                },
            }
        ],
    }
    fast = small("llama", recipe, max_tokens=120)
    with Stepped(fast) as engine:
        assert [pages.group.released for pages in engine._scheduler.pages] == [None, None]
        prompts = [[3 + i % 40 for i in range(start, start + 60)] for start in (0, 5, 9, 13)]
        for prompt, result in zip(
            prompts, engine.all(prompts, Sampling(max_tokens=20, ignore_eos=True)), strict=True
        ):
            assert len(result.tokens) == 20 and result.usage.preemptions == 0, prompt
