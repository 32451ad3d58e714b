"""Replicas over ranks, and more of them under load.

Quick: how ranks start and end, with processes that do no more than that. Slow: a Ray cluster on this machine.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvcompile.errors import ServeError

ray = pytest.importorskip("ray")
from kvcompile.serve.replicas import ranks  # noqa: E402 (with Ray alone)

LIVES = "import os, sys; open(sys.argv[1] + os.environ['RANK'], 'w').write(repr(dict(os.environ))); sys.stdin.read()"
DIES = "import sys; sys.exit(3)"


class Nothing:
    """An engine's place."""


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # put back afterwards


def until(there: Callable[[], Any], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not there() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(there())


def test_ranks_start_with_the_environment_of_torchrun(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ranks, "_COMMAND", (sys.executable, "-c", LIVES, str(tmp_path / "rank")))
    reasons: list[str] = []
    started = ranks.Ranks(Nothing, 3, reasons.append)
    files = [tmp_path / "rank1", tmp_path / "rank2"]
    assert until(lambda: all(file.is_file() and file.read_text().endswith("}") for file in files))
    for rank, file in enumerate(files, 1):
        found = eval(file.read_text())
        assert (found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"]) == (str(rank), str(rank), "3")
        assert found["MASTER_PORT"] == os.environ["MASTER_PORT"]
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "3")
    assert all(process.poll() is None for process in started.processes)
    started.end()
    assert [process.poll() for process in started.processes] == [0, 0] and not reasons


def test_a_rank_that_dies_before_the_engine_is_there_ends_the_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "_COMMAND", (sys.executable, "-c", DIES))
    monkeypatch.setattr(ranks, "_WATCHED", 0.01)
    reasons: list[str] = []

    def make() -> Any:
        assert until(lambda: reasons)
        return Nothing()

    ranks.on_ranks(make, 2, reasons.append)
    assert reasons == ["rank 1 ended with 3 before the engine was there"]


def test_ranks_end_with_a_rank_0_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ranks, "_COMMAND", (sys.executable, "-c", LIVES, str(tmp_path / "rank")))
    made: list[ranks.Ranks] = []
    kind = ranks.Ranks

    def kept(*given: Any) -> ranks.Ranks:
        made.append(kind(*given))
        return made[0]

    monkeypatch.setattr(ranks, "Ranks", kept)
    with pytest.raises(ServeError, match="must return one where RANK is 0"):
        ranks.on_ranks(lambda: None, 2)
    assert made[0].processes[0].poll() is not None


# ---- a cluster

WORDS = 61
PROMPT = [5, 6, 7, 8]


def over_two() -> Any:
    """An engine of a tiny Llama over two ranks, in the processes of one replica."""
    import torch

    import kvcompile
    from kvcompile.serve import Engine, follow
    from tests.serve.http.fake_engine import tiny_tokenizer
    from tests.support.models import TinyConfig, TinyLlamaPositions, make

    torch.set_num_threads(1)
    model = make(TinyLlamaPositions, TinyConfig(vocab_size=WORDS, num_heads=8, num_kv_heads=4))
    fast = kvcompile.optimize(
        model,
        "paged",
        max_tokens=64,
        max_batch=4,
        compile={"mode": "none"},
        parallel={"tensor": 2, "timeout": 20, "start": 120},
    )
    if os.environ["RANK"] != "0":
        follow(fast)
        return None
    return Engine(fast, tokenizer=tiny_tokenizer())


def slow_engine() -> Any:
    from tests.serve.replicas.test_cluster import make

    return make()


def serving(application: Any) -> Any:
    """A client of an application on a cluster of its own, which ends afterwards."""
    import socket

    import openai
    from ray import serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(application)
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k3y", max_retries=0, timeout=120)


@pytest.fixture
def ended() -> Iterator[None]:
    from ray import serve

    yield
    serve.shutdown()
    ray.shutdown()


def replicas() -> list[str]:
    found = ray.util.list_named_actors(all_namespaces=True)
    return sorted(one["name"] for one in found if "#replicas#" in one["name"])


def followers() -> list[psutil.Process]:
    """The ranks beside rank 0 of all replicas on this machine that this process has started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cmdline()[-2:] == ["-m", "kvcompile.serve.replicas.ranks"]:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_replica_of_two_ranks(ended: None) -> None:
    import torch

    import kvcompile
    from kvcompile.serve.http import Options
    from kvcompile.serve.replicas import application
    from tests.support.models import TinyConfig, TinyLlamaPositions, make

    model = make(TinyLlamaPositions, TinyConfig(vocab_size=WORDS, num_heads=8, num_kv_heads=4))
    alone: Any = kvcompile.optimize(model, "paged", max_tokens=64, compile={"mode": "none"})
    wanted = alone.generate(torch.tensor([PROMPT]), max_new_tokens=8)[0, len(PROMPT) :].tolist()
    options = Options(name="tiny", api_key="k3y")
    client = serving(
        application(over_two, options=options, replicas=1, resources={"num_cpus": 0}, ranks=2, drain=5.0)
    )

    def ask() -> str:
        more: Any = {"ignore_eos": True}
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=8, temperature=0, extra_body=more
        )
        return answer.choices[0].text.strip()

    from tests.serve.http.fake_engine import WORDS as ALL

    said = " ".join(ALL[token] for token in wanted if token > 2)
    assert ask() == said
    before, (follower,) = replicas(), followers()
    follower.kill()  # a rank dies: the engine ends, and Ray makes another replica with ranks of its own
    assert until(lambda: replicas() not in (before, []) and len(followers()) == 1, 200)

    def again() -> bool:
        try:
            return ask() == said
        except Exception:  # whatever HTTP says while the replica starts
            return False

    assert until(again, 200)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_replicas_come_with_load_and_go_without(ended: None) -> None:
    from kvcompile.serve.http import Options
    from kvcompile.serve.replicas import application
    from tests.serve.replicas.test_cluster import prompt, text_of

    scaled = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": 2,
        "upscale_delay_s": 0.5,
        "downscale_delay_s": 2.0,
        "metrics_interval_s": 0.3,
        "look_back_period_s": 1.0,
    }
    options = Options(name="fake", api_key="k3y")
    client = serving(
        application(slow_engine, options=options, replicas=scaled, resources={"num_cpus": 0}, drain=20.0)
    )
    assert len(replicas()) == 1

    def ask(number: int) -> str:
        answer = client.completions.create(model="fake", prompt=prompt(number), max_tokens=60)
        return answer.choices[0].text.strip()

    asked = 0
    with ThreadPoolExecutor(12) as threads:
        deadline = time.monotonic() + 150
        while len(replicas()) < 2 and time.monotonic() < deadline:
            numbers = range(asked, asked + 12)
            asked += 12
            assert list(threads.map(ask, numbers)) == [text_of(prompt(number), 60) for number in numbers]
    assert len(replicas()) == 2
    assert until(lambda: len(replicas()) == 1, 150)  # nobody asks any more
    assert ask(3) == text_of(prompt(3), 60)
