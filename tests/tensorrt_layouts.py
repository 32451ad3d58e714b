"""Layouts as real TensorRT engines, whose graphs, with an engine's bindings, give the numbers of the eager model.

The engines are built by TensorRT for RTX, which needs no GPU for it. Running them does: here the graphs that they were
built from run on ONNX Runtime, called through `Engine` by execution contexts that take what the real ones do
(`tests/tensorrt_fake.py`).
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import kvcompile
from kvcompile.artifact.manifest import Manifest
from kvcompile.emit.tensorrt import Options, Sizes, adapter, build
from kvcompile.runtime.tensorrt import Engine
from tests.models import tiny_hf
from tests.tensorrt_fake import Fake

_MODEL = {"dtype": "model"}


def _both(
    retention: dict[str, Any], placement: dict[str, Any] | None = None, **storage: Any
) -> dict[str, Any]:
    side = storage or _MODEL
    cache = {"keys": side, "values": side, "retention": retention}
    return cache if placement is None else {**cache, "placement": placement}


_FULL: dict[str, Any] = {"kind": "full"}
_RING = {"kind": "ring"}
_SLOTS = {"kind": "slots"}
_PAGES = {"kind": "paged", "page_size": 16}
_SINK = {"kind": "sink_window", "sinks": 4, "window": 12}
LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": _both(_FULL),
    "window": _both({"kind": "window", "size": 16}, _RING),
    "sink_window": _both({**_SINK, "positions": "original"}, _RING),
    "streaming": _both({**_SINK, "positions": "in_cache"}, _RING),
    "int8": _both(_FULL, dtype="int8"),
    "int8_window": _both({"kind": "window", "size": 16}, _RING, dtype="int8"),
    "fp8": _both(_FULL, dtype="fp8_e4m3"),
    "int4": _both(_FULL, dtype="int4", group=32),
    "kivi2": {
        "keys": {"dtype": "int2", "axis": "channel", "group": 32, "residual": 32},
        "values": {"dtype": "int2", "group": 32, "residual": 32},
        "retention": _FULL,
    },
    "kivi4": {
        "keys": {"dtype": "int4", "axis": "channel", "group": 32, "residual": 32},
        "values": {"dtype": "int4", "group": 32, "residual": 32},
        "retention": _FULL,
    },
    "paged": _both(_FULL, _PAGES),
    "paged_int8": _both(_FULL, _PAGES, dtype="int8"),
    "h2o": _both({"kind": "h2o", "sinks": 4, "heavy": 8, "recent": 8}, _SLOTS),
    "tova": _both({"kind": "tova", "budget": 16}, _SLOTS),
    "snapkv": _both({"kind": "snapkv", "heavy": 16, "recent": 8, "rows": 4}, _SLOTS),
    "long_context": _both(
        {"kind": "h2o", "sinks": 4, "heavy": 0.2, "recent": 16, "prefill": "bounded"}, _PAGES, dtype="int8"
    ),
}
LIMITS = {"max_tokens": 96, "max_batch": 3, "prefill_chunk": 16}
# The caches that an engine updates in place: floating, [B, H, T, D], a row per token, in the order of tokens.
IN_PLACE = {
    "contiguous": {"keys_data", "values_data"},
    "int4": {"keys_scale", "keys_minimum", "values_scale", "values_minimum"},
    "kivi2": {"values_scale", "values_minimum"},
    "kivi4": {"values_scale", "values_minimum"},
}
SCORED = ("h2o", "tova", "snapkv", "long_context")
# The same sums in another order: of fp16 numbers below 1, and of codes that may round to the next step.
TOLERANCE = {"fp8": 2e-2, "int4": 2e-2, "kivi2": 4e-2, "kivi4": 2e-2, "int8": 4e-3}


def small_model(dtype: torch.dtype) -> nn.Module:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    return tiny_hf(layers=1, **sizes).to(dtype)


@lru_cache(maxsize=1)
def installed() -> adapter.TensorRT:
    return adapter.load(("tensorrt_rtx_bindings",))


def export(folder: Path, layout: str, dtype: torch.dtype, targets: tuple[str, ...] = ()) -> Manifest:
    recipe = {"name": layout, "cache": LAYOUTS[layout]}
    return kvcompile.export(
        small_model(dtype),
        folder,
        "tensorrt",
        recipe=recipe,
        verify="off",
        options={"compute_capabilities": targets, "package": "tensorrt_rtx_bindings"},
        **LIMITS,
    )


def check_layout(layout: str, folder: Path) -> None:
    """Build the layout's engines for all GPUs and for one, and run them as far as that can be."""
    manifest = export(folder, layout, torch.float16)
    phases = [graph.phase for graph in manifest.graphs]
    assert phases == (["prefill", "decode"] if layout in SCORED else ["step"])
    for graph in manifest.graphs:
        assert (folder / graph.file).stat().st_size > 100_000
        in_place = {alias.input.split("_", 2)[2] for alias in graph.aliases if alias.in_place}
        assert in_place == IN_PLACE.get(layout, set())
    built_again_for(folder, manifest, "SM89")
    same_as_eager(folder, layout)


def built_again_for(folder: Path, manifest: Manifest, target: str) -> None:
    """An engine for one GPU, of the same graph: no larger than one for all of them."""
    for graph in manifest.graphs:
        size = (folder / graph.file).stat().st_size
        onnx_file = folder / graph.file.replace(".engine", ".onnx")
        other = onnx_file.with_name(f"{target}_{onnx_file.name}")
        other.write_bytes(onnx_file.read_bytes())
        profile = graph.profiles[-1].shapes
        pages = {p.dimension: profile[p.caches[0]].max[0] for p in manifest.pages}
        sizes = Sizes(LIMITS["max_batch"], profile["input_ids"].max[1], manifest.slots, pages)
        built = build(installed(), other, graph, sizes, Options((target,)))
        assert 0 < built.bytes <= size
        assert built.graph.profiles == graph.profiles and built.graph.aliases == graph.aliases
        other.with_suffix(".engine").unlink()
        other.unlink()


def same_as_eager(folder: Path, layout: str) -> None:
    fake = Fake(folder)
    engine = Engine(folder, device="cpu", trt=fake.trt, gpu=fake.gpu)
    recipe = {"name": layout, "cache": LAYOUTS[layout], "compile": {"mode": "none"}}
    eager = kvcompile.optimize(small_model(torch.float16), recipe=recipe, verify="off", **LIMITS)
    tolerance = TOLERANCE.get(layout, 2e-3)
    generator = torch.Generator().manual_seed(0)

    def tokens(batch: int, count: int) -> torch.Tensor:
        return torch.randint(3, 60, (batch, count), generator=generator)

    with torch.no_grad():
        # Left padding in a prompt of more than one chunk; one token alone; and a chunk that comes after decode steps.
        for batch, count, pads, more in ((3, 21, (7, 1, 0), 0), (1, 1, (0,), 0), (2, 9, (0, 0), 11)):
            engine.reset()
            eager.reset()
            mask = (torch.arange(count) >= torch.tensor(pads)[:, None]).long()
            ids = tokens(batch, count)
            got = engine.prefill(ids, mask if max(pads) else None, keep=None)
            want = eager(ids, attention_mask=mask if max(pads) else None).logits
            assert torch.allclose(got[mask.bool()], want[mask.bool()], atol=tolerance)
            for _ in range(30):
                ids = tokens(batch, 1)
                assert torch.allclose(engine.decode(ids), eager(ids).logits, atol=tolerance)
            if more:
                ids = tokens(batch, more)
                assert torch.allclose(engine.prefill(ids, keep=None), eager(ids).logits, atol=tolerance)
