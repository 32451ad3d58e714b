"""Models over two devices of one process, beside the same on one: `python -m tests.support.over_devices LIBRARY`.

Prints what each case found, as one JSON object (of some parts alone, where they are named);
`tests/runtime/test_over_devices.py` says what it must be.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kvcompile
from kvcompile import api
from kvcompile.errors import KVCompileError
from kvcompile.pipeline import Front, understand
from kvcompile.recipe import Recipe
from kvcompile.runtime.module import CachedModel
from kvcompile.serve import Sampling
from kvcompile.serve.moves import Copy
from kvcompile.serve.rows import Rows
from tests.support import second_device
from tests.support.models import TinyLlama, make, tiny_hf
from tests.support.serving import Stepped

RECIPES: dict[str, Any] = {
    "baseline": "baseline",
    "int8": "int8",
    "paged": "paged",
    "h2o": {"name": "h2o", "cache": {"retention": {"kind": "h2o", "sinks": 1, "heavy": 4, "recent": 4}}},
    "sink window": {
        "name": "window",
        "cache": {
            "retention": {"kind": "sink_window", "sinks": 2, "window": 6},
            "placement": {"kind": "ring"},
        },
    },
}
OPTIONS: dict[str, Any] = {"max_tokens": 64, "max_batch": 2, "compile": {"mode": "none"}}
IDS = torch.arange(3, 12)[None]
NEW = 9
PAGES_OF_8 = {"kind": "paged", "page_size": 8}
MEMORY = {"paged": 18_000, "h2o": 16_500}  # bytes for an engine: less than all texts take
MAPS = {
    "llama": ("model.embed_tokens model.rotary_emb model.layers.0", "model.layers.1 model.norm lm_head"),
    "bloom": (
        "transformer.word_embeddings transformer.word_embeddings_layernorm transformer.h.0 lm_head",
        "transformer.h.1 transformer.ln_f",
    ),
    "gemma2": (
        "model.embed_tokens model.rotary_emb model.layers.0 lm_head",
        "model.layers.1 model.norm",
    ),
}


def tiny(kind: str) -> nn.Module:
    return tiny_hf(kind, attn="sdpa" if kind == "llama" else "eager")


def dispatched(kind: str) -> nn.Module:
    """As `from_pretrained(device_map=..)` puts a model's modules onto devices."""
    import accelerate

    places = {name: f"twin:{number}" for number, names in enumerate(MAPS[kind]) for name in names.split()}
    model: nn.Module = accelerate.dispatch_model(tiny(kind), places)
    return model


class TwoHalves(TinyLlama):
    """A hand-written decoder that moves its values itself."""

    def spread(self, places: tuple[torch.device, torch.device]) -> TwoHalves:
        self.to(places[0])
        half = len(self.layers) // 2
        for layer in (*self.layers[half:], self.norm, self.lm_head):
            layer.to(places[1])
        for number, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(partial(_move, places[number >= half]))
        self.norm.register_forward_pre_hook(partial(_move, places[1]))
        return self


def _move(device: torch.device, module: nn.Module, inputs: Any) -> Any:
    return tuple(value.to(device) if isinstance(value, Tensor) else value for value in inputs)


def placed(fast: CachedModel) -> dict[str, list[str]]:
    """The devices of each layer's buffers."""
    found: dict[str, set[str]] = {}
    for layer, names in zip(fast.plan.decisions, fast.program.caches, strict=True):
        found.setdefault(str(layer.layer), set()).update(
            str(fast.cache.buffers[name].device) for name in names
        )
    return {layer: sorted(devices) for layer, devices in found.items()}


class Pair:
    """A model on one device and the same over two, understood once for all recipes."""

    def __init__(self, one: nn.Module, two: nn.Module):
        self.models = (one, two)
        self.fronts: tuple[Front, ...] = (understand(one), understand(two))

    def built(self, recipe: object, **more: Any) -> list[Any]:
        checked = Recipe.load(recipe, **OPTIONS, **more)
        pairs = zip(self.models, self.fronts, strict=True)
        return [api.build(model, front, checked) for model, front in pairs]


def written(fast: Any, ids: Tensor = IDS, **more: Any) -> list[list[int]]:
    out: Tensor = fast.generate(ids.to(fast.device), max_new_tokens=NEW, do_sample=False, **more)
    return out.tolist()


def recipes(pair: Pair) -> dict[str, Any]:
    found = {}
    for name, recipe in RECIPES.items():
        one, two = pair.built(recipe)
        found[name] = {
            "same": written(one) == written(two),
            "placed": placed(two),
            "checks": len(two.report["checks"]),
            "digest": one.plan.digest() == two.plan.digest(),
            "bytes": two.plan.bytes_by_device(1) == two.cache.nbytes_by_device if name == "int8" else True,
        }
    return found


def moves(pair: Pair) -> dict[str, Any]:
    """What happens to a cache, and where its buffers stand afterwards."""
    found: dict[str, Any] = {}
    for recipe in ("int8", "paged"):
        one, two = pair.built(recipe)

        def after(
            what: str, do: Callable[[Any], Any], one: Any = one, two: Any = two, of: str = recipe
        ) -> None:
            found[f"{of}, {what}"] = {"same": do(one) == do(two), "placed": placed(two)}

        def forked(fast: Any) -> Any:
            fast(IDS.to(fast.device))
            fork = fast.handle.fork()
            ids = torch.tensor([[5]]).to(fast.device)
            logits = fast(ids, past_key_values=fork).logits[0, -1].argmax().item()
            fork.crop(5)
            again = fast(ids, past_key_values=fork).logits[0, -1].argmax().item()
            here = {str(buffer.device) for buffer in fork.cache.buffers.values()}
            return logits, again, len(here) == len(fast.cache.nbytes_by_device)

        def stored(fast: Any) -> Any:
            fast.reset()
            fast(IDS.to(fast.device))
            with tempfile.TemporaryDirectory() as folder:
                fast.handle.save(Path(folder) / "text")
                fast.release()
                fast.handle.load(Path(folder) / "text")
            return fast(torch.tensor([[5]]).to(fast.device)).logits[0, -1].argmax().item()

        after("reset", lambda fast: (fast.reset(), written(fast))[1])
        after("fork and crop", forked)
        after("save and load", stored)
        after("beams", lambda fast: (fast.reset(), written(fast, num_beams=2))[1])
        after("batch of two", lambda fast: (fast.reset(), written(fast, torch.cat([IDS, IDS + 7])))[1])
    one, two = pair.built("int8")
    with tempfile.TemporaryDirectory() as folder:
        two.save(Path(folder) / "module")
        again: Any = kvcompile.load(Path(folder) / "module")
    found["a saved module"] = {"same": written(again) == written(one), "placed": placed(again)}
    return found


def served(pair: Pair) -> dict[str, Any]:
    """An engine whose texts give up their pages for each other: by prefixes, a host tier and swapping."""
    prompts = [[first, *range(3, 20)] for first in (4, 5, 6, 7)]
    sampling = Sampling(max_tokens=8, ignore_eos=True)
    found: dict[str, Any] = {"paged, swapped": swapped(pair)}
    for name in ("paged", "h2o"):
        recipe, results, stats = RECIPES[name], [], []
        if name == "h2o":  # what scores keep cannot be computed again: such a text goes to the host
            kept = {"kind": "h2o", "sinks": 4, "heavy": 20, "recent": 8}
            recipe = {"name": name, "cache": {"retention": kept, "placement": PAGES_OF_8}}
        for fast in pair.built(recipe, serve={"host_memory": 1 << 20}):
            with Stepped(fast, memory=MEMORY[name]) as engine:
                answers = [engine.all(prompts, sampling) for _ in range(2)]
                results.append([answer.tokens for both in answers for answer in both])
                stats.append(engine.stats())
                devices = sorted({str(buffer.device) for buffer in engine._passes.rows.buffers.values()})
        kept = ("cached_tokens", "preemptions", "swapped_bytes", "host_bytes")
        counts = [{of: getattr(own, of) for of in kept} for own in stats]
        found[name] = {"same": results[0] == results[1], "devices": devices, "counts": counts}
    return found


def swapped(pair: Pair) -> dict[str, Any]:
    """A text's pages that went to the host and came back on others."""
    fast = pair.built("paged")[1]
    rows = Rows(fast.cache.shape, fast.device, 2, [6])
    for buffer in rows.buffers.values():
        buffer.copy_(torch.arange(buffer.numel()).view(buffer.shape))
    rows.place(7)
    state = rows.state(7, [[1, 2]])
    rows.restore(7, 20, [[4, 3]], state)
    again = rows.state(7, [[4, 3]])
    rows.copy_pages([Copy(0, 4, 5)])
    copied = rows.state(7, [[5, 3]])
    same = all(
        torch.equal(state[name], again[name]) and torch.equal(state[name], copied[name]) for name in state
    )
    return {"same": same, "devices": sorted({str(buffer.device) for buffer in rows.buffers.values()})}


def others(_: Pair) -> dict[str, Any]:
    found = {}
    for kind in ("bloom", "gemma2"):
        one, two = Pair(tiny(kind), dispatched(kind)).built("baseline")
        found[kind] = {"same": written(one) == written(two), "placed": placed(two)}
    places = (torch.device("twin", 0), torch.device("twin", 1))
    made: Any = make(TwoHalves)
    split: Any = make(TwoHalves)
    one, two = Pair(made, split.spread(places)).built("baseline")
    found["hand-written"] = {"same": written(one) == written(two), "placed": placed(two)}
    return found


def told(pair: Pair) -> dict[str, Any]:
    """What is said of devices, and what is refused."""
    split = pair.models[1]

    def refused(do: Callable[[], Any]) -> str:
        try:
            do()
        except KVCompileError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def graphs() -> None:
        api.build(split, pair.fronts[1], Recipe.load("baseline", compile={"mode": "cudagraphs"}))

    with tempfile.TemporaryDirectory() as folder:
        exported = refused(lambda: kvcompile.export(split, Path(folder) / "made", "onnx", max_tokens=64))
    return {
        "explain": str(kvcompile.explain(split, "int8", max_tokens=64)),
        "estimate": str(kvcompile.estimate(split, "int8", tokens=64)),
        "exported": exported,
        "parallel": refused(lambda: kvcompile.explain(split, "int8", parallel={"stages": 2})),
        "graphs": refused(graphs),
    }


PARTS: dict[str, Callable[[Pair], dict[str, Any]]] = {
    "recipes": recipes,
    "moves": moves,
    "served": served,
    "others": others,
    "told": told,
}


def main(library: str, *parts: str) -> None:
    torch.set_num_threads(1)
    second_device.register(Path(library))
    pair = Pair(tiny_hf("llama"), dispatched("llama"))
    print(json.dumps({part: PARTS[part](pair) for part in parts or PARTS}))


if __name__ == "__main__":
    main(*sys.argv[1:])
