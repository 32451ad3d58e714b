"""The first tokens in full, and the newest ones in rings too: against the policy, in memory, and what is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor.utils import fresh_cache

import kvcompile
from kvcompile.api import build
from kvcompile.errors import PlanError, RecipeError, VerificationError
from kvcompile.kernels.oracle import quantize
from kvcompile.kernels.reference import codec, residual
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import (
    CacheLayout,
    Contiguous,
    Full,
    InKeys,
    Ring,
    SinkWindow,
    Window,
    fp8,
    int8,
    model_dtype,
    per_channel,
    uint,
    with_hadamard,
    with_residual,
)
from kvcompile.layouts import symbols as sy
from kvcompile.pipeline import plan_for
from kvcompile.recipe import Recipe
from kvcompile.specs import RotaryForm
from kvcompile.verify import check_program, verify
from tests.kernels.reference.test_attention import check, rope_tables
from tests.kernels.reference.test_storage import CHUNKS, close, inputs
from tests.support.models import tiny_hf
from tests.support.policy import policy_attention
from tests.support.runner import run
from tests.verify.test_verify import fronts

SINKS: list[Any] = [
    with_residual(int8(), 0, 3),
    with_hadamard(with_residual(uint(2, 32), 0, 2)),
    with_residual(fp8(), 4, 3),
    with_hadamard(with_residual(uint(4), 5, 1)),
]
GROUPS: list[Any] = [per_channel(2, 4, 8, sinks=3), with_hadamard(per_channel(4, 3, 9, sinks=5))]
RECENT: list[Any] = [
    with_residual(uint(2, 32), 6),
    with_residual(fp8(), 3),
    with_hadamard(with_residual(int8(), 4)),
]
RINGS = [(Ring(), SinkWindow(3, 9)), (Ring(), SinkWindow(3, 8, "in_cache")), (Ring(), SinkWindow(5, 2))]
D = 64


# ---- what it is


@pytest.mark.parametrize("storage", [*SINKS, *GROUPS], ids=str)
def test_the_first_tokens_come_back_as_they_are_and_the_others_as_without(storage: Any) -> None:
    """The oracle itself: sinks in full, the rest rounded as if there were none."""
    x = torch.randn(2, 20, D, generator=torch.Generator().manual_seed(0))
    kept, plain = storage, replace(storage, sinks=0)
    older, without = (quantize.older_and_newest(s, x)[0] for s in (storage, plain))
    exact = (older - x).abs().amax(-1) <= 1e-6 * x.abs().amax()
    assert exact[:, : kept.sinks].all() and not exact[:, kept.sinks : 18].any()
    assert torch.equal(older[:, kept.sinks :], without[:, kept.sinks :])


@given(
    storage=st.sampled_from([*SINKS, *GROUPS]),
    slots=st.integers(1, 90),
    batch=st.integers(1, 4),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
)
def test_bytes_are_those_of_the_tensors(storage: Any, slots: int, batch: int, dtype: torch.dtype) -> None:
    layout = CacheLayout(storage, storage)
    buffers = layout.buffers(3, 64, 32, dtype, slots)
    real = sum(torch.empty((batch, *b.shape), dtype=b.dtype, device="meta").nbytes for b in buffers)
    values = {sy.B: batch, sy.T: slots, sy.H: 3, sy.D: 64, sy.Dv: 32, sy.P: dtype.itemsize}
    assert layout.bytes.subs(values) == real
    full = [b for b in buffers if b.name.endswith(".full")]
    assert [b.shape[1] for b in full] == [storage.sinks + storage.residual] * 2
    assert CacheLayout.from_json(layout.to_json()) == layout


# ---- the cached reference

PLACED = [(Contiguous(), Full()), (Contiguous(), SinkWindow(5, 6)), *RINGS]


@pytest.mark.few(2)
@pytest.mark.parametrize("placed", PLACED, ids=lambda p: f"{p[0]}-{p[1]}")
def test_any_chunks_equal_the_policy(placed: Any) -> None:
    """Sinks and recents, alone and together, for keys and for values, in every placement that takes them."""
    storages = [*SINKS, *RECENT, *([] if isinstance(placed[0], Ring) else GROUPS)]
    pairs = [*itertools.pairwise(storages), (SINKS[0], model_dtype()), (int8(), RECENT[0])]
    for keys, values in pairs:
        spec = SiteSpec(CacheLayout(keys, values, *placed), D**-0.5)
        for chunks in ([40], [1] * 20, [13, 1, 1, 20, 1, 4]):
            check(spec, chunks, [0, 9])


@settings(max_examples=60, deadline=None)
@given(
    keys=st.sampled_from([*SINKS, *RECENT, int8(), model_dtype()]),
    values=st.sampled_from([*SINKS, *RECENT, int8(), model_dtype()]),
    sinks=st.integers(0, 4),
    window=st.integers(1, 12),
    in_cache=st.booleans(),
    chunks=st.lists(st.integers(1, 15), min_size=1, max_size=5),
    padding=st.lists(st.integers(0, 8), min_size=1, max_size=3),
)
def test_any_ring(
    keys: Any, values: Any, sinks: int, window: int, in_cache: bool, chunks: Any, padding: Any
) -> None:
    """Also where the ring is smaller than what is in full, and forgets the sinks: wasteful, and still exact."""
    retention = SinkWindow(sinks, window, "in_cache" if in_cache else "original")
    while sum(chunks) > 40:
        chunks = chunks[:-1]
    padding = [min(pad, sum(chunks) - 1) for pad in padding]
    check(SiteSpec(CacheLayout(keys, values, Ring(), retention), D**-0.5), chunks, padding)


@pytest.mark.parametrize("storage", [*SINKS, *GROUPS, *RECENT], ids=str)
def test_values_in_the_keys(storage: Any) -> None:
    """MLA's rows, contiguous and in a ring, after RoPE and before it."""
    args, pads = inputs(2, k_dim=D, v_dim=40, heads=1), torch.tensor([0, 3])
    rope, form = rope_tables(64, 8), RotaryForm("half", 48, 8)
    placed = [(Contiguous(), Full())]
    if storage not in GROUPS:
        placed += [(Ring(), SinkWindow(3, 6)), (Ring(), SinkWindow(3, 6, "in_cache"))]
    for place in placed:
        layout = CacheLayout(storage, InKeys(40), *place)
        tables = rope if place[1].in_cache else []
        spec = SiteSpec(layout, 0.125, rotary=form if tables else None)
        wanted = policy_attention(*args, spec, tables, pads)
        for chunks in CHUNKS[1:]:
            close(run(spec, args, chunks, pads, tables).out, wanted, pads)


@pytest.mark.parametrize("storage", [SINKS[0], SINKS[2], with_hadamard(with_residual(int8(), 4, 3))], ids=str)
def test_every_head_may_keep_other_tokens_in_any_order(storage: Any) -> None:
    """Positions of keys [B, Hkv, T]: each head's slots are shuffled by themselves, and some hold nothing."""
    g = torch.Generator().manual_seed(3)
    batch, heads, group, tokens = 2, 3, 2, 30
    x, q = (torch.randn(batch, heads, n, D, generator=g) for n in (tokens, group))
    p = torch.rand(batch, heads, group, tokens, generator=g)
    order = torch.stack([torch.randperm(tokens, generator=g) for _ in range(batch * heads)])
    order = order.view(batch, heads, tokens)
    gone = (torch.rand(batch, heads, tokens, generator=g) < 0.3) & (order < tokens - storage.residual)
    positions = torch.where(gone, -1, order)
    length = torch.full((batch,), tokens)
    every = torch.arange(tokens).expand(batch, -1)
    parts = [
        torch.zeros(batch, heads, part.rows(tokens), *part.shape, dtype=part.dtype)
        for part in storage.parts(D, x.dtype)
    ]
    _, encoded = residual.settled(storage, x, parts, every)
    for part, new in zip(parts, encoded, strict=False):
        residual.overwrite(part, new, every, torch.ones(batch, tokens, dtype=torch.bool))
    residual.append(storage, x, parts, every, torch.zeros_like(length))
    own = [residual.take(part, order) for part in parts[:-1]] + parts[-1:]

    older, newest = quantize.older_and_newest(storage, x.flatten(0, 1))
    full = torch.arange(tokens) >= quantize.newest_from(storage, tokens)
    read = torch.where(full[:, None], newest, older).view_as(x).gather(2, order[..., None].expand_as(x))
    got = residual.decode(storage, own, positions, length, x.dtype)
    seen = positions >= 0
    assert torch.equal(got[seen], read[seen])
    plain = storage.without_hadamard  # what attention reads: turned vectors stay turned
    basis = codec.turned(storage, read) if storage.hadamard else read
    scores = residual.dot_keys(plain, q, own, positions, length)
    torch.testing.assert_close(
        scores[seen[:, :, None].expand_as(scores)],
        torch.einsum("bhgd,bhtd->bhgt", q, basis)[seen[:, :, None].expand_as(scores)],
        rtol=0,
        atol=1e-4,
    )
    p = p.masked_fill(~seen[:, :, None], 0)
    out = residual.weigh_values(plain, p, own, positions, length)
    torch.testing.assert_close(out, p @ basis, rtol=0, atol=1e-4)


# ---- what is refused


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (
            {"keys": {"dtype": "int8", "sinks": 4}, "retention": {"kind": "window", "size": 9}},
            "sinks: 4 keeps tokens in full that retention 'window 9' forgets: use a retention with as many sinks, "
            "or sinks: 0",
        ),
        (
            {
                "values": {"dtype": "int8", "sinks": 3},
                "retention": {"kind": "sink_window", "sinks": 2, "window": 9},
            },
            "sinks: 3 keeps tokens in full that retention 'sinks 2 + window 9' forgets",
        ),
        ({"keys": {"dtype": "bfloat16", "sinks": 1}}, "sinks is for quantized dtypes only, not for bfloat16"),
        ({"keys": {"sinks": 1}}, "sinks is for quantized dtypes only, not for model"),
        ({"keys": {"dtype": "int8", "sinks": -1}}, "cache.keys.sinks"),
        (
            {
                "keys": {"dtype": "int2", "axis": "channel", "group": 32, "residual": 32},
                "retention": {"kind": "window", "size": 8},
            },
            "axis: channel needs slots in the order of tokens: they settle in whole groups, and a ring takes slots "
            "back one by one; use placement 'contiguous', or axis: token",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(cache: dict[str, Any], reason: str) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.load({"cache": cache})
    assert reason in str(caught.value)


def test_a_window_that_is_all_in_full_is_refused() -> None:
    _, front = fronts("llama", "float32")
    cache = {"values": {"dtype": "int8", "residual": 9}, "retention": {"kind": "window", "size": 9}}
    with pytest.raises(
        PlanError, match=r"cache.values.residual: the last 9 tokens in full are all of the window's 9"
    ):
        plan_for(front, Recipe.load({"cache": cache}))
    cache["values"]["residual"] = 8  # type: ignore[index]
    assert plan_for(front, Recipe.load({"cache": cache})).bounded


# ---- whole models

MIXED: dict[str, dict[str, Any]] = {
    "sinks": {"keys": {"dtype": "int4", "sinks": 4}, "values": {"dtype": "fp8_e4m3", "sinks": 2}},
    "sinks and recents in a ring": {
        "keys": {"dtype": "int4", "sinks": 4, "residual": 8},
        "values": {"dtype": "int4", "residual": 6, "rotate": "hadamard"},
        "retention": {"kind": "sink_window", "sinks": 4, "window": 20},
    },
    "recents in a ring, before RoPE": {
        "keys": {"dtype": "int4", "residual": 8, "rotate": "hadamard", "sinks": 2},
        "values": {"dtype": "int2", "residual": 6},
        "retention": {"kind": "sink_window", "sinks": 4, "window": 20, "positions": "in_cache"},
    },
    "KIVI with sinks": {
        "keys": {"dtype": "int2", "axis": "channel", "group": 32, "residual": 32, "sinks": 4},
        "values": {"dtype": "int2", "residual": 32, "sinks": 4},
    },
}


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("what", MIXED)
def test_models_are_verified_and_take_the_memory_that_was_told(what: str, dtype: str) -> None:
    model, front = fronts("llama", dtype)
    recipe = {"cache": MIXED[what], "runtime": {"max_tokens": 80}}
    fast = build(model, front, Recipe.load(recipe, compile={"mode": "none"}))
    for result in verify(model, front, fast.plan, "thorough"):
        assert result.error < result.budget / 2, str(result)
    fast(torch.randint(3, 61, (2, 30)))
    assert fast.cache.nbytes == fast.plan.bytes(2)
    assert kvcompile.estimate(fast, batch=2, tokens=80).bytes == fast.cache.nbytes


def _one_sink_less(inner: Any) -> Any:
    return lambda storage, positions: inner(storage, positions) & (positions + 1 < storage.sinks)


def _next_row(inner: Any) -> Any:
    return lambda storage, positions: inner(storage, positions + 1)


@pytest.mark.parametrize(
    ("name", "breaks", "what"),
    [
        ("_is_sink", _one_sink_less, "sinks"),
        ("row_of", _next_row, "sinks and recents in a ring"),
        ("_places", lambda inner: lambda *args: inner(*args).roll(1, -1), "sinks and recents in a ring"),
    ],
)
def test_broken_on_purpose(monkeypatch: pytest.MonkeyPatch, name: str, breaks: Any, what: str) -> None:
    model, front = fronts("llama", "float32")
    recipe = {"cache": MIXED[what], "compile": {"kernels": "reference"}}  # which is broken below
    plan = plan_for(front, Recipe.load(recipe, max_tokens=64))
    monkeypatch.setattr(residual, name, breaks(getattr(residual, name)))
    with pytest.raises(VerificationError, match="layer 0"):
        verify(model, front, plan, "quick")


CONTIGUOUS: dict[str, Any] = {"dtype": "int8", "sinks": 4, "residual": 8}


# In a contiguous cache of few tokens, the rows in full stand beyond the columns that are in use.
@pytest.mark.parametrize(
    ("cache", "tokens"),
    [(MIXED["sinks and recents in a ring"], 40), ({"keys": CONTIGUOUS, "values": CONTIGUOUS}, 6)],
)
def test_rows_of_a_beam_change_places(cache: dict[str, Any], tokens: int) -> None:
    model = tiny_hf("llama", hidden_size=192, head_dim=32)
    recipe = {"cache": cache, "verify": "off", "compile": {"mode": "none"}}
    made: list[Any] = [kvcompile.optimize(model, recipe, max_tokens=64) for _ in range(2)]
    ids = torch.randint(3, 61, (3, tokens), generator=torch.Generator().manual_seed(0))
    order = torch.tensor([2, 0, 0])
    made[0](ids)
    made[1](ids[order])
    made[0].cache.reorder(order)
    for step in range(3):
        got, wanted = (fast(torch.full((3, 1), 5 + step)).logits for fast in made)
        assert (got - wanted).abs().max() <= 64 * torch.finfo(got.dtype).eps * wanted.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["sinks", "sinks and recents in a ring"])
def test_compiled_programs_equal_the_policy(what: str) -> None:
    model, front = fronts("llama", "float32")
    with fresh_cache():
        fast = build(model, front, Recipe.load({"cache": MIXED[what]}, max_tokens=120, verify="off"))
        chunks = (29, 1, 1, 1, 1, 9, 1, 40, 1)
        check_program(lambda ids, mask: fast(ids, mask).logits, front, fast.plan, chunks)


def test_a_sink_makes_the_difference_it_is_for() -> None:
    """A first token with a large channel: int2 of the others alone is far closer."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, 20, D, generator=g)
    x[:, 0] *= 30

    def error(storage: Any) -> Tensor:
        return (quantize.older_and_newest(storage, x)[0] - x).norm()

    assert error(with_residual(uint(2, 32), 0, 1)) < 0.2 * error(uint(2, 32))


def test_a_window_needs_no_sinks() -> None:
    assert CacheLayout(RECENT[0], RECENT[1], Ring(), Window(9)).check() is None
