"""What a new user does wrong in the first day: one message of ours, at once, and nothing lost."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

import kvcompile
from kvcompile.errors import InputError, KVCompileError, ModelError, RecipeError
from tests.support.models import NanoGPT, make, tiny_hf

EAGER: dict[str, Any] = {"compile": {"mode": "none"}, "verify": "off", "max_tokens": 64}
IDS = torch.randint(3, 61, (1, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def fast() -> Any:
    return kvcompile.optimize(tiny_hf("llama"), **EAGER)


@pytest.fixture(scope="module")
def plain() -> Any:
    return kvcompile.optimize(make(NanoGPT), **EAGER)


def logits(answer: Any) -> torch.Tensor:
    found: torch.Tensor = getattr(answer, "logits", answer)
    return found


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=61, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, intermediate_size=56
    )
    return transformers.BertForSequenceClassification(config).eval()


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return tiny_hf("llama")


def offloaded() -> nn.Module:
    from accelerate import cpu_offload

    found: nn.Module = cpu_offload(tiny_hf("llama"), execution_device="cpu")
    return found


def one_on_meta() -> nn.Module:
    model: Any = tiny_hf("llama")
    model.lm_head.to("meta")
    return model


def labels() -> nn.Module:
    return transformers.LlamaForTokenClassification(tiny_hf("llama").config).eval()


NO_DECODER: dict[str, tuple[Callable[[], Any], str]] = {
    "a linear layer": (
        lambda: nn.Linear(4, 4),
        "Linear does not run on token ids: RuntimeError: mat1 and mat2",
    ),
    "a convolution": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), "Sequential"),
    "a classifier": (bert, "BertForSequenceClassification gives no logits"),
    "labels of tokens": (labels, "LlamaForTokenClassification gives no logits"),
    "no module": (lambda: "smollm2", "expected a torch.nn.Module, got str"),
    "offloaded": (
        offloaded,
        "weights that accelerate loads when a layer runs.*model.embed_tokens.weight and 20 others.*stages",
    ),
    "on meta": (on_meta, "model.embed_tokens.weight and .* others are on the meta device"),
    "one weight on meta": (one_on_meta, r"weights yet: lm_head\.weight is on the meta device"),
}


@pytest.mark.parametrize("what", NO_DECODER)
def test_no_decoder_is_told_at_once(
    what: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes long is to trace it, in any of the ways there are: nothing is traced."""
    traced: list[object] = []
    monkeypatch.setattr(torch.export, "export", lambda *args, **kwargs: traced.append(args))
    build, message = NO_DECODER[what]
    with pytest.raises(ModelError, match=message):
        kvcompile.optimize(build())
    assert not traced
    assert capfd.readouterr().err == ""


def test_a_model_without_a_head() -> None:
    model: Any = tiny_hf("llama")
    with pytest.raises(ModelError, match="hidden states and no logits"):
        kvcompile.optimize(model.model)


def test_weights_that_are_not_finite_are_named() -> None:
    model: Any = tiny_hf("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = float("nan")
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has 1 values that are NaN"):
        kvcompile.optimize(model, **EAGER | {"verify": "quick"})


def test_optimized_twice(fast: Any) -> None:
    with pytest.raises(ModelError, match="optimized already"):
        kvcompile.optimize(fast)


@pytest.mark.parametrize("kind", ["fast", "plain"])
@pytest.mark.parametrize("bad", [61, -1, 2**40])
def test_ids_outside_of_the_vocabulary(request: pytest.FixtureRequest, kind: str, bad: int) -> None:
    module = request.getfixturevalue(kind)
    module.reset()
    module(IDS)
    ids = torch.cat([IDS, torch.tensor([[bad]])], dim=1)
    for call in (lambda: module(ids), lambda: module.generate(ids, max_new_tokens=2)):
        with pytest.raises(InputError, match=rf"expected ids from 0 to 60, got {bad}"):
            call()
    assert module.cache.columns == IDS.shape[1]


BAD_CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a text": (lambda f: f.generate("Why is the sky blue?"), "got str"),
    "warmup of less than one": (lambda f: f.warmup(-1), "at least 1, got -1"),
    "warmup of half": (lambda f: f.warmup(0.5), "at least 1, got 0.5"),
    "a mask of NaN": (lambda f: f(IDS, torch.full(IDS.shape, float("nan"))), "got other values"),
    "a mask of scores": (lambda f: f(IDS, torch.full(IDS.shape, -1e9)), "got other values"),
    "guidance": (lambda f: f.generate(IDS, guidance_scale=1.5, max_new_tokens=2), "guidance_scale=1.5"),
}


@pytest.mark.parametrize("kind", ["fast", "plain"])
@pytest.mark.parametrize("what", BAD_CALLS)
def test_bad_calls(request: pytest.FixtureRequest, kind: str, what: str) -> None:
    call, message = BAD_CALLS[what]
    module = request.getfixturevalue(kind)
    module.reset()
    wanted = logits(module(IDS))
    module.reset()
    module(IDS[:, :4])
    with pytest.raises(InputError, match=message):
        call(module)
    torch.testing.assert_close(logits(module(IDS[:, 4:])), wanted[:, 4:], atol=1e-5, rtol=1e-4)


def test_a_plain_module_says_what_its_generate_takes(plain: Any) -> None:
    with pytest.raises(
        InputError, match=r"num_beams=4: this generate\(\) takes max_new_tokens, do_sample, .*, past"
    ):
        plain.generate(IDS, max_new_tokens=2, num_beams=4)
    for wrong in (None, "5", 2.0, True):
        with pytest.raises(
            InputError, match=f"max_new_tokens: expected a whole number of at least 1, got {wrong!r}"
        ):
            plain.generate(IDS, max_new_tokens=wrong)
    wanted = plain.generate(IDS, max_new_tokens=2)
    drawn = plain.generate(
        IDS, max_new_tokens=np.int64(2), do_sample=True, temperature=np.float32(1e-6), top_k=np.int32(1)
    )
    assert torch.equal(drawn, wanted), "numbers of NumPy are numbers"


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy, lambda f: torch.save(f, io.BytesIO())])
def test_what_cannot_be_copied_says_what_to_use(fast: Any, copied: Callable[[Any], Any]) -> None:
    with pytest.raises(KVCompileError, match=r"kvcompile\.export"):
        copied(fast)


def test_limits_that_no_machine_has() -> None:
    for tokens in (2**62, 2**31):
        with pytest.raises(RecipeError, match="max_tokens"):
            kvcompile.optimize(make(NanoGPT), **EAGER | {"max_tokens": tokens})


def test_the_nearest_name(tmp_path: Path) -> None:
    for wrong, meant in (("int9", "int8"), ("stream", "streaming"), ("KIVI4", "kivi4")):
        with pytest.raises(RecipeError, match=f"did you mean '{meant}'"):
            kvcompile.optimize(make(NanoGPT), wrong)
    with pytest.raises(RecipeError) as error:
        kvcompile.optimize(make(NanoGPT), "nothing_like_it")
    assert "did you mean" not in str(error.value)


def test_a_limit_beyond_what_the_model_was_made_for_warns() -> None:
    with pytest.warns(UserWarning, match="max_tokens is 1024, and LlamaForCausalLM was made for 512"):
        kvcompile.optimize(tiny_hf("llama"), **EAGER | {"max_tokens": 1024})


def test_the_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvcompile.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"kvcompile {kvcompile.__version__}"


def test_ids_of_half_a_vocabulary_are_free_where_nothing_says_more() -> None:
    """Ids that are wrapped before the embedding have no bound."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make(NanoGPT)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.inner(input_ids % 61)

    model = Wrapped().eval()
    fast = kvcompile.optimize(model, **EAGER)
    ids = IDS + 61 * 7
    torch.testing.assert_close(fast(ids), model(ids), atol=1e-5, rtol=1e-4)
