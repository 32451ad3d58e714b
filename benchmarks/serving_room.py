"""How many pages texts take, and how many texts fit a memory."""

from __future__ import annotations

from typing import Any

from serving_loads import offline
from serving_speed import Bench
from serving_watch import run, watched

CONTEXT = 1024  # tokens of a text, where texts are counted that fit
MEMORY = 2 << 30
SAMPLED: dict[str, Any] = {"prompts": (512, 505), "new": 64}  # the second one ends within a page


def samples(bench: Bench) -> dict[str, Any]:
    """Pages of eight texts of one prompt, over those of the prompt once and what is each one's own."""
    from kvcompile.serve import Sampling

    new, found = SAMPLED["new"], {}
    for prompt in SAMPLED["prompts"]:
        with bench.engine(max_sequences=8) as engine, watched(engine, pages=True) as watch:
            bench.tell(f"samples: a prompt of {prompt}")
            sampling = Sampling(max_tokens=new, ignore_eos=True, n=8, temperature=1.0, seed=0)
            engine.submit(bench.text.piece(prompt), sampling).result()
            size = engine._scheduler.pages[0].group.page_size
        least = (prompt + 8 * (new - 1)) / size
        most = max(step.held for step in watch.steps)
        found[str(prompt)] = {"pages": most, "tokens_in_pages": least, "ratio": most / least}
    return found


def waste(bench: Bench) -> dict[str, Any]:
    """Pages that a text has beyond what its tokens fill, at most, in any step of the offline load."""
    with bench.engine(max_sequences=32) as engine, watched(engine, pages=True) as watch:
        bench.tell("waste")
        run(engine, offline(bench.text, 12 if bench.quick else 32, seed=5))
    return {"pages": max(step.waste for step in watch.steps), "steps": len(watch.steps)}


def int8(bench: Bench) -> dict[str, Any]:
    """Texts of 1,024 tokens that 2 GiB hold, as int8 and as fp16."""
    import torch

    import kvcompile
    from kvcompile.serve.capacity import capacity

    found = {}
    half = {"keys": {"dtype": "float16"}, "values": {"dtype": "float16"}}
    for name, recipe, more in (("fp16", "paged", {"cache": half}), ("int8", "paged_int8", {})):
        bench.tell(f"capacity of {name}")
        made = kvcompile.optimize(
            bench.module.model,
            recipe,
            verify="off",
            compile={"mode": "none"},
            max_tokens=4096,
            max_batch=4096,
            **more,
        )
        room = capacity(
            made.plan, made.cache.shape, torch.device("cpu"), 4096, MEMORY, made.plan.limits.prefill_chunk
        )
        # Rows are for as many texts as there are, not for the 4,096 that could be.
        pages = (MEMORY - 4096 * room.row_bytes) // room.page_bytes[0]
        size = room.groups[0].page_size
        texts = MEMORY // (room.row_bytes + room.page_bytes[0] * -(-CONTEXT // size))
        found[name] = {
            "texts": texts,
            "page_bytes": room.page_bytes[0],
            "row_bytes": room.row_bytes,
            "pages": room.groups[0].pages,
            "pages_expected": pages,
        }
    return found | {"ratio": found["int8"]["texts"] / found["fp16"]["texts"]}
