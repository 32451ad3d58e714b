"""A decode step never asks the device for a value: nothing in it may wait for what was launched before.

There is no GPU here, so what waits is told by what would: every way from a tensor to a Python value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import kvcompile
from kvcompile.api import build
from kvcompile.kernels.ops.page_copy import page_copy
from kvcompile.pipeline import understand
from kvcompile.recipe import Recipe
from tests.support.models import NanoGPT, TinyConfig, make, tiny_hf
from tests.verify.test_verify import fronts

WAYS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__")
SCALAR = torch.ops.aten._local_scalar_dense.default
# Their results have as many elements as the values say.
SIZED = (
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten._unique2.default,
)
INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


class Waited(AssertionError):
    pass


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is SCALAR or func in SIZED:
            raise Waited(str(func))
        if func in INDEXING and any(i is not None and i.dtype == torch.bool for i in args[1]):
            raise Waited(f"{func} by a mask")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_values(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fail(name: str) -> Any:
        def asked(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            raise Waited(f"Tensor.{name}")

        return asked

    with monkeypatch.context() as patch, _Watch():
        patch.setattr("kvcompile.runtime.module.reads_at_once", lambda device: False)  # as of a GPU
        for name in WAYS:
            patch.setattr(torch.Tensor, name, fail(name))
        yield


def test_every_way_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(1)
    ways: list[Callable[[Tensor], Any]] = [
        *(lambda t, name=name: getattr(t, name)() for name in ("item", "tolist", "cpu", "numpy", "nonzero")),
        *(bool, int, float, torch.unique, lambda t: t[t > 0]),
    ]
    for way in ways:
        with no_values(monkeypatch), pytest.raises(Waited):
            way(x)
    assert x.item() == 1


RECIPES: dict[str, dict[str, Any]] = {
    "baseline": {},
    "int8": {},
    "kivi2": {"cache": {"values": {"group": 0}}},
    "streaming": {"cache": {"retention": {"window": 20}}},
    "h2o": {"cache": {"retention": {"heavy": 8, "recent": 9}}},
    "paged_int8": {},
    "long_context": {"prefill_chunk": 16, "cache": {"retention": {"recent": 9}}},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_decode_step_waits_for_nothing(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the end of pages and rings; also where the prompt was padded."""
    model, front = fronts("llama", "float32")
    made = {"max_tokens": 64, "verify": "off", "compile": {"mode": "none"}} | RECIPES[recipe]
    fast: Any = build(model, front, Recipe.load(recipe, **made))
    mask = torch.ones(2, 21, dtype=torch.int64)
    mask[0, :3] = 0
    for padding in (None, mask):
        fast.reset()
        fast(torch.randint(3, 61, (2, 21)), padding)
        with no_values(monkeypatch):
            for _ in range(25):
                fast(torch.randint(3, 61, (2, 1)))


def test_nor_does_one_that_counts_positions_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(NanoGPT, TinyConfig(num_layers=1))
    recipe = Recipe.load("int8", max_tokens=64, verify="off", compile={"mode": "none"})
    fast: Any = build(model, understand(model), recipe)
    fast(torch.randint(3, 61, (1, 9)))
    with no_values(monkeypatch):
        fast(torch.randint(3, 61, (1, 1)))


def test_nor_does_generate_between_the_steps() -> None:
    """What Hugging Face's loop hands over after the prompt is no mask to look into."""
    model = tiny_hf("llama")
    recipe = Recipe.load("int8", max_tokens=64, verify="off", compile={"mode": "none"})
    fast: Any = build(model, understand(model), recipe)
    masks = []
    call = fast._call

    def noted(ids: Tensor, mask: Any, keep: Any) -> Any:
        masks.append(mask)
        return call(ids, mask, keep)

    fast._call = noted
    prompt = torch.randint(3, 61, (2, 9))
    mask = torch.ones_like(prompt)
    mask[0, :2] = 0
    fast.generate(prompt, attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert len(masks) == 4 and masks[0] is not None and masks[1:] == [None] * 3


# ---- pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_page_copies(kernels: Any, dtype: torch.dtype) -> None:
    """By PyTorch, and by the generated kernel."""
    made = torch.randint(0, 100, (6, 2, 4, 3)).to(torch.uint8 if dtype.itemsize == 1 else dtype)
    wanted = made.clone()
    wanted[[4, 5]] = made[[1, 3]]
    pool = made.clone().view(dtype)
    page_copy(kernels)(pool, torch.tensor([1, 3]), torch.tensor([4, 5]))
    assert torch.equal(pool.view(made.dtype), wanted)


def test_beams_of_a_model_on_generated_kernels_copy_their_pages() -> None:
    """A sequence that is chosen twice goes on by itself, as it does where the reference runs the layers."""
    model = tiny_hf("llama")
    ids = torch.randint(3, 61, (2, 11), generator=torch.Generator().manual_seed(0))
    more: dict[str, Any] = {"max_tokens": 64, "verify": "off"}
    logits = []
    for kernels in ("reference", "triton"):
        fast: Any = kvcompile.optimize(model, "paged", compile={"mode": "none", "kernels": kernels}, **more)
        fast(ids)
        fast.cache.reorder(torch.tensor([1, 1]))
        logits.append(torch.cat([fast(torch.tensor([[5 + step], [9]])).logits for step in range(3)]))
    assert (logits[0] - logits[1]).abs().max() <= 64 * torch.finfo(torch.float32).eps * logits[0].abs().max()
