"""Verification catches a rewrite or a kernel that is broken on purpose, names the layer, and passes healthy ones.

Errors of healthy rewrites as a part of their budget, quick, tiny Llama of three layers:

| dtype | detection | baseline, paged | int8, paged_int8 | int4 | fp8 | kivi2 | kivi4 | streaming | streaming_int8 |
|---|---|---|---|---|---|---|---|---|---|
| float32 | 0.04 | 0.05 | 0.00 | 0.00 | 0.00 | 0.00 | 0.00 | 0.05 | 0.00 |
| bfloat16 | 0.16 | 0.15 | 0.14 | 0.15 | 0.17 | 0.17 | 0.16 | 0.13 | 0.14 |
| float16 | 0.16 | 0.15 | 0.18 | 0.28 | 0.16 | 0.13 | 0.27 | 0.14 | 0.14 |
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import kvcompile
from kvcompile import pipeline
from kvcompile.errors import VerificationError
from kvcompile.kernels.ops import cached_attention as ops
from kvcompile.kernels.reference import attend_one, codec, paged, residual, score_sums, slots, visibility
from kvcompile.kernels.reference.retention import by_score
from kvcompile.layouts import Ring
from kvcompile.layouts import symbols as sy
from kvcompile.pipeline import Front, plan_for, understand
from kvcompile.recipe import Recipe
from kvcompile.verify import Check, verify
from tests.support.marks import cases
from tests.support.models import NanoGPT, TinyConfig, TinyLlama, make, tiny_hf

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RECIPES: dict[str, dict[str, Any]] = {
    "baseline": {"max_tokens": 64},
    "int8": {"max_tokens": 64},
    "int4": {"max_tokens": 64, "cache": {"keys": {"group": 0}, "values": {"group": 0}}},
    "fp8": {"max_tokens": 64},
    "kivi2": {"max_tokens": 64, "cache": {"values": {"group": 0}}},
    "kivi4": {"max_tokens": 64, "cache": {"values": {"group": 0}}},
    "streaming": {},
    "streaming_int8": {},
    "paged": {"max_tokens": 64},
    "paged_int8": {"max_tokens": 64},
    "h2o": {"max_tokens": 64, "cache": {"retention": {"heavy": 8, "recent": 9}}},
    "h2o_int8": {},
    "sinks_h2o_fp8": {"max_tokens": 64},
    "snapkv": {},
    "long_context": {"max_tokens": 64, "prefill_chunk": 16, "cache": {"retention": {"recent": 9}}},
}


_SHARPER = 1.5  # standard deviation of q and k


@lru_cache
def fronts(kind: str, dtype: str) -> tuple[nn.Module, Front]:
    models: dict[str, Callable[[], nn.Module]] = {
        "llama": lambda: tiny_hf("llama", layers=3),
        "mistral": lambda: tiny_hf("mistral", layers=3),
        "nanogpt": lambda: make(NanoGPT, TinyConfig(num_layers=3)),
        "tinyllama": lambda: make(TinyLlama, TinyConfig(num_layers=3)),
    }
    model = models[kind]()
    # Random weights attend to all tokens alike, and hide what mixes them up: make the scores matter.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("q_proj.weight", "k_proj.weight", "c_attn.weight")):
                parameter.mul_(_SHARPER / (parameter.std() * parameter.shape[-1] ** 0.5))
    model.to(DTYPES[dtype])
    return model, understand(model)


def check(
    recipe: str, kind: str = "llama", dtype: str = "float32", mode: Any = "quick", run_by: str = "reference"
) -> tuple[Check, ...]:
    """What is broken here is the reference, or what only it asks of the graph."""
    model, front = fronts(kind, dtype)
    kernels = {"kernels": run_by}
    return verify(
        model, front, plan_for(front, Recipe.load(recipe, **RECIPES[recipe], compile=kernels)), mode
    )


@lru_cache
def healthy(recipe: str, kind: str, dtype: str) -> tuple[Check, ...]:
    """What is measured where nothing is broken, once for all tests: ask for it before anything is."""
    return check(recipe, kind, dtype)


@pytest.mark.few(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_healthy_ones_pass_well_under_their_budget(recipe: str, dtype: str) -> None:
    for result in healthy(recipe, "llama", dtype):
        assert result.error < result.budget / 2, str(result)


@pytest.mark.parametrize(
    "recipe", ["int8", *(pytest.param(r, marks=pytest.mark.slow) for r in RECIPES if r != "int8")]
)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_kernels_for_cpus_pass_as_well(recipe: str, dtype: str) -> None:
    for result in check(recipe, dtype=dtype, run_by="cpp"):
        assert result.error < result.budget / 2, str(result)


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ["mistral", "nanogpt", "tinyllama"])
def test_other_models_pass(kind: str) -> None:
    for result in healthy("baseline", kind, "float32"):
        assert result.error < result.budget / 2, str(result)


@pytest.mark.parametrize("slots", cases((132, 1024), (132,)))
def test_thorough_passes_and_measures_more(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        RECIPES, "streaming_int8", {"cache": {"retention": {"sinks": 4, "window": slots - 4}}}
    )
    quick, thorough = (check("streaming_int8", mode=mode) for mode in ("quick", "thorough"))
    assert len(thorough) > len(quick) and {c.name for c in quick} < {c.name for c in thorough}
    assert max(c.tokens for c in thorough) > slots  # the plan's own ring is full
    assert check("baseline", mode="off") == ()


Patch = Callable[[pytest.MonkeyPatch], None]


def _attribute(owner: Any, name: str, make_new: Callable[[Any], Any]) -> Patch:
    return lambda patch: patch.setattr(owner, name, make_new(getattr(owner, name)))


def _graph(change: Callable[[GraphModule, list[Node]], None]) -> Patch:
    """Change every rewritten graph; the second argument has the attention nodes."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        inner = pipeline.insert_cache

        def broken(*args: Any) -> Any:
            rewritten = inner(*args)
            module = rewritten.graph_module
            change(module, [n for n in module.graph.nodes if n.target is ops.cached_attention])
            module.recompile()
            return rewritten

        patch.setattr(pipeline, "insert_cache", broken)

    return apply


def _at(node: Node, index: int, value: Any) -> None:
    node.args = (*node.args[:index], value, *node.args[index + 1 :])


def _spec(node: Node, **changes: Any) -> None:
    _at(node, len(node.args) - 1, json.dumps(json.loads(node.args[-1]) | changes, sort_keys=True))


def _blind_to_itself(visible: Any) -> Any:
    return lambda query, key, spec: visible(query, key, spec) & ((key < query) | (query <= 0))


def _sees_the_next(visible: Any) -> Any:
    return lambda query, key, spec: visible(query + 1, key, spec)


def _window_one_short(visible: Any) -> Any:
    def short(query: Tensor, key: Tensor, spec: Any) -> Tensor:
        retention = spec.layout.retention
        oldest = (key == query - retention.window + 1) & (key >= retention.sinks)
        return visible(query, key, spec) & ~oldest

    return short


def _sinks_forgotten(visible: Any) -> Any:
    return lambda query, key, spec: (
        visible(query, key, spec) & ((key > query - spec.layout.retention.window) | (query < 0))
    )


def _padding_seen(visible: Any) -> Any:
    return lambda query, key, spec: visible(query, key, spec) | (key < 0)


def _next_slot(address: Any) -> Any:
    return lambda ring, retention: address(ring, retention).subs(sy.pos, sy.pos + 1)


def _q_one_place_on(rotate: Any) -> Any:
    """In a decode step only, where q is one token and the keys are many."""

    def broken(x: Tensor, positions: Tensor, *tables: Tensor, form: Any) -> Tensor:
        return rotate(x, positions + (x.shape[2] == 1), *tables, form=form)

    return broken


def _last_token_lost(write: Any) -> Any:
    def broken(x: Any, slot: Tensor) -> None:
        if x.k.shape[2] > 1:  # the last of a chunk is written as the one before it
            k, v = (torch.cat([new[:, :, :-1], new[:, :, -2:-1]], dim=2) for new in (x.k, x.v))
            x = replace(x, k=k, v=v)
        write(x, slot)

    return broken


def _last_row_twice(take: Any) -> Any:
    """The last row that is taken is the one before it."""
    return lambda x, index: take(x, torch.cat([index[:, :-1], index[:, -2:-1]], dim=1))


def _offset_one_on(module: GraphModule, sites: list[Node]) -> None:
    """Positions after the first chunk are one too large."""
    past = next(n for n in module.graph.nodes if n.name == "past_length")
    with module.graph.inserting_after(past):
        later = module.graph.call_function(torch.ops.aten.gt.Scalar, (past, 0))
    with module.graph.inserting_after(later):
        wrong = module.graph.call_function(torch.ops.aten.add.Tensor, (past, later))
    past.replace_all_uses_with(wrong, delete_user_cb=lambda user: user not in (later, wrong))


def _positions_late(module: GraphModule, sites: list[Node]) -> None:
    """position_ids, where the model takes them, are one too small from the second token of a chunk on."""
    node = next(n for n in module.graph.nodes if n.name == "position_ids")
    with module.graph.inserting_after(node):
        wrong = module.graph.call_function(_late, (node,))
    node.replace_all_uses_with(wrong, delete_user_cb=lambda user: user is not wrong)


def _late(positions: Tensor) -> Tensor:
    return torch.cat([positions[:, :1], (positions[:, 1:] - 1).clamp(min=0)], dim=1)


def _swap_k_and_v(module: GraphModule, sites: list[Node]) -> None:
    k, v = sites[1].args[1:3]
    _at(sites[1], 1, v)
    _at(sites[1], 2, k)


def _heads_mixed(module: GraphModule, sites: list[Node]) -> None:
    """K of one layer has its heads in another order than V."""
    with module.graph.inserting_before(sites[2]):
        flipped = module.graph.call_function(torch.ops.aten.flip.default, (sites[2].args[1], [1]))
    _at(sites[2], 1, flipped)


def _first_table(inner: Any) -> Any:
    return lambda table, rows, size: inner(table[:1].expand_as(table), rows, size)


def _next_page(inner: Any) -> Any:
    return lambda pool, table, rows: inner(pool, table.roll(1, 1), rows)


def _no_table(inner: Any) -> Any:
    """Pages in the order of their place in the table, as if no other sequence had any."""
    return lambda table, rows, size: inner(torch.arange(table.shape[1]).expand_as(table), rows, size)


def _worst_stay(staying: Any) -> Any:
    return lambda tokens, scores, *rest: staying(tokens, -scores, *rest)


def _one_recent_less(staying: Any) -> Any:
    def broken(tokens: Tensor, scores: Tensor, last: Tensor, slots: int, retention: Any) -> Tensor:
        fewer = replace(retention, recent=retention.recent - 1)
        return staying(tokens, scores, last, slots, fewer)

    return broken


def _others_rows(take: Any) -> Any:
    return lambda old, new, index: take(old, new, index.roll(1, -1))


# what is broken: (how, recipe, model, the layer that differs first; None: any)
BROKEN: dict[str, tuple[Patch, str, str, int | None]] = {
    "a query does not see itself": (
        _attribute(visibility, "visible", _blind_to_itself),
        "baseline",
        "llama",
        0,
    ),
    "a query sees the next": (_attribute(visibility, "visible", _sees_the_next), "baseline", "llama", 0),
    "window one short": (_attribute(visibility, "visible", _window_one_short), "streaming", "llama", 0),
    "own window one short": (_attribute(visibility, "visible", _window_one_short), "baseline", "mistral", 0),
    "sinks are forgotten": (_attribute(visibility, "visible", _sinks_forgotten), "streaming", "llama", 0),
    "padding is seen": (_attribute(visibility, "visible", _padding_seen), "baseline", "llama", 0),
    "the next slot of the ring": (_attribute(Ring, "address", _next_slot), "streaming", "llama", 0),
    "the next slot, int8": (_attribute(Ring, "address", _next_slot), "streaming_int8", "llama", 0),
    "a token is not appended": (_attribute(slots, "write", _last_token_lost), "baseline", "llama", 0),
    "a place in the cache off by one": (
        _attribute(attend_one, "rotate", _q_one_place_on),
        "streaming",
        "llama",
        0,
    ),
    "K's scale is dropped": (
        _attribute(codec, "dot_keys", lambda inner: lambda storage, q, parts: codec._dot(q, parts[0])),
        "int8",
        "llama",
        0,
    ),
    "V's scale is dropped": (
        _attribute(codec, "weigh_values", lambda inner: lambda storage, p, parts: codec._weigh(p, parts[0])),
        "int8",
        "llama",
        0,
    ),
    "tokens settle one step late": (
        _attribute(
            residual, "in_full_from", lambda inner: lambda storage, length: inner(storage, length - 1)
        ),
        "kivi2",
        "llama",
        0,
    ),
    "a group ends one token early": (_attribute(residual, "take", _last_row_twice), "kivi4", "llama", 0),
    "two sequences have one's pages": (_attribute(paged, "located", _first_table), "paged", "llama", 0),
    "a page is read for the next": (_attribute(paged, "read", _next_page), "paged", "llama", 0),
    "the table is not read": (_attribute(paged, "located", _no_table), "paged_int8", "mistral", 0),
    "what matters most goes": (_attribute(by_score, "chosen", _worst_stay), "h2o", "llama", 0),
    "a recent token goes": (_attribute(by_score, "chosen", _one_recent_less), "h2o_int8", "llama", 0),
    "a step leaves no score": (
        _attribute(
            score_sums, "pooled", lambda inner: lambda p, retention: inner(p, retention) * (p.dim() > 4)
        ),
        "h2o",
        "llama",
        0,
    ),
    "a token's vectors are another's": (_attribute(by_score, "_take", _others_rows), "snapkv", "llama", 0),
    "the offset is off by one, learned": (_graph(_offset_one_on), "baseline", "nanogpt", 0),
    "the offset is off by one, RoPE": (_graph(_offset_one_on), "baseline", "tinyllama", 0),
    "position_ids off by one": (_graph(_positions_late), "baseline", "llama", 0),
    "scale of a layer": (_graph(lambda m, sites: _spec(sites[1], sm_scale=0.25)), "baseline", "llama", 1),
    "window of a layer": (
        _graph(lambda m, sites: _spec(sites[2], mask={"kind": "sliding", "window": 9})),
        "baseline",
        "llama",
        2,
    ),
    "K and V of a layer swapped": (_graph(_swap_k_and_v), "baseline", "llama", 1),
    "heads of a layer mixed": (_graph(_heads_mixed), "int8", "llama", 2),
    "a layer writes into another's cache": (
        _graph(lambda m, sites: _at(sites[2], 3, sites[1].args[3])),
        "baseline",
        "llama",
        1,
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("what", BROKEN)
def test_broken_on_purpose(monkeypatch: pytest.MonkeyPatch, what: str, dtype: str) -> None:
    breaks, recipe, kind, layer = BROKEN[what]
    healthy(recipe, kind, dtype)
    breaks(monkeypatch)
    with pytest.raises(VerificationError) as caught:
        check(recipe, kind, dtype)
    assert caught.value.layer == layer and caught.value.error > 0
    _, front = fronts(kind, dtype)
    site = front.sites[layer or 0]
    assert f"layer {layer} ({site.module_path}, {site.source}" in str(caught.value)


def test_optimize_returns_nothing_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    _graph(_swap_k_and_v)(monkeypatch)
    model = tiny_hf("llama", layers=3)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(VerificationError, match="layer 1"):
        kvcompile.optimize(model, "int8", max_tokens=64, compile={"mode": "none"})
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_a_mask_read_wrongly_is_seen_against_the_original() -> None:
    """Detection is checked against the model itself: a causal site taken for a sliding one."""
    model, front = fronts("llama", "float32")
    wrong = replace(front.sites[1], mask=replace(front.sites[1].mask, kind="sliding", window=5))
    plan = plan_for(
        replace(front, sites=(front.sites[0], wrong, front.sites[2])), Recipe.load("baseline", max_tokens=64)
    )
    with pytest.raises(VerificationError, match="detection"):
        verify(model, front, plan, "quick")
