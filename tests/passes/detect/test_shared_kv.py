"""Layers that read another layer's keys and values: one cache, several readers, whatever the layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kvcompile
from kvcompile.compile.regions import cut
from kvcompile.errors import PlanError
from kvcompile.kernels.ops import cached_attention as ops
from kvcompile.pipeline import plan_for, rewrite, understand
from kvcompile.recipe import Recipe
from tests.support.models import TinyConfig, TinyLlama, make

HEADS, KV_HEADS, DIM = 4, 2, 8


class CrossLayer(nn.Module):
    """Cross-layer attention: layers 0 and 1 make keys and values, 2, 3 and 4 read those of 0, 1 and 0.

    window: what layers 0, 2 and 4 see. parallel: the last layer reads the embedding, so it waits for no other.
    """

    frequencies: Tensor

    def __init__(self, window: int = 6, parallel: bool = False):
        super().__init__()
        torch.manual_seed(0)
        width = HEADS * DIM
        self.window, self.parallel = window, parallel
        self.embed, self.head = nn.Embedding(61, width), nn.Linear(width, 61)
        self.q = nn.ModuleList(nn.Linear(width, width) for _ in range(5))
        self.kv = nn.ModuleList(nn.Linear(width, 2 * KV_HEADS * DIM) for _ in range(2))
        self.register_buffer("frequencies", 0.4 / 80 ** (torch.arange(DIM // 2) / (DIM // 2)))

    def turn(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[2])[:, None] * self.frequencies
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def forward(self, input_ids: Tensor) -> Tensor:
        batch, size = input_ids.shape
        start = x = self.embed(input_ids)
        distance = torch.arange(size)[:, None] - torch.arange(size)
        masks = [(distance >= 0) & (distance < self.window), distance >= 0]
        kept: list[tuple[Tensor, Tensor]] = []
        for layer, project in enumerate(self.q):
            source = start if self.parallel and layer == 4 else x
            if layer < 2:
                parts = self.kv[layer](source).view(batch, size, 2, KV_HEADS, DIM).unbind(2)
                k, v = (part.transpose(1, 2) for part in parts)
                kept.append((self.turn(k), v))
            k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in kept[layer % 2])
            q = self.turn(project(source).view(batch, size, HEADS, DIM).transpose(1, 2))
            y = F.scaled_dot_product_attention(q, k, v, masks[layer % 2])
            x = x + y.transpose(1, 2).reshape(batch, size, -1)
        return self.head(x)


SINKS = {"kind": "sink_window", "sinks": 2, "window": 30, "positions": "in_cache"}
RECIPES: dict[str, dict[str, Any]] = {
    # `exact` ones forget nothing that the model would read within 24 tokens
    "baseline": {"recipe": "baseline", "max_tokens": 64},
    "streaming": {"recipe": "streaming", "cache": {"retention": SINKS}},
}


def optimized(model: nn.Module, recipe: str, **more: Any) -> Any:
    return kvcompile.optimize(model, compile={"mode": "none"}, max_batch=2, recipe=recipe, **more)


def check(fast: Any, model: nn.Module) -> None:
    ids = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(2))
    fast.reset()
    found = torch.cat([fast(part) for part in ids.split([11, 1, 1, 7, 4], 1)], 1)
    torch.testing.assert_close(found, model(ids), rtol=1e-4, atol=1e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_readers_attend_to_one_cache(recipe: str, parallel: bool) -> None:
    """Windows of 6 wrap within a chunk of 7: a reader still finds what the chunk's own tokens overwrite."""
    model = CrossLayer(parallel=parallel).eval()
    fast = optimized(model, **RECIPES[recipe], verify="thorough")
    assert [d.kv_source for d in fast.plan.decisions] == [0, 1, 0, 1, 0]
    check(fast, model)
    whole = 64 if recipe == "baseline" else 32
    assert fast.cache.nbytes == 2 * (6 + whole) * 2 * KV_HEADS * DIM * 4
    assert fast.cache.nbytes == fast.plan.bytes(2)
    assert fast.plan.bytes_per_token == 2 * 2 * KV_HEADS * DIM * 4


def test_quantized() -> None:
    model = CrossLayer().eval()
    fast = optimized(model, "int8", max_tokens=64, verify="thorough")
    assert fast.plan.bytes_per_token == 2 * 2 * KV_HEADS * (DIM + 2)


def test_one_append_and_one_reader_each() -> None:
    """The first of a cache's sites appends before, the last one after; the others only read."""
    front = understand(CrossLayer().eval())
    plan = plan_for(front, Recipe.load("baseline", max_tokens=64))
    rewritten, _ = rewrite(front, plan)
    assert rewritten.caches[0] == rewritten.caches[2] == rewritten.caches[4] != rewritten.caches[1]
    graph = rewritten.graph_module.graph
    sites = [node for node in graph.nodes if node.target is ops.cached_attention]
    share = [next(s for s in ("first", "middle", "last") if f'"{s}"' in str(node.args[8])) for node in sites]
    assert share == ["first", "first", "middle", "last", "last"]
    assert len([node for node in graph.nodes if node.op == "placeholder" and "cache_" in node.name]) == 4


def test_sites_of_one_cache_keep_their_order_when_cut() -> None:
    """A site that waits for no other could run first, but for the cache that it shares."""
    front = understand(CrossLayer(parallel=True).eval())
    rewritten, _ = rewrite(front, plan_for(front, Recipe.load("baseline", max_tokens=64)))
    regions = cut(rewritten.graph_module, lambda node: node.target is ops.cached_attention)
    order = []
    for call in regions.calls:
        for node in regions.modules[call.region].graph.nodes:
            if node.target is ops.cached_attention:
                order.append(node.args[8])
    wanted = [n.args[8] for n in rewritten.graph_module.graph.nodes if n.target is ops.cached_attention]
    assert order == wanted


def test_the_readers_layout_is_the_owners() -> None:
    """A recipe cannot keep one cache in two ways; both layers are named."""
    layers = [{"where": {"index": 3}, "cache": {"keys": {"dtype": "int8"}}}]
    with pytest.raises(PlanError) as caught:
        optimized(CrossLayer().eval(), "baseline", max_tokens=64, layers=layers)
    assert "layer 3" in str(caught.value) and "reads the keys and values of layer 1" in str(caught.value)
    layers = [{"where": {"index": [1, 3]}, "cache": {"keys": {"dtype": "int8"}}}]
    assert optimized(CrossLayer().eval(), "baseline", max_tokens=64, layers=layers)


def test_explain_and_estimate_count_them_once() -> None:
    fast = optimized(CrossLayer().eval(), "baseline", max_tokens=64)
    text = kvcompile.explain(fast).render(full=True)
    assert "kept once for layers 0, 2, 4" in text and "reads the cache of layer 1" in text
    found = kvcompile.estimate(fast)
    assert found.bytes_per_token == fast.plan.bytes_per_token and found.bytes == fast.plan.bytes(1)


@pytest.mark.slow  # tests/coverage has it in every run
def test_a_transformers_model() -> None:
    """Gemma 3n: the last layers read the last layer of their own kind before them."""
    from tests.coverage.configs import tiny_model

    model = tiny_model("gemma3n_text")
    fast = kvcompile.optimize(model, max_tokens=64, max_batch=2, compile={"mode": "none"})
    assert [d.kv_source for d in fast.plan.decisions] == [0, 1, 0, 1]
    estimate = kvcompile.estimate(model.config, dtype="float32", max_tokens=64)
    assert estimate.bytes_per_token == fast.plan.bytes_per_token and estimate.bytes == fast.plan.bytes(1)
    assert not [note for note in estimate.notes if "own cache" in note]


def test_repeated_layers_share_nothing() -> None:
    class Twice(TinyLlama):
        def __init__(self) -> None:
            super().__init__(TinyConfig(num_layers=1))
            self.layers.append(self.layers[0])

    fast = optimized(make(Twice), "baseline", max_tokens=64)
    assert [d.owns for d in fast.plan.decisions] == [True, True]
