"""Generation with guesses, of an assistant or looked up in the prompt: the same tokens, or a refusal at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvcompile.errors import InputError, LimitError
from tests.support.handles import ONWARD, PAGED, Steps, made, text
from tests.support.models import tiny_hf


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return tiny_hf("llama", head_dim=32)


def test_assisted_generation_and_prompt_lookup(llama: nn.Module) -> None:
    fast = made(llama, "baseline", max_tokens=160)
    assistant = tiny_hf("llama")
    with torch.no_grad():  # nearly the same, so that some of its tokens are taken and some are not
        for p in assistant.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    for seed in range(4):
        ids = text(12, seed=seed).repeat(1, 2)
        wanted = fast.generate(ids, max_new_tokens=30, do_sample=False)
        steps = Steps(fast)
        for more in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": assistant}):
            got = fast.generate(ids, max_new_tokens=30, do_sample=False, **more)
            assert torch.equal(got, wanted), more
        assert any(size in (2, 3, 4, 5) for size in steps.sizes)


def test_an_optimized_assistant(llama: nn.Module) -> None:
    fast, assistant = made(llama, "baseline"), made(tiny_hf("llama"), "int8")
    ids = text(12)
    wanted = fast.generate(ids, max_new_tokens=20, do_sample=False)
    got = fast.generate(ids, max_new_tokens=20, do_sample=False, assistant_model=assistant)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("recipe", ONWARD)
def test_assisted_generation_is_refused_where_nothing_steps_back(llama: nn.Module, recipe: str) -> None:
    fast = made(llama, recipe, **ONWARD[recipe][0])
    with pytest.raises(InputError, match=ONWARD[recipe][1]):
        fast.generate(text(30), max_new_tokens=4, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("recipe", ["kivi4", "streaming"])
def test_guesses_are_taken_back_while_nothing_is_given_up(llama: nn.Module, recipe: str) -> None:
    """A text that never gets as long as the window, or as what stays in full, can always step back."""
    fast = made(llama, recipe, **ONWARD[recipe][0])
    most = {"kivi4": 31, "streaming": 14}[recipe]
    ids = text(5).repeat(1, 2)
    for more in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": llama}):
        given = {"max_new_tokens": most - 10 + 1, "do_sample": False, "eos_token_id": None}
        assert torch.equal(fast.generate(ids, **given, **more), fast.generate(ids, **given))
        with pytest.raises(InputError, match=f"beyond {most} tokens, and this text may come to {most + 1}"):
            fast.generate(ids, **given | {"max_new_tokens": most - 10 + 2}, **more)


def test_whether_a_text_can_be_cropped_is_known_by_its_end(llama: nn.Module) -> None:
    """transformers 5.24 asks it of a text with guesses after its prompt."""
    fast = made(llama, "streaming", **ONWARD["streaming"][0])
    found: list[bool] = []

    def asking(_: Tensor, scores: Tensor) -> Tensor:
        found.append(fast.handle.is_croppable)
        return scores

    for new in (5, 6):  # after 10: up to 14 tokens in the cache, and 15
        fast.generate(text(10), max_new_tokens=new, logits_processor=[asking], eos_token_id=None)
    assert found == [True] * 5 + [False] * 6 and not fast.handle.is_croppable


def test_no_guess_goes_beyond_the_limit(llama: nn.Module) -> None:
    """transformers looks up more than may still come; those would be refused in the middle of a text that fits."""
    fast = made(llama, "paged", cache=PAGED, max_tokens=48)
    ids = text(5).repeat(1, 4)
    given = {"max_new_tokens": 48 - 20 + 1, "do_sample": False, "eos_token_id": None}
    wanted = fast.generate(ids, **given)
    for more in ({"prompt_lookup_num_tokens": 9}, {"assistant_model": llama}):
        assert torch.equal(fast.generate(ids, **given, **more), wanted), more
    small = made(llama, "baseline", max_tokens=40)
    with pytest.raises(LimitError, match=r"more than the assistant's runtime\.max_tokens 40"):
        fast.generate(ids, **given, assistant_model=small)


def test_tokens_alone_and_guesses(llama: nn.Module) -> None:
    """transformers cuts the mask to the tokens that it has; padding stands before them."""
    fast = made(llama, "baseline")
    ids = text(12).repeat(1, 2)
    mask = (torch.arange(24) >= 5).long()[None]
    given = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    wanted = fast.generate(ids, attention_mask=mask, **given)[:, 24:]
    for more in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": llama}):
        fast.reset()
        fast(ids[:, :15], mask[:, :15])
        got = fast.generate(ids[:, 15:], attention_mask=mask, past_key_values=fast.handle, **given, **more)
        assert torch.equal(got[:, 9:], wanted), more


def test_tokens_alone_that_would_not_fit(llama: nn.Module) -> None:
    fast = made(llama, "baseline", max_tokens=48)
    fast(text(30))
    given = {"attention_mask": torch.ones(1, 35), "past_key_values": fast.handle}
    with pytest.raises(LimitError, match="come to 49 cached tokens"):
        fast.generate(text(5, seed=1), max_new_tokens=48 - 35 + 2, **given)
    assert len(fast.handle) == 30
    fast.generate(text(5, seed=1), max_new_tokens=48 - 35 + 1, eos_token_id=None, **given)
    assert len(fast.handle) == 48


@pytest.mark.parametrize("recipe", ONWARD)
def test_an_assistant_that_cannot_step_back_is_told_at_once(llama: nn.Module, recipe: str) -> None:
    assistant = made(llama, recipe, **ONWARD[recipe][0])
    target = made(llama, "baseline")
    target(text(7))
    steps = Steps(target)
    with pytest.raises(InputError, match="the assistant steps back"):
        target.generate(text(30), max_new_tokens=9, assistant_model=assistant)
    assert not steps.sizes and len(target.handle) == 7
    with pytest.raises(InputError, match="an assistant steps back"):
        llama.generate(text(30), max_new_tokens=9, assistant_model=assistant)


def test_one_cache_is_not_at_two_texts(llama: nn.Module) -> None:
    """A module that guesses for itself, or is called by what its generate() calls, would write over its own text."""
    fast = made(llama, "baseline")
    ids = text(12)
    wanted = fast.generate(ids, max_new_tokens=8, do_sample=False)

    def calling(call: Any) -> dict[str, Any]:
        def processor(_: Tensor, scores: Tensor) -> Tensor:
            call()
            return scores

        return {"logits_processor": [processor]}

    fork = fast.handle.fork()
    for more in (
        {"assistant_model": fast},
        calling(lambda: fast.generate(ids, max_new_tokens=2)),
        calling(lambda: fast(ids)),
    ):
        with pytest.raises(InputError, match="would write over its text"):
            fast.generate(ids, max_new_tokens=8, do_sample=False, **more)
    for more in (
        {"assistant_model": fast, "past_key_values": fork},
        calling(lambda: fast.generate(ids, max_new_tokens=2, past_key_values=fork)),
    ):
        assert torch.equal(fast.generate(ids, max_new_tokens=8, do_sample=False, **more), wanted)
