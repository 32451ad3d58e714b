"""A plan's digest: it is another one where anything that decides is, and the same where only words are others."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from typing import Any

import pytest

from kvcompile.decide.known import KnownSite
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import CacheLayout, Paged, fp8, int8
from kvcompile.original.model_config import LayerShape
from kvcompile.passes.records import AttentionSite
from kvcompile.plan import Decision, Limits, Plan
from kvcompile.specs import MaskSpec, RecurrentState, RotaryForm, ScoreSpec, SiteFacts, SiteShape, StateSlot

PROSE = {
    Plan: {
        "recipe": "mine",
        "recipe_digest": "other",
        "notes": ("noted",),
        "step_because": "asked for",
        "backend_because": "engines",
    },
    Decision: {
        "source": "other.py:7",
        "idiom": "softmax",
        "because": ("so",),
        "kernels_because": "quick",
        "device": "cuda:1",
    },
}
OTHERS: dict[type, dict[str, Any]] = {
    Plan: {
        "dtype": "float16",
        "limits": Limits(8, 99, 512),
        "decisions": (),
        "states": (RecurrentState("mixer", (StateSlot("s", (3,), "float32"),), "alone"),),
        "scales": "digest",
        "step": "cudagraph",
        "backend": "torch_tensorrt",
    },
    Decision: {
        "layer": 7,
        "module_path": "layers.7",
        "num_qo_heads": 16,
        "num_kv_heads": 1,
        "head_dim": 32,
        "v_head_dim": 32,
        "sm_scale": 0.5,
        "mask": MaskSpec("sliding", 9),
        "layout": CacheLayout(int8()),
        "lossless": False,
        "kv_source": 3,
        "rope": RotaryForm("half", 0, 64),
        "score": ScoreSpec(softcap=30.0),
        "latent": True,
        "rerun": True,
        "mask_rows": (StateSlot("m", (3,), "int64"),),
        "scales": (("keys.scale", (0.5,)),),
        "kernels": "triton",
        "rope_on_append": True,
    },
}


def plan() -> Plan:
    decision = Decision(
        layer=0,
        module_path="layers.0",
        source="model.py:3",
        idiom="sdpa",
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim=64,
        v_head_dim=64,
        sm_scale=0.125,
        mask=MaskSpec("causal"),
        layout=CacheLayout(),
        lossless=True,
        because=("all",),
        kv_source=0,
    )
    return Plan("baseline", "digest", "float32", Limits(8, 64, 512), (decision,))


def changed(kind: type, name: str, value: Any) -> Plan:
    made = plan()
    if kind is Plan:
        return replace(made, **{name: value})
    return replace(made, decisions=(replace(made.decisions[0], **{name: value}),))


def test_every_field_is_looked_at() -> None:
    for kind in PROSE:
        assert {of.name for of in fields(kind)} == {*PROSE[kind], *OTHERS[kind]}


@pytest.mark.parametrize(
    "kind,shared",
    [(AttentionSite, SiteFacts), (KnownSite, SiteFacts), (Decision, SiteFacts), (LayerShape, SiteShape)],
)
def test_facts_of_a_site_are_declared_once(kind: type, shared: type) -> None:
    assert issubclass(kind, shared)
    assert not {of.name for of in fields(shared)} & set(inspect.get_annotations(kind))


@pytest.mark.parametrize("kind,name", [(kind, name) for kind in PROSE for name in PROSE[kind]])
def test_words_decide_nothing(kind: type, name: str) -> None:
    assert changed(kind, name, PROSE[kind][name]).digest() == plan().digest()


@pytest.mark.parametrize("kind,name", [(kind, name) for kind in OTHERS for name in OTHERS[kind]])
def test_everything_else_does(kind: type, name: str) -> None:
    made = changed(kind, name, OTHERS[kind][name])
    assert made != plan() and made.digest() != plan().digest()


@pytest.mark.parametrize(
    "layout",
    [CacheLayout(fp8("e5m2")), CacheLayout(placement=Paged(page_size=16)), CacheLayout(values=int8())],
)
def test_layouts_are_told_apart(layout: CacheLayout) -> None:
    digests = {
        changed(Decision, "layout", own).digest() for own in (layout, CacheLayout(), CacheLayout(fp8()))
    }
    assert len(digests) == 3
    assert SiteSpec(layout, 1.0, MaskSpec("causal")) != SiteSpec(CacheLayout(), 1.0, MaskSpec("causal"))
