"""Pages that a step reads (Quest): the choice, what is read, what is noted, in every storage and placement.

The oracle is a dictionary of tokens in float64 (`tests/support/dictionary.py`), which chooses pages for itself and is
then told which of nearly equal ones were read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import kvcompile
from kvcompile.errors import InputError, PlanError, RecipeError, VerificationError
from kvcompile.kernels.oracle.attention import attention
from kvcompile.kernels.oracle.selection import read_by
from kvcompile.kernels.reference import page_selection
from kvcompile.kernels.shared import page_summaries
from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.supports import unsupported
from kvcompile.layouts import (
    AllTokens,
    CacheLayout,
    Contiguous,
    InKeys,
    Paged,
    Ring,
    SinkWindow,
    Storage,
    TopPages,
    Window,
    fp8,
    int8,
    model_dtype,
    mxfp4,
    per_channel,
    uint,
    with_hadamard,
    with_residual,
)
from kvcompile.layouts.stepping import steps_back
from kvcompile.specs import BiasSpec, ScoreSpec
from tests.support import dictionary
from tests.support.models import tiny_hf
from tests.support.runner import run

HQ, HKV, D, DV, T = 4, 2, 32, 64, 40
EPS = torch.finfo(torch.float32).eps
STORAGES = (
    model_dtype(),
    fp8(),
    int8(),
    uint(4, 32),
    mxfp4(),
    with_hadamard(int8()),
    with_residual(int8(), 3),
    with_residual(uint(2), 4, sinks=2),
)
SCORES = (
    ScoreSpec(),
    ScoreSpec(softcap=4.0, sinks=True),
    ScoreSpec(bias=BiasSpec("alibi")),
    ScoreSpec(bias=BiasSpec("relative", T)),
)


def vectors(
    seed: int, total: int, heads: tuple[int, int] = (HQ, HKV), dims: tuple[int, int] = (D, DV)
) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    sizes = ((heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]))
    return [torch.randn(2, h, total, d, generator=g) for h, d in sizes]


@st.composite
def cases(draw: st.DrawFn) -> tuple[SiteSpec, list[int], int]:
    selection = TopPages(draw(st.integers(2, 7)), draw(st.integers(1, 5)))
    layout = CacheLayout(
        draw(st.sampled_from(STORAGES)),
        draw(st.sampled_from(STORAGES)),
        draw(st.sampled_from((Contiguous(), Paged(8), Paged(16)))),
        selection=selection,
    )
    assert layout.check() is None
    chunks = draw(st.lists(st.sampled_from((1, 1, 1, 1, 2, 5, 9, 14)), min_size=1, max_size=16))
    assume(sum(chunks) <= T)
    return SiteSpec(layout, D**-0.5, score=draw(st.sampled_from(SCORES))), chunks, draw(st.integers(0, 6))


@settings(max_examples=80, deadline=None)
@given(case=cases(), seed=st.integers(0, 10**6))
def test_equals_a_dictionary_of_tokens(case: tuple[SiteSpec, list[int], int], seed: int) -> None:
    spec, chunks, pad = case
    total, g = sum(chunks), torch.Generator().manual_seed(seed)
    qkv = vectors(seed, total)
    pads = torch.tensor([0, min(pad, total - 1)])
    extra: dict[str, Any] = {"sinks": torch.randn(HQ, generator=g)} if spec.score.sinks else {}
    if spec.score.bias is not None:
        extra["bias"] = torch.randn((HQ,) if spec.score.bias.kind == "alibi" else (HQ, T), generator=g).abs()
    ran = run(spec, qkv, chunks, pads, **extra)
    for row, first in enumerate(pads.tolist()):
        own = [x[row, :, first:] for x in qkv]
        read = dictionary.pages_read(spec, own[0], own[1], chunks, first, [held[row] for held in ran.held])
        wanted = dictionary.attend(spec, *own, sinks=extra.get("sinks"), bias=extra.get("bias"), read=read)
        error = (ran.out[row, :, first:].double() - wanted).abs().max()
        assert error <= 16 * EPS * qkv[2].abs().max()


# ---- the choice


def test_a_choice_by_hand() -> None:
    """Pages of two tokens; the query is (1, -1), so that a page's bound is its largest first channel less its smallest
    second: 3, 1, 7 and 0."""
    keys = torch.tensor([[2.0, 0], [1, -1], [1, 1], [1, 0], [-9, -5], [2, 3], [0, 0], [0, 0]])
    selection = TopPages(2, 2)
    smallest, largest = torch.full((1, 1, 4, 2), 99.0), torch.full((1, 1, 4, 2), 99.0)
    page_summaries.summarise(selection, keys[None, None], torch.arange(8)[None], smallest, largest)
    assert smallest[0, 0].tolist() == [[1, -1], [1, 0], [-9, -5], [0, 0]]
    assert largest[0, 0].tolist() == [[2, 0], [1, 1], [2, 3], [0, 0]]
    q = torch.tensor([1.0, -1])[None, None, None]

    def pages(count: int, position: int, sm_scale: float = 1.0) -> list[int]:
        found = page_selection.choose(
            TopPages(2, count), q, sm_scale, smallest, largest, torch.tensor([[position]]), 8
        )
        return [page for page in found[0, 0].tolist() if page <= position // 2]

    assert pages(1, 7) == [3], "its own page always"
    assert pages(2, 7) == [2, 3]
    assert pages(3, 7) == [0, 2, 3]
    assert pages(2, 3) == [0, 1], "what comes later is not there yet"
    assert pages(2, 1) == [0]
    # Turned around, the bounds are those of (-1, 1): 0 - 1, 0, 9 + 3 and 0.
    assert pages(2, 7, -1.0) == [2, 3] and pages(3, 7, -1.0) == [1, 2, 3]


def test_query_heads_of_a_group_read_the_same_pages() -> None:
    """A page that one head of the group looks for is read for all."""
    keys = torch.zeros(1, 1, 8, 2)
    keys[0, 0, 0], keys[0, 0, 2] = torch.tensor([5.0, 0]), torch.tensor([0.0, 9])
    smallest, largest = torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2)
    page_summaries.summarise(TopPages(2, 2), keys, torch.arange(8)[None], smallest, largest)
    q = torch.tensor([[3.0, 0], [0, 1]])[None, :, None]
    found = page_selection.choose(TopPages(2, 2), q, 1.0, smallest, largest, torch.tensor([[7]]), 8)
    assert found[0, 0].tolist() == [0, 3], "15 of the first head is more than 9 of the second"


@pytest.mark.parametrize("chunks", [[23], [1] * 23, [4, 1, 9, 1, 1, 7], [3, 3, 3, 14]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_summaries_do_not_depend_on_how_tokens_come(chunks: list[int], dtype: torch.dtype) -> None:
    """Nor on padding, nor on what stood in their rows."""
    qkv = [x.to(dtype) for x in vectors(3, 23)]
    spec = SiteSpec(CacheLayout(int8(), int8(), selection=TopPages(4, 2)), 0.2)
    pads = torch.tensor([0, 5])
    *_, smallest, largest, _ = run(spec, qkv, chunks, pads).buffers
    for row, first in enumerate(pads.tolist()):
        keys = qkv[1][row, :, first:]
        for page, own in enumerate(keys.split(4, dim=1)):
            assert torch.equal(smallest[row, :, page], own.amin(1))
            assert torch.equal(largest[row, :, page], own.amax(1))


# ---- all pages are the full cache


@pytest.mark.few(2)
@pytest.mark.parametrize("placement", [Contiguous(), Paged(8)], ids=str)
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_all_pages_are_the_full_cache(storage: Storage, placement: Any) -> None:
    qkv, pads = vectors(1, T), torch.tensor([0, 7])
    layout = CacheLayout(storage, storage, placement)
    for chunks in ([T - 6, *[1] * 6], [1] * T):
        full = run(SiteSpec(layout, 0.2), qkv, chunks, pads).out
        every = replace(layout, selection=TopPages(4, -(-T // 4) + 1))
        assert torch.equal(run(SiteSpec(every, 0.2), qkv, chunks, pads).out, full)
        some = replace(layout, selection=TopPages(4, 2))
        assert not torch.equal(run(SiteSpec(some, 0.2), qkv, chunks, pads).out, full)


def test_all_pages_by_the_way_of_some_are_the_full_cache_but_for_the_order_of_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the span is not known while tracing, pages are gathered even if all are read."""
    qkv, pads = vectors(2, T), torch.tensor([0, 3])
    layout = CacheLayout(int8(), int8())
    chunks = [T - 8, *[1] * 8]
    full = run(SiteSpec(layout, 0.2), qkv, chunks, pads).out
    monkeypatch.setattr(TopPages, "tokens", property(lambda self: -1))
    every = SiteSpec(replace(layout, selection=TopPages(4, 12)), 0.2)
    torch.testing.assert_close(run(every, qkv, chunks, pads).out, full, rtol=0, atol=2e-6)


def test_prompts_read_everything() -> None:
    qkv, pads = vectors(4, T), torch.tensor([0, 2])
    layout = CacheLayout(int8(), int8(), selection=TopPages(2, 1))
    whole = run(SiteSpec(replace(layout, selection=AllTokens()), 0.2), qkv, [15, 25], pads).out
    ran = run(SiteSpec(layout, 0.2), qkv, [15, 25], pads)
    assert torch.equal(ran.out, whole) and all((held == -1).all() for held in ran.held)


def test_the_latent_of_mla_is_selected_as_keys_are() -> None:
    """One KV head for all queries, whose values are its first channels."""
    qkv = vectors(5, T, (4, 1), (48, 16))
    qkv[2] = qkv[1][..., :16]
    spec = SiteSpec(CacheLayout(int8(), InKeys(16), selection=TopPages(4, 3)), 0.2)
    pads, chunks = torch.tensor([0, 3]), [20, *[1] * 20]
    ran = run(spec, qkv, chunks, pads)
    wanted, choices = attention(*qkv, spec, [], pads, chunks=chunks, held=ran.held)
    real = (torch.arange(T) >= pads[:, None])[:, None, :, None].expand_as(wanted)
    torch.testing.assert_close(ran.out[real], wanted[real], rtol=0, atol=1e-5)
    assert choices and all(choice.excess <= 1e-5 for choice in choices)


# ---- the oracle tells what is wrong


def test_the_oracle_refuses_what_cannot_have_been_read() -> None:
    q, k, _ = vectors(6, 12)
    q, k, chunks = q[:1], k[:1], [11, 1]

    def told(pages: list[int]) -> str:
        held = [torch.full((1, HKV, 2), -1), torch.tensor(pages).expand(1, HKV, 2)]
        with pytest.raises(ValueError, match="read page") as error:
            read_by(TopPages(4, 2), q, k, 0.2, chunks, None, held)
        return str(error.value)

    assert "expected 2 pages up to 2" in told([0, 1]), "its own page is missing"
    assert "expected 2 pages" in told([2, 2])
    assert "expected 2 pages" in told([2, -1])


def wrong_bounds(module: Any) -> Any:
    inner = module.choose

    def choose(selection: Any, q: Tensor, sm_scale: float, smallest: Tensor, *rest: Any) -> Tensor:
        return inner(selection, q, sm_scale, torch.zeros_like(smallest), *rest)

    return choose


def no_older_tokens(module: Any) -> Any:
    inner = module.summarise

    def summarise(selection: Any, k: Tensor, positions: Tensor, smallest: Tensor, largest: Tensor) -> None:
        page = positions[:, -1:].clamp(min=0) // selection.page_size
        smallest.scatter_(2, page[:, None, :, None].expand(-1, smallest.shape[1], -1, smallest.shape[3]), 9e9)
        inner(selection, k, positions, smallest, largest)

    return summarise


@pytest.mark.parametrize(
    ("module", "name", "broken"),
    [(page_selection, "choose", wrong_bounds), (page_summaries, "summarise", no_older_tokens)],
)
def test_verification_catches_a_wrong_choice(
    module: Any, name: str, broken: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_hf("llama")
    kvcompile.optimize(model, RECIPE, max_tokens=64)
    monkeypatch.setattr(module, name, broken(module))
    with pytest.raises(VerificationError):
        kvcompile.optimize(model, RECIPE, max_tokens=64)


# ---- in use

SELECTION = {"kind": "top_pages", "page_size": 4, "pages": 4, "dense_layers": 1}
RECIPE: dict[str, Any] = {
    "cache": {"keys": {"dtype": "int8"}, "selection": SELECTION},
    "compile": {"mode": "none"},
}


def fed(fast: Any, ids: Tensor, prompt: int) -> Tensor:
    fast.reset()
    outs = [
        fast(ids[:, :prompt]).logits,
        *(fast(ids[:, i : i + 1]).logits for i in range(prompt, ids.shape[1])),
    ]
    return torch.cat(outs, dim=1)


@pytest.mark.slow
def test_compiled_steps_are_those_of_the_reference_and_compile_once() -> None:
    from torch._dynamo.utils import counters

    model = tiny_hf("llama", layers=1)
    recipe = {**RECIPE, "cache": {"selection": {**SELECTION, "dense_layers": 0}}}
    ids = torch.randint(0, 50, (2, 90), generator=torch.Generator().manual_seed(0))
    eager = kvcompile.optimize(model, recipe, max_tokens=256)
    fast = kvcompile.optimize(model, {**recipe, "compile": {"mode": "default"}}, max_tokens=256)
    with torch.no_grad():
        wanted, got = fed(eager, ids, 30), fed(fast, ids, 30)
        before = counters["aot_autograd"]["total"]
        fed(fast, torch.cat([ids, ids], dim=1), 70)
        assert counters["aot_autograd"]["total"] == before
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    assert (wanted - model(ids).logits).abs().max() > 1e-3, "some pages are left out"
    assert [d.layout.selection.selects for d in fast.plan.decisions] == [True]


def test_as_many_pages_as_there_are_give_the_full_caches_tokens() -> None:
    model = tiny_hf("llama")
    ids = torch.randint(0, 50, (1, 20))
    every = {**RECIPE, "cache": {"selection": {**SELECTION, "pages": 16, "dense_layers": 0}}}
    wanted = kvcompile.optimize(model, "baseline", max_tokens=64, compile={"mode": "none"})
    fast = kvcompile.optimize(model, every, max_tokens=64)
    assert torch.equal(fed(fast, ids, 9), fed(wanted, ids, 9))
    assert torch.equal(fast.generate(ids, max_new_tokens=30), wanted.generate(ids, max_new_tokens=30))


def test_a_saved_handle_goes_on_as_it_was(tmp_path: Path) -> None:
    model = tiny_hf("llama")
    ids = torch.randint(0, 50, (1, 60), generator=torch.Generator().manual_seed(3))
    fast = kvcompile.optimize(model, RECIPE, max_tokens=128)
    wanted = fed(fast, ids, 40)[:, 50:]
    fast.reset()
    fast(ids[:, :40])
    for i in range(40, 50):
        fast(ids[:, i : i + 1])
    fast.handle.save(tmp_path / "text.safetensors")
    with pytest.raises(InputError, match="summaries of pages"):
        fast.handle.crop(45)
    fast.reset()
    fast.handle.load(tmp_path / "text.safetensors")
    got = torch.cat([fast(ids[:, i : i + 1]).logits for i in range(50, 60)], dim=1)
    assert torch.equal(got, wanted)


def test_bytes_are_those_of_the_buffers() -> None:
    model = tiny_hf("llama")
    for placement in ("contiguous", "paged"):
        recipe = {"cache": {**RECIPE["cache"], "placement": {"kind": placement}}, "compile": {"mode": "none"}}
        fast = kvcompile.optimize(model, recipe, max_tokens=256)
        cost = kvcompile.estimate(model, recipe, tokens=256, max_tokens=256)
        fast(torch.randint(0, 50, (1, 250)))
        assert fast.cache.reserved == cost.bytes


# ---- what is refused


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        (CacheLayout(retention=Window(9)), "forgets most"),
        (CacheLayout(placement=Ring(), retention=SinkWindow(1, 9)), "forgets most"),
        (CacheLayout(int8(), before_rope=True), "use rope: after"),
        (CacheLayout(per_channel(2, 4, 8)), "use axis: token"),
        (CacheLayout(values=per_channel(2, 4, 8)), "use axis: token"),
    ],
    ids=str,
)
def test_what_cannot_be_selected_is_refused(layout: CacheLayout, told: str) -> None:
    assert layout.check() is None
    problem = replace(layout, selection=TopPages(4, 2)).check()
    assert problem is not None and told in problem


def test_recipes_are_refused_where_they_are_read_or_meet_a_model() -> None:
    with pytest.raises(RecipeError, match="use axis: token"):
        kvcompile.Recipe.load(
            {
                "cache": {
                    "keys": {"dtype": "int2", "axis": "channel", "group": 32, "residual": 32},
                    "selection": {"kind": "top_pages"},
                }
            }
        )
    with pytest.raises(RecipeError, match="expected one of 'full', 'top_pages', got 'best'"):
        kvcompile.Recipe.load({"cache": {"selection": {"kind": "best"}}})
    with pytest.raises(PlanError, match="give sliding layers selection"):
        kvcompile.optimize(tiny_hf("mistral"), {"cache": {"selection": {**SELECTION, "dense_layers": 0}}})


def test_kernels_and_stepping_say_what_they_cannot() -> None:
    layout = CacheLayout(selection=TopPages(16, 8))
    assert unsupported(layout, torch.float32) is None
    assert "summaries of pages" in str(steps_back([layout], False).problem(3))
    assert CacheLayout.from_json(layout.to_json()) == layout
    assert "selection" not in CacheLayout().to_dict()
