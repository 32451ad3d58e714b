"""/v1/completions through the official client: whole and streamed, every form of a prompt, every option."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.serve.http.fake_engine import EOS, WORDS, FakeEngine, tokens_of

PROMPT = [3, 4, 5]
TEXT = "w3 w4 w5"


def words(tokens: list[int]) -> str:
    return " ".join(WORDS[token] for token in tokens)


def said(engine: FakeEngine, index: int = 0) -> str:
    """What the fake engine says to the last request."""
    ids, sampling, _ = engine.seen[-1]
    return words(tokens_of(ids, sampling, index))


def test_a_text_goes_on(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.completions.create(model="fake", prompt=TEXT, max_tokens=5)
    assert engine.seen[-1][0] == PROMPT
    (choice,) = answer.choices
    assert choice.text == said(engine) and len(choice.text.split()) == 5
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert answer.object == "text_completion" and answer.model == "fake" and answer.id.startswith("cmpl-")
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 5, 8)
    assert usage.prompt_tokens_details.cached_tokens == 1


def test_openai_s_defaults(client: openai.OpenAI, engine: FakeEngine) -> None:
    client.completions.create(model="fake", prompt=TEXT)
    sampling = engine.seen[-1][1]
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.n) == (1.0, 1.0, 16, 1)
    assert sampling.logprobs is None and sampling.seed is None and sampling.structure is None


def test_every_option_reaches_the_engine(client: openai.OpenAI, engine: FakeEngine) -> None:
    client.completions.create(
        model="fake",
        prompt=PROMPT,
        max_tokens=7,
        temperature=0.25,
        top_p=0.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        seed=11,
        n=2,
        stop=["never", "nowhere"],
        user="somebody",
        logprobs=2,
        extra_body={
            "top_k": 9,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "ignore_eos": True,
            "stop_token_ids": [60],
            "cache_salt": "mine",
        },
    )
    ids, sampling, salt = engine.seen[-1]
    assert ids == PROMPT and salt == "mine"
    assert sampling.model_dump() == {
        "max_tokens": 7,
        "temperature": 0.25,
        "top_k": 9,
        "top_p": 0.5,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "seed": 11,
        "stop": ("never", "nowhere"),
        "stop_token_ids": (60,),
        "ignore_eos": True,
        "logprobs": 2,
        "n": 2,
        "structure": None,
    }


def test_salts_are_told_apart(client: openai.OpenAI, engine: FakeEngine) -> None:
    for salt in ("a", "b"):
        client.completions.create(model="fake", prompt=TEXT, extra_body={"cache_salt": salt})
    client.completions.create(model="fake", prompt=TEXT)
    assert [one[2] for one in engine.seen[-3:]] == ["a", "b", ""]


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        (TEXT, [PROMPT]),
        ([TEXT, "w9"], [PROMPT, [9]]),
        (PROMPT, [PROMPT]),
        ([PROMPT, [9, 10]], [PROMPT, [9, 10]]),
    ],
)
def test_forms_of_a_prompt(
    client: openai.OpenAI, engine: FakeEngine, prompt: Any, ids: list[list[int]]
) -> None:
    before = len(engine.seen)
    answer = client.completions.create(model="fake", prompt=prompt, max_tokens=3, n=2, seed=1)
    assert [one[0] for one in engine.seen[before:]] == ids
    assert [choice.index for choice in answer.choices] == list(range(2 * len(ids)))
    expected = [words(tokens_of(one, engine.seen[-1][1], index)) for one in ids for index in range(2)]
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage is not None and answer.usage.completion_tokens == 6 * len(ids)
    assert answer.usage.prompt_tokens == sum(map(len, ids))


def test_why_texts_end(client: openai.OpenAI, engine: FakeEngine) -> None:
    assert client.completions.create(model="fake", prompt="w60").choices[0].finish_reason == "stop"
    answer = client.completions.create(model="fake", prompt=TEXT, stop="w17", max_tokens=9)
    assert answer.choices[0].finish_reason == "stop"
    assert "w17" in said(engine) and answer.choices[0].text == said(engine).partition("w17")[0]


def test_echo(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.completions.create(model="fake", prompt=[TEXT, "w9"], echo=True, max_tokens=2)
    assert [one.text[: len(start)] for one, start in zip(answer.choices, (TEXT, "w9"), strict=True)] == [
        TEXT,
        "w9",
    ]
    assert client.completions.create(model="fake", prompt=PROMPT, echo=True).choices[0].text.startswith(TEXT)
    chunks = list(client.completions.create(model="fake", prompt=TEXT, echo=True, stream=True, max_tokens=2))
    assert chunks[0].choices[0].text == TEXT
    assert "".join(one.choices[0].text for one in chunks) == TEXT + said(engine)


def test_logprobs(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.completions.create(model="fake", prompt=TEXT, logprobs=3, max_tokens=3)
    found = answer.choices[0].logprobs
    assert found is not None
    tokens = [
        f" {word}" for word in said(engine).split()
    ]  # the tokenizer's decoder puts spaces between words
    assert found.tokens == tokens and found.token_logprobs == [-0.5] * 3
    assert found.text_offset == [0, len(tokens[0]), len(tokens[0]) + len(tokens[1])]
    # the chosen one is among them; what cannot come has no infinity in JSON
    assert found.top_logprobs is not None
    assert found.top_logprobs[0] == {" w3": -1.0, " w4": -2.0, " w5": -9999.0, tokens[0]: -0.5}


def test_token_ids(client: openai.OpenAI, engine: FakeEngine) -> None:
    extra = {"return_token_ids": True}
    answer = client.completions.create(model="fake", prompt="w60", extra_body=extra)
    tokens = tokens_of(*engine.seen[-1][:2], 0)
    assert answer.choices[0].token_ids == tokens and tokens[-1] == EOS  # type: ignore[attr-defined]
    stream = client.completions.create(model="fake", prompt="w60", extra_body=extra, stream=True)
    assert [id for chunk in stream for id in chunk.choices[0].token_ids] == tokens  # type: ignore[attr-defined]


def test_a_stream_is_the_whole_answer(client: openai.OpenAI, engine: FakeEngine) -> None:
    asked: dict[str, Any] = {"model": "fake", "prompt": [TEXT, "w9"], "n": 2, "max_tokens": 6, "logprobs": 1}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True))
    texts, ends, tokens, offsets = [""] * 4, [None] * 4, [[] for _ in range(4)], [[] for _ in range(4)]  # type: ignore[var-annotated]
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        ends[choice.index] = choice.finish_reason or ends[choice.index]  # type: ignore[assignment]
        assert choice.logprobs is not None
        tokens[choice.index] += choice.logprobs.tokens or []
        offsets[choice.index] += choice.logprobs.text_offset or []
    for choice, text, end, told, places in zip(whole.choices, texts, ends, tokens, offsets, strict=True):
        assert choice.logprobs is not None
        assert (choice.text, choice.finish_reason, choice.logprobs.tokens) == (text, end, told)
        assert choice.logprobs.text_offset == places
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_in_a_stream(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="fake", prompt=TEXT, stream=True, max_tokens=4, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert [chunk.usage for chunk in chunks] == [None] * 4
    assert last.choices == [] and last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 4)


@pytest.mark.parametrize(
    ("extra", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json", ""),
        ({"guided_regex": "[ab]+"}, "regex", "[ab]+"),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
    ],
)
def test_structures(client: openai.OpenAI, engine: FakeEngine, extra: Any, kind: str, text: str) -> None:
    client.completions.create(model="fake", prompt=TEXT, extra_body=extra)
    structure = engine.seen[-1][1].structure
    assert structure is not None and (structure.kind, structure.text) == (kind, text)
