"""How many tokens a second an engine gives, and where the rest of a step goes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from serving_loads import Ask, Text, offline, same_lengths
from serving_watch import Step, Watch, run, watched

CONTEXT = 512
WARM_MEMORY, WARM_ROUNDS = "192MiB", 3  # two rounds of four such texts write all of it


@dataclass
class Bench:
    """model, module: the name of the model, and it optimized; quick: shorter, for a first look; tell: what it is at;
    peers: others' engines, by name."""

    model: str
    module: Any
    text: Text
    quick: bool
    most_rounds: int
    threads: int
    peers: tuple[str, ...]
    tell: Callable[[str], None]

    def engine(self, **options: Any) -> Any:
        from kvcompile.serve import Engine

        made = Engine(self.module, **{"prefix_cache": "off", **options})
        made.warmup()
        return made

    def rounds(self, usual: int) -> int:
        """How often what is compared takes its turn."""
        return 1 if self.quick else min(usual, self.most_rounds)


def decodes(bench: Bench) -> dict[str, Any]:
    """Decode speed at 512 tokens of context: one text, and eight; what a step of eight is made of."""
    new = 24 if bench.quick else 48
    rates: dict[int, list[float]] = {1: [], 8: []}
    prompts: list[float] = []
    eight: list[Step] = []
    with bench.engine(max_sequences=8) as engine:
        for turn in range(bench.rounds(5) + 1):  # the first one warms up
            for count in (1, 8):
                bench.tell(f"decodes: {count} texts, round {turn}")
                with watched(engine) as watch:
                    run(engine, same_lengths(bench.text, count, CONTEXT, new))
                steps = [s for s in watch.steps if s.decodes == count and not s.chunks]
                if turn:
                    rates[count].append(
                        len(steps) * count / (steps[-1].began + steps[-1].whole - steps[0].began)
                    )
                    prompts += [s.chunks / s.chunk for s in watch.steps if s.chunks and not s.decodes]
                    eight += steps if count == 8 else []
    one, all_eight = median(rates[1]), median(rates[8])
    return {
        "one_tokens_s": one,
        "eight_tokens_s": all_eight,
        "ratio": median(b / a for a, b in zip(rates[1], rates[8], strict=True)),
        "rounds": {str(count): found for count, found in rates.items()},
        "prompt_tokens_s": median(prompts),
        "step_of_eight_ms": 1e3 * median(s.whole for s in eight),
        "pass_ms": 1e3 * median(s.decode for s in eight),
        "pick_ms": 1e3 * median(s.pick for s in eight),
        "rest_ms": 1e3 * median(s.rest for s in eight),
        "pick_share": sum(s.pick for s in eight) / sum(s.whole for s in eight),
        "rest_share": sum(s.rest for s in eight) / sum(s.whole for s in eight),
    }


def all_at_once(bench: Bench) -> dict[str, Any]:
    """The offline load: 32 requests of all lengths."""
    asks = offline(bench.text)
    seconds, watch = [], Watch()
    with bench.engine(max_sequences=32) as engine:
        for turn in range(bench.rounds(2) + 1):
            bench.tell(f"offline: round {turn}")
            with watched(engine) as watch:
                _, took = run(engine, asks[: 4 if not turn else None])
            seconds += [took] if turn else []
    return offline_figures(asks, seconds) | parts(watch)


def offline_figures(asks: list[Ask], seconds: list[float]) -> dict[str, Any]:
    prompt, new = sum(len(ask.prompt) for ask in asks), sum(ask.new for ask in asks)
    return {
        "requests": len(asks),
        "prompt_tokens": prompt,
        "new_tokens": new,
        "seconds": median(seconds),
        "rounds_s": seconds,
        "new_tokens_s": new / median(seconds),
        "all_tokens_s": (prompt + new) / median(seconds),
    }


def parts(watch: Watch) -> dict[str, Any]:
    """What the steps of a load are made of, by how many texts took a token."""
    steps = watch.steps
    whole = sum(s.whole for s in steps)
    between = sum(b.began - a.began - a.whole for a, b in pairwise(steps))
    found: dict[str, Any] = {
        "steps": len(steps),
        "steps_s": whole,
        "between_steps_s": between,
        "decode_s": sum(s.decode for s in steps),
        "chunk_s": sum(s.chunk for s in steps),
        "pick_s": sum(s.pick for s in steps),
        "rest_s": sum(s.rest for s in steps),
        "chunk_tokens_s": sum(s.chunks for s in steps) / max(sum(s.chunk for s in steps), 1e-9),
        "decode_tokens_s": sum(s.decodes for s in steps) / max(sum(s.decode for s in steps), 1e-9),
    }
    by: dict[int, list[float]] = {}
    for step in steps:
        if step.decodes:
            by.setdefault(1 << (step.decodes - 1).bit_length(), []).append(step.decode / step.decodes)
    found["pass_ms_per_token"] = {str(n): 1e3 * median(each) for n, each in sorted(by.items())}
    return found


def concurrency(bench: Bench) -> dict[str, Any]:
    """Tokens a second of the offline load, by how many texts there may be at a time."""
    asks = offline(bench.text, seed=1)
    found: dict[str, Any] = {}
    for texts in (1, 8, 32) if bench.quick else (1, 2, 4, 8, 16, 32):
        bench.tell(f"concurrency: {texts}")
        few = asks[: max(8, min(32, 2 * texts))]
        with bench.engine(max_sequences=texts) as engine:
            run(engine, few[:2])
            with watched(engine) as watch:
                _, took = run(engine, few)
        gaps = sorted(watch.gaps())
        found[str(texts)] = offline_figures(few, [took]) | {"gap_p50_s": gaps[len(gaps) // 2]}
    return found


def no_hits(bench: Bench) -> dict[str, Any]:
    """What looking for prefixes costs where there are none: prompts of 512 tokens, the cache on and off by turns.

    Pages that are kept are not taken again at once, as free ones are: an engine with the cache on goes through all its
    memory first. So memory is small, and all of it was written before anything is measured.
    """
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    passes: dict[str, list[float]] = {"off": [], "on": []}
    rest: dict[str, list[float]] = {"off": [], "on": []}
    options = {"max_sequences": 4, "memory": WARM_MEMORY}
    with bench.engine(**options) as off, bench.engine(**options, prefix_cache="on") as on:
        for turn in range(bench.rounds(5) + WARM_ROUNDS):
            for name, engine in (("off", off), ("on", on)) if turn % 2 else (("on", on), ("off", off)):
                bench.tell(f"no hits: {name}, round {turn}")
                with watched(engine) as watch:
                    results, took = run(engine, same_lengths(bench.text, 4, CONTEXT, 16))
                assert not any(result.usage.cached_tokens for result in results)
                if turn >= WARM_ROUNDS:
                    seconds[name].append(took)
                    passes[name].append(sum(s.chunk + s.decode for s in watch.steps))
                    rest[name].append(sum(s.rest for s in watch.steps) / took)
    return {
        "seconds": {name: median(found) for name, found in seconds.items()},
        "passes_s": {name: median(found) for name, found in passes.items()},
        "rest_share": {name: median(found) for name, found in rest.items()},
        "rounds": seconds,
        "cost": median(a / b for a, b in zip(seconds["on"], seconds["off"], strict=True)) - 1,
    }


def squeeze(bench: Bench) -> dict[str, Any]:
    """The offline load in half the pages that it would like to have, beside all of them."""
    asks = offline(bench.text, 16 if bench.quick else 32, seed=2)
    seconds: dict[str, list[float]] = {"ample": [], "half": [], "half_host": []}
    usage: dict[str, Any] = {}
    with bench.engine(max_sequences=32) as engine:
        rules, group = engine._scheduler.rules, engine._scheduler.pages[0].group
        pages = sum(group.pages_for(ask.tokens) for ask in asks)
        half = math.ceil(pages / 2) * rules.page_bytes[0] + 32 * rules.row_bytes + 2 * rules.page_bytes[0]
    engines = {
        "ample": bench.engine(max_sequences=32),
        "half": bench.engine(max_sequences=32, memory=half, prefix_cache="auto"),
        "half_host": bench.engine(max_sequences=32, memory=half, prefix_cache="auto", host_memory="8GiB"),
    }
    try:
        for turn in range(bench.rounds(2)):
            for name, engine in engines.items():
                bench.tell(f"squeeze: {name}, round {turn}")
                before = engine.stats()
                salted = [
                    Ask([turn + 1, *ask.prompt[1:]], ask.new) for ask in asks
                ]  # not of the round before
                results, took = run(engine, salted)
                stats = engine.stats()
                seconds[name].append(took)
                usage[name] = {
                    "pages": stats.pages,
                    "preemptions": stats.preemptions - before.preemptions,
                    "most_of_one": max(result.usage.preemptions for result in results),
                    "recomputed_tokens": stats.recomputed_tokens - before.recomputed_tokens,
                    "swapped_bytes": stats.swapped_bytes - before.swapped_bytes,
                }
    finally:
        for engine in engines.values():
            engine.close()
    return {
        "working_set_pages": pages,
        "seconds": {name: median(found) for name, found in seconds.items()},
        "rounds": seconds,
        "ratio": median(a / b for a, b in zip(seconds["ample"], seconds["half"], strict=True)),
        "ratio_host": median(a / b for a, b in zip(seconds["ample"], seconds["half_host"], strict=True)),
        "of": usage,
    }
