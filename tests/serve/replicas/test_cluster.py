"""A Ray cluster of two replicas on this machine: what HTTP clients see, where prompts go, and what a death costs.

Run with -m slow: the cluster takes half a minute to come up.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import httpx2
import openai
import psutil
import pytest

from kvcompile.serve.http import Options
from kvcompile.serve.replicas.affinity import PIECE
from tests.serve.http.fake_engine import tokens_of

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORDS = [f"w{number}" for number in range(3, 59)]


def make() -> Any:
    """An engine whose texts are a function of their prompts, in the replica's process."""
    import time as clock

    from tests.serve.http.fake_engine import FakeEngine, tiny_tokenizer

    class Slow(FakeEngine):
        def _step(self, run: Any) -> None:
            clock.sleep(0.01)
            super()._step(run)

    return Slow(tiny_tokenizer(), max_queue=64)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    from ray import serve

    from kvcompile.serve.replicas import application

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = int(free.getsockname()[1])
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": number})
        options = Options(name="fake", api_key="k3y")
        serve.run(application(make, options=options, resources={"num_cpus": 0}, slack=64))
        yield number
        serve.shutdown()
    finally:
        ray.shutdown()


@pytest.fixture(scope="module")
def client(port: int) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k3y", max_retries=0, timeout=120)


def replicas() -> list[str]:
    """Names of the actors that are replicas now."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return sorted(one["name"] for one in found if "#replicas#" in one["name"])


def stats() -> list[Any]:
    from ray import serve

    handle: Any = serve.get_deployment_handle("replicas", "default")
    each: list[Any] = handle.broadcast("stats").results(timeout_s=30)
    return each


def prompt(number: int, length: int = 6) -> list[int]:
    """Ids that begin as no other number's do."""
    return [3 + number % 50, *(3 + (number // 50 + place) % 50 for place in range(length - 1))]


def text_of(ids: list[int], tokens: int) -> str:
    from kvcompile.serve import Sampling
    from tests.serve.http.fake_engine import WORDS as ALL

    return " ".join(ALL[one] for one in tokens_of(ids, Sampling(max_tokens=tokens), 0))


def ask(client: openai.OpenAI, ids: list[int], tokens: int = 5) -> str:
    answer = client.completions.create(model="fake", prompt=ids, max_tokens=tokens)
    return answer.choices[0].text.strip()


def test_answers_and_streams(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert ask(client, [5, 6, 7]) == text_of([5, 6, 7], 5)
    stream = client.completions.create(model="fake", prompt=[5, 6, 7], max_tokens=5, stream=True)
    pieces = [chunk.choices[0].text for chunk in stream if chunk.choices]
    assert len(pieces) >= 5 and "".join(pieces).strip() == text_of([5, 6, 7], 5)


def test_errors_are_those_of_one_engine(client: openai.OpenAI, port: int) -> None:
    with pytest.raises(openai.BadRequestError, match="tokens never fit the pages"):  # said by the replica
        ask(client, [5] * 220)
    with pytest.raises(openai.BadRequestError, match="ids from 0"):  # said by the interface
        ask(client, [5, 1 << 20])
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="other", max_retries=0).models.list()


def test_what_begins_alike_goes_to_one_replica(client: openai.OpenAI) -> None:
    before = [one.requests for one in stats()]
    for tail in range(6):
        ask(client, [*prompt(7, 2 * PIECE), 4 + tail])
    more = sorted(after - old for after, old in zip((one.requests for one in stats()), before, strict=True))
    assert more == [0, 6]


def test_what_begins_otherwise_is_shared_out(client: openai.OpenAI) -> None:
    before = [one.requests for one in stats()]
    for number in range(24):
        ask(client, prompt(number, 2 * PIECE), tokens=1)
    more = [after - old for after, old in zip((one.requests for one in stats()), before, strict=True)]
    assert sum(more) == 24 and min(more) >= 3  # a fair coin gives less once in 5,000 sets of names


def test_a_client_who_leaves_gives_back_what_it_had(client: openai.OpenAI) -> None:
    before = sum(one.cancelled for one in stats())
    stream = client.completions.create(model="fake", prompt=[5, 6, 7], max_tokens=100, stream=True)
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 20
    while sum(one.cancelled for one in stats()) == before and time.monotonic() < deadline:
        time.sleep(0.2)
    assert sum(one.cancelled for one in stats()) == before + 1
    assert sum(one.running for one in stats()) == 0


def test_metrics_are_of_all_replicas(client: openai.OpenAI, port: int) -> None:
    said = httpx2.get(f"http://127.0.0.1:{port}/metrics", headers={"Authorization": "Bearer k3y"}, timeout=30)
    assert "kvcompile_pages 80.0" in said.text  # 40 of each


def test_a_replica_that_hangs_keeps_what_went_to_it_and_no_more(client: openai.OpenAI) -> None:
    """Clients of the other one do not notice, and who waited for it is answered where it goes on."""
    processes = [process for process in psutil.Process().children(recursive=True) if _is_replica(process)]
    assert len(processes) == 2
    processes[0].suspend()
    try:
        with ThreadPoolExecutor(12) as threads:
            running = []
            for number in range(12):
                running.append(threads.submit(ask, client, prompt(number)))
                time.sleep(0.2)
            answered = wait(running, 8).done
            processes[0].resume()
            assert [one.result(30) for one in running] == [text_of(prompt(number), 5) for number in range(12)]
    finally:
        processes[0].resume()
    assert 10 <= len(answered) < 12


def _is_replica(process: psutil.Process) -> bool:
    try:
        return any("ServeReplica:default:replicas" in word for word in process.cmdline())
    except psutil.Error:  # it has ended meanwhile
        return False


def test_a_replica_that_dies_under_load_costs_only_what_had_begun(client: openai.OpenAI) -> None:
    """Every request either is answered in full, or fails with one clear error after some of its tokens."""
    assert len(replicas()) == 2

    def one(number: int) -> tuple[str, str]:
        ids, said = prompt(number, PIECE), ""
        try:
            stream = client.completions.create(model="fake", prompt=ids, max_tokens=60, stream=True)
            for chunk in stream:
                said += chunk.choices[0].text if chunk.choices else ""
        except openai.APIError as error:
            return said, str(error)
        assert said.strip() == text_of(ids, 60)
        return said, ""

    with ThreadPoolExecutor(24) as threads:
        running = [threads.submit(one, number) for number in range(24)]
        deadline = time.monotonic() + 30
        while min(each.running for each in stats()) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        victim = ray.get_actor(replicas()[0], namespace="serve")
        ray.kill(victim)
        running += [threads.submit(one, 100 + number) for number in range(12)]  # while one is dead
        ended = [each.result(timeout=120) for each in running]
    failed = [(said, error) for said, error in ended if error]
    assert all(said and "replica that answered this request is gone" in error for said, error in failed)
    assert failed and len(failed) < 24
    assert all(not error for _, error in ended[24:])
    deadline = time.monotonic() + 120
    while len(replicas()) < 2 and time.monotonic() < deadline:  # Ray starts another one
        time.sleep(0.5)
    assert len(replicas()) == 2
    assert ask(client, [5, 6, 7]) == text_of([5, 6, 7], 5)
