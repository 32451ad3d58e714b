"""What an engine computes is what the module computes of each text alone, whatever runs beside it.

Batches of other sizes round otherwise. So the budget is measured: by how much a text's own logits differ when the
module has it in a batch, eightfold, as verification allows.
"""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcompile
from kvcompile.runtime.module import CachedModel
from kvcompile.serve import Sampling
from kvcompile.verify.compare import allowed, relative
from tests.coverage.configs import tiny_model
from tests.support.marks import cases
from tests.support.models import NanoGPT, make, tiny_hf
from tests.support.serving import Stepped, alone

CHUNK = 16
KIVI = {
    "keys": {"dtype": "int4", "axis": "channel", "group": 32, "residual": 32},
    "values": {"dtype": "int4", "residual": 32},
    "placement": {"kind": "paged", "page_size": 32},
}
RECIPES: dict[str, Any] = {
    name: name
    for name in ("baseline", "paged", "paged_int8", "h2o", "snapkv", "streaming", "streaming_int8", "quest")
} | {
    "kivi": {"cache": {name: part for name, part in KIVI.items() if name != "placement"}},
    "kivi in pages": {"cache": KIVI},
    "window in pages": {
        "cache": {
            "retention": {"kind": "sink_window", "sinks": 3, "window": 21},
            "placement": {"kind": "paged", "page_size": 8},
        }
    },
    "released": {
        "cache": {
            "retention": {"kind": "sink_window", "sinks": 3, "window": 11},
            "placement": {"kind": "paged", "page_size": 8, "released": True},
        }
    },
    "released, in full beside": {
        "cache": {
            "keys": {"dtype": "int8", "residual": 5},
            "retention": {"kind": "sink_window", "sinks": 9, "window": 13},
            "placement": {"kind": "paged", "page_size": 8, "released": True},
        }
    },
    "h2o in pages": {
        "cache": {
            "retention": {"kind": "h2o", "sinks": 2, "recent": 8, "heavy": 14},
            "placement": {"kind": "paged", "page_size": 8},
        }
    },
    "layers apart": {
        "cache": {"placement": {"kind": "paged", "page_size": 8}},
        "layers": [
            {
                "where": {"index": [0]},
                "cache": {
                    "keys": {"dtype": "int8"},
                    "retention": {"kind": "sink_window", "sinks": 0, "window": 16},
                    "placement": {"kind": "paged", "page_size": 16},
                },
            }
        ],
    },
}
OWN = "released windows of the model"
RECIPES[OWN] = {
    "cache": {"placement": {"kind": "paged", "page_size": 8}},
    "layers": [
        {
            "where": {"attention": "sliding"},
            "cache": {
                "retention": {"kind": "window"},
                "placement": {"kind": "paged", "page_size": 8, "released": True},
            },
        }
    ],
}
MODELS = ["mistral", "gemma2", "gpt2", "bloom", "deepseek_v3", "bamba", "lfm2", "gpt_oss", "nanogpt"]


@lru_cache
def module(kind: str, recipe: str) -> CachedModel:
    model = (
        make(NanoGPT)
        if kind == "nanogpt"
        else tiny_hf(kind)
        if kind in ("llama", "mistral")
        else tiny_model(kind)
    )
    return kvcompile.optimize(
        model,
        RECIPES[recipe],
        verify="off",
        compile={"mode": "none"},
        max_tokens=80,
        max_batch=4,
        prefill_chunk=CHUNK,
    )


def texts(seed: int, vocabulary: int) -> list[list[int]]:
    """Prompts of many lengths, some of which begin alike, and at page ends and a token beside."""
    draw = random.Random(seed)
    common = [draw.randrange(3, vocabulary) for _ in range(40)]
    kept = [0, 7, 8, 16, 17, 33]
    return [
        common[:keep] + [draw.randrange(3, vocabulary) for _ in range(draw.randint(1, 14))] for keep in kept
    ]


def noise(fast: CachedModel, prompts: list[list[int]]) -> float:
    """By how much a row's logits differ between a batch and alone, at most."""
    size = min(map(len, prompts))
    ids = torch.tensor([prompt[-size:] for prompt in prompts[:4]])
    found = []
    for rows in (ids[:2], ids[:3], ids):
        fast.reset()
        together = torch.cat([_logits(fast(rows))[:, -1:], _logits(fast(rows[:, :1]))], dim=1)
        for i, row in enumerate(rows):
            fast.reset()
            own = torch.cat([_logits(fast(row[None]))[:, -1:], _logits(fast(row[None, :1]))], dim=1)
            found.append(error(together[i : i + 1], own))
    fast.reset()
    return max(found)


def error(found: Tensor, truth: Tensor) -> float:
    return relative(found, truth, torch.ones(truth.shape[:2], dtype=torch.bool))


def _logits(out: Any) -> Tensor:
    found = out if isinstance(out, Tensor) else out.logits
    assert isinstance(found, Tensor)
    return found.float()


def compare(kind: str, recipe: str, seed: int, **settings: Any) -> Stepped:
    """Six requests that come at any time, against each text alone."""
    fast = module(kind, recipe)
    prompts = texts(seed, 61)
    draw = random.Random(seed)
    with Stepped(fast, max_sequences=4, **settings) as engine:
        handles = []
        for prompt in prompts:
            handles.append(
                engine.submit(
                    prompt,
                    Sampling(max_tokens=draw.randint(1, 20), ignore_eos=True, n=draw.choice([1, 1, 2])),
                )
            )
            for _ in range(draw.randint(0, 6)):
                engine.turn()
        results = engine.finish(handles)
        budget = allowed(noise(fast, prompts), torch.float32)
        known: dict[tuple[int, ...], Tensor] = {}
        for prompt, result in zip(prompts, results, strict=True):
            for completion in result.completions:
                whole = (*prompt, *completion.tokens[:-1])
                if whole not in known:  # two texts of a prompt may be the same
                    known[whole] = alone(fast, whole, len(prompt), CHUNK, fast.plan.whole_prompts)
                expected = known[whole]
                own = torch.stack(
                    [engine.logits[result.id, completion.index, i] for i in range(len(expected))]
                )
                off = error(own[None], expected[None])
                assert off <= budget, f"{result.id}: off by {off:.1e}, {budget:.1e} allowed"
        stats = engine.stats()
        assert stats.pages_held == 0 and stats.running == stats.waiting == 0
        return engine


FEW = {"cache": {"placement": {"kind": "paged", "page_size": 8, "pages": 13}}}
RECIPES["few pages"] = FEW
RECIPES["few pages, int4"] = {
    "cache": {**FEW["cache"], "keys": {"dtype": "int4"}, "values": {"dtype": "int8"}}
}


RECIPES["few pages, released"] = {
    "cache": {
        "retention": {"kind": "sink_window", "sinks": 3, "window": 21},
        "placement": {**FEW["cache"]["placement"], "released": True},
    }
}


@pytest.mark.parametrize("recipe", ["few pages", "few pages, released"])
@pytest.mark.parametrize("host", [0, 1 << 20], ids=["computed again", "swapped"])
def test_texts_that_give_up_their_pages(host: int, recipe: str) -> None:
    stats = compare("llama", recipe, seed=3, host_memory=host).stats()
    assert stats.preemptions > 0 and (stats.swapped_bytes > 0) == (host > 0)
    assert (stats.recomputed_tokens > 0) == (host == 0)


@pytest.mark.parametrize("recipe", ["few pages", "few pages, int4", "few pages, released", "kivi in pages"])
def test_swapped_texts_give_the_same_bits(recipe: str) -> None:
    """What goes to the host and comes back is what never went.

    Beside others, an int4 code may fall either way by how a batch rounds: bits are compared of a text alone.
    """
    fast, prompt = module("llama", recipe), texts(5, 61)[3]
    sampling = Sampling(max_tokens=30, ignore_eos=True)
    found = []
    for moved in (False, True):
        with Stepped(fast, prefix_cache="off", host_memory=1 << 20) as engine:
            handle = engine.submit(prompt, sampling)
            for number in range(40):
                engine.turn()
                if moved and number in (4, 9):
                    text = engine._scheduler.running[0]
                    moves: list[Any] = []
                    engine._scheduler._preempt(text, moves)
                    engine._passes.move(moves, {})
                    rows = engine._passes.rows
                    for name in rows.shape.buffers:  # nothing of it stays behind
                        rows.buffers[name].fill_(3)
            assert handle.result(0).usage.preemptions == (2 if moved else 0)
            found.append(torch.stack(list(engine.logits.values())))
    assert torch.equal(*found)


# What is in another layout, too, with more.
SLOW = ("paged", "h2o", "streaming", "kivi")
LAYOUTS = [name for name in RECIPES if not name.startswith("few") and name != OWN]


@pytest.mark.few(2)
@pytest.mark.parametrize("recipe", cases(LAYOUTS, {*LAYOUTS} - {*SLOW}))
def test_every_layout(recipe: str) -> None:
    compare("llama", recipe, seed=1)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_model(kind: str) -> None:
    compare(kind, "paged", seed=2)


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gpt_oss"])
def test_windows_of_models_that_are_released(kind: str) -> None:
    assert compare(kind, OWN, seed=2).stats().found_device_tokens > 0


def test_latent_rows_in_packed_steps() -> None:
    """`tests/serve/test_packed.py` has the other layouts and models."""
    assert compare("deepseek_v3", "paged", seed=2, packed="on").stats().packed_steps > 4
