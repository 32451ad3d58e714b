"""What a tuner tries, and in which order, by predictions; the facts are made up, so that the order is known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.config import Config
from kvcompile.kernels.triton.device import Device, acting_as
from kvcompile.kernels.triton.predict import prior
from kvcompile.kernels.triton.predict.assumptions import HOPELESS
from kvcompile.kernels.triton.predict.prior import Ranked, ranked
from kvcompile.kernels.triton.tools import tune
from kvcompile.kernels.triton.tools.assemble import Assembled, Request
from kvcompile.kernels.triton.tools.ttgir import Pipeline
from kvcompile.kernels.triton.tools.tune import Point, Subject, candidates, ranking
from kvcompile.layouts import CacheLayout, int8
from kvcompile.util.machines import MACHINES
from tests.support.predicted import H200, fact, shape

INT8 = CacheLayout(int8(), int8())
SUBJECT = Subject(
    "int8",
    "decode",
    SiteSpec(INT8, 0.1),
    (32, 8),
    (128, 128),
    torch.bfloat16,
    (Point(32, 4096), Point(1, 32768)),
)
REAL = Device("NVIDIA H200", 90, 132)


def facts(requests: Iterable[Request], progress: object = None) -> dict[Request, Assembled | str]:
    """Of three stages, what has a pipeline; of two, what has none and is slow; of four, what no program fits; of five,
    what does not assemble. Tiles of 16 take far more instructions."""
    found: dict[Request, Assembled | str] = {}
    for one in requests:
        count = 4000 if one.spec.block_n == 16 else 300
        made = {
            2: fact(instructions=count, pipeline=Pipeline(1, 0, 3), barriers=100),
            3: fact(instructions=count, pipeline=Pipeline(2, 2, 0)),
            4: fact(shared=500_000, pipeline=Pipeline(3, 4, 0)),
            5: "no register is left",
        }
        found[one] = made[one.num_stages] if one.spec.role == "decode" else fact(registers=64, shared=2048)
    return found


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(prior, "facts", facts)
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path))


def test_the_fastest_come_first_and_what_does_not_run_is_named() -> None:
    tried = [Config(block_n=64, num_stages=stages) for stages in (2, 3, 4, 5)]
    of = [shape(INT8, (4096,) * 32), shape(INT8, (32768,))]
    found = ranked("decode", tried, of, H200)
    assert found.order == (tried[1], tried[0]) and found.without == (tried[2], tried[3])
    one = [ranked("decode", [tried[0]], [each], H200).seconds[tried[0]] for each in of]
    assert found.seconds[tried[0]] == pytest.approx((one[0] * one[1]) ** 0.5)


def test_what_is_hopeless() -> None:
    a, b, c = (Config(block_n=size) for size in (16, 32, 64))
    found = Ranked({a: 3.1, b: 1.0, c: 1.9}, ())
    assert found.hopeful() == (b, c) and found.hopeful(4.0) == (b, c, a)
    assert HOPELESS == 2.0 and Ranked({}, (a,)).hopeful() == ()


def test_a_tuner_leaves_out_what_is_hopeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU of the table: what is measured are candidates, in the order of predictions; with `hopeless`, all."""
    seen: list[Config] = []

    def times(role: str, pair: tuple[Config, Config], one: object, rounds: int) -> tuple[float, float]:
        seen.append(pair[1])
        return 10.0, 9.0

    monkeypatch.setattr(tune, "_times", times)
    monkeypatch.setattr(tune, "_sample", lambda *_: None)
    own = [Config(block_n=size, num_stages=stages, waves=3.0) for size in (16, 64) for stages in (2, 3, 4, 5)]
    monkeypatch.setattr(tune, "candidates", lambda subject, device: own)
    subject = replace(SUBJECT, points=SUBJECT.points[:1])
    with acting_as(REAL):
        found = tune._tuned(subject, torch.device("cpu"), 1, 0, lambda *_: None)
        assert seen[0] == own[5] and not {own[0], own[2], own[3], own[7]} & {*seen}
        assert (found.tried, found.left_out) == (len(seen), len(own) - len(seen))
        seen.clear()
        found = tune._tuned(subject, torch.device("cpu"), 1, 0, lambda *_: None, hopeless=True)
        assert seen == own and (found.tried, found.left_out) == (8, 0)


def test_a_gpu_that_is_not_in_the_table_tries_all() -> None:
    device = Device("NVIDIA T4", 80, 40)
    assert tune._hopeful(SUBJECT, device, lambda *_: None) == candidates(SUBJECT, device)


def test_where_none_is_said_to_run_all_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        prior, "facts", lambda requests, progress: dict.fromkeys(requests, "nothing assembles")
    )
    assert tune._hopeful(SUBJECT, REAL, lambda *_: None) == candidates(SUBJECT, REAL)


def test_what_the_table_says_now_is_ranked_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "candidates", lambda subject, device: [Config(block_n=64, num_stages=3)])
    found = ranking(SUBJECT, MACHINES["h200"])
    now = next(iter(found.seconds))
    assert (now.block_n, now.num_stages, now.waves) == (64, 3, 3.0) and len(found.seconds) == 2
