"""RoPE on append: the op turns new queries and keys, and everything after is as if the graph had.

The reference does it as well as generated kernels, so that all of it can be checked without a GPU: the pass sees a
plan of generated kernels here, and the graph then runs on the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvcompile import api
from kvcompile.decide.rope_on_append import refusal, rope_on_append
from kvcompile.errors import VerificationError
from kvcompile.kernels.ops import cached_attention as ops
from kvcompile.kernels.reference import attention as reference
from kvcompile.kernels.shared.rope import rotate
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import (
    CacheLayout,
    Contiguous,
    Full,
    Ring,
    Scored,
    SinkWindow,
    Slots,
    int8,
    model_dtype,
    uint,
    with_hadamard,
    with_residual,
)
from kvcompile.pipeline import Front, absorbed, plan_for, rewrite, understand
from kvcompile.plan import Plan
from kvcompile.recipe import Recipe
from kvcompile.specs import RotaryForm
from kvcompile.verify import verify
from tests.kernels.reference.test_attention import rope_tables
from tests.passes.detect.test_shared_kv import CrossLayer
from tests.passes.rules import test_rope
from tests.passes.rules.test_latent import Latent
from tests.support.models import TinyLlama, make, tiny_hf
from tests.verify.test_verify import fronts

# ---- the op

LAYOUTS = [
    CacheLayout(),
    CacheLayout(with_hadamard(uint(4)), int8()),
    CacheLayout(int8(), int8(), Ring(), SinkWindow(2, 6)),
    CacheLayout(with_residual(int8(), 4, 2), model_dtype(), Contiguous(), Full()),
    CacheLayout(int8(), int8(), Slots(), Scored(2, 3, 4)),
]
FORMS = [RotaryForm("half", 0, 64), RotaryForm("half", 0, 16), RotaryForm("interleaved", 32, 32)]
HQ, HKV, D, T = 4, 2, 64, 17


def run(spec: SiteSpec, args: list[Tensor], rope: list[Tensor], turn: bool) -> tuple[Tensor, list[Tensor]]:
    """The op over a prompt, steps and a chunk, one row padded; turn: rotate before the op, as a graph would."""
    batch, pads = 2, torch.tensor([0, 3])
    buffers = [
        torch.zeros(batch, *b.shape, dtype=b.dtype)
        for b in spec.layout.buffers(HKV, D, D, torch.float32, T + 2)
    ]
    seq_lens, outs, start = torch.zeros(batch, dtype=torch.long), [], 0
    for size in (9, 1, 1, 6):
        q, k, v = (x[:, :, start : start + size] for x in args)
        first = seq_lens - (pads - start).clamp(0, size)
        positions = first[:, None] + torch.arange(size)
        if turn:
            q, k = (rotate(x, positions, *rope, form=form_of(spec)) for x in (q, k))
        own = replace(spec, rotary=None) if turn else spec
        tables = [] if turn else rope
        out = ops.cached_attention(
            q, k, v, buffers, positions, seq_lens, tables, min(start + size, T + 2), own.to_json()
        )
        outs.append(out)
        seq_lens = positions[:, -1] + 1
        start += size
    return torch.cat(outs, 2), buffers


def form_of(spec: SiteSpec) -> RotaryForm:
    assert spec.rotary is not None
    return spec.rotary


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_op_turns_what_the_graph_would(layout: CacheLayout, form: RotaryForm) -> None:
    """Bit by bit: results, and what the cache holds."""
    g = torch.Generator().manual_seed(0)
    args = [torch.randn(2, heads, T, D, generator=g) for heads in (HQ, HKV, HKV)]
    rope = rope_tables(T + 2, form.rotary_dim)
    spec = SiteSpec(layout, 0.125, rotary=form)
    assert spec.rotates_on_append
    got, wanted = (run(spec, args, rope, turn) for turn in (False, True))
    assert torch.equal(got[0], wanted[0])
    for a, b in zip(got[1], wanted[1], strict=True):
        assert torch.equal(a, b)


def test_keys_before_rope_are_turned_when_they_are_read() -> None:
    before = CacheLayout(int8(), int8(), before_rope=True)
    assert not SiteSpec(before, 0.125, rotary=FORMS[0]).rotates_on_append
    in_cache = CacheLayout(int8(), int8(), Ring(), SinkWindow(2, 6, "in_cache"))
    assert not SiteSpec(in_cache, 0.125, rotary=FORMS[0]).rotates_on_append


# ---- plans


def as_generated(plan: Plan) -> Plan:
    return replace(plan, decisions=tuple(replace(d, kernels="triton") for d in plan.decisions))


def fused(front: Front, recipe: Recipe) -> Plan:
    """The plan that generated kernels would have, run by the reference."""
    plan = rope_on_append(as_generated(plan_for(front, recipe)))
    return replace(plan, decisions=tuple(replace(d, kernels="reference") for d in plan.decisions))


def test_what_is_left_to_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    _, front = fronts("llama", "float32")
    plan = as_generated(plan_for(front, Recipe.load("int8", max_tokens=64, compile={"kernels": "reference"})))
    done = rope_on_append(plan)
    assert all(d.rope_on_append and d.ops[0] == "rope+append[contiguous]" for d in done.decisions)
    assert done.digest() != plan.digest()
    first = plan.decisions[0]
    before = replace(first.layout, before_rope=True)
    endless = replace(plan, limits=replace(plan.limits, max_tokens=None))
    shared = replace(plan, decisions=(first, replace(plan.decisions[1], kv_source=0), plan.decisions[2]))
    for decision, of, reason in (
        (replace(first, kernels="reference"), plan, "the reference runs the site"),
        (replace(first, layout=before), plan, "keys are stored before RoPE"),
        (replace(first, rope=None), plan, "no rotary embedding was recognised"),
        (first, shared, "layers share the keys and values"),
        (first, endless, "nothing limits the tokens"),
    ):
        assert refusal(decision, of) == reason
    assert [d.rope_on_append for d in rope_on_append(shared).decisions] == [False, False, True]
    monkeypatch.setenv("KVCOMPILE_DISABLE", "gemv,rope_on_append")
    assert rope_on_append(plan) is plan


# ---- whole models

MODELS: dict[str, Callable[[], nn.Module]] = {
    "positions of its own": lambda: make(TinyLlama),
    "norms before": lambda: tiny_hf("qwen3"),
    "partial": lambda: tiny_hf("gpt_neox"),
    "windows": lambda: tiny_hf("gemma3"),
    "sink logits": lambda: tiny_hf("gpt_oss", attn="eager"),
    "latent rows": lambda: Latent(),
    "latent rows, rope first": lambda: Latent("rope first"),
    **{
        f"spelled {rope.__name__}": lambda rope=rope: test_rope.Rotated(rope)  # type: ignore[misc]
        for rope in (
            test_rope.interleaved,
            test_rope.deinterleaved,
            test_rope.phases,
            test_rope.partial_last,
            test_rope.normed_after,
        )
    },
}


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", MODELS)
def test_models_equal_their_own_rotation(kind: str) -> None:
    """The oracle of the cache is the model's graph with its own rotation in it."""
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    front = understand(model)
    plan = fused(front, Recipe.load("baseline", max_tokens=64))
    assert all(d.rope_on_append for d in plan.decisions)
    for result in verify(model, front, plan, "quick"):
        assert result.error < result.budget / 2, str(result)
    rewritten, constants = rewrite(front, plan)
    assert {name for name in constants if name.startswith("rope")}
    # What the rotation leaves alone of a latent row's query is cut out of the rotated one.
    assert kind.startswith("latent") or not cosines(rewritten)


def cosines(rewritten: Any) -> list[str]:
    """What is left of the graph's own tables."""
    aten = torch.ops.aten
    return [
        n.name for n in rewritten.graph_module.graph.nodes if n.target in (aten.cos.default, aten.sin.default)
    ]


@pytest.mark.few(2)
@pytest.mark.parametrize("recipe", ["int8", "kivi2", "paged_int8", "h2o"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_kind_of_cache(recipe: str, dtype: str) -> None:
    from tests.verify.test_verify import RECIPES

    model, front = fronts("llama", dtype)
    plan = fused(front, Recipe.load(recipe, **RECIPES[recipe]))
    assert all(d.rope_on_append for d in plan.decisions)
    for result in verify(model, front, plan, "quick"):
        assert result.error < result.budget / 2, str(result)


def test_layers_that_share_their_cache_keep_their_own_rotation() -> None:
    model = CrossLayer().eval()
    front = understand(model)
    plan = fused(front, Recipe.load("int8", max_tokens=64))
    assert not any(d.rope_on_append for d in plan.decisions)
    assert not rewrite(front, plan)[1]


def test_the_module_is_as_near_to_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits over prompt, steps and a chunk of two rows, one padded; and the graph has nothing else to turn by."""
    model, front = fronts("llama", "float32")
    recipe = Recipe.load("baseline", max_tokens=40, verify="off", compile={"mode": "none"})
    monkeypatch.setattr(api, "plan_for", fused)
    fast: Any = api.build(model, front, recipe)
    assert fast.program.constants["rope_0_cos"].shape == (40, 8)
    ids = torch.randint(3, 61, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[1, :4] = 0
    outs, start = [], 0
    for size in (29, 1, 1, 9):
        outs.append(fast(ids[:, start : start + size], mask[:, : start + size] if not start else None).logits)
        start += size
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    real = mask.bool()
    torch.testing.assert_close(torch.cat(outs, 1)[real], wanted[real])


def test_tables_of_long_contexts_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcompile.passes.detect import rotation

    _, front = fronts("llama", "float32")
    plan = fused(front, Recipe.load("int8", max_tokens=300))
    whole = rewrite(front, plan)[1]
    monkeypatch.setattr(rotation, "_AT_ONCE", 2000)  # of 2 samples, 6 heads and 8 channels: 20 positions
    parts = rewrite(front, plan)[1]
    assert whole.keys() == parts.keys() and len(whole) == 2
    for name, table in whole.items():
        assert table.shape == (300, 8) and torch.equal(table, parts[name])


def test_broken_on_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries that are turned one place too far."""
    model, front = fronts("llama", "float32")
    plan = fused(front, Recipe.load("int8", max_tokens=64))
    turned_first = reference.rotated_first

    def late(q: Tensor, k: Tensor, positions: Tensor, *more: Any) -> Any:
        return (turned_first(q, k, positions + 1, *more)[0], *turned_first(q, k, positions, *more)[1:])

    monkeypatch.setattr(reference, "rotated_first", late)
    with pytest.raises(VerificationError, match="layer 0"):
        verify(model, absorbed(front, plan), plan, "quick")
