"""Layouts as real TensorRT engines, whose graphs, with an engine's bindings, are held against the oracle of the policy.

The engines are built by TensorRT for RTX, which needs no GPU for it. Running them does: here the graphs that they were
built from run on ONNX Runtime, called through `Engine` by execution contexts that take what the real ones do
(`tests/support/tensorrt_fake.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvcompile.recipe import Recipe
from kvcompile.targets.manifest import Manifest
from kvcompile.targets.source import Source
from kvcompile.targets.tensorrt import adapter
from kvcompile.targets.tensorrt.build import build
from kvcompile.targets.tensorrt.options import Options
from kvcompile.targets.tensorrt.profiles import Sizes
from kvcompile.targets.tensorrt.session import Engine
from kvcompile.targets.verify import CHUNKS, check_session
from tests.support.exports import SHIPPED, small, tiny, written
from tests.support.tensorrt_fake import Fake

_PLAIN = {"keys": {"dtype": "model"}, "values": {"dtype": "model"}}
_RING = {"placement": {"kind": "ring"}}
LIMITS: dict[str, Any] = {"max_tokens": 128, "max_batch": 3, "prefill_chunk": 16}
# Besides the shipped recipes.
OWN: dict[str, dict[str, Any]] = {
    "window": {**_PLAIN, **_RING, "retention": {"kind": "window", "size": 16}},
    "sink_window": {
        **_PLAIN,
        **_RING,
        "retention": {"kind": "sink_window", "sinks": 4, "window": 12, "positions": "original"},
    },
    "tova": {**_PLAIN, "placement": {"kind": "slots"}, "retention": {"kind": "tova", "budget": 16}},
}
# The caches that an engine updates in place: floating, [B, H, T, D], a row per token, in the order of tokens.
IN_PLACE = {
    "baseline": {"keys_data", "values_data"},
    "quest": {"keys_data", "values_data"},
    "nf4": {"keys_scale", "values_scale"},
    "int4": {"keys_scale", "keys_minimum", "values_scale", "values_minimum"},
    "kivi2": {"values_scale", "values_minimum"},
    "kivi4": {"values_scale", "values_minimum"},
}
PAGES = {"paged": [16], "paged_int8": [16], "chat": [32]}
SCORED = ("h2o", "h2o_int8", "sinks_h2o_fp8", "tova", "snapkv", "long_context")
PACKAGE = "tensorrt_rtx_bindings"


def recipe_of(layout: str) -> Recipe:
    if layout in SHIPPED:
        return small(layout, **LIMITS)
    return Recipe.load({"name": layout, "cache": OWN[layout], "verify": "off"}, **LIMITS)


def check_layout(layout: str, folder: Path) -> None:
    """Build the layout's engines for all GPUs and for one, and run them as far as that can be."""
    source = written(tiny(torch.float16, layers=1), folder, "tensorrt", recipe_of(layout), package=PACKAGE)
    manifest = Manifest.read(folder)
    phases = [graph.phase for graph in manifest.graphs]
    assert phases == (["prefill", "decode"] if layout in (*SCORED, "quest", "quest_int8") else ["step"])
    for graph in manifest.graphs:
        assert (folder / graph.file).stat().st_size > 100_000
        in_place = {alias.input.split("_", 2)[2] for alias in graph.aliases if alias.in_place}
        assert in_place == IN_PLACE.get(layout, set())
    assert [pages.page_size for pages in manifest.pages] == PAGES.get(layout, [])
    _build_again(folder, manifest, "SM89")
    check_bindings(folder, source)


def check_bindings(folder: Path, source: Source) -> None:
    """A ragged prompt in chunks, another chunk, and decode steps through `Engine`, against the oracle."""
    fake = Fake(folder)
    engine = Engine(folder, device="cpu", trt=fake.trt, gpu=fake.gpu)
    assert check_session(engine, source, CHUNKS).tokens == 52
    used = [context.profile.name for made in fake.engines for context in made.contexts if context.profile]
    assert sorted(used) == ["decode", "prefill"]


def check_bf16(layout: str, folder: Path) -> None:
    written(
        tiny(torch.bfloat16, layers=1),
        folder,
        "tensorrt",
        recipe_of(layout),
        package=PACKAGE,
        compute_capabilities=["SM89"],
    )
    manifest = Manifest.read(folder)
    assert manifest.engine is not None and manifest.engine["compute_capabilities"] == ["SM89"]
    assert manifest.graphs[0].outputs[0].dtype == "bfloat16"
    assert all((folder / graph.file).stat().st_size > 10_000 for graph in manifest.graphs)


def _build_again(folder: Path, manifest: Manifest, target: str) -> None:
    """An engine for one GPU, of the same graph: no larger than one for all of them."""
    trt = adapter.load((PACKAGE,))
    for graph in manifest.graphs:
        made_of = folder / f"{graph.phase}.onnx"
        other = folder / f"again_{graph.phase}.onnx"
        other.write_bytes(made_of.read_bytes())
        most = graph.profiles[-1].shapes
        pages = {p.dimension: most[p.caches[0]].max[0] for p in manifest.pages}
        sizes = Sizes(LIMITS["max_batch"], most["input_ids"].max[1], manifest.slots, pages)
        built = build(trt, other, graph, sizes, Options((target,)))
        assert 0 < built.bytes <= (folder / graph.file).stat().st_size
        assert built.graph.profiles == graph.profiles and built.graph.aliases == graph.aliases
        other.with_suffix(".engine").unlink()
        other.unlink()
