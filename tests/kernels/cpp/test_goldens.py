"""The text of C++ kernels, byte by byte; KVCOMPILE_ACCEPT=1 accepts what is generated."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvcompile.kernels.cpp.attend.prefill import COLUMNS, site_of
from kvcompile.kernels.cpp.generate import generate
from kvcompile.kernels.cpp.host.attention import spec_of
from kvcompile.kernels.cpp.spec import CppSpec
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import (
    CacheLayout,
    Paged,
    Ring,
    Scored,
    SinkWindow,
    Slots,
    int8,
    mxfp4,
    per_channel,
    uint,
    with_residual,
)
from kvcompile.specs import BiasSpec, RotaryForm, ScoreSpec
from tests.support import carried_scores

GOLDENS = Path(__file__).parents[2] / "goldens"
ROPE = RotaryForm("half", 0, 64)
SITES = {
    "plain": SiteSpec(CacheLayout(), 0.125, rotary=ROPE),
    "int8": SiteSpec(CacheLayout(int8(), int8()), 0.125),
    "pages": SiteSpec(CacheLayout(uint(4, 32), uint(4, 32), Paged(16)), 0.125),
    "released": SiteSpec(
        CacheLayout(placement=Paged(16, released=True), retention=SinkWindow(4, 508)), 0.125
    ),
    "ring": SiteSpec(CacheLayout(mxfp4(), int8(), Ring(), SinkWindow(4, 60, "in_cache")), 0.125, rotary=ROPE),
    "kivi": SiteSpec(CacheLayout(per_channel(2, 32, 128), with_residual(uint(2, 32), 128)), 0.125),
    "scored": SiteSpec(
        CacheLayout(placement=Slots(), retention=Scored(4, 100, 24)),
        0.125,
        score=ScoreSpec(30.0, BiasSpec("alibi"), True),
    ),
    "expression": SiteSpec(CacheLayout(), 0.125, score=ScoreSpec(mod=carried_scores.buckets(9).mod)),
}


def test_text_of_prompts() -> None:
    site = SiteSpec(
        CacheLayout(retention=SinkWindow(4, 60)), 0.125, score=ScoreSpec(30.0, BiasSpec("relative"), True)
    )
    spec = CppSpec("prefill", site_of(site), 9, 3, 64, 64, "bfloat16")
    compare(generate(spec), GOLDENS / "cpp_prefill.cpp")
    placed = replace(
        site, layout=replace(site.layout, keys=int8(), placement=Ring()), rotary=ROPE, share="first"
    )
    assert site_of(placed) == spec.site, "one kernel is for all layouts with the same retention"


def test_text_of_prompts_that_score() -> None:
    retention = Scored(4, 100, 24, "snapkv", "vote", "max", "layer", rows=16)
    site = SiteSpec(CacheLayout(placement=Slots(), retention=retention), 0.125)
    spec = CppSpec("prefill", site_of(site), 9, 3, 64, 64, "bfloat16", (COLUMNS,))
    compare(generate(spec), GOLDENS / "cpp_prefill_scored.cpp")


def test_text_of_prompts_that_score_in_several_forms() -> None:
    """With places in the cache, by which an expression goes, of which a query may see nothing."""
    retention = Scored(4, 100, 56, positions="in_cache")
    layout = CacheLayout(with_residual(int8(), 48), with_residual(int8(), 32), Slots(), retention, True)
    site = SiteSpec(
        layout, 0.125, score=ScoreSpec(mod=replace(carried_scores.windows(9).mod, empty_rows=True))
    )
    spec = CppSpec("prefill", site_of(site), 9, 3, 64, 64, "bfloat16", (COLUMNS,))
    compare(generate(spec), GOLDENS / "cpp_prefill_forms.cpp")


def compare(made: str, path: Path) -> None:
    if os.environ.get("KVCOMPILE_ACCEPT"):
        path.write_text(made, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == made


@pytest.mark.parametrize("name", SITES)
def test_text(name: str) -> None:
    spec = spec_of(SITES[name], (9, 3), (64, 64), "torch.bfloat16")
    compare(generate(spec), GOLDENS / f"cpp_{name}.cpp")


def test_specs_are_texts_and_back() -> None:
    for site in SITES.values():
        spec = spec_of(site, (9, 3), (64, 64), "torch.bfloat16", chosen=True)
        assert CppSpec.from_json(spec.to_json()) == spec and len(spec.key) == 16
