"""/v1/chat/completions through the official client: templates, streams, log-probabilities, structures."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.serve.http.fake_engine import TEMPLATE, FakeEngine, tiny_tokenizer, tokens_of
from tests.serve.http.running_server import Running
from tests.serve.http.test_completions import said, words

TALK: list[Any] = [{"role": "user", "content": "w7"}]
ENDS: list[Any] = [{"role": "user", "content": "w60"}]  # the fake engine ends by itself


def test_a_message_is_answered(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.chat.completions.create(model="fake", messages=TALK, max_completion_tokens=4)
    assert words(engine.seen[-1][0]) == "w3 <unk> w7 w4 w5"  # the role is no word of the tokenizer
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", said(engine))
    assert (choice.finish_reason, choice.logprobs) == ("length", None)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.usage is not None and answer.usage.total_tokens == 5 + 4


def test_a_chat_goes_on_while_there_is_room(client: openai.OpenAI, engine: FakeEngine) -> None:
    client.chat.completions.create(model="fake", messages=TALK)
    assert engine.seen[-1][1].max_tokens == 100  # Limits.completion_tokens
    client.completions.create(model="fake", prompt=[3] * 190, max_tokens=67)
    assert engine.seen[-1][1].max_tokens == 256 - 190 + 1


def test_a_whole_talk(client: openai.OpenAI, engine: FakeEngine) -> None:
    client.chat.completions.create(
        model="fake",
        messages=[
            {"role": "system", "content": "w8"},
            {"role": "user", "content": [{"type": "text", "text": "w9"}, {"type": "text", "text": "w10"}]},
            {
                "role": "assistant",
                "content": "w11",
                "refusal": None,
                "tool_calls": [],
            },  # as clients give it back
            {"role": "user", "content": "w12", "name": "somebody"},
        ],
    )
    assert [word for word in words(engine.seen[-1][0]).split() if word not in ("<unk>", "w3", "w4")] == [
        "w8",
        "w9",
        "w10",
        "w11",
        "w12",
        "w5",
    ]


def test_developers_are_systems_where_a_template_does_not_know_them(serving: Callable[..., Running]) -> None:
    for template, role in (
        ("{{ messages[0].role }}", "system"),
        ("{{ messages[0].role }}{# developer #}", "developer"),
    ):
        tokenizer = tiny_tokenizer(template)
        tokenizer.add_tokens(["system", "developer"])
        engine = FakeEngine(tokenizer)
        serving(engine).client().chat.completions.create(
            model="fake", messages=[{"role": "developer", "content": "w7"}]
        )
        assert tokenizer.decode(engine.seen[-1][0]) == role


def test_a_stream_is_the_whole_answer(client: openai.OpenAI, engine: FakeEngine) -> None:
    asked: dict[str, Any] = {"model": "fake", "messages": TALK, "n": 3, "max_tokens": 5, "logprobs": True}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    *chunks, last = chunks
    assert last.choices == [] and last.usage == whole.usage
    for index, choice in enumerate(whole.choices):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert own[0].delta.role == "assistant" and all(one.delta.role is None for one in own[1:])
        assert "".join(one.delta.content or "" for one in own) == choice.message.content
        assert [one.finish_reason for one in own] == [None] * (len(own) - 1) + [choice.finish_reason]
        told = [token for one in own if one.logprobs for token in one.logprobs.content or []]
        assert choice.logprobs is not None and told == choice.logprobs.content
    assert whole.choices[0].message.content != whole.choices[1].message.content


def test_the_client_s_own_helper_for_streams(client: openai.OpenAI, engine: FakeEngine) -> None:
    with client.chat.completions.stream(model="fake", messages=ENDS) as stream:
        kinds = {event.type for event in stream}
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert stream.get_final_completion().choices[0].message.content == " ".join(said(engine).split()[:2])


def test_logprobs(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=TALK, logprobs=True, top_logprobs=3, max_tokens=2
    )
    assert engine.seen[-1][1].logprobs == 3
    found = answer.choices[0].logprobs
    assert found is not None and found.content is not None
    assert [one.token.strip() for one in found.content] == said(engine).split()
    for one in found.content:
        assert one.logprob == -0.5 and bytes(one.bytes or []).decode() == one.token
        assert [(top.token, top.logprob) for top in one.top_logprobs] == [
            (" w3", -1.0),
            (" w4", -2.0),
            (" w5", -9999.0),  # JSON has no infinity
        ]


def test_a_schema(client: openai.OpenAI, engine: FakeEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    client.chat.completions.create(
        model="fake",
        messages=TALK,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": schema, "strict": True},
        },
    )
    structure = engine.seen[-1][1].structure
    assert structure is not None and structure.kind == "json_schema" and json.loads(structure.text) == schema


def test_the_client_s_own_schemas(client: openai.OpenAI, engine: FakeEngine) -> None:
    class Answer(BaseModel):
        number: int

    with pytest.raises(ValueError, match="Invalid JSON"):  # the fake engine says words, whatever it is asked
        client.chat.completions.parse(model="fake", messages=ENDS, response_format=Answer)
    structure = engine.seen[-1][1].structure
    assert structure is not None and json.loads(structure.text)["properties"]["number"]["type"] == "integer"


def test_text_asks_for_no_structure(client: openai.OpenAI, engine: FakeEngine) -> None:
    client.chat.completions.create(model="fake", messages=TALK, response_format={"type": "text"})
    assert engine.seen[-1][1].structure is None


def test_a_template_that_refuses(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="the user begins") as caught:
        client.chat.completions.create(model="fake", messages=[{"role": "assistant", "content": "w7"}])
    assert caught.value.param == "messages"
    assert "raise_exception" in TEMPLATE


def test_no_template_and_no_tokenizer(serving: Callable[..., Running]) -> None:
    client = serving(FakeEngine(tiny_tokenizer(None))).client()
    with pytest.raises(openai.BadRequestError, match="has no chat template") as caught:
        client.chat.completions.create(model="fake", messages=TALK)
    assert caught.value.code == "no_chat_template"
    assert client.completions.create(model="fake", prompt="w7").choices[0].text

    engine = FakeEngine(None)
    client = serving(engine).client()
    for ask in (
        lambda: client.chat.completions.create(model="fake", messages=TALK),
        lambda: client.completions.create(model="fake", prompt="w7"),
    ):
        with pytest.raises(openai.BadRequestError, match="has no tokenizer") as caught:
            ask()
        assert caught.value.code == "no_tokenizer"
    answer = client.completions.create(
        model="fake", prompt=[3], logprobs=0, extra_body={"return_token_ids": True}
    )
    tokens = tokens_of(*engine.seen[-1][:2], 0)
    assert answer.choices[0].token_ids == tokens and answer.choices[0].text == ""  # type: ignore[attr-defined]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == [f"token_id:{token}" for token in tokens]
