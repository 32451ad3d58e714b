"""/metrics: the engine's numbers as they are, times as clients see them, and how requests ended."""

from __future__ import annotations

import threading
from collections.abc import Callable

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvcompile.serve.http import Options
from tests.serve.http.conftest import LIMITS
from tests.serve.http.fake_engine import FakeEngine, tiny_tokenizer
from tests.serve.http.running_server import Running


def values(server: Running) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    response = httpx2.get(f"{server.root}/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_what_is_told(serving: Callable[..., Running]) -> None:
    engine = FakeEngine(tiny_tokenizer())
    server = serving(engine, Options(limits=LIMITS))
    client = server.client()
    before = values(server)
    assert before["kvcompile_requests_submitted_total", frozenset()] == 0
    assert before["kvcompile_time_to_first_token_seconds_count", frozenset()] == 0
    client.completions.create(model="fake", prompt="w3 w4", max_tokens=5, n=2)
    list(
        client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "w3"}], max_tokens=3, stream=True
        )
    )
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="w3")
    httpx2.get(f"{server.root}/nothing/{'x' * 50}")

    found = values(server)
    plain = {name: value for (name, labels), value in found.items() if not labels}
    assert plain["kvcompile_requests_submitted_total"] == plain["kvcompile_requests_finished_total"] == 2
    assert plain["kvcompile_prompt_tokens_total"] == 2 + 5
    assert plain["kvcompile_completion_tokens_total"] == 2 * 5 + 3
    assert plain["kvcompile_prefix_cache_hit_tokens_total"] == 2
    assert plain["kvcompile_preemptions_total"] == 3
    assert plain["kvcompile_requests_waiting"] == plain["kvcompile_requests_running"] == 0
    assert (plain["kvcompile_pages"], plain["kvcompile_pages_held"], plain["kvcompile_pages_cached"]) == (
        40,
        0,
        5,
    )
    assert plain["kvcompile_cache_bytes"] == 1 << 20
    assert plain["kvcompile_time_to_first_token_seconds_count"] == 2
    assert plain["kvcompile_inter_token_seconds_count"] == 2 * 4 + 2
    assert plain["kvcompile_request_seconds_count"] == 2
    assert 0 < plain["kvcompile_time_to_first_token_seconds_sum"] <= plain["kvcompile_request_seconds_sum"]

    ended = {
        (dict(labels)["route"], dict(labels)["outcome"]): value
        for (name, labels), value in found.items()
        if name == "kvcompile_http_requests_total"
    }
    assert ended == {
        ("/v1/completions", "ok"): 1,
        ("/v1/chat/completions", "ok"): 1,
        ("/v1/completions", "refused"): 1,
        ("other", "refused"): 1,  # a label of its own for every path would fill the memory
        ("/metrics", "ok"): 1,
    }


def test_two_servers_count_apart(serving: Callable[..., Running]) -> None:
    one, other = (serving(FakeEngine(tiny_tokenizer())) for _ in range(2))
    one.client().completions.create(model="fake", prompt="w3")
    assert one.metric("kvcompile_request_seconds_count") == 1
    assert other.metric("kvcompile_request_seconds_count") == 0


def test_cache_in_use(serving: Callable[..., Running]) -> None:
    engine = FakeEngine(tiny_tokenizer())
    server = serving(engine)
    engine.hold()
    asking = threading.Thread(target=lambda: server.client().completions.create(model="fake", prompt="w3"))
    asking.start()
    assert engine.wait_for(1)
    assert server.metric("kvcompile_cache_usage_ratio") == 0.25
    assert server.metric("kvcompile_requests_running") == 1
    engine.hold(False)
    asking.join(10)
    assert server.metric("kvcompile_cache_usage_ratio") == 0
