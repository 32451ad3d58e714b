"""Random bodies: whatever comes, the answer is one of OpenAI's shape, never a failure of ours, and never a hang."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcompile.serve.http.schemas.chat import ChatRequest
from kvcompile.serve.http.schemas.completions import CompletionRequest
from kvcompile.serve.http.schemas.unsupported import REQUEST
from tests.serve.http.fake_engine import FakeEngine
from tests.serve.http.running_server import Running
from tests.serve.http.test_errors import error_of

NUMBERS = st.one_of(
    st.integers(-3, 70),
    st.sampled_from([0.5, 1.0, 2, -0.0, 1e308, float("nan"), float("inf"), 10**30, -(10**30), 1 << 63]),
)
WORDS = st.one_of(
    st.sampled_from(["w3 w4", "", "w60", "text", "user", "json_object", "\x00", "€𝄞"]), st.text(max_size=8)
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, WORDS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["type", "text", "role", "content", "schema", "name", "json_schema", "x"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=8,
)
GOOD: dict[str, dict[str, Any]] = {
    "/completions": {"model": "fake", "prompt": "w3", "max_tokens": 2},
    "/chat/completions": {"model": "fake", "messages": [{"role": "user", "content": "w3"}], "max_tokens": 2},
}
NAMES = sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields, *REQUEST, "best_of", "unknown"})


def answered(server: Running, path: str, body: bytes) -> None:
    response = server.post(path, content=body, headers={"Content-Type": "application/json"})
    if response.status_code == 200:
        if response.headers["content-type"].startswith("text/event-stream"):
            assert response.text.endswith("data: [DONE]\n\n") and '"error"' not in response.text
        else:
            assert response.json()["choices"]
    else:
        assert response.status_code in (400, 404, 413, 429), (response.status_code, response.text, body)
        error_of(response)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(sorted(GOOD)),
    changes=st.dictionaries(st.sampled_from(NAMES), VALUES, min_size=1, max_size=3),
)
def test_any_value_of_any_field(
    server: Running, engine: FakeEngine, path: str, changes: dict[str, Any]
) -> None:
    answered(server, path, json.dumps({**GOOD[path], **changes}).encode())
    assert engine.wait_for(0)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(sorted(GOOD)), data=st.data())
def test_any_bytes(server: Running, engine: FakeEngine, path: str, data: st.DataObject) -> None:
    """Good bodies with a piece replaced."""
    good = json.dumps(GOOD[path]).encode()
    start = data.draw(st.integers(0, len(good)))
    end = data.draw(st.integers(start, len(good)))
    answered(server, path, good[:start] + data.draw(st.binary(max_size=6)) + good[end:])


@pytest.mark.slow
@settings(max_examples=5000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(sorted(GOOD)), changes=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5)
)
def test_many_values(server: Running, path: str, changes: dict[str, Any]) -> None:
    answered(server, path, json.dumps({**GOOD[path], **changes}).encode())
