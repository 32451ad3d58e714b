"""Bad input: a KVCompileError that says what was expected, what came and what to do; nothing has changed."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvcompile
from kvcompile import errors
from kvcompile.errors import (
    DetectionError,
    InputError,
    KVCompileError,
    LimitError,
    ModelError,
    PlanError,
    RecipeError,
)
from tests.support.models import NanoGPT, make, tiny_hf

EAGER = {"compile": {"mode": "none"}, "verify": "off"}
IN_CACHE = {"retention": {"kind": "sink_window", "sinks": 2, "window": 8, "positions": "in_cache"}}


class TokensAlone(nn.Module):
    """A language model without attention: each token predicts the next by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(61, 16), nn.Linear(16, 61)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(torch.relu(self.embed(input_ids)))


def ids(batch: int = 2, tokens: int = 5, seed: int = 1) -> Tensor:
    return torch.randint(3, 61, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def mask(*rows: str) -> Tensor:
    return torch.tensor([[int(c) for c in row] for row in rows])


@pytest.fixture(scope="module")
def llama() -> Any:
    return kvcompile.optimize(
        tiny_hf("llama"), "baseline", max_tokens=32, max_batch=4, prefill_chunk=8, **EAGER
    )


@pytest.fixture(scope="module")
def nano() -> Any:
    return kvcompile.optimize(make(NanoGPT), "baseline", max_tokens=32, max_batch=4, **EAGER)


# what: (arguments of a call on two sequences of six tokens, error, what its message says)
CALLS: dict[str, tuple[dict[str, Any], type[KVCompileError], tuple[str, ...]]] = {
    "too many tokens": (
        {"input_ids": ids(2, 27)},
        LimitError,
        ("6 tokens in the cache", "27 new", "runtime.max_tokens 32", "reset()"),
    ),
    "another batch": ({"input_ids": ids(3)}, InputError, ("holds 2 sequences", "has 3", "reset()")),
    "int32": ({"input_ids": ids().int()}, InputError, ("torch.int64", "torch.int32", "input_ids.long()")),
    "float": ({"input_ids": ids().float()}, InputError, ("torch.int64", "torch.float32")),
    "device": ({"input_ids": ids().to("meta")}, InputError, ("device cpu", "got meta", ".to('cpu')")),
    "no tokens": ({"input_ids": ids(2, 0)}, InputError, ("[batch, new tokens]", "(2, 0)")),
    "no sequences": ({"input_ids": ids(0, 3)}, InputError, ("[batch, new tokens]", "(0, 3)")),
    "one dimension": ({"input_ids": ids()[0]}, InputError, ("[batch, new tokens]", "(5,)")),
    "a list": ({"input_ids": [[1, 2]]}, InputError, ("int64 tensor", "list")),
    "mask shape": (
        {"input_ids": ids(), "attention_mask": torch.ones(2, 7)},
        InputError,
        ("attention_mask", "[2, 5] or [2, 11]", "(2, 7)"),
    ),
    "mask rank": (
        {"input_ids": ids(), "attention_mask": torch.ones(2, 1, 5, 11)},
        InputError,
        ("attention_mask", "[2, 5] or [2, 11]", "(2, 1, 5, 11)"),
    ),
    "mask kind": ({"input_ids": ids(), "attention_mask": "none"}, InputError, ("attention_mask", "str")),
    "right padding": (
        {"input_ids": ids(), "attention_mask": mask("11111", "11100")},
        InputError,
        ("left", "padding_side"),
    ),
    "padding in the middle": (
        {"input_ids": ids(), "attention_mask": mask("11111", "11011")},
        InputError,
        ("left", "padding_side"),
    ),
    "padding after tokens": (
        {"input_ids": ids(), "attention_mask": mask("11111", "00111")},
        InputError,
        ("left", "before its first token"),
    ),
}


def assert_goes_on(fast: Any, state: tuple[int, list[int]], expected: Tensor) -> None:
    """The cache is as it was: the next tokens give what they gave without the error."""
    assert (fast.cache.columns, fast.cache.seq_lens.tolist()) == state
    got = fast(ids(2, 4, seed=3))
    assert torch.equal(got if isinstance(got, Tensor) else got.logits, expected)


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("kind", ["llama", "nano"])
def test_a_bad_call_changes_nothing(request: pytest.FixtureRequest, kind: str, what: str) -> None:
    fast = request.getfixturevalue(kind)
    arguments, error, says = CALLS[what]
    fast.reset()
    fast(ids(2, 6))
    expected = fast(ids(2, 4, seed=3))
    fast.reset()
    fast(ids(2, 6))
    buffers = {name: (buffer.data_ptr(), buffer.clone()) for name, buffer in fast.cache.buffers.items()}
    with pytest.raises(error) as caught:
        fast(**arguments)
    for part in says:
        assert part in str(caught.value)
    for name, buffer in fast.cache.buffers.items():
        assert buffer.data_ptr() == buffers[name][0] and torch.equal(buffer, buffers[name][1])
    assert_goes_on(fast, (6, [6, 6]), expected if isinstance(expected, Tensor) else expected.logits)


# On an empty cache, nothing may be allocated either.
FIRST: dict[str, tuple[dict[str, Any], type[KVCompileError], tuple[str, ...]]] = {
    "tokens": ({"input_ids": ids(1, 33)}, LimitError, ("33 tokens", "runtime.max_tokens is 32", "bounded")),
    "batch": ({"input_ids": ids(5, 3)}, LimitError, ("5 sequences", "runtime.max_batch is 4", "fewer")),
    "right padding": (
        {"input_ids": ids(), "attention_mask": mask("11111", "11100")},
        InputError,
        ("attention_mask", "left"),
    ),
    "middle": (
        {"input_ids": ids(), "attention_mask": mask("11111", "01011")},
        InputError,
        ("attention_mask", "left"),
    ),
    "shape": ({"input_ids": ids(), "attention_mask": torch.ones(1, 5)}, InputError, ("[2, 5]", "(1, 5)")),
    "float": ({"input_ids": ids().half()}, InputError, ("int64", "float16")),
    "empty": ({"input_ids": ids(1, 0)}, InputError, ("(1, 0)",)),
}


@pytest.mark.parametrize("what", FIRST)
def test_a_bad_first_call_allocates_nothing(llama: Any, what: str) -> None:
    arguments, error, says = FIRST[what]
    llama.release()
    with pytest.raises(error) as caught:
        llama(**arguments)
    for part in says:
        assert part in str(caught.value)
    assert llama.cache.columns == llama.cache.nbytes == 0
    assert llama(ids(2, 32)).logits.shape == (2, 32, 61)


def test_padding_needs_position_ids(nano: Any) -> None:
    nano.reset()
    with pytest.raises(InputError, match=r"not by position_ids alone.*one length without padding"):
        nano(ids(), mask("11111", "01111"))
    assert nano(ids(), mask("11111", "11111")).shape == (2, 5, 61)


def test_a_mask_that_hides_what_is_cached(llama: Any) -> None:
    llama.reset()
    first = mask("111111", "001111")
    llama(ids(2, 6), first)
    ones = torch.ones(2, 1, dtype=torch.int64)
    for row in ("111111", "000111", "110011"):
        with pytest.raises(InputError, match=r"tokens in the cache.*reset\(\)"):
            llama(ids(2, 1), torch.cat([mask("111111", row), ones], dim=1))
    assert llama.cache.columns == 6
    llama(ids(2, 1), torch.cat([first, ones], dim=1))


# arguments of the transformers call that a module with a cache inside cannot honour
FOREIGN: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "labels": ({"labels": ids()}, ("labels",)),
    "inputs_embeds": ({"input_ids": None, "inputs_embeds": torch.ones(2, 5, 48)}, ("inputs_embeds",)),
    "hidden states": ({"output_hidden_states": True}, ("output_hidden_states",)),
    "another cache": ({"past_key_values": object()}, ("past_key_values", "handle", "object")),
    "another cache, by its new name": ({"cache": object()}, ("handle", "object")),
    "no cache": ({"use_cache": False}, ("use_cache=False", "original")),
    "logits_to_keep": ({"logits_to_keep": -1}, ("logits_to_keep", "-1")),
    "logits_to_keep tensor": ({"logits_to_keep": torch.arange(2)}, ("logits_to_keep",)),
    "position_ids": ({"position_ids": torch.arange(5)[None]}, ("position_ids", "leave them out")),
    "position_ids shape": ({"position_ids": torch.arange(3)[None]}, ("position_ids", "leave them out")),
    "nothing": ({"input_ids": None}, ("no input_ids",)),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_arguments_that_cannot_be_honoured(llama: Any, what: str) -> None:
    arguments, says = FOREIGN[what]
    llama.reset()
    llama(ids(2, 6))
    expected = llama(ids(2, 4, seed=3)).logits
    llama.reset()
    llama(ids(2, 6))
    with pytest.raises(InputError) as caught:
        llama(**{"input_ids": ids()} | arguments)
    for part in says:
        assert part in str(caught.value)
    assert_goes_on(llama, (6, [6, 6]), expected)


def test_position_ids_that_say_the_same_are_taken(llama: Any) -> None:
    llama.release()
    llama(
        ids(2, 6),
        mask("111111", "001111"),
        position_ids=torch.tensor([[0, 1, 2, 3, 4, 5], [1, 1, 0, 1, 2, 3]]),
    )
    llama(ids(2, 2), position_ids=torch.tensor([[6, 7], [4, 5]]), use_cache=True)
    assert llama.cache.seq_lens.tolist() == [8, 6]


MODELS: dict[str, tuple[Callable[[], Any], type[KVCompileError], str]] = {
    "bidirectional": (lambda: tiny_hf("bert"), DetectionError, r"bidirectional.*modeling_bert\.py:\d+"),
    "no attention": (TokensAlone, DetectionError, "no softmax attention.*no KV cache to choose"),
    "no module": (lambda: "gpt2", ModelError, r"expected a torch\.nn\.Module, got str"),
    "no tokens": (lambda: nn.Bilinear(2, 3, 4), ModelError, "callable with input_ids alone.*input1, input2"),
}


@pytest.mark.parametrize("what", MODELS)
def test_models_without_a_cache(what: str) -> None:
    model, error, says = MODELS[what]
    with pytest.raises(error, match=f"(?s){says}"):
        kvcompile.optimize(model(), "baseline", max_tokens=32, **EAGER)


def test_all_problems_of_a_recipe_at_once() -> None:
    recipe = {
        "cache": {"keys": {"dtype": "int5"}, "retention": {"kind": "window", "size": 0}, "plcement": {}},
        "layers": [{"where": {"index": 0}, "cache": {"values": {"dtype": "int8", "group": 32}}}],
        "runtime": {"max_batch": 0, "max_token": 5},
        "verify": "sometimes",
        "speed": "high",
    }
    with pytest.raises(RecipeError) as caught:
        kvcompile.optimize(make(NanoGPT), recipe)
    assert caught.value.problems == (
        "cache.keys.dtype: expected 'model', 'float32', 'float16', 'bfloat16', 'fp8_e4m3', 'fp8_e5m2', 'int8', 'int4', "
        "'int3', 'int2', 'nf4' or 'mxfp4', got 'int5'",
        "cache.retention.size: expected greater than or equal to 1, got 0",
        "cache.plcement: unknown key; allowed: keys, values, placement, retention, selection, latent; did you mean "
        "'placement'?",
        "runtime.max_batch: expected greater than or equal to 1, got 0",
        "runtime.max_token: unknown key; allowed: max_batch, max_tokens, prefill_chunk; did you mean 'max_tokens'?",
        "verify: expected 'quick', 'thorough' or 'off', got 'sometimes'",
        "speed: unknown key; allowed: name, description, auto, cache, layers, scales, runtime, serve, compile, verify",
        "layers[0].cache.values: group is for int2, int3, int4, nf4 and int8 with mode: asymmetric only, not for int8",
    )


def test_errors_go_from_one_process_to_another() -> None:
    for error in (
        RecipeError("mine.yaml", ["runtime: a", "verify: b"]),
        errors.QualityError(["one"]),
        errors.LogitsError({0: "NaN"}),
        errors.VerificationError("far off", 3, 0.5),
        errors.MethodError("no such"),
    ):
        there = pickle.loads(pickle.dumps(error))
        assert type(there) is type(error) and str(there) == str(error) and vars(there) == vars(error)


def test_files_of_recipes(tmp_path: Path) -> None:
    unsafe = tmp_path / "unsafe.yaml"
    marker = tmp_path / "ran"
    unsafe.write_text(f"name: !!python/object/apply:os.mkdir ['{marker}']\n")
    with pytest.raises(RecipeError, match=r"(?s)unsafe\.yaml.*not safe YAML.*python/object"):
        kvcompile.optimize(make(NanoGPT), unsafe)
    assert not marker.exists()
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(RecipeError, match=r"(?s)binary\.yaml.*cannot be read"):
        kvcompile.optimize(make(NanoGPT), str(binary))
    with pytest.raises(RecipeError, match="cannot be read"):
        kvcompile.optimize(make(NanoGPT), tmp_path)  # a folder
    with pytest.raises(RecipeError, match=r"(?s)nowhere\.yaml.*no such file.*shipped: auto, baseline"):
        kvcompile.optimize(make(NanoGPT), tmp_path / "nowhere.yaml")
    with pytest.raises(RecipeError, match="no such file, and no shipped recipe of that name"):
        kvcompile.optimize(make(NanoGPT), "basline")


def test_positions_in_the_cache_need_rope() -> None:
    with pytest.raises(
        PlanError, match=r"(?s)layers 0, 1.*in_cache needs a rotary embedding.*positions: original"
    ):
        kvcompile.optimize(make(NanoGPT), {"cache": IN_CACHE, **EAGER})


def test_positions_in_the_cache_and_a_sliding_mask() -> None:
    with pytest.raises(
        PlanError, match=r"(?s)in_cache.*sliding\(9\).*layers: \[\{where: \{attention: sliding\}"
    ):
        kvcompile.optimize(tiny_hf("mistral"), {"cache": IN_CACHE, **EAGER})


def test_a_layer_that_does_not_exist() -> None:
    """Also beside others, and where a mask must hold as well: a slip would otherwise leave it as it was."""
    model = make(NanoGPT)
    for where, missing in (
        ({"index": 7}, "7"),
        ({"index": [0, 7, -3]}, "7, -3"),
        ({"range": [1, 99]}, "99"),
        ({"index": 7, "attention": "sliding"}, "7"),
    ):
        rule = {"where": where, "cache": {"keys": {"dtype": "int8"}}}
        with pytest.raises(
            PlanError, match=rf"layers\[0\]\.where: this model has no layer {missing}: .* 0 to 1, or"
        ):
            kvcompile.optimize(model, {"layers": [rule], **EAGER})
    rule = {"where": {"index": 0, "range": [1, 1]}, "cache": {}}
    with pytest.raises(PlanError, match=r"layers\[0\]: no layer of this model matches"):
        kvcompile.optimize(model, {"layers": [rule], **EAGER})


def test_entries_that_make_no_sense_together() -> None:
    """Each may do so by itself."""
    asymmetric = {"where": {"index": 1}, "cache": {"keys": {"mode": "asymmetric", "group": 32}}}
    symmetric = {"where": {"range": [0, 1]}, "cache": {"keys": {"mode": "symmetric"}}}
    recipe = {"cache": {"keys": {"dtype": "int8"}}, "layers": [asymmetric, symmetric], **EAGER}
    with pytest.raises(PlanError) as caught:
        kvcompile.optimize(make(NanoGPT), recipe)
    assert (
        "layer 1 (h.1" in str(caught.value)
        and "cache.keys: group is for" in str(caught.value)
        and "not for int8 (as layers[0] and layers[1] make it)" in str(caught.value)
        and "pydantic" not in str(caught.value)
    )


def test_moves_and_training_change_nothing(llama: Any) -> None:
    llama.reset()
    llama(ids(2, 6))
    expected = llama(ids(2, 4, seed=3)).logits
    llama.reset()
    llama(ids(2, 6))
    for call in (llama.half, lambda: llama.to(torch.bfloat16), lambda: llama.to("meta"), llama.train):
        with pytest.raises(KVCompileError, match="optimize"):
            call()
    assert_goes_on(llama, (6, [6, 6]), expected)
    assert all(p.dtype == torch.float32 and p.device.type == "cpu" for p in llama.parameters())
