"""generate(): Hugging Face's own equals the original's; the plain module's is a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcompile
from kvcompile.errors import InputError, KVCompileError, LimitError, MethodError
from kvcompile.runtime.handle import CacheHandle
from tests.support import handles
from tests.support.models import NanoGPT, make, tiny_hf

transformers = pytest.importorskip("transformers")

EAGER = {"compile": {"mode": "none"}, "verify": "off"}


@pytest.fixture(scope="module")
def original() -> Any:
    model = tiny_hf("llama")
    # Logits of a random model are nearly flat, and float noise would choose: make them decided.
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    return model


@pytest.fixture(scope="module")
def shared(original: Any) -> Any:
    return kvcompile.optimize(original, "baseline", max_tokens=96, max_batch=12, prefill_chunk=16, **EAGER)


@pytest.fixture
def fast(shared: Any) -> Any:
    shared.release()
    return shared


def nano() -> Any:
    model = make(NanoGPT)
    # The head is tied to the embedding: as it is, every token is followed by itself.
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.randn_like(model.lm_head.weight) * 0.2)
    return model


@pytest.fixture(scope="module")
def plain_original() -> Any:
    return nano()


@pytest.fixture(scope="module")
def plain(plain_original: Any) -> Any:
    return kvcompile.optimize(plain_original, "baseline", **EAGER)


def prompt(batch: int = 1, tokens: int = 23, seed: int = 0) -> Tensor:
    return torch.randint(3, 61, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def ragged() -> dict[str, Tensor]:
    """Three sequences of different lengths, padded on the left."""
    ids, mask = prompt(3), torch.ones(3, 23, dtype=torch.int64)
    for row, pads in enumerate((0, 5, 18)):
        ids[row, :pads], mask[row, :pads] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def both(original: Any, fast: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """generate() of both from the same random state."""
    outs = []
    for model in (original, fast):
        transformers.set_seed(7)
        outs.append(model.generate(*args, **kwargs))
    return outs[0], outs[1]


class Streamer:
    """What generate() asks of a streamer: put tokens, and end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


class Steps(transformers.StoppingCriteria):
    """Stops each row at its first token of a set."""

    def __init__(self, stop: set[int]):
        self.stop = torch.tensor(sorted(stop))

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.isin(input_ids[:, -1], self.stop)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 1.3},
    "top_k_top_p": {"do_sample": True, "top_k": 9, "top_p": 0.8},
    "beams": {"num_beams": 3},
    "beam_sampling": {"num_beams": 3, "do_sample": True},
    "best_beams": {"num_beams": 4, "num_return_sequences": 3},
    "several": {"do_sample": True, "num_return_sequences": 4},
    "penalties": {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    "lengths": {"min_new_tokens": 9, "max_new_tokens": 31},
    "max_length": {"max_length": 40, "max_new_tokens": None},
    "prefill_chunks": {"prefill_chunk_size": 4},
}


def test_a_later_chunk_of_a_prompt_keeps_its_mask(fast: Any) -> None:
    """transformers 5.17 does not say that it belongs to the prompt: without its mask, padding would be seen."""
    ids, mask = ragged().values()
    for start in (0, 8):
        end = start + 8
        given = fast.prepare_inputs_for_generation(
            ids[:, start:end], attention_mask=mask[:, :end], past_key_values=fast.handle
        )
        assert torch.equal(given["attention_mask"], mask[:, :end])
        fast(**given)
    added = torch.ones(3, 17, dtype=torch.int64)
    token = fast.prepare_inputs_for_generation(ids[:, :1], attention_mask=added, past_key_values=fast.handle)
    assert token["attention_mask"] is None, "what generate() adds is never padding"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("padded", [False, True], ids=["one", "padded"])
def test_equals_the_original(original: Any, fast: Any, way: str, padded: bool) -> None:
    inputs = ragged() if padded else {"input_ids": prompt()}
    expected, got = both(original, fast, **inputs, **{"max_new_tokens": 20} | WAYS[way])
    assert torch.equal(got, expected)


def test_twice_in_a_row(original: Any, fast: Any) -> None:
    for seed in (1, 2):
        expected, got = both(original, fast, prompt(2, 9, seed), max_new_tokens=12)
        assert torch.equal(got, expected)
    assert fast.handle.get_seq_length() == 9 + 12 - 1


def test_a_forgotten_reset_would_show(original: Any, fast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fast(prompt(1, 5, seed=3))
    monkeypatch.setattr(CacheHandle, "keep", lambda self, columns: None)
    expected, got = both(original, fast, prompt(), max_new_tokens=20)
    assert not torch.equal(got, expected)


def test_end_of_text_pads_the_rows_that_have_ended(original: Any, fast: Any) -> None:
    free = original.generate(**ragged(), max_new_tokens=20)
    kwargs = {"eos_token_id": int(free[1, -12]), "pad_token_id": 0, "max_new_tokens": 20}
    expected, got = both(original, fast, **ragged(), **kwargs)
    assert torch.equal(got, expected) and (expected[1] == 0).sum() > 5  # the row's own padding is 5


def test_streamer(original: Any, fast: Any) -> None:
    streamers = [Streamer(), Streamer()]
    outs = [
        m.generate(prompt(), max_new_tokens=9, streamer=s)
        for m, s in zip((original, fast), streamers, strict=True)
    ]
    assert streamers[1].tokens == streamers[0].tokens == outs[1][0].tolist() and streamers[1].ended


def test_stopping_criteria_and_logits_processors(original: Any, fast: Any) -> None:
    def ban_even(input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, ::2] = float("-inf")
        return scores

    kwargs = {
        "stopping_criteria": transformers.StoppingCriteriaList([Steps(set(range(1, 21, 2)))]),
        "logits_processor": transformers.LogitsProcessorList([ban_even]),
        "max_new_tokens": 40,
    }
    expected, got = both(original, fast, **ragged(), **kwargs)
    assert torch.equal(got, expected) and got.shape[1] < 23 + 40
    assert (got[0, 23:] % 2 == 1).sum() > 0


def test_scores_and_the_cache_in_a_dict(original: Any, fast: Any) -> None:
    kwargs = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected, got = both(original, fast, **ragged(), max_new_tokens=10, **kwargs)
    assert type(got) is type(expected) and torch.equal(got.sequences, expected.sequences)
    for name in ("scores", "logits"):
        for ours, theirs in zip(getattr(got, name), getattr(expected, name), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert got.past_key_values is fast.handle
    assert fast.handle.get_seq_length() == 32 and "32 tokens" in repr(fast.handle)


def test_conversation_of_turns(original: Any, fast: Any) -> None:
    """The handle goes on, with the whole conversation or with what is new, padded or not."""
    for inputs in ({"input_ids": prompt(1, 9)}, ragged()):
        ids, mask = inputs["input_ids"], inputs.get("attention_mask", torch.ones(1, 9, dtype=torch.int64))
        answer = fast.generate(ids, attention_mask=mask, max_new_tokens=6)
        said = torch.cat([answer, prompt(len(ids), 4, seed=5)], dim=1)
        full = torch.cat([mask, mask.new_ones(len(ids), said.shape[1] - ids.shape[1])], dim=1)
        expected = original.generate(said, attention_mask=full, max_new_tokens=11)
        before = fast.handle.get_seq_length()
        got = fast.generate(said, attention_mask=full, past_key_values=fast.handle, max_new_tokens=11)
        assert torch.equal(got, expected)
        assert fast.handle.get_seq_length() == said.shape[1] + 10 and before == ids.shape[1] + 5
    again = torch.cat([got, prompt(3, 2, seed=6)], dim=1)
    ones = full.new_ones(3, again.shape[1] - full.shape[1])
    full = torch.cat([full, ones], dim=1)
    expected = original.generate(again, attention_mask=full, max_new_tokens=5)
    new = again[:, fast.handle.get_seq_length() :]
    tail = fast.generate(new, attention_mask=full, past_key_values=fast.handle, max_new_tokens=5)
    assert torch.equal(tail[:, new.shape[1] :], expected[:, again.shape[1] :])


def test_a_mask_that_transformers_makes(original: Any, fast: Any) -> None:
    """Of padding ids, where none is passed: turns keep what is cached, as with the mask."""
    ids = ragged()["input_ids"]
    said = torch.cat([fast.generate(ids, max_new_tokens=6, eos_token_id=None), prompt(3, 4, seed=5)], dim=1)
    steps = handles.Steps(fast)
    got = fast.generate(said, past_key_values=fast.handle, max_new_tokens=3, eos_token_id=None)
    assert torch.equal(got, original.generate(said, max_new_tokens=3, eos_token_id=None))
    assert steps.sizes == [5, 1, 1]


def test_a_generation_config_is_passed_on_alone(fast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers warns of arguments beside one, and will refuse them: none of ours are."""
    monkeypatch.setattr(transformers.generation.utils.logger, "warning_once", lambda text: told.append(text))
    told: list[str] = []
    fast.generate(prompt(), generation_config=transformers.GenerationConfig(max_new_tokens=2))
    assert not told


def test_another_text_is_not_gone_on_with(original: Any, fast: Any) -> None:
    """Shorter than the cache, longer, branching off; see tests/runtime/test_handle.py."""
    for ids in (prompt(1, 9), prompt(1, 40, seed=8), torch.cat([prompt(1, 9), prompt(1, 30, seed=9)], dim=1)):
        fast.generate(prompt(), max_new_tokens=5)
        got = fast.generate(ids, past_key_values=fast.handle, max_new_tokens=6)
        assert torch.equal(got, original.generate(ids, max_new_tokens=6))


def test_assisted_generation(original: Any, fast: Any) -> None:
    for more in ({"assistant_model": original}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(*both(original, fast, prompt(), max_new_tokens=9, **more))


def test_a_config_that_has_no_cache_by_default(
    original: Any, fast: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPT's says so: it is no wish of who calls."""
    monkeypatch.setattr(original.generation_config, "use_cache", False)
    assert torch.equal(*both(original, fast, prompt(), max_new_tokens=5))
    config = transformers.GenerationConfig(use_cache=False, max_new_tokens=5)
    with pytest.raises(InputError, match="use_cache=False"):
        fast.generate(prompt(), generation_config=config)
    with pytest.raises(InputError, match="use_cache=False"):
        fast.generate(prompt(), config)


REFUSED: dict[str, tuple[Callable[[Any], dict[str, Any]], type[KVCompileError], str]] = {
    "static cache": (lambda m: {"cache_implementation": "static"}, InputError, "the recipe has chosen"),
    "another cache": (lambda m: {"past_key_values": transformers.DynamicCache()}, InputError, "DynamicCache"),
    "inputs_embeds": (lambda m: {"inputs_embeds": torch.ones(1, 3, 48)}, InputError, "inputs_embeds"),
    "no cache": (lambda m: {"use_cache": False}, InputError, "use_cache=False"),
    "hidden states": (
        lambda m: {"output_hidden_states": True, "return_dict_in_generate": True},
        InputError,
        "output_hidden_states",
    ),
    "other positions": (lambda m: {"position_ids": torch.arange(23)[None] + 2}, InputError, "position_ids"),
    "contrastive search": (
        lambda m: {"penalty_alpha": 0.6, "top_k": 4},
        InputError,
        "contrastive_search: this module",
    ),
    "guidance of its own config": (
        lambda m: {"generation_config": transformers.GenerationConfig(guidance_scale=2.0)},
        InputError,
        r"guidance_scale=2\.0: it runs another text",
    ),
    "healing": (lambda m: {"token_healing": True}, InputError, "token_healing=True: it runs another text"),
    "padding in the midst": (
        lambda m: {"inputs": prompt().where(torch.arange(23) != 9, 0), "pad_token_id": 0},
        InputError,
        "No attention_mask was passed, so pad_token_id is padding",
    ),
    "early exit": (lambda m: {"assistant_early_exit": 1}, InputError, "assistant_early_exit: it runs some"),
    "guesses for several": (
        lambda m: {"inputs": prompt(2), "prompt_lookup_num_tokens": 3},
        InputError,
        "it is for one sequence, got 2",
    ),
    "no beams": (
        lambda m: {"generation_config": transformers.GenerationConfig(num_beams=0)},
        InputError,
        "num_beams: expected a whole number",
    ),
    "its own batches": (
        lambda m: {"cache_implementation": "paged"},
        MethodError,
        r"kvcompile\.serve\.Engine",
    ),
    "too long": (lambda m: {"max_new_tokens": 96 - 23 + 2}, LimitError, "97 cached tokens.*max_tokens 96"),
    "too many": (lambda m: {"num_beams": 13}, LimitError, "13 sequences.*max_batch is 12"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_before_the_first_token(original: Any, fast: Any, what: str) -> None:
    fast(prompt(1, 6))
    arguments, kind, message = REFUSED[what]
    streamer = Streamer()
    calls = fast.cache.columns
    with pytest.raises(kind, match=message):
        fast.generate(**{"inputs": prompt(), "max_new_tokens": 8} | arguments(original))
    # "other positions" is seen by the first forward, after generate() has emptied the cache.
    assert fast.cache.columns in (calls, 0) and not streamer.tokens
    assert torch.equal(*both(original, fast, prompt(), max_new_tokens=9))


def test_all_that_fits_fits(original: Any, fast: Any) -> None:
    """The last token is never cached: prompt + new tokens may be one more than the limit."""
    assert torch.equal(*both(original, fast, prompt(), max_new_tokens=96 - 23 + 1))


def test_a_step_looks_at_no_mask_and_no_old_token(fast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[tuple[int, ...], bool]] = []
    inner = type(fast)._call

    def call(self: Any, input_ids: Tensor, attention_mask: Tensor | None, keep: int | None) -> Any:
        seen.append((tuple(input_ids.shape), attention_mask is not None))
        assert keep == 1
        return inner(self, input_ids, attention_mask, keep)

    monkeypatch.setattr(type(fast), "_call", call)
    fast.generate(**ragged(), max_new_tokens=5)
    assert seen == [((3, 23), True)] + [((3, 1), False)] * 4


def test_pipeline(original: Any, fast: Any) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = ["<pad>", "<s>", "</s>", *(chr(c) for c in range(ord("A"), ord("A") + 58))]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(letters)}, unk_token="<s>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, padding_side="left", **special)
    texts = ["ABCabcXYZ", "hello", "Z"]
    outs = []
    for model in (original, fast):
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
        outs.append(pipe(texts, max_new_tokens=9, do_sample=False, batch_size=3))
    assert outs[1] == outs[0] and all(len(o[0]["generated_text"]) > 9 for o in outs[1])


def test_plain_greedy_is_the_loop_over_the_original(plain_original: Any, plain: Any) -> None:
    model, ids = plain_original, prompt(2, 9)
    expected = ids
    with torch.no_grad():
        for _ in range(15):
            expected = torch.cat([expected, model(expected)[:, -1].argmax(-1, keepdim=True)], dim=1)
    for _ in range(2):
        assert torch.equal(plain.generate(ids, max_new_tokens=15), expected)


def test_plain_sampling_is_reproducible(plain: Any) -> None:
    def run(seed: int, **kwargs: Any) -> Tensor:
        g = torch.Generator().manual_seed(seed)
        return plain.generate(prompt(2, 9), max_new_tokens=15, do_sample=True, generator=g, **kwargs)

    assert torch.equal(run(1, temperature=0.9), run(1, temperature=0.9))
    assert not torch.equal(run(1), run(2))
    assert torch.equal(run(1, top_k=1), plain.generate(prompt(2, 9), max_new_tokens=15))


def test_plain_end_and_streamer(plain: Any) -> None:
    free = plain.generate(prompt(2, 9), max_new_tokens=15)
    end = int(free[0, 13])
    at = 9 + free[0, 9:].tolist().index(end)
    both_rows = plain.generate(prompt(2, 9), max_new_tokens=15, eos_token_id=end)
    assert torch.equal(both_rows[0, : at + 1], free[0, : at + 1]) and (both_rows[0, at:] == end).all()
    streamer = Streamer()
    one = plain.generate(prompt(2, 9)[:1], max_new_tokens=15, eos_token_id=end, streamer=streamer)
    assert streamer.tokens == one[0].tolist() == free[0, : at + 1].tolist() and streamer.ended


@pytest.mark.parametrize(
    ("kwargs", "kind", "message"),
    [
        ({"max_new_tokens": 0}, InputError, "max_new_tokens: expected a whole number of at least 1"),
        ({"temperature": 0.0, "do_sample": True}, InputError, "temperature: expected more than 0"),
        ({"top_k": 0, "do_sample": True}, InputError, "top_k: expected a whole number of at least 1"),
        ({"eos_token_id": "end"}, InputError, "eos_token_id: expected a token id, got 'end'"),
        ({"eos_token_id": [2, 3]}, InputError, r"eos_token_id: expected a token id, got \[2, 3\]"),
        ({"max_new_tokens": 121}, LimitError, "129 tokens a sequence, but runtime.max_tokens is 128"),
        ({"streamer": Streamer(), "input_ids": prompt(2, 9)}, InputError, "streamer: expected one sequence"),
        ({"input_ids": prompt(1, 9).float()}, InputError, "expected dtype torch.int64"),
    ],
)
def test_plain_errors_leave_the_cache(
    plain: Any, kwargs: dict[str, Any], kind: type[KVCompileError], message: str
) -> None:
    plain.reset()
    plain(prompt(1, 5))
    with pytest.raises(kind, match=message):
        plain.generate(**{"input_ids": prompt(1, 9), "max_new_tokens": 4} | kwargs)
    assert plain.cache.columns == 5
