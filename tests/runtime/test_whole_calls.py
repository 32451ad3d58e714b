"""A call appends all of its tokens or none: what a call leaves that memory or a user has ended on its way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvcompile.api import build
from kvcompile.errors import CompileError, InputError
from kvcompile.pipeline import Front, understand
from kvcompile.recipe import Recipe
from tests.support.models import tiny_hf

EAGER: dict[str, Any] = {"compile": {"mode": "none"}, "verify": "off", "max_tokens": 96, "prefill_chunk": 16}
_INT4 = {"dtype": "int4", "group": 32}
BACK: dict[str, dict[str, Any]] = {
    "int8": {},
    "paged": {"cache": {"placement": {"kind": "paged", "page_size": 8}}},
    "quest": {"cache": {"selection": {"page_size": 8, "pages": 3, "dense_layers": 0}}},
}
ONWARD: dict[str, dict[str, Any]] = {
    "kivi4": {"cache": {"keys": {**_INT4, "residual": 32}, "values": {**_INT4, "residual": 32}}},
    "h2o": {"cache": {"retention": {"sinks": 0, "heavy": 8, "recent": 8}}},
    "streaming": {"cache": {"retention": {"sinks": 2, "window": 12}}},
    "quest": BACK.pop("quest"),
}


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return tiny_hf("llama", head_dim=32)


@lru_cache
def front(model: nn.Module) -> Front:
    return understand(model)


def made(model: nn.Module, recipe: str) -> Any:
    more = {**BACK, **ONWARD}[recipe]
    return build(model, front(model), Recipe.load(recipe, **{**EAGER, **more}))


def text(count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 61, (1, count), generator=torch.Generator().manual_seed(seed))


@contextmanager
def ended(fast: Any, passes: int = 1) -> Iterator[None]:
    """The call within is ended in its pass of that number, once all layers have written."""
    module = fast.executor.regions.modules[fast.executor.regions.calls[-1].region]
    forward, count = module.forward, 0

    def ending(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == passes:
            raise KeyboardInterrupt
        return forward(*args)

    module.forward = ending
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        module.forward = forward


@pytest.mark.parametrize("recipe", BACK)
@pytest.mark.parametrize("passes", [1, 3])
def test_what_can_step_back_is_as_it_was(llama: nn.Module, recipe: str, passes: int) -> None:
    """Also where earlier passes over a prompt had ended: the same call again must not append them twice."""
    fast, fresh = made(llama, recipe), made(llama, recipe)
    fast(text(20)), fresh(text(20))
    with ended(fast, passes):
        fast(text(40, seed=1))
    assert torch.equal(fast.handle.input_ids, text(20))
    for ids in (text(1, seed=2), text(33, seed=1)):
        assert torch.equal(fast(ids).logits, fresh(ids).logits)
    assert [pool.used for pool in fast.cache.pools] == [pool.used for pool in fresh.cache.pools]


@pytest.mark.parametrize("recipe", ONWARD)
@pytest.mark.parametrize("tokens", [1, 13])
def test_what_cannot_step_back_has_lost_its_text(
    llama: nn.Module, recipe: str, tokens: int, tmp_path: Path
) -> None:
    """The slots of what stays were overwritten, or scores have queries in them that never were."""
    fast, fresh = made(llama, recipe), made(llama, recipe)
    base = text(40)
    fast.generate(base, max_new_tokens=3, do_sample=False)
    with ended(fast):
        fast(text(tokens, seed=1))
    handle = fast.handle
    assert len(handle) == 42
    for use in (
        lambda: fast(text(1)),
        lambda: handle.crop(-1),
        lambda: handle.fork(),
        lambda: handle.save(tmp_path / "text"),
        lambda: handle.reorder_cache(torch.tensor([0])),
    ):
        with pytest.raises(InputError, match=r"is lost: .* ended by KeyboardInterrupt .*reset\(\)"):
            use()
    longer = torch.cat([base, text(5, seed=2)], 1)
    got = fast.generate(longer, max_new_tokens=6, do_sample=False, past_key_values=handle)
    assert torch.equal(got, fresh.generate(longer, max_new_tokens=6, do_sample=False))
    for again in (fast.reset, fast.release):
        with ended(fast):
            fast(text(tokens, seed=1))
        again()
        fresh.reset()
        assert torch.equal(fast(text(20)).logits, fresh(text(20)).logits)


@pytest.mark.parametrize("recipe", ONWARD)
def test_a_first_call_has_nothing_to_lose(llama: nn.Module, recipe: str) -> None:
    fast, fresh = made(llama, recipe), made(llama, recipe)
    with ended(fast):
        fast(text(40))
    for ids in (text(30, seed=1), text(1)):
        assert torch.equal(fast(ids).logits, fresh(ids).logits)


def test_what_fails_before_it_writes_loses_nothing(llama: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, fresh = made(llama, "h2o"), made(llama, "h2o")
    fast(text(40)), fresh(text(40))

    def failing(*args: Any) -> None:
        raise CompileError("no compiler")

    with monkeypatch.context() as patched, pytest.raises(CompileError):
        patched.setattr(fast, "_prepare", failing)
        fast(text(1))
    assert torch.equal(fast(text(1)).logits, fresh(text(1)).logits)
