"""Handles: texts that are gone on with, stepped back, forked, saved; against the original over the whole text."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kvcompile.api import build
from kvcompile.errors import InputError, LimitError, MethodError
from kvcompile.layouts import CacheLayout
from kvcompile.layouts.stepping import steps_back
from kvcompile.pipeline import understand
from kvcompile.recipe import Recipe
from kvcompile.runtime.huggingface import HuggingFaceCachedModel
from tests.support.budget import as_original
from tests.support.handles import BACK, KIVI, ONWARD, PAGED, Steps, close, made, text
from tests.support.models import NanoGPT, make, tiny_hf


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return tiny_hf("llama", head_dim=32)


@pytest.mark.parametrize("recipe", BACK)
def test_a_step_back_is_as_if_the_tokens_had_never_come(llama: nn.Module, recipe: str) -> None:
    fast, fresh = (made(llama, recipe, **BACK[recipe]) for _ in range(2))
    first, other = text(40), text(30, seed=1)
    for keep in (39, 17, 16, 1):
        fast.reset()
        fast(first)
        fast.handle.crop(keep)
        assert len(fast.handle) == keep and torch.equal(fast.handle.input_ids, first[:, :keep])
        fresh.reset()
        fresh(first[:, :keep])
        close(fast(other), fresh(other))
        if fast.cache.pools:
            assert fast.cache.pools[0].used == fresh.cache.pools[0].used


def test_a_step_back_of_padded_rows(llama: nn.Module) -> None:
    fast, fresh = (made(llama, "baseline") for _ in range(2))
    ids = text(20, batch=3)
    mask = torch.arange(20) >= torch.tensor([0, 5, 11])[:, None]
    fast(ids, mask.long())
    fast.handle.crop(-6)
    fresh(ids[:, :14], mask[:, :14].long())
    more = text(9, seed=2, batch=3)
    close(fast(more), fresh(more))
    assert fast.cache.seq_lens.tolist() == [23, 18, 12]


@pytest.mark.parametrize("recipe", ONWARD)
def test_what_cannot_step_back_says_why_and_stays(llama: nn.Module, recipe: str) -> None:
    more, why = ONWARD[recipe]
    fast, fresh = (made(llama, recipe, **more) for _ in range(2))
    ids = text(40)
    fast(ids), fresh(ids)
    assert not fast.handle.is_croppable
    with pytest.raises(InputError, match=why):
        fast.handle.crop(30)
    close(fast(text(3, seed=3)), fresh(text(3, seed=3)))


def test_a_window_steps_back_until_it_has_given_up_a_token(llama: nn.Module) -> None:
    more, _ = ONWARD["streaming"]
    fast, fresh = (made(llama, "streaming", **more) for _ in range(2))
    ids = text(14)
    fast(ids)
    fast.handle.crop(5)
    fresh(ids[:, :5])
    close(fast(text(20, seed=3)), fresh(text(20, seed=3)))
    with pytest.raises(InputError, match="given up"):
        fast.handle.crop(-1)


def test_crop_of_nonsense(llama: nn.Module) -> None:
    fast = made(llama, "baseline")
    fast(text(10))
    for tokens in (11, -11):
        with pytest.raises(InputError, match="holds 10"):
            fast.handle.crop(tokens)
    fast.handle.crop(0)  # as transformers calls it where nothing is to be forgotten
    assert len(fast.handle) == 10
    for nonsense in (True, 2.0, torch.tensor(2.0), torch.tensor([1, 2]), "2"):
        with pytest.raises(InputError, match="expected a whole number"):
            fast.handle.crop(nonsense)  # type: ignore[arg-type]
    fast.handle.crop(torch.tensor(-1))  # as transformers 5.17 counts
    assert len(fast.handle) == 9
    fast.handle.crop(-9)
    assert len(fast.handle) == 0
    close(fast(text(7)), fast.model(text(7)))


@pytest.mark.few(2)
@pytest.mark.parametrize("recipe", [*BACK, *ONWARD])
def test_generate_goes_on_from_what_a_text_has_in_common(llama: nn.Module, recipe: str) -> None:
    """The issue's case: a text that is no continuation must not be gone on with as if it were."""
    more = BACK[recipe] if recipe in BACK else ONWARD[recipe][0]
    fast, fresh = (made(llama, recipe, **more) for _ in range(2))
    base = text(20)
    texts = [
        base,
        torch.cat([base, text(6, seed=1)], 1),  # a continuation, if what was generated is left out
        torch.cat([base[:, :9], text(8, seed=2)], 1),  # branches off
        text(25, seed=3),  # nothing in common
        base[:, :5],  # shorter than what is held
        base,
        base,
    ]
    for ids in texts:
        before = len(fast.handle)
        got = fast.generate(ids, max_new_tokens=7, do_sample=False, past_key_values=fast.handle)
        wanted = fresh.generate(ids, max_new_tokens=7, do_sample=False)
        assert torch.equal(got, wanted), (before, ids)
        assert torch.equal(fast.handle.input_ids, got[:, :-1])
    answer = fast.generate(base, max_new_tokens=5, do_sample=False)
    longer = torch.cat([answer, text(4, seed=9)], 1)
    steps = Steps(fast)
    got = fast.generate(longer, max_new_tokens=5, do_sample=False, past_key_values=fast.handle)
    if recipe != "h2o":  # what it keeps depends on the pieces in which a text comes
        assert torch.equal(got, fresh.generate(longer, max_new_tokens=5, do_sample=False))
    assert steps.sizes[0] == 5  # the last generated token, whose row is not there yet, and the four


def test_only_what_is_in_common_is_kept(llama: nn.Module) -> None:
    fast = made(llama, "baseline")
    base = text(30)
    fast.generate(base, max_new_tokens=2, do_sample=False)
    steps = Steps(fast)
    branch = torch.cat([base[:, :21], text(9, seed=4)], 1)
    assert not torch.equal(branch[:, 21], base[:, 21])
    fast.generate(branch, max_new_tokens=2, do_sample=False, past_key_values=fast.handle)
    assert steps.sizes == [9, 1]


def test_padded_batches_go_on_and_start_anew(llama: nn.Module) -> None:
    fast, fresh = (made(llama, "baseline") for _ in range(2))
    ids = text(12, batch=2)
    mask = (torch.arange(12) >= torch.tensor([0, 4])[:, None]).long()
    new = text(5, seed=6, batch=2)
    longer, ones = torch.cat([ids, new], 1), torch.ones(2, 5, dtype=torch.long)
    for own in (mask, mask.flip(0)):  # the same padding; then another, which shares nothing
        fast(ids, mask) if not len(fast.handle) else None
        kwargs = {"attention_mask": torch.cat([own, ones], 1), "max_new_tokens": 4, "do_sample": False}
        got = fast.generate(longer, past_key_values=fast.handle, **kwargs)
        assert torch.equal(got, fresh.generate(longer, **kwargs))


def test_tokens_alone_go_on_with_a_mask_of_all(llama: nn.Module) -> None:
    """Transformers' other way: only what is new, and the mask of everything."""
    fast, fresh = (made(llama, "baseline") for _ in range(2))
    ids, new = text(12), text(5, seed=7)
    fast(ids)
    got = fast.generate(
        new, attention_mask=torch.ones(1, 17), max_new_tokens=4, do_sample=False, past_key_values=fast.handle
    )
    wanted = fresh.generate(torch.cat([ids, new], 1), max_new_tokens=4, do_sample=False)
    assert torch.equal(got[:, 5:], wanted[:, 17:])


def test_a_refused_call_keeps_the_text(llama: nn.Module) -> None:
    fast = made(llama, "baseline")
    ids = text(12)
    fast(ids)
    with pytest.raises(LimitError):
        fast.generate(text(9, seed=5), max_new_tokens=500, past_key_values=fast.handle)
    other = made(llama, "baseline")
    with pytest.raises(InputError, match="another module's handle"):
        fast.generate(ids, max_new_tokens=2, past_key_values=other.handle)
    assert torch.equal(fast.handle.input_ids, ids)


def test_a_text_of_other_weights_is_not_gone_on_with() -> None:
    """Training between two turns: what the cache has of the first one is of the weights before."""
    model: Any = tiny_hf("llama")
    fast: Any = build(
        model, understand(model), Recipe.load("baseline", compile={"mode": "none"}, max_tokens=64)
    )
    first = fast.generate(text(9), max_new_tokens=4, do_sample=False)
    fork = fast.handle.fork()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    whole = torch.cat([first, text(3)], 1)
    wanted = model.generate(whole, max_new_tokens=6, do_sample=False)
    scores = [
        fast.generate(
            whole,
            past_key_values=handle,
            max_new_tokens=6,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        for handle in (fast.handle, fork)
    ]
    for found in scores:
        as_original(torch.stack(found.logits, 1), model, wanted[:, :-1])


def test_both_names_of_a_cache(llama: nn.Module) -> None:
    """transformers 5.24 calls `cache` what was `past_key_values`; with any transformers, either is taken."""
    fast = made(llama, "baseline")
    answer = fast.generate(text(12), max_new_tokens=5, do_sample=False)
    fork = fast.handle.fork()
    longer = torch.cat([answer, text(4, seed=9)], 1)
    got = []
    for name in ("past_key_values", "cache"):
        steps = Steps(fast)
        got.append(fast.generate(longer, max_new_tokens=5, do_sample=False, **{name: fast.handle}))
        assert steps.sizes[0] < longer.shape[1], name  # it went on
        columns = len(fork)
        fast(longer[:, :1], **{name: fork})
        assert len(fork) == columns + 1, name
    assert torch.equal(*got)
    for call in (fast, fast.generate):
        with pytest.raises(InputError, match="two names of one argument"):
            call(longer, past_key_values=fork, cache=fast.handle)


@pytest.mark.parametrize("recipe", [*BACK, *ONWARD])
def test_forks_go_their_own_ways(llama: nn.Module, recipe: str) -> None:
    more = BACK[recipe] if recipe in BACK else ONWARD[recipe][0]
    fast, fresh = (made(llama, recipe, **more) for _ in range(2))
    ids = text(30)
    fast(ids)
    forks = [fast.handle.fork() for _ in range(2)]
    tails = [text(11, seed=s) for s in (5, 6)]
    for i in range(11):  # turn by turn, beside a text of the module's own
        for fork, tail in zip(forks, tails, strict=True):
            got = fast(tail[:, i : i + 1], past_key_values=fork)
        fast(ids[:, i : i + 1])
    for fork, tail in zip(forks, tails, strict=True):
        fresh.reset()
        fresh(ids)
        for i in range(11):
            wanted = fresh(tail[:, i : i + 1])
        assert torch.equal(fork.input_ids, torch.cat([ids, tail], 1))
    close(got, wanted)
    assert len(fast.handle) == 41


def test_plain_modules_have_handles(tmp_path: Path) -> None:
    fast, fresh = (made(make(NanoGPT), "baseline") for _ in range(2))
    ids = text(10)
    branch = torch.cat([ids[:, :6], text(6, seed=8)], 1)
    fast.generate(ids, max_new_tokens=3)
    fork = fast.handle.fork()
    got = fast.generate(branch, max_new_tokens=5, past_key_values=fast.handle)
    assert torch.equal(got, fresh.generate(branch, max_new_tokens=5))
    assert torch.equal(fork.input_ids[:, :10], ids)
    got = fast.generate(ids, max_new_tokens=5, past_key_values=fork)
    assert torch.equal(got, fresh.generate(ids, max_new_tokens=5))
    assert torch.equal(fast.handle.input_ids[:, :12], branch)


@pytest.mark.parametrize("recipe", [*BACK, *ONWARD])
def test_a_saved_text_goes_on_elsewhere(llama: nn.Module, recipe: str, tmp_path: Path) -> None:
    more = BACK[recipe] if recipe in BACK else ONWARD[recipe][0]
    fast, other = (made(llama, recipe, max_batch=2, **more) for _ in range(2))
    ids = text(30, batch=2)
    mask = (torch.arange(30) >= torch.tensor([0, 4])[:, None]).long()
    fast(ids, mask)
    fast.handle.save(tmp_path / "text.safetensors")
    other(text(9))
    other.handle.load(tmp_path / "text.safetensors")
    assert torch.equal(other.handle.input_ids, ids)
    assert other.cache.seq_lens.tolist() == [30, 26]
    for _ in range(4):
        new = text(3, seed=2, batch=2)
        assert torch.equal(fast(new).logits, other(new).logits)


def test_a_saved_text_of_something_else(llama: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "text.safetensors"
    fast = made(llama, "baseline")
    with pytest.raises(InputError, match="no text"):
        fast.handle.save(path)
    ids = text(9)
    fast(ids)
    with pytest.raises(InputError, match="cannot be saved"):
        fast.handle.save(tmp_path / "none" / "text.safetensors")
    fast.handle.save(path)
    trained = tiny_hf("llama", head_dim=32)
    with torch.no_grad():
        next(iter(trained.parameters()))[0, 0] += 1
    for held, why in ((made(llama, "int8"), "other plan"), (made(trained, "baseline"), "other weights")):
        held(text(4))
        with pytest.raises(InputError, match=why):
            held.handle.load(path)
        assert torch.equal(held.handle.input_ids, text(4))
    whole = path.read_bytes()
    for broken in (
        whole[: len(whole) // 2],
        b"",
        b"no safetensors at all",
        whole[:200] + b"\xff" * 40 + whole[240:],
        whole[:-20] + bytes([whole[-20] ^ 1]) + whole[-19:],  # a number that looks like any other
    ):
        path.write_bytes(broken)
        with pytest.raises(InputError):
            fast.handle.load(path)
        assert torch.equal(fast.handle.input_ids, ids)
    with pytest.raises(InputError, match="no saved cache"):
        fast.handle.load(tmp_path / "missing")


@pytest.mark.parametrize("recipe", ["kivi4", "int4"])
def test_steps_back_until_a_token_is_rounded(llama: nn.Module, recipe: str) -> None:
    own = {"dtype": "int4", "group": 32, "residual": 8}
    cache, most = {"kivi4": (KIVI, 31), "int4": ({"keys": own, "values": own}, 8)}[recipe]
    fast, fresh = (made(llama, recipe, cache=cache) for _ in range(2))
    ids, other = text(most + 1), text(40, seed=1)
    for keep in (1, most - 1):
        fast.reset(), fresh.reset()
        fast(ids[:, :most])
        fast.handle.crop(keep)
        fresh(ids[:, :keep])
        for start, end in ((0, 3), (3, 4), (4, 40)):
            close(fast(other[:, start:end]), fresh(other[:, start:end]))
    fast.reset()
    fast(ids)
    with pytest.raises(InputError, match="rounded"):
        fast.handle.crop(-1)


@pytest.mark.parametrize("recipe", ["baseline", "paged", "h2o"])
def test_rows_that_are_none(llama: nn.Module, recipe: str) -> None:
    more = BACK.get(recipe) or ONWARD.get(recipe, ({},))[0]
    fast, fresh = (made(llama, recipe, max_batch=4, **more) for _ in range(2))
    ids = text(40, batch=3)
    fast(ids), fresh(ids)
    for index in (
        torch.tensor([0]),
        torch.tensor([0, 1, 2, 1]),
        torch.tensor([0, 1, 3]),
        torch.tensor([-1, 0, 1]),
        torch.tensor([0.0, 1.0, 2.0]),
        torch.tensor([True, False, True]),
        torch.tensor([[0, 1, 2]]),
        [0, 1, 2],
        None,
    ):
        with pytest.raises(InputError, match=r"reorder_cache: expected int64 \[3\] of rows from 0 to 2, got"):
            fast.handle.reorder_cache(index)  # type: ignore[arg-type]
    close(fast(text(2, batch=3)), fresh(text(2, batch=3)))
    fast.handle.reorder_cache(torch.tensor([2, 0, 0], dtype=torch.int32))
    assert torch.equal(fast.handle.input_ids[:, :40], ids[[2, 0, 0]])


@pytest.mark.parametrize("recipe", [*BACK, *ONWARD])
def test_a_batch_of_other_rows(llama: nn.Module, recipe: str) -> None:
    """A prefix that was computed once, for several texts; and fewer again."""
    more = BACK[recipe] if recipe in BACK else ONWARD[recipe][0]
    fast, fresh = (made(llama, recipe, max_batch=4, **more) for _ in range(2))
    ids = text(40, batch=2)
    mask = (torch.arange(40) >= torch.tensor([0, 9])[:, None]).long()
    fast(ids, mask)
    fork = fast.handle.fork()
    index = torch.arange(2)
    for change, rows in (
        (lambda h: h.batch_repeat_interleave(2), torch.tensor([0, 0, 1, 1])),
        (lambda h: h.batch_select_indices(torch.tensor([3, 0, 3])), torch.tensor([3, 0, 3])),
        (lambda h: h.batch_select_indices(torch.tensor([1])), torch.tensor([1])),
    ):
        change(fork)
        index = index[rows]
        assert torch.equal(fork.input_ids[:, :40], ids[index]) and fork.cache.batch == len(index)
        fresh.reset()
        fresh(ids[index], mask[index])
        copied = fork.fork()
        for new in (text(1, seed=1, batch=len(index)), text(5, seed=2, batch=len(index))):
            close(fast(new, past_key_values=copied), fresh(new))
    with pytest.raises(LimitError, match=r"5 sequences, but runtime\.max_batch is 4"):
        fork.batch_repeat_interleave(5)
    for wrong in (torch.tensor([1]), torch.tensor([], dtype=torch.int64), torch.tensor([-1]), [0]):
        with pytest.raises(InputError, match="batch_select_indices: expected int64 some of rows from 0 to 0"):
            fork.batch_select_indices(wrong)  # type: ignore[arg-type]
    for count in (0, 1.5, True):
        with pytest.raises(InputError, match="expected a count of at least 1"):
            fork.batch_repeat_interleave(count)  # type: ignore[arg-type]
    fast.reset()
    with pytest.raises(InputError, match="the cache is empty"):
        fast.handle.batch_select_indices(torch.tensor([0]))


def test_many_answers_to_a_prefix(llama: nn.Module) -> None:
    fast, fresh = (made(llama, "baseline", max_batch=3) for _ in range(2))
    ids = text(20)
    fast(ids[:, :17])
    fast.handle.batch_repeat_interleave(3)
    steps, given = Steps(fast), {"max_new_tokens": 6, "do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(5)
    got = fast.generate(ids, past_key_values=fast.handle, **given)
    torch.manual_seed(5)
    assert torch.equal(got, fresh.generate(ids, **given)) and steps.sizes[0] == 3


def test_a_handle_is_no_cache_of_the_original(llama: Any) -> None:
    fast = made(llama, "baseline")
    with pytest.raises(MethodError, match=r"goes to that alone"):
        llama.generate(text(12), past_key_values=fast.handle, max_new_tokens=2)
    assert not hasattr(fast.handle, "update")


def test_beams_go_on_from_beams(llama: nn.Module) -> None:
    """Rows that have parted keep what all of them have in common with the prompt."""
    fast, fresh = (made(llama, "paged", cache=PAGED, max_batch=6) for _ in range(2))
    ids = text(20, batch=2)
    mask = (torch.arange(20) >= torch.tensor([0, 6])[:, None]).long()
    given = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    out = fast.generate(ids, attention_mask=mask, **given)
    longer = torch.cat([out, text(4, seed=1, batch=2)], 1)
    hides = torch.cat([mask, torch.ones(2, longer.shape[1] - 20, dtype=torch.long)], 1)
    steps = Steps(fast)
    got = fast.generate(longer, attention_mask=hides, past_key_values=fast.handle, **given)
    assert torch.equal(got, fresh.generate(longer, attention_mask=hides, **given))
    assert steps.sizes[0] <= longer.shape[1] - 20


def test_a_deep_copy_is_a_fork(llama: nn.Module) -> None:
    """Of all addresses, a copy would take memory; and what was captured over one cache is known by its version."""
    with pytest.warns(UserWarning, match="was made for 512"):
        fast = made(llama, "baseline", max_tokens=4096)
    fast(text(9))
    copied, alias = copy.deepcopy(fast.handle), copy.copy(fast.handle)
    assert copied.cache.version != fast.handle.cache.version and alias.cache is fast.handle.cache
    assert copied.cache.nbytes == fast.cache.nbytes < copied.cache.reserved / 8
    wanted = fast(text(3, seed=1)).logits
    close(fast(text(3, seed=1), past_key_values=copied), wanted)
    alias.reset()
    assert len(fast.handle) == 0 and len(copied) == 12
    for saved in (pickle.dumps, lambda h: torch.save(h, io.BytesIO())):
        with pytest.raises(InputError, match=r"handle\.save\(path\)"):
            saved(fast.handle)


def test_recurrent_state_does_not_step_back() -> None:
    layout = CacheLayout()
    assert steps_back([layout], states=False).always
    found = steps_back([layout], states=True)
    assert not found.always and "state" in str(found.problem(1))
    module: Any = SimpleNamespace(
        cache=SimpleNamespace(shape=SimpleNamespace(back=found)), program=SimpleNamespace(states=["conv"])
    )
    # No recipe is named: none changes what a model carries.
    with pytest.raises(InputError, match="cannot be taken back; use greedy search"):
        HuggingFaceCachedModel._check_steps_back(module, 9, "it")
