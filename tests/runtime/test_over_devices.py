"""Models over several devices of one process: each layer's cache stands on its layer's device.

Quick: where a plan puts things, on PyTorch's meta device, which has shapes and no values. Slow: models that run over
two devices, in a process that has a second one (`tests/support/second_device.py`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from kvcompile.decide.auto import free_for_caches
from kvcompile.decide.decode_step import with_step
from kvcompile.errors import PlanError
from kvcompile.kernels.ops import cached_attention as ops
from kvcompile.passes.rewrite.insert_cache import Rewritten, insert_cache
from kvcompile.pipeline import Front, divided, known, plan_for, understand
from kvcompile.plan import Plan
from kvcompile.recipe import Recipe
from kvcompile.runtime.cache import KVCache
from kvcompile.runtime.cache_spec import CacheShape
from kvcompile.serve.rows import Rows
from tests.support.models import tiny_hf

CPU, META = torch.device("cpu"), torch.device("meta")
BEFORE = {"keys": {"dtype": "int8", "rope": "before"}}


@lru_cache
def spread() -> Front:
    """A front whose last two layers' attention is on the meta device, as its graph's values say."""
    front = understand(tiny_hf("llama", layers=3))
    for site in front.sites[1:]:
        val = site.out.meta["val"]
        with val.fake_mode:
            site.out.meta["val"] = torch.empty_like(val, device=META)
        assert isinstance(site.out.meta["val"], FakeTensor)
    return front


def planned(cache: Any) -> tuple[Plan, Rewritten]:
    recipe = Recipe.load(
        {"name": "some", "cache": cache}, max_tokens=64, max_batch=2, compile={"mode": "none"}
    )
    plan = plan_for(spread(), recipe)
    return plan, insert_cache(spread().canonical, spread().sites, plan)


def placed(cache: KVCache | Rows) -> dict[str, str]:
    return {name: str(buffer.device) for name, buffer in cache.buffers.items()}


def wanted(rewritten: Rewritten) -> dict[str, str]:
    return {
        name: place
        for names, place in zip(rewritten.caches, ("cpu", "meta", "meta"), strict=True)
        for name in names
    }


def test_a_plan_knows_devices_and_is_the_same_plan() -> None:
    plan, _ = planned({"keys": {"dtype": "int8"}})
    assert [decision.device for decision in plan.decisions] == ["cpu", "meta", "meta"]
    assert plan.devices == ("cpu", "meta")
    here = replace(plan, decisions=tuple(replace(d, device=None) for d in plan.decisions))
    assert here.devices == () and here.digest() == plan.digest()
    sizes = plan.bytes_by_device(2)
    assert (
        sum(sizes.values()) == plan.bytes(2)
        and 2 * sizes["cpu"] == sizes["meta"]
        and not here.bytes_by_device(2)
    )


@pytest.mark.parametrize("cache", [{}, BEFORE, {"placement": {"kind": "paged", "page_size": 16}}], ids=str)
def test_what_a_layer_reads_is_copied_to_its_device_once(cache: Any) -> None:
    _, rewritten = planned(cache)
    graph = rewritten.graph_module.graph
    sites = [node for node in graph.nodes if node.target is ops.cached_attention]
    first, *later = ([node.args[4], node.args[5], *node.kwargs.values()] for node in sites)
    assert all(node.op == "placeholder" for node in first)
    for here, *there in zip(first, *later, strict=True):
        assert there[0] is there[1] and there[0].target is torch.ops.aten._to_copy.default
        assert there[0].args == (here,) and there[0].kwargs == {"device": META}
    tables = {table.cos_name: table.device for table in rewritten.ropes}
    read = [tables[site.args[6][0].name] for site in sites if site.args[6]]
    assert read == ([CPU, META, META] if cache == BEFORE else []) and len(tables) == len(set(read))


@pytest.mark.parametrize("paged", [False, True])
def test_buffers_stay_on_their_layers_devices(paged: bool) -> None:
    plan, rewritten = planned({"placement": {"kind": "paged", "page_size": 16}} if paged else {})
    cache = KVCache(CacheShape.of(plan, rewritten.caches, CPU), CPU)
    tables = {"page_table_0": "cpu"} if paged else {}
    places = wanted(rewritten) | tables

    def columns(count: int) -> None:
        cache.allocate(2, count, None)
        ids = torch.zeros(2, count, dtype=torch.int64)
        cache.advance(ids, cache.seq_lens + count, cache.rows(None) if paged else None)

    columns(20)
    assert placed(cache) == places
    assert {name: str(device) for name, (_, _, device) in cache.shapes().items()} == places
    columns(30)  # a pool grows
    for other in (cache, cache.copy()):
        other.crop(7)
        other.reorder(torch.tensor([1, 1]))  # a row is copied, and its pages are
        assert placed(other) == places
        assert set(other.report()["devices"]) == {"cpu", "meta"}
        assert {name: str(part.device) for name, part in other.state().items()} == wanted(rewritten)
    cache.restore(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([3, 3]), [3, 3], _of(cache, 3, paged))
    assert placed(cache) == places
    cache.reset()
    cache.release()
    columns(1)
    assert placed(cache) == places


def _of(cache: KVCache, columns: int, paged: bool) -> dict[str, torch.Tensor]:
    """What a text of so many columns gives."""
    made = KVCache(cache.shape, CPU)
    made.allocate(2, columns, None)
    rows = made.rows(None) if paged else None
    made.advance(torch.zeros(2, columns, dtype=torch.int64), made.seq_lens + columns, rows)
    return made.state()


def test_an_engines_buffers_are_there_too() -> None:
    plan, rewritten = planned({"placement": {"kind": "paged", "page_size": 16}})
    rows = Rows(CacheShape.of(plan, rewritten.caches, CPU), CPU, 2, [4])
    assert placed(rows) == wanted(rewritten) | {"page_table_0": "cpu"}


def test_what_cannot_be_over_devices_is_refused() -> None:
    front = spread()
    with pytest.raises(
        PlanError, match=r"layers are on cpu, meta in this process already: leave parallel= out"
    ):
        divided(front, planned({})[0], 1, 2)
    plan = with_step(planned({})[0], "max-autotune", torch.device("cuda"), ())
    assert plan.step == "regions" and plan.step_because.endswith("and the model is on cpu, meta")


def test_what_is_free_is_counted_by_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {CPU: 1000, META: 300}
    monkeypatch.setattr("kvcompile.decide.auto.free_memory", free.get)
    assert free_for_caches(known(spread())) == 450  # 300 for two of three layers
    one = replace(known(spread()), sites=known(spread()).sites[:1])
    assert free_for_caches(one) == 1000


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What `tests/support/over_devices.py` finds, in a process of its own."""
    pytest.importorskip("accelerate")
    if shutil.which("g++") is None:
        pytest.skip("the second device is compiled by g++")
    from tests.support import second_device

    library = second_device.build(tmp_path_factory.mktemp("device"))
    command = [sys.executable, "-m", "tests.support.over_devices", str(library)]
    run = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


HALVES = {"0": ["twin:0"], "1": ["twin:1"]}
slow = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("recipe", ["baseline", "int8", "paged", "h2o", "sink window"])
class TestOverTwoDevices:
    pytestmark = slow

    def test_the_same_tokens(self, found: Any, recipe: str) -> None:
        own = found["recipes"][recipe]
        assert own["same"] and own["digest"] and own["bytes"]
        assert own["placed"] == HALVES
        assert own["checks"] >= 2  # with the oracle and the original


class TestWhatHappensToIt:
    pytestmark = slow

    def test_moves_keep_devices(self, found: Any) -> None:
        assert len(found["moves"]) == 11
        for what, own in found["moves"].items():
            assert own == {"same": True, "placed": HALVES}, what

    def test_engines(self, found: Any) -> None:
        for what, own in found["served"].items():
            assert own["same"] and own["devices"] == ["twin:0", "twin:1"], what
        for what in ("paged", "h2o"):
            one, two = found["served"][what]["counts"]
            assert one == two, what
        counts = found["served"]["paged"]["counts"][1]
        assert counts["host_bytes"] > 0 and counts["cached_tokens"] > 0

    def test_other_models(self, found: Any) -> None:
        """ALiBi's slopes, windows with tables of their own, and a decoder that moves its values itself."""
        assert found["others"].keys() == {"bloom", "gemma2", "hand-written"}
        for what, own in found["others"].items():
            assert own == {"same": True, "placed": HALVES}, what

    def test_what_is_told(self, found: Any) -> None:
        told = found["told"]
        assert "twin:1: layers 1, 2.50 KiB a sequence" in told["explain"]
        # A prompt computes one row of logits.
        assert "input_ids, position_ids, logits_to_keep in" in told["explain"]
        assert "of it on twin:1        2.50 KiB" in told["estimate"]
        assert told["exported"].startswith("ExportError: the model's layers are on twin:0, twin:1")
        assert told["parallel"].startswith("PlanError: parallel: the model's layers are on twin:0, twin:1")
        assert "a CUDA graph is one device's" in told["graphs"]
