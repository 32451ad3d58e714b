"""What is found gives the same bits as if it were computed: in pages, snapshots, the host's memory, and files."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcompile
from kvcompile.errors import PlanError
from kvcompile.runtime.module import CachedModel
from kvcompile.serve import Engine, Sampling
from kvcompile.serve.stats import Stats
from tests.serve.test_numerics import CHUNK, OWN, RECIPES, module, texts
from tests.support.marks import cases
from tests.support.serving import Stepped

SAMPLING = Sampling(max_tokens=6, ignore_eos=True)
SCORED = {"retention": {"kind": "h2o", "sinks": 2, "recent": 8, "heavy": 14, "prefill": "bounded"}}
PAGES = {"placement": {"kind": "paged", "page_size": 8}}
RECIPES |= {
    "sinks in full": {"cache": {**PAGES, "keys": {"dtype": "int4", "sinks": 4}}},
    "ring in full": {
        "cache": {
            **PAGES,
            "retention": {"kind": "sink_window", "sinks": 3, "window": 21},
            "keys": {"dtype": "int8", "residual": 5},
        }
    },
    "scored, bounded": {"cache": SCORED},
    "scored in pages, bounded": {"cache": {**PAGES, **SCORED}},
    "tova, bounded": {"cache": {"retention": {"kind": "tova", "budget": 24, "prefill": "bounded"}}},
    "calibrated in pages": {"cache": {**PAGES, "keys": {"dtype": "int8"}}},
    "quest in pages": {
        "cache": {**PAGES, "selection": {"kind": "top_pages", "page_size": 8, "pages": 2, "dense_layers": 0}},
    },
    "quest": {"cache": {"selection": {"kind": "top_pages", "page_size": 8, "pages": 2, "dense_layers": 0}}},
}
FOUND = [
    ("llama", recipe)
    for recipe in RECIPES
    if recipe not in ("h2o", "snapkv", "h2o in pages", "few pages, int4", "few pages, released", OWN)
] + [
    *((kind, "paged") for kind in ("bamba", "lfm2", "gpt_oss", "gemma2")),
    *((kind, OWN) for kind in ("mistral", "gpt_oss", "gemma2")),
]


def spoil(engine: Stepped) -> None:
    """Nothing of texts that ended is left in rows, and nothing is on pages that nobody finds."""
    rows = engine._passes.rows
    for name in rows._own:
        if rows.shape.buffers[name].spec.fill is None:
            rows.buffers[name].fill_(3)
    for pages, names in zip(engine._scheduler.pages, rows._pooled, strict=True):
        lost = [page for page in range(1, pages.group.pages + 1) if pages.key(page) is None]
        assert not pages.held
        for name in names:
            rows.buffers[name].view(torch.uint8)[lost] = 3


def talk(engine: Stepped, seed: int = 4) -> list[tuple[Tensor, int]]:
    """Turns of a talk, another one that begins alike, and one of another salt: logits and what was found, of each."""
    start = texts(seed, 61)[5] + texts(seed + 1, 61)[5][:12]
    found: list[tuple[Tensor, int]] = []

    def say(prompt: list[int], salt: str = "") -> list[int]:
        handle = engine.submit(prompt, SAMPLING, salt=salt)
        (result,) = engine.finish([handle])
        own = [engine.logits[handle.id, 0, place] for place in range(len(result.tokens))]
        found.append((torch.stack(own), result.usage.cached_tokens))
        spoil(engine)
        return [*prompt, *result.tokens]

    said = say(start[:50])
    say([*start[:40], 7, 8, 9])
    say([*said, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22])
    say(start[:50], "another")
    say(start[:33])
    return found


def told(fast: CachedModel, **settings: Any) -> tuple[list[tuple[Tensor, int]], Stats]:
    given = {"deterministic": True, "snapshot_memory": "8MiB", "max_sequences": 2} | settings
    with Stepped(fast, **given) as engine:
        return talk(engine), engine.stats()


def same(one: list[tuple[Tensor, int]], other: list[tuple[Tensor, int]]) -> bool:
    return all(torch.equal(a, b) for (a, _), (b, _) in zip(one, other, strict=True))


# What is in another layout, too, with more.
SLOW = {("llama", recipe) for recipe in ("paged_int8", "streaming", "kivi", "few pages", "window in pages")}


@pytest.mark.few(2)
@pytest.mark.parametrize(("kind", "recipe"), cases(FOUND, {*FOUND} - SLOW), ids=lambda x: x)
def test_what_is_found_gives_the_same_bits(kind: str, recipe: str) -> None:
    fast = module(kind, recipe)
    cold, _ = told(fast, prefix_cache="off")
    warm, stats = told(fast, prefix_cache="on")
    assert same(cold, warm)
    size = max((group.page_size for group in fast.plan.page_groups), default=CHUNK)
    first, other, turn, salted, again = [count for _, count in warm]
    assert first == salted == 0 and min(other, turn, again) >= max(CHUNK, size), warm
    assert turn >= 48 // max(CHUNK, size) * max(CHUNK, size), "to the last whole chunk of the turn before"
    assert stats.found_device_tokens + stats.found_host_tokens == other + turn + again


@pytest.mark.parametrize("recipe", ["kivi", "sinks in full"])
def test_what_comes_token_by_token_gives_the_same_bits(recipe: str) -> None:
    """Steps of one token settle what has left the newest in full; chunks settle more at once."""
    fast = module("llama", recipe)
    cold, _ = told(fast, prefix_cache="off", prefill_tokens=1)
    warm, _ = told(fast, prefix_cache="on", prefill_tokens=1)
    assert same(cold, warm) and warm[1][1] >= 40


def test_nothing_of_prompts_in_one_piece_is_shared() -> None:
    for recipe in ("h2o", "snapkv"):
        with pytest.raises(PlanError, match="takes a prompt in one piece"):
            Engine(module("llama", recipe), prefix_cache="on")


@pytest.mark.few(3)
@pytest.mark.parametrize("recipe", ["few pages", "few pages, released", "kivi in pages", "scored, bounded"])
@pytest.mark.parametrize("stored", [False, True], ids=["host", "store"])
def test_what_was_evicted_gives_the_same_bits(recipe: str, stored: bool, tmp_path: Path) -> None:
    """Texts of other talks come between, so that no page of the first is left in the pool."""
    fast = module("llama", recipe)
    below: dict[str, Any] = (
        {"store": tmp_path, "host_memory": 0, "snapshot_memory": 0}
        if stored
        else {"host_memory": "8MiB", "snapshot_memory": "8MiB"}
    )
    found = []
    for settings in ({"prefix_cache": "off"}, {"prefix_cache": "on", **below}):
        with Stepped(fast, deterministic=True, max_sequences=1, **settings) as engine:
            mine = [talk(engine)]
            for other in (20, 30):
                talk(engine, other)
            mine.append(talk(engine))
            found.append(mine)
            stats = engine.stats()
    assert all(same(*pair) for pair in zip(*found, strict=True))
    assert found[1][1][0][1] > 0, "it begins with what went down"
    assert (stats.found_store_tokens if stored else stats.found_host_tokens) > 0
    assert not (stats.found_host_tokens if stored else stats.found_store_tokens)


@pytest.mark.parametrize("recipe", ["paged", "kivi", "baseline"])
def test_another_engine_finds_what_one_has_stored(recipe: str, tmp_path: Path) -> None:
    fast = module("llama", recipe)
    cold, _ = told(fast, prefix_cache="off")
    first, _ = told(fast, store=tmp_path)
    again, stats = told(fast, store=tmp_path)
    assert same(cold, first) and same(cold, again)
    assert again[0][1] >= 32 and stats.found_store_tokens > 0


def test_a_deterministic_engine_finds_nothing_of_another_one(tmp_path: Path) -> None:
    """Which stores pages that steps of one token have filled."""
    fast = module("llama", "paged")
    cold, _ = told(fast, prefix_cache="off")
    told(fast, store=tmp_path, deterministic=False)
    own, stats = told(fast, store=tmp_path)
    assert same(cold, own) and not stats.found_store_tokens


def test_weights_that_change_leave_nothing_to_find(tmp_path: Path) -> None:
    """In place: in the same engine, in the next one on the same folder, and back again."""
    from tests.support.models import tiny_hf

    model = tiny_hf()
    fast = kvcompile.optimize(
        model,
        "paged",
        verify="off",
        compile={"mode": "none"},
        max_tokens=80,
        max_batch=2,
        prefill_chunk=CHUNK,
    )
    prompt = texts(4, 61)[5]
    weight = next(parameter for name, parameter in model.named_parameters() if "v_proj" in name)
    before = weight.detach().clone()

    def ask(engine: Stepped) -> int:
        return engine.all([prompt], SAMPLING)[0].usage.cached_tokens

    with Stepped(fast, store=tmp_path) as engine:
        assert ask(engine) == 0 and ask(engine) > 0
        with torch.no_grad():
            weight.mul_(1.5)
        assert ask(engine) == 0 and ask(engine) > 0
    with Stepped(fast, store=tmp_path) as engine:
        assert ask(engine) > 0
        with torch.no_grad():
            weight.copy_(before)
        assert ask(engine) > 0, "what the first weights left"


def test_a_snapshot_needs_memory() -> None:
    fast = module("llama", "kivi")
    with pytest.raises(
        PlanError, match="tokens in full are in no page, and snapshots of them have no memory"
    ):
        Engine(fast, prefix_cache="on", snapshot_memory=0)
    with warnings.catch_warnings(), Stepped(fast, snapshot_memory=0) as engine:
        assert engine.stats().prefix_cache.startswith("off: ")
