"""Packed steps: all texts of a step in one pass give what each gives alone; what fails; what is refused, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

import kvcompile
from kvcompile.compile.packed import packed as packed_regions
from kvcompile.compile.regions import RegionCall
from kvcompile.errors import InputError, PlanError, ServeError
from kvcompile.runtime.packed import refusal
from kvcompile.serve import Sampling
from kvcompile.serve.capacity import capacity
from kvcompile.serve.packing import unpacked_because
from kvcompile.serve.passes import Passes
from kvcompile.serve.texts import Text
from kvcompile.serve.tiers import Tiers
from kvcompile.specs import StateSlot
from kvcompile.verify.compare import allowed
from tests.serve.test_numerics import CHUNK, OWN, compare, error, module, noise, texts
from tests.support import carried_scores
from tests.support.models import tiny_hf
from tests.support.serving import Stepped

SOME = Sampling(max_tokens=8, ignore_eos=True)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        pytest.param("llama", "paged", marks=pytest.mark.slow),  # of other models below, and of int8
        ("llama", "paged_int8"),
        pytest.param("llama", "window in pages", marks=pytest.mark.slow),  # released, or of a layer
        ("llama", "released"),
        ("gemma2", OWN),
        ("llama", "layers apart"),
        ("gemma2", "paged"),
        ("gpt_oss", "paged"),
        ("gpt2", "paged"),
    ],
)
def test_every_text_is_what_it_is_alone(kind: str, recipe: str) -> None:
    stats = compare(kind, recipe, seed=1, packed="on").stats()
    assert stats.packed == "on" and 4 < stats.packed_steps < stats.steps


@pytest.mark.parametrize("host", [0, 1 << 20], ids=["computed again", "swapped"])
def test_texts_that_give_up_their_pages(host: int) -> None:
    stats = compare("llama", "few pages", seed=3, host_memory=host, packed="on").stats()
    assert stats.preemptions > 0 and (stats.swapped_bytes > 0) == (host > 0) and stats.packed_steps > 4


def test_a_step_is_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of chunks and decodes together; each alone has the pass that it always had."""
    fast = module("llama", "paged")
    with Stepped(fast, packed="on") as engine:
        passes: list[str] = []
        for name in ("run", "run_packed"):
            monkeypatch.setattr(engine._passes, name, _noted(getattr(engine._passes, name), name, passes))
        first = engine.submit(texts(1, 61)[2], SOME)
        engine.turn()
        engine.turn()
        assert passes == ["run", "run"]
        handles = [first, *(engine.submit(prompt, SOME) for prompt in ([5, 6, 7], [8, 9]))]
        engine.turn()
        assert passes[2:] == ["run_packed"]
        engine.turn()
        assert passes[3:] == ["run"]
        engine.finish(handles)


def _noted(run: Any, name: str, passes: list[str]) -> Any:
    def noted(*args: Any) -> Any:
        passes.append(name)
        return run(*args)

    return noted


@pytest.mark.parametrize("where", ["pass", "pick", "text"])
def test_what_fails_takes_nobody_of_another_step_along(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that fails fails the requests in it; what fails after it, its own."""
    fast, prompts = module("llama", "paged"), texts(6, 61)
    with Stepped(fast, packed="on", max_sequences=2) as engine:
        good = engine.all([prompts[1]], SOME)[0]
        one = engine.submit(prompts[0], SOME)
        engine.turn()
        other = engine.submit(prompts[1], SOME)
        waits = engine.submit(prompts[2], SOME)  # there are rows for two
        live = engine._requests[one.id].texts[0]
        if where == "pass":
            monkeypatch.setattr(engine._passes.module.packed(), "run", _raises)
        elif where == "pick":
            monkeypatch.setattr(live.picker, "sampling", None)
        else:
            monkeypatch.setattr(live.ends, "take", _raises)
        engine.turn()
        monkeypatch.undo()
        for _ in range(30):
            engine.turn()
        with pytest.raises(ServeError, match="a step of this request failed"):
            one.result(0)
        if where == "pass":
            with pytest.raises(ServeError, match="RuntimeError: broken"):
                other.result(0)
        else:
            assert other.result(0).tokens == good.tokens
        assert len(waits.result(0).tokens) == 8
        stats = engine.stats()
        assert stats.pages_held == stats.running == 0 and stats.failed == (2 if where == "pass" else 1)


def _raises(*_: Any) -> None:
    raise RuntimeError("broken")


@pytest.mark.parametrize(
    ("kind", "recipe", "reason"),
    [
        ("llama", "baseline", "layer 0: placement 'contiguous': each sequence has memory of its own"),
        ("llama", "h2o in pages", "notes scores of each sequence's slots, in no page"),
        ("llama", "quest", "layer 0: placement 'contiguous'"),
        ("llama", "kivi in pages", "keeps tokens in full beside, in no page"),
        ("bloom", "paged", "the model counts positions"),
        ("bamba", "paged", "the model carries a state from token to token"),
    ],
)
def test_what_cannot_be_packed_says_why(kind: str, recipe: str, reason: str) -> None:
    fast = module(kind, recipe)
    assert reason in str(refusal(fast.plan, fast.program))
    with pytest.raises(PlanError, match="packed: on, and steps of this plan cannot be") as raised:
        Stepped(fast, packed="on")
    assert reason in str(raised.value)
    with pytest.raises(PlanError, match="no packed step"):
        fast.packed()
    assert reason in str(unpacked_because("auto", fast, False))


def test_settings() -> None:
    fast = module("llama", "paged")
    with pytest.raises(InputError, match=r"packed: expected .auto., .on. or .off., got .yes."):
        Stepped(fast, packed="yes")
    with pytest.raises(InputError, match="packed: on, and deterministic"):
        Stepped(fast, packed="on", deterministic=True)
    with Stepped(fast, deterministic=True) as engine:
        assert engine.stats().packed.startswith("off: deterministic")
    with Stepped(fast, packed="off") as engine:
        assert engine.stats().packed == "off: asked for"
    with Stepped(fast) as engine:
        assert engine.stats().packed.startswith("off: on a CPU")


def test_who_does_not_use_it_has_none() -> None:
    fast = kvcompile.optimize(
        tiny_hf(), "paged", verify="off", compile={"mode": "none"}, max_tokens=64, max_batch=4
    )
    with Stepped(fast, prefill_tokens=4) as engine:
        engine.all([[5, 6, 7], [8, 9], [5] * 9], SOME)
        engine.warmup()
    assert fast._packed is None


def test_compiled_regions_give_the_same() -> None:
    """By Inductor, for any number of tokens, sequences and decodes, one of 0 and 1 as well."""
    settings: dict[str, Any] = {"verify": "off", "max_tokens": 80, "max_batch": 4, "prefill_chunk": CHUNK}
    model, prompts = tiny_hf(), texts(7, 61)
    found = []
    for mode in ("none", "default"):
        fast = kvcompile.optimize(model, "paged_int8", compile={"mode": mode}, **settings)
        passes = Passes(fast, capacity(fast.plan, fast.cache.shape, fast.device, 4, None, 16), Tiers())
        whole = [Text(n, (n, 0), prompt, len(prompt), b"") for n, prompt in enumerate(prompts[-3:])]
        for text in whole:
            text.tables = [[1 + 5 * text.id + page for page in range(5)]]
        seen = []
        for ends in ([7, 5, 9], [8, 9, 10], [9, 10, 11]):  # chunks; one decode and chunks; decodes alone
            seen.append(passes.run_packed(whole, ends))
            for text, end in zip(whole, ends, strict=True):
                text.computed = end
        found.append(torch.stack(seen))
        classes = fast.packed().executor.compile_seconds
        assert len(classes) == (mode != "none")
    assert error(found[1], found[0]) <= allowed(noise(module("llama", "paged_int8"), prompts), torch.float32)


def test_what_else_is_refused() -> None:
    """By the pure function alone, of plans and programs that differ in one thing."""
    fast = module("llama", "paged")
    plan, program = fast.plan, fast.program
    assert refusal(plan, program) is None
    first, *others = plan.decisions
    mod = carried_scores.anywhere(6)[0]().mod
    of_token = replace(mod, leaves=("query",))

    def of(**changed: Any) -> str | None:
        return refusal(replace(plan, decisions=(*others, replace(first, **changed))), program)

    assert "openvino compiles this program" in str(refusal(replace(plan, backend="openvino"), program))
    assert "by the length of a batch" in str(refusal(plan, replace(program, takes_past_length=True)))
    assert "layer 0: its mask keeps something" in str(of(mask_rows=(StateSlot("a", (1,), "float32"),)))
    assert "layer 0: a part of its mask is computed for all" in str(of(rerun=True))
    assert "layer 0: its scores read tensors of all" in str(of(score=replace(first.score, mod=of_token)))


def test_a_graph_that_asks_for_sequences_outside_of_attention_is_refused() -> None:
    fast = module("llama", "paged")
    regions = fast.executor.regions
    graph = Graph()
    lens = graph.placeholder("in_0")
    graph.output((graph.call_function(torch.ops.aten.neg.default, (lens,)),))
    odd = GraphModule(torch.nn.Module(), graph)
    calls = (*regions.calls, RegionCall(len(regions.modules), ("seq_lens",), ("neg",)))
    with pytest.raises(ValueError, match=r"aten\.neg\.default reads seq_lens, which is of sequences"):
        packed_regions(replace(regions, modules=(*regions.modules, odd), calls=calls))
