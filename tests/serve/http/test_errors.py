"""Every bad request is one clear error of OpenAI's shape, and nothing of it reaches the engine."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx2
import openai
import pytest

from kvcompile.serve.http import Limits, Options
from tests.serve.http.conftest import LIMITS
from tests.serve.http.fake_engine import FakeEngine, tiny_tokenizer
from tests.serve.http.running_server import Running

TEXT: dict[str, Any] = {"model": "fake", "prompt": "w3 w4"}
TALK: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "w7"}]}


def error_of(response: httpx2.Response) -> dict[str, Any]:
    """The error of an answer, whose shape is checked."""
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and body["error"]["code"]
    return dict(body["error"])


def refused(server: Running, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    raw = body if isinstance(body, (bytes, str)) else json.dumps(body)
    response = server.post(path, content=raw, headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    return error_of(response)


def streamed(**options: Any) -> dict[str, Any]:
    return {"stream": True, "stream_options": options}


def said(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "w3", **message}]}


# A good request, what it is changed by, `param`, and what the message says.
BAD: list[tuple[dict[str, Any], dict[str, Any], str | None, str]] = [
    (TEXT, {"temperature": float("nan")}, "temperature", "finite number"),
    (TEXT, {"temperature": float("inf")}, "temperature", "finite number"),
    (TEXT, {"temperature": -1}, "temperature", "greater than or equal to 0"),
    (TEXT, {"temperature": "1"}, "temperature", "valid number"),
    (TEXT, {"temperature": True}, "temperature", "valid number"),
    (TEXT, {"top_p": 0}, "top_p", "greater than 0"),
    (TEXT, {"top_k": -1}, "top_k", "greater than or equal to 0"),
    (TEXT, {"min_p": 2}, "min_p", "less than or equal to 1"),
    (TEXT, {"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    (TEXT, {"presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
    (TEXT, {"frequency_penalty": -3}, "frequency_penalty", "greater than or equal to -2"),
    (TEXT, {"seed": 1 << 70}, "seed", "less than"),
    (TEXT, {"seed": 1.5}, "seed", "valid integer"),
    (TEXT, {"n": 0}, "n", "greater than or equal to 1"),
    (TEXT, {"n": 9}, "n", "at most 8 texts"),
    (TEXT, {"n": 10**30}, "n", "at most 8 texts"),
    (TEXT, {"n": 3, "prompt": ["w3"] * 3}, "n", "3 prompts times n=3"),
    (TEXT, {"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    (TEXT, {"max_tokens": 101}, "max_tokens", "100 are the most"),
    (TEXT, {"max_tokens": 10**30}, "max_tokens", "100 are the most"),
    (TEXT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "another name"),
    (TEXT, {"prompt": [3] * 190, "max_tokens": 68}, "max_tokens", "leaves room for 67, and 68 are asked for"),
    (TEXT, {"prompt": [3] * 300}, "max_tokens", "has 300 tokens"),
    (TEXT, {"prompt": [3] * 201}, "max_tokens", "never fit the pages"),
    (TEXT, {"prompt": ""}, "prompt", "no tokens"),
    (TEXT, {"prompt": []}, "prompt", "empty list"),
    (TEXT, {"prompt": [[]]}, "prompt", "expected a text"),
    (TEXT, {"prompt": [3, "w3"]}, "prompt", "expected a text"),
    (TEXT, {"prompt": [True]}, "prompt", "expected a text"),
    (TEXT, {"prompt": {"a": 1}}, "prompt", "expected a text"),
    (TEXT, {"prompt": None}, "prompt", "expected a text"),
    (TEXT, {"prompt": [3, 61]}, "prompt", "ids from 0 to 60, got 61"),
    (TEXT, {"prompt": [-1]}, "prompt", "ids from 0 to 60, got -1"),
    (TEXT, {"prompt": [[3], [10**40]]}, "prompt", "ids from 0 to 60"),
    (TEXT, {"stop": ""}, "stop.0", "at least 1 character"),
    (TEXT, {"stop": [str(number) for number in range(17)]}, "stop", "at most 16 items"),
    (TEXT, {"stop": [1]}, "stop.0", "valid string"),
    (TEXT, {"stop_token_ids": [61]}, "stop_token_ids", "below 61"),
    (TEXT, {"stop_token_ids": [-1]}, "stop_token_ids.0", "greater than or equal to 0"),
    (TEXT, {"logprobs": 21}, "logprobs", "less than or equal to 20"),
    (TEXT, {"logprobs": True}, "logprobs", "valid integer"),
    (TEXT, {"echo": True, "logprobs": 1}, "echo", "no log-probabilities"),
    (TEXT, {"best_of": 2}, "best_of", "not supported"),
    (TEXT, {"suffix": "x"}, "suffix", "not supported"),
    (TEXT, {"logit_bias": {"3": 1}}, "logit_bias", "not supported"),
    (TEXT, {"cache_salt": "x" * 257}, "cache_salt", "at most 256"),
    (TEXT, {"stream_options": {"include_usage": True}}, "stream_options", "goes with stream"),
    (TEXT, streamed(include_all=1), "stream_options.include_all", "not a field"),
    (TEXT, streamed(include_obfuscation=True), "stream_options.include_obfuscation", "padded"),
    (TEXT, {"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
    (TEXT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "goes with"),
    (TEXT, {"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format", "one of them"),
    (TEXT, {"guided_regex": ""}, "guided_regex", "empty"),
    (TEXT, {"guided_grammar": "broken"}, None, "cannot be read"),
    (TEXT, {"temprature": 1}, "temprature", "not a field"),
    (TEXT, {"model": "gpt-4"}, "model", "no model 'gpt-4'"),
    (TEXT, {"model": 3}, "model", "valid string"),
    (TALK, {"messages": []}, "messages", "at least 1 item"),
    (TALK, {"messages": "w3"}, "messages", "valid list"),
    (TALK, said(role="wizard"), "messages.0.role", "'system'"),
    (TALK, said(role="tool", tool_call_id="x"), "messages.0.tool_call_id", "no tools"),
    (TALK, said(role="tool"), "messages.0.role", "no tools"),
    (TALK, {"messages": [{"role": "user"}]}, "messages.0.content", "is required"),
    (TALK, said(content=3), "messages.0.content", "valid string"),
    (TALK, said(content=[{"type": "image_url", "image_url": {}}]), "messages.0.content", "'image_url'"),
    (TALK, said(content=[{"type": "input_audio"}]), "messages.0.content", "'input_audio'"),
    (TALK, said(content=[{"type": "text"}]), "messages.0.content", "type and text"),
    (TALK, said(tool_calls=[{}]), "messages.0.tool_calls", "no tools"),
    (TALK, {"top_logprobs": 2}, "top_logprobs", "goes with logprobs"),
    (TALK, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    (TALK, {"logprobs": 3}, "logprobs", "valid boolean"),
    (TALK, {"tools": [{"type": "function"}]}, "tools", "no tools are offered"),
    (TALK, {"tool_choice": "auto"}, "tool_choice", "no tools"),
    (TALK, {"functions": [{}]}, "functions", "no tools"),
    (TALK, {"modalities": ["text", "audio"]}, "modalities", "not supported"),
    (TALK, {"audio": {"voice": "x"}}, "audio", "not supported"),
    (TALK, {"store": True}, "store", "nothing is stored"),
    (TALK, {"metadata": {"a": "b"}}, "metadata", "nothing is stored"),
    (TALK, {"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
    (TALK, {"prediction": {"type": "content"}}, "prediction", "not supported"),
    (TALK, {"web_search_options": {"x": 1}}, "web_search_options", "not supported"),
    (TALK, {"service_tier": "flex"}, "service_tier", "one tier"),
    (TALK, {"prompt": "w3"}, "prompt", "not a field"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("good", "change", "param", "told"), BAD, ids=lambda value: str(value)[:40])
def test_bad_requests(
    server: Running,
    engine: FakeEngine,
    good: dict[str, Any],
    change: dict[str, Any],
    param: str | None,
    told: str,
    stream: bool,
) -> None:
    before = len(engine.seen)
    path = "/chat/completions" if "messages" in good else "/completions"
    body = {**good, **({"stream": True} if stream and "stream_options" not in change else {}), **change}
    unknown = change.get("model") == "gpt-4"
    error = refused(server, path, body, 404 if unknown else 400)
    assert (
        error["type"] == "invalid_request_error" and error["param"] == param and told in error["message"]
    ), error
    assert len(error["message"]) < 1000
    if unknown:
        assert error["code"] == "model_not_found"
    if "not supported" in error["message"]:
        assert (
            error["code"] == "unsupported_parameter"
            or "parts of type" in error["message"]
            or "role" in error["message"]
        )
    assert len(engine.seen) == before and engine.wait_for(0)


@pytest.mark.parametrize("change", [{}, {"model": "gpt-4"}])
def test_what_is_missing(server: Running, change: dict[str, Any]) -> None:
    assert "prompt: is required" in refused(server, "/completions", {"model": "fake", **change})["message"]
    error = refused(server, "/chat/completions", {"temperature": "hot"})
    assert all(
        one in error["message"] for one in ("model: is required", "messages: is required", "temperature")
    )


HARMLESS: dict[str, Any] = {
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": None,
    "logit_bias": {},
    "modalities": ["text"],
    "audio": None,
    "store": False,
    "metadata": None,
    "service_tier": "auto",
}


def test_what_asks_for_nothing_is_taken(client: openai.OpenAI) -> None:
    client.chat.completions.create(**TALK, extra_body=HARMLESS)
    client.completions.create(**TEXT, best_of=2, n=2)
    client.completions.create(**TEXT, best_of=1)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b"null", b'"x"', b"\xff", b'{"a": "\\ud800"}', b"[" * 10_000, b"[" + b"1" * 5000 + b"]"],
    ids=lambda body: repr(body[:20]),
)  # fmt: skip
def test_no_json(server: Running, body: bytes) -> None:
    error = refused(server, "/completions", body)
    assert error["code"] == "invalid_json" and len(error["message"]) < 1000


def test_headers(server: Running) -> None:
    for headers, told in (
        ({}, "Content-Type: application/json"),
        ({"Content-Type": "text/plain"}, "got 'text/plain'"),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, "not compressed"),
    ):
        response = server.post("/completions", content=json.dumps(TEXT), headers=headers)
        assert response.status_code == 415 and told in error_of(response)["message"]
    response = server.post(
        "/completions", content=json.dumps(TEXT), headers={"Content-Type": "application/json; charset=utf-8"}
    )
    assert response.status_code == 200


def test_routes_that_do_not_exist(server: Running) -> None:
    response = httpx2.get(f"{server.root}/v2/x")
    assert response.status_code == 404 and "GET /v2/x" in error_of(response)["message"]
    response = httpx2.get(f"{server.url}/completions")
    assert response.status_code == 405 and error_of(response)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


def test_models(client: openai.OpenAI, serving: Callable[..., Running]) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by, model.object) == ("fake", "kvcompile", "model")
    assert client.models.retrieve("fake") == model
    with pytest.raises(openai.NotFoundError, match="no model 'other'") as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"
    named = serving(FakeEngine(tiny_tokenizer()), Options(name="org/mine", limits=LIMITS)).client()
    assert named.models.retrieve("org/mine").id == "org/mine"
    assert named.completions.create(model="org/mine", prompt="w3").model == "org/mine"
    with pytest.raises(openai.NotFoundError):
        named.completions.create(**TEXT)


def test_headers_that_have_no_end(server: Running) -> None:
    """Many small ones, or one that is large, for the first request of a connection or the next: no memory for all."""
    pytest.importorskip("httptools")
    where = ("127.0.0.1", int(server.root.rpartition(":")[2]))
    first = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for before, piece in ((b"", b"X-A: a\r\n" * 1000), (first, b"a" * 8000)):
        with socket.create_connection(where, timeout=10) as one:
            one.sendall(before)
            assert not before or b"200 OK" in one.recv(4096)
            one.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-B: ")
            sent = 0
            with suppress(ConnectionError):
                while sent < 4 << 20:
                    sent += one.send(piece)
                    if select.select([one], [], [], 0)[0]:
                        break
            answer = b""
            with suppress(ConnectionError):
                answer = one.recv(4096)
        assert sent < 4 << 20
        assert answer == b"" or (answer.startswith(b"HTTP/1.1 431") and b"headers_too_large" in answer)
    many = {f"X-{number}": "a" * 100 for number in range(300)}  # as many as a browser may have cookies
    assert server.post("/completions", json=TEXT, headers=many).status_code == 200


def test_a_body_may_be_larger_than_headers(serving: Callable[..., Running]) -> None:
    large = {**TEXT, "user": "a" * 1_000_000}
    assert (
        serving(FakeEngine(tiny_tokenizer()), Options()).post("/completions", json=large).status_code == 200
    )


def test_bodies_that_are_too_large(server: Running, engine: FakeEngine) -> None:
    before = len(engine.seen)
    large = {**TEXT, "prompt": "w3 " * 10_000}
    error = refused(server, "/completions", large, 413)
    assert "19.53 KiB" in error["message"] and error["code"] == "body_too_large"

    def pieces() -> Any:  # no Content-Length
        yield from (json.dumps(large).encode()[start : start + 5000] for start in range(0, 30_000, 5000))

    response = server.post("/completions", content=pieces(), headers={"Content-Type": "application/json"})
    assert response.status_code == 413 and error_of(response)["code"] == "body_too_large"
    assert len(engine.seen) == before


def test_prompts_that_are_too_long(serving: Callable[..., Running]) -> None:
    client = serving(FakeEngine(tiny_tokenizer()), Options(limits=Limits(prompt_tokens=4))).client()
    client.completions.create(model="fake", prompt="w3 w3 w3 w3")
    for ask in (
        lambda: client.completions.create(model="fake", prompt="w3 w3 w3 w3 w3"),
        lambda: client.completions.create(model="fake", prompt=[[3], [3] * 5]),
        lambda: client.chat.completions.create(**TALK),
    ):
        with pytest.raises(openai.BadRequestError, match="has 5 tokens, and 4 are the most here") as caught:
            ask()
        assert caught.value.code == "context_length_exceeded"


def test_a_full_queue(serving: Callable[..., Running]) -> None:
    engine = FakeEngine(tiny_tokenizer(), max_queue=2)
    server = serving(engine)
    client = server.client()
    engine.hold()
    with pytest.raises(openai.RateLimitError, match="2 requests are waiting") as caught:
        client.completions.create(model="fake", prompt=["w3", "w4", "w5"])
    assert caught.value.response.headers["retry-after"] == "1" and caught.value.code == "queue_full"
    assert engine.wait_for(0) and len(engine.cancelled) == 2  # all prompts, or none
    engine.hold(False)
    assert client.completions.create(model="fake", prompt=["w3", "w4"]).choices


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_fails(serving: Callable[..., Running], stream: bool) -> None:
    engine = FakeEngine(tiny_tokenizer())
    client = serving(engine).client()
    engine.fail_next = "a step failed: the kernel said no"
    with pytest.raises(openai.InternalServerError, match="the kernel said no") as caught:
        client.completions.create(**TEXT, stream=stream)
    assert caught.value.status_code == 500 and caught.value.code == "engine_failed"
    assert client.completions.create(**TEXT).choices[0].text  # the next one does not notice


def test_a_step_that_fails_within_a_stream(serving: Callable[..., Running]) -> None:
    engine = FakeEngine(tiny_tokenizer())
    server = serving(engine)
    stream = server.client().chat.completions.create(**TALK, stream=True)
    next(stream)
    next(stream)
    engine.fail_next = "a step failed"
    with pytest.raises(openai.APIError, match="a step failed") as caught:
        list(stream)
    assert caught.value.code == "engine_failed"
    assert server.until(
        lambda: (
            server.metric('kvcompile_http_requests_total{outcome="failed",route="/v1/chat/completions"}') == 1
        )
    )


def test_a_closed_engine(serving: Callable[..., Running]) -> None:
    engine = FakeEngine(tiny_tokenizer())
    client = serving(engine).client()
    engine.close()
    with pytest.raises(openai.InternalServerError, match="the engine is closed") as caught:
        client.completions.create(**TEXT)
    assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"] == "1"


def test_a_defect_tells_nothing_of_itself(
    serving: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(tiny_tokenizer())
    server = serving(engine)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr(engine, "submit", broken)
    for stream in (False, True):
        response = server.post("/completions", json={**TEXT, "stream": stream})
        assert response.status_code == 500
        assert error_of(response)["code"] == "internal_error" and "secret" not in response.text
