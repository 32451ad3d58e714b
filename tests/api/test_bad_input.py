"""What nobody means to pass, files and numbers of any size, objects of another kind: one message of ours, at once."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import kvcompile
from kvcompile.errors import (
    InputError,
    KVCompileError,
    LimitError,
    MethodError,
    ModelError,
    QualityError,
    RecipeError,
)
from kvcompile.recipe import Recipe
from kvcompile.recipe.scales import Scales
from kvcompile.report.quality.text import tokens_of
from tests.support.models import NanoGPT, make, tiny_hf

EAGER: dict[str, Any] = {"compile": {"mode": "none"}, "verify": "off", "max_tokens": 64}
IDS = torch.randint(3, 61, (1, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_hf("llama")


@pytest.fixture(scope="module")
def fast(llama: Any) -> Any:
    return kvcompile.optimize(llama, **EAGER)


# Recipes

NINE = ",".join(["x"] * 9)
BOMB = f"a: &a [{NINE}]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 9)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)
NO_RECIPE = {
    "digits": (
        "runtime: {max_tokens: " + "9" * 5000 + "}",
        "a number of 5,000 characters at line 1, column 23",
    ),
    "hex digits": ("runtime: {max_tokens: 0x" + "9" * 5000 + "}", "a number of 5,002 characters"),
    "minutes": ("runtime: {max_tokens: " + ":".join(["59"] * 3000) + "}", "a number of 8,999 characters"),
    "brackets": ("cache: " + "[" * 5000 + "]" * 5000, "more than 32 levels deep"),
    "braces": ("cache: " + "{a: " * 5000 + "}" * 5000, "more than 32 levels deep"),
    "indents": ("\n".join(" " * i + "a:" for i in range(500)), "more than 32 levels deep at line 32"),
    "a bomb of aliases": (BOMB, "more than 10,000 values at line 5"),
    "an alias of itself": ("cache: &a {keys: *a}", "an alias of what it stands in"),
    "a key twice": (
        "cache: {keys: {dtype: int8}}\nverify: off\ncache: {}\n",
        "cache: stands twice .* lines 1 and 3",
    ),
    "a key twice within": ("cache: {keys: {dtype: int8, dtype: int4}}", "dtype: stands twice"),
    "a number of base 8": ("runtime: {max_tokens: 0100}", "0100, which YAML reads as 64"),
    "a number of base 60": ("runtime: {max_tokens: 1:30}", "1:30, which YAML reads as 90"),
    "no date": ("name: 2001-99-99", "month must be in 1..12"),
    "a character": ("cache: \x00", "special characters are not allowed"),
    "a list": ("- cache", "expected a mapping of name, description"),
}


@pytest.mark.parametrize("what", NO_RECIPE)
def test_files_that_are_no_recipe(what: str, tmp_path: Path) -> None:
    text, message = NO_RECIPE[what]
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    started = time.process_time()
    with pytest.raises(RecipeError, match=rf"(?s)mine\.yaml.*{message}") as caught:
        Recipe.load(file)
    assert time.process_time() - started < 30 and len(str(caught.value)) < 1000


def test_all_keys_that_stand_twice(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("cache: {keys: {dtype: int8, dtype: int4}}\nverify: off\nverify: quick\n")
    with pytest.raises(RecipeError) as caught:
        Recipe.load(file)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["dtype", "verify"]


def test_aliases_that_are_small_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("cache: {keys: &side {dtype: int8}, values: {<<: *side, dtype: int4, group: 32}}\n")
    assert Recipe.load(file).cache.values.group == 32


@pytest.mark.parametrize(
    "source", ["", "a" * 5000, "a\0b", Path("/"), None, 5, {1: 2}, {"runtime": [1]}, {"layers": "ab"}]
)
def test_what_is_no_recipe(source: Any) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.load(source, max_tokens=64)
    assert len(str(caught.value)) < 1000


NUMBERS = (2**31, 2**62, 10**5000, -1, float("nan"), float("inf"), "5", True)


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: type(number).__name__)
def test_numbers_that_no_cache_has(number: Any) -> None:
    for changes in (
        {"max_batch": number},
        {"max_tokens": number},
        {"prefill_chunk": number},
        {"cache": {"retention": {"kind": "window", "size": number}}},
        {"cache": {"retention": {"kind": "h2o", "heavy": number, "recent": 4}}},
        {"cache": {"keys": {"dtype": "int8", "residual": number}}},
        {"cache": {"placement": {"kind": "paged", "pages": number}}},
    ):
        with pytest.raises(RecipeError) as caught:
            Recipe.load("baseline", **changes)
        assert len(str(caught.value)) < 1000


def test_a_cache_that_no_memory_has_room_for(llama: Any) -> None:
    with pytest.warns(UserWarning, match="was made for 512"):
        huge = kvcompile.optimize(llama, **EAGER | {"max_tokens": 2**31 - 1, "max_batch": 2**20})
    with pytest.raises(LimitError, match=r"no (addresses|memory) for .*max_tokens"):
        huge(torch.ones(2**20, 1, dtype=torch.int64))
    assert huge.cache.columns == huge.cache.nbytes == 0


def test_a_budget_that_no_memory_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told when it is verified, before any text."""

    def none(*args: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nand more")

    monkeypatch.setattr("kvcompile.verify.cached._filled", none)
    recipe = {"cache": {"retention": {"kind": "window", "size": 12}}}
    told = r"no memory for the caches .* of \d+ sequences \(.+\): .*memory; .*smaller budget"
    with pytest.raises(LimitError, match=told):
        kvcompile.optimize(make(NanoGPT), recipe, **EAGER | {"verify": "quick", "max_tokens": 100})


# Configs

LLAMA = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
NO_DECODER: dict[str, tuple[Any, str]] = {
    "bert": (transformers.BertConfig(), "is_decoder: false"),
    "its dict": ({"model_type": "bert"}, "is_decoder: false"),
    "images": (transformers.ViTConfig(), "vit: a model for image.*continues no text"),
    "images and text": (transformers.CLIPConfig(), "clip: .*continues no text"),
    "sound": (transformers.Wav2Vec2Config(), "wav2vec2: .*continues no text"),
    "masks": (transformers.DistilBertConfig(), "distilbert: .*masked lm.*continues no text"),
    "two models": (
        {
            "model_type": "encoder-decoder",
            "encoder": {"model_type": "bert"},
            "decoder": {"model_type": "bert"},
        },
        "an encoder-decoder model",
    ),
    "no layers": (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers: expected a whole number from 1"),
    "a billion layers": (
        LLAMA | {"num_hidden_layers": 10**9},
        "num_hidden_layers: .* to 10,000, got 1000000000",
    ),
    "no heads": (LLAMA | {"num_attention_heads": 0}, "missing: head_dim or hidden_size"),
    "negative heads": (LLAMA | {"num_key_value_heads": -2}, "num_key_value_heads: .* got -2"),
    "a word": (LLAMA | {"head_dim": "x"}, "head_dim: .* got 'x'"),
    "digits": (LLAMA | {"head_dim": 10**5000}, "a number of about 4,983 digits"),
    "half a window": (LLAMA | {"sliding_window": 0.5}, "sliding_window: .* got 0.5"),
    "a length": (LLAMA | {"max_position_embeddings": "long"}, "max_position_embeddings: .* got 'long'"),
    "a rank": (LLAMA | {"kv_lora_rank": "x"}, "kv_lora_rank: .* got 'x'"),
}


@pytest.mark.parametrize("what", NO_DECODER)
def test_configs_without_a_decoder(what: str) -> None:
    config, message = NO_DECODER[what]
    with pytest.raises(ModelError, match=message):
        kvcompile.estimate(config)


def test_a_bert_that_is_a_decoder() -> None:
    assert kvcompile.estimate(transformers.BertConfig(is_decoder=True)).bytes_per_token > 0


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, '{"hidden_size": ' + "9" * 5000 + "}", "null"]
)
def test_configs_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        kvcompile.estimate(str(file))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("memory", ["9" * 5000, 2**60, "1e9GiB", -1, float("nan"), "0GiB", "99999999999 PiB"])
def test_memory_that_no_machine_has(memory: Any) -> None:
    with pytest.raises(KVCompileError, match="memory: expected"):
        kvcompile.estimate(LLAMA, memory=memory)


# Calibration and quality


@pytest.mark.parametrize("bad", [61, -1, 2**40])
def test_calibrating_on_ids_outside_of_the_vocabulary(bad: int) -> None:
    with pytest.raises(InputError, match=f"calibrate: token ids: expected ids from 0 to 60, got {bad}"):
        kvcompile.calibrate(make(NanoGPT), torch.tensor([1, 2, bad]))


def test_calibrating_with_what_is_no_tokenizer() -> None:
    with pytest.raises(InputError, match="tokenizer: expected one of transformers, got str"):
        kvcompile.calibrate(make(NanoGPT), "a text", tokenizer="gpt2")


def test_scales_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scales = kvcompile.calibrate(make(NanoGPT), torch.arange(3, 40))
    file = tmp_path / "scales.json"
    scales.save(file)
    before = file.read_text()

    def full(path: Path, text: str, **kwargs: Any) -> int:
        path.write_bytes(text[:9].encode())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(InputError, match=r"scales\.json: cannot be written: No space left on device"):
        scales.save(file)
    monkeypatch.undo()
    assert file.read_text() == before and [path.name for path in tmp_path.iterdir()] == ["scales.json"]
    assert Scales.load(file) == scales
    with pytest.raises(InputError, match="cannot be written: No such file"):
        scales.save(tmp_path / "no" / "scales.json")


def test_quality_of_what_is_no_text() -> None:
    with pytest.raises(QualityError, match="expected the text itself, a str, got Tensor"):
        tokens_of(None, IDS)


def test_quality_of_a_recipe_without_a_name() -> None:
    with pytest.raises(RecipeError, match="expected a name or a path, got ''"):
        kvcompile.quality(make(NanoGPT), None, "")


# Calls

ASKED: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"max_new_tokens": 0}, "`max_new_tokens` must be greater than 0"),
    "a word for a number": ({"max_new_tokens": "3"}, "generate: "),
    "shorter than the prompt": ({"max_length": 3}, "Input length of input_ids is 9"),
    "no temperature": ({"do_sample": True, "temperature": 0.0}, "`temperature`"),
    "an unknown argument": ({"max_new_token": 3}, "max_new_token"),
    "an argument of the original's": ({"labels": IDS}, "it cannot honour: labels. Call the original"),
    "no beams": ({"num_beams": 0}, "num_beams: expected a whole number of at least 1, got 0"),
    "more than beams": ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences"),
    "a mask of text": ({"attention_mask": "x"}, "attention_mask: expected a tensor .* got str"),
    "a mask of four axes": ({"attention_mask": torch.ones(1, 1, 9, 9)}, r"got \(1, 1, 9, 9\)"),
    "a sparse mask": ({"attention_mask": torch.ones(1, 9).to_sparse()}, "expected a dense tensor"),
    "a mask elsewhere": ({"attention_mask": torch.ones(1, 9, device="meta")}, "on meta"),
    "a streamer": ({"streamer": 5}, "streamer: expected one with put"),
    "a word to stop at": ({"stop_strings": "a"}, "stop string"),
}


@pytest.mark.parametrize("what", ASKED)
def test_what_generate_cannot_do(fast: Any, what: str) -> None:
    arguments, message = ASKED[what]
    with pytest.raises(InputError, match=message):
        fast.generate(
            IDS, **{"max_new_tokens": 2} | arguments if "max_length" not in arguments else arguments
        )
    assert fast.generate(IDS, max_new_tokens=1, do_sample=False).shape == (1, 10)


BAD_CALLS: dict[str, tuple[Callable[[Any], Any], type[KVCompileError], str]] = {
    "sparse ids": (lambda f: f(IDS.to_sparse()), InputError, "expected a dense tensor"),
    "nested ids": (lambda f: f(torch.nested.nested_tensor([IDS[0]])), InputError, "got a nested one"),
    "a list": (lambda f: f([1, 2]), InputError, "got list"),
    "warmup of more than the limit": (lambda f: f.warmup(65), LimitError, "65 sequences"),
    "warmup of 2**62": (lambda f: f.warmup(2**62), LimitError, "runtime.max_batch is 64"),
    "crop of a word": (lambda f: f.handle.crop("all"), InputError, "expected a whole number of tokens"),
}


@pytest.mark.parametrize("what", BAD_CALLS)
def test_bad_calls(fast: Any, what: str) -> None:
    call, error, message = BAD_CALLS[what]
    with pytest.raises(error, match=message):
        call(fast)


# The habits of transformers


def test_methods_that_would_have_no_effect_are_refused_by_name(fast: Any) -> None:
    for name in ("resize_token_embeddings", "push_to_hub", "gradient_checkpointing_enable"):
        with pytest.raises(MethodError, match=rf"call fast\.model\.{name}\(\.\.\)"):
            getattr(fast, name)
        assert not hasattr(fast, name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        fast.nonsense  # noqa: B018


def test_what_people_look_for_on_a_model(fast: Any, llama: Any, tmp_path: Path) -> None:
    assert fast.num_parameters() == llama.num_parameters()
    assert fast.get_memory_footprint() == llama.get_memory_footprint()
    assert fast.config is llama.config and fast.name_or_path == llama.name_or_path
    fast.save_pretrained(tmp_path)
    again: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), llama.parameters(), strict=True))


def test_the_report_is_ready_for_json() -> None:
    fast = kvcompile.optimize(make(NanoGPT), "int8", max_tokens=64, compile={"mode": "none"})
    told = json.loads(json.dumps(fast.report.to_dict()))
    assert told["verify_seconds"] > 0
    assert [check["name"] for check in told["checks"]] == [check.name for check in fast.report["checks"]]


def test_a_pipeline_has_nothing_to_say(fast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers.pipelines import base

    words = Tokenizer(
        WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 61)}}, "<unk>")
    )
    words.pre_tokenizer = Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    complaints: list[str] = []
    monkeypatch.setattr(base.logger, "error", complaints.append)
    pipe = transformers.pipeline("text-generation", model=fast, tokenizer=tokenizer)
    (said,) = pipe("w3 w4 w5", max_new_tokens=3, do_sample=False)
    assert said["generated_text"].startswith("w3 w4 w5")
    assert not complaints


def test_forward_hooks_are_named_once() -> None:
    model: Any = make(NanoGPT)
    called = []

    def record(module: nn.Module, given: Any, result: Any) -> None:
        called.append(module)

    model.h[1].fc.register_forward_hook(record)
    model.register_forward_pre_hook(lambda module, given: None)
    with pytest.warns(
        UserWarning, match=r"forward hooks of NanoGPT .*: NanoGPT \(<lambda>\), h\.1\.fc \(record\)"
    ) as told:
        fast = kvcompile.optimize(model, **EAGER)
    assert len([one for one in told if "forward hooks" in str(one.message)]) == 1
    called.clear()
    fast(IDS)
    assert not called
