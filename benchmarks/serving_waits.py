"""How long requests wait for their first token, and for the next."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any

from serving_loads import Ask, offline, poisson, same_lengths
from serving_speed import Bench, offline_figures
from serving_watch import run, watched

COMMON, OWN = 1024, 32
SAID = 48  # tokens of each side in each turn of a talk
LONG = 2048


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return {"p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "most": ordered[-1]}


def shared(bench: Bench) -> dict[str, Any]:
    """Time to the first token of 1,024 common tokens and 32 own: when nobody had them, and when somebody had."""
    times: dict[str, list[float]] = {"cold": [], "hit": []}
    with bench.engine(max_sequences=4, prefix_cache="on") as engine:
        for turn in range(bench.rounds(4) + 1):
            bench.tell(f"shared: round {turn}")
            common = bench.text.piece(COMMON)
            for name in ("cold", "hit"):
                results, _ = run(engine, [Ask(common + bench.text.piece(OWN), 4)])
                found = results[0].usage
                assert found.cached_tokens == (COMMON if name == "hit" else 0), found
                if turn:
                    times[name].append(found.first_token)
    return {
        "cold_s": median(times["cold"]),
        "hit_s": median(times["hit"]),
        "rounds": times,
        "ratio": median(a / b for a, b in zip(times["hit"], times["cold"], strict=True)),
    }


def turns(bench: Bench) -> dict[str, Any]:
    """Eight talks of five turns at once: what is said to it each time is as long as what it says."""
    talks, each = 8, 3 if bench.quick else 5
    found: dict[str, Any] = {}
    for name in ("off", "on"):
        bench.tell(f"turns: prefix cache {name}")
        with bench.engine(max_sequences=talks, prefix_cache=name) as engine:
            run(engine, same_lengths(bench.text, 2, 16, 4))
            said = [[bench.text.piece(SAID) for _ in range(each)] for _ in range(talks)]
            began = time.perf_counter()
            with ThreadPoolExecutor(talks) as pool:
                usages = list(pool.map(partial(_talk, engine), said))
            took = time.perf_counter() - began
        flat = [usage for own in usages for usage in own]
        found[name] = {
            "seconds": took,
            "first_token_s_by_turn": [
                median(usage.first_token for usage in turn) for turn in zip(*usages, strict=True)
            ],
            "cached_share": sum(u.cached_tokens for u in flat) / sum(u.prompt_tokens for u in flat),
        }
    return found | {"speedup": found["off"]["seconds"] / found["on"]["seconds"]}


def _talk(engine: Any, said: list[list[int]]) -> list[Any]:
    """The usage of every turn of one talk."""
    past: list[int] = []
    usages = []
    for piece in said:
        past = past + piece
        results, _ = run(engine, [Ask(past, SAID)])
        past += results[0].tokens
        usages.append(results[0].usage)
    return usages


def arrivals(bench: Bench) -> dict[str, Any]:
    """Requests that come by chance at 70 % of what the engine can do: what they wait for each token."""
    requests = 16 if bench.quick else 48
    with bench.engine(max_sequences=32, prefix_cache="auto") as engine:
        bench.tell("arrivals: all at once")
        asks = offline(bench.text, requests, seed=3)
        _, took = run(engine, asks)
        rate = 0.7 * len(asks) / took
        bench.tell(f"arrivals: {rate:.2f} a second")
        asks = poisson(offline(bench.text, requests, seed=4), rate)
        with watched(engine) as watch:
            results, took = run(engine, asks)
    return offline_figures(asks, [took]) | {
        "per_second": rate,
        "first_token_s": percentiles([result.usage.first_token for result in results]),
        "gap_s": percentiles(watch.gaps()),
        "queued_s": percentiles([result.usage.queued for result in results]),
        "first_token_all_s": sorted(result.usage.first_token for result in results),
        "gaps_all_s": sorted(round(gap, 5) for gap in watch.gaps()),
    }


def long_prompt(bench: Bench) -> dict[str, Any]:
    """What eight texts wait for their next token while a prompt of 2,048 comes in, beside a chunk's pass and theirs."""
    from kvcompile.serve import Sampling

    found: dict[str, Any] = {}
    for chunk in (None,) if bench.quick else (None, 128):
        with bench.engine(max_sequences=9, prefill_tokens=chunk) as engine:
            run(engine, same_lengths(bench.text, 1, LONG, 2))
            ratios, waits, quiet = [], [], []
            for turn in range(bench.rounds(2)):
                bench.tell(f"long prompt: chunks of {chunk or 'the recipe'}, round {turn}")
                with watched(engine) as watch:
                    many = 40 if chunk is None else 64
                    asks = same_lengths(bench.text, 8, 256, many)
                    handles = [
                        engine.submit(ask.prompt, Sampling(max_tokens=ask.new, ignore_eos=True))
                        for ask in asks
                    ]
                    for handle in handles:  # all of them say something
                        next(iter(handle))
                    began = time.perf_counter()
                    late = engine.submit(bench.text.piece(LONG), Sampling(max_tokens=1, ignore_eos=True))
                    late.result()
                    ended = time.perf_counter()
                    for handle in handles:
                        handle.result()
                own = [
                    b - a
                    for handle in handles
                    for a, b in zip(watch.came[handle.id], watch.came[handle.id][1:], strict=False)
                    if began < a and b < ended
                ]
                beside = [s for s in watch.steps if s.chunks and s.decodes == 8 and s.began > began]
                alone = [s.whole for s in watch.steps if not s.chunks and s.decodes == 8]
                passes = median(s.chunk for s in beside) + median(s.decode for s in beside)
                most = max(s.chunk + s.decode for s in beside)
                waits.append(percentiles(own)["p99"])
                ratios.append((waits[-1] / passes, waits[-1] / most))
                quiet.append(median(alone))
        found[str(engine._scheduler.rules.chunk)] = {
            "gap_p99_s": median(waits),
            "ratio": median(ratio for ratio, _ in ratios),
            "ratio_to_longest": median(ratio for _, ratio in ratios),
            "step_without_s": median(quiet),
            "first_token_s": late.result().usage.first_token,
            "chunk_pass_s": [s.chunk for s in beside],
            "decode_pass_s": [s.decode for s in beside],
        }
    return found
