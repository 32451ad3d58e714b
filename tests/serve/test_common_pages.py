"""Texts that begin with the same pages are neighbours in a step, and kernels read those pages once: the texts are the
same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcompile
from kvcompile.kernels.triton.append import common_pages
from kvcompile.kernels.triton.host import ops_attend
from kvcompile.kernels.triton.host import source as source_module
from kvcompile.runtime.module import CachedModel
from kvcompile.serve import Sampling, passes
from kvcompile.serve.moves import Tables
from kvcompile.serve.rows import Rows
from kvcompile.verify.compare import allowed
from tests.serve.test_numerics import CHUNK, compare, error, noise
from tests.support.models import tiny_hf
from tests.support.serving import Stepped, alone
from tests.support.triton_write import kernels_folder  # noqa: F401  (a fixture)

orders: list[list[int]] = []


class Bundled(Rows):
    """Rows as of kernels that read common pages once; each order is looked at."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.in_bundles = True

    def by_pages(self, texts: Mapping[int, Tables]) -> list[int]:
        found = super().by_pages(texts)
        orders.append(found)
        first = [texts[text][0][0] for text in found]
        runs = [page for place, page in enumerate(first) if place == 0 or page != first[place - 1]]
        assert len(runs) == len(set(runs)), "texts of one first page are not neighbours"
        return found

    def arrange(self, texts: Mapping[int, Tables]) -> list[int]:
        found = super().arrange(texts)
        assert found == self._at[: len(texts)] and [self._row[text] for text in found] == [*range(len(found))]
        for text in found:
            # What stands in a row is of its text, up to pages that this step writes.
            written = self._written[self._row[text]][0]
            assert self.buffers[self._tables[0]][self._row[text], : len(written)].tolist() == written
        return found


@pytest.fixture
def bundled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    orders.clear()
    monkeypatch.setattr(passes, "Rows", Bundled)
    yield
    assert orders


@pytest.mark.parametrize(("recipe", "packed"), [("paged", "off"), ("paged_int8", "on")])
def test_texts_in_the_order_of_their_pages(bundled: None, recipe: str, packed: str) -> None:
    """Of any that come and go, each is what it is alone."""
    compare("llama", recipe, seed=1, packed=packed)
    assert any(order != sorted(order) for order in orders)


def test_texts_that_have_more_than_pages_stay_in_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "Rows", Bundled)
    orders.clear()
    compare("llama", "kivi in pages", seed=1)
    assert not orders


PROMPT = [7, 5, 11, 3, 9, 8, 4, 6] * 4 + [2]


def made(kernels: str) -> CachedModel:
    return kvcompile.optimize(
        tiny_hf("llama", "sdpa", 1, head_dim=16),
        {"cache": {"placement": {"kind": "paged", "page_size": 8}}},
        verify="off",
        compile={"mode": "none", "kernels": kernels},
        max_tokens=64,
        max_batch=4,
        prefill_chunk=CHUNK,
    )


@pytest.mark.parametrize("packed", [pytest.param("off", marks=pytest.mark.slow), "on"])
def test_a_prompt_that_texts_share(monkeypatch: pytest.MonkeyPatch, packed: str) -> None:
    """On Triton kernels, interpreted: its pages are read once for all, and each text is what it is alone."""
    monkeypatch.setattr(common_pages, "LEAST", 16)
    for kept in (source_module.kernel, source_module.kernel_of):
        kept.cache_clear()
    seen: list[Tensor] = []
    plain = ops_attend.decode

    def noted(*arguments: Any) -> list[Tensor]:
        if isinstance(arguments[-1], Tensor):
            seen.append(arguments[-1].clone())
        return plain(*arguments)  # type: ignore[no-any-return]

    monkeypatch.setattr(ops_attend, "decode", noted)
    reference = made("reference")
    prompts = [[*PROMPT, 13], [21, 22, 23], [*PROMPT, 17, 19], [*PROMPT, 12]]
    with Stepped(made("triton"), max_sequences=4, packed=packed) as engine:
        first = engine.submit(prompts[0], Sampling(max_tokens=5, ignore_eos=True))
        for _ in range(3):  # its pages are there to be found
            engine.turn()
        others = [engine.submit(prompt, Sampling(max_tokens=4, ignore_eos=True)) for prompt in prompts[1:]]
        results = engine.finish([first, *others])
        budget = allowed(noise(reference, [[*PROMPT], [*PROMPT[::-1]]] * 2), torch.float32)
        for prompt, result in zip(prompts, results, strict=True):
            (completion,) = result.completions
            whole = (*prompt, *completion.tokens[:-1])
            expected = alone(reference, whole, len(prompt), CHUNK, reference.plan.whole_prompts)
            own = torch.stack([engine.logits[result.id, 0, i] for i in range(len(expected))])
            assert error(own[None], expected[None]) <= budget
        assert (engine.stats().packed_steps > 0) == (packed == "on")
    for kept in (source_module.kernel, source_module.kernel_of):
        kept.cache_clear()
    # Of 33 tokens in common the four full pages, for two or three texts.
    most = max(seen, key=lambda one: int(one[:, 3].max()))
    assert int(most[:, 3].max()) == 3 and most[most[:, 2] > 0, 0].tolist() == [32, 32]
