"""A real engine behind the server: what clients get is what the engine gives by itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import kvcompile
from kvcompile.serve.engine import Engine
from kvcompile.serve.http import Limits, Options
from kvcompile.serve.sampling import Sampling
from tests.serve.http.fake_engine import tiny_tokenizer
from tests.serve.http.running_server import Running, running
from tests.support.models import tiny_hf


@pytest.fixture(scope="module")
def real() -> Iterator[Engine]:
    """A tiny Llama whose ids are words of the tiny tokenizer."""
    recipe = {"name": "tiny", "cache": {"placement": {"kind": "paged", "page_size": 8}}}
    fast = kvcompile.optimize(
        tiny_hf("llama"), recipe, max_tokens=128, max_batch=4, verify="off", compile={"mode": "none"}
    )
    with Engine(fast, tokenizer=tiny_tokenizer(), name="tiny") as engine:
        yield engine


@pytest.fixture(scope="module")
def served(real: Engine) -> Iterator[Running]:
    with running(real, Options(limits=Limits(seconds=60))) as found:
        yield found


def test_texts_are_the_engine_s(real: Engine, served: Running) -> None:
    prompts = ["w3 w4 w5 w6 w7 w8 w9 w10 w11 w12", "w20 w21"]
    expected = real.generate(prompts, Sampling(max_tokens=12, logprobs=2, ignore_eos=True))
    client = served.client()
    extra = {"return_token_ids": True, "ignore_eos": True}
    answer = client.completions.create(
        model="tiny", prompt=prompts, max_tokens=12, temperature=0, logprobs=2, extra_body=extra
    )
    for choice, result in zip(answer.choices, expected, strict=True):
        assert choice.text == result.text and choice.finish_reason == "length"
        assert tuple(choice.token_ids) == result.tokens  # type: ignore[attr-defined]
        assert choice.logprobs is not None and len(choice.logprobs.tokens or []) == 12
        assert choice.logprobs.token_logprobs == pytest.approx(
            [one.logprob for one in result.completions[0].logprobs], abs=1e-4
        )
    stream = client.completions.create(
        model="tiny",
        prompt=prompts[0],
        max_tokens=12,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == expected[0].text


def test_a_chat_with_seeds(served: Running) -> None:
    client = served.client()

    def ask(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "w7"}], n=2, seed=seed, max_tokens=10
        )
        return [choice.message.content for choice in answer.choices]

    first = ask(1)
    assert first == ask(1) and first != ask(2) and first[0] != first[1]


def test_the_prefix_cache_is_told(served: Running) -> None:
    client = served.client()
    prompt = [3 + place % 50 for place in range(40)]

    before = served.metric("kvcompile_prefix_cache_hit_tokens_total")

    def cached(salt: str) -> int:
        answer = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=2, extra_body={"cache_salt": salt}
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert cached("mine") == 0
    assert cached("mine") == 32  # whole pages of 8, and at least one token is computed
    assert cached("yours") == 0
    assert cached("yours") == 32
    assert served.metric("kvcompile_prefix_cache_hit_tokens_total") - before == 64


def test_limits_are_the_engine_s(real: Engine, served: Running) -> None:
    client = served.client()
    longest = client.completions.create(
        model="tiny", prompt=[3] * 100, max_tokens=29, extra_body={"ignore_eos": True}
    )
    assert longest.usage is not None and longest.usage.completion_tokens == 29
    answer = served.post("/completions", json={"model": "tiny", "prompt": [3] * 100, "max_tokens": 30})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_client_that_leaves_gives_its_pages_back(real: Engine, served: Running) -> None:
    with served.client().completions.create(
        model="tiny", prompt="w3", max_tokens=120, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(stream)
        assert real.stats().pages_held > 0
    assert served.until(lambda: real.stats().pages_held == 0)
    assert served.until(lambda: real.stats().cancelled == 1)


def test_a_structure_is_followed_or_refused(served: Running) -> None:
    body = {"model": "tiny", "prompt": "w3", "max_tokens": 4, "guided_regex": "(w7 ?)+"}
    answer = served.post("/completions", json=body)
    assert answer.status_code == 400 or set(answer.json()["choices"][0]["text"].split()) == {"w7"}
