"""A real model on real text: SmolLM2-135M-Instruct (30 layers, GQA 9/3) on Python's own documentation.

Logits are compared teacher-forced. The budget of a lossless cache is twice the error of plain transformers
against float64 (RMS over all logits), plus rounding. Perplexities belong to this text: only their ratios are
asserted, with the margins of `techniques.md`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcompile
from kvcompile import api
from kvcompile.errors import ModelError
from kvcompile.models import load_model
from kvcompile.pipeline import Front, understand
from kvcompile.verify import check_program

LONG, SHORT = 1100, 300
EAGER = {"compile": {"mode": "none"}, "verify": "off"}


@pytest.fixture(scope="module", autouse=True)
def _two_threads(_one_thread: None) -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def loaded() -> Any:
    pytest.importorskip("transformers")
    try:
        return load_model("smollm2", "float32")
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def front(loaded: Any) -> Front:
    return understand(loaded.model)


@pytest.fixture(scope="module")
def text(loaded: Any) -> Tensor:
    """Tokens of the topics of Python's help(), [1, about 11,000]."""
    from pydoc_data.topics import topics

    words = "\n\n".join(topics[key] for key in sorted(topics))[:50_000]
    return loaded.tokenizer(words, return_tensors="pt").input_ids


@pytest.fixture(scope="module")
def optimize(loaded: Any, front: Front) -> Iterator[Callable[..., Any]]:
    """kvcompile.optimize of the model, which is captured only once."""
    patch = pytest.MonkeyPatch()
    patch.setattr(api, "understand", lambda model: front)

    def build(recipe: object, **more: Any) -> Any:
        return kvcompile.optimize(loaded.model, recipe, **{**EAGER, **more})

    yield build
    patch.undo()


@pytest.fixture(scope="module")
def baseline(optimize: Callable[..., Any]) -> Any:
    return optimize("baseline", max_tokens=LONG)


@pytest.fixture(scope="module")
def plain(loaded: Any, text: Tensor) -> Tensor:
    """Logits of plain transformers, [1, LONG, V]."""
    with torch.no_grad():
        return loaded.model(text[:, :LONG]).logits


@pytest.fixture(scope="module")
def budget(loaded: Any, text: Tensor, plain: Tensor) -> float:
    """Relative RMS: twice the error of plain transformers against float64, plus rounding."""
    with torch.no_grad():
        exact = copy.deepcopy(loaded.model).double()(text[:, :SHORT]).logits
    return 2 * relative(plain[:, :SHORT], exact) + 8 * torch.finfo(torch.float32).eps


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).double().norm() / expected.double().norm())


def feed(fast: Any, ids: Tensor, chunks: Sequence[int], mask: Tensor | None = None) -> Tensor:
    fast.reset()
    outs, start = [], 0
    for size in chunks:
        part = slice(start, start + size)
        outs.append(fast(ids[:, part], None if mask is None else mask[:, part]).logits)
        start += size
    return torch.cat(outs, dim=1)


def pieces(total: int, size: int) -> list[int]:
    return [min(size, total - start) for start in range(0, total, size)]


def losses(fast: Any, ids: Tensor, chunk: int = 512) -> Tensor:
    """Negative log-likelihood of each token from the second on, teacher-forced; the cache is emptied first."""
    fast.reset()
    out = []
    for start in range(0, ids.shape[1] - 1, chunk):
        part = ids[:, start : min(start + chunk, ids.shape[1] - 1)]
        target = ids[0, start + 1 : start + 1 + part.shape[1]]
        out.append(torch.nn.functional.cross_entropy(fast(part).logits[0], target, reduction="none"))
    return torch.cat(out)


def window(sinks: int, size: int, positions: str = "original") -> dict[str, Any]:
    return {"retention": {"kind": "sink_window", "sinks": sinks, "window": size, "positions": positions}}


def test_one_piece(baseline: Any, text: Tensor, plain: Tensor, budget: float) -> None:
    error = relative(feed(baseline, text, [LONG]), plain)
    print(f"error {error:.1e} of {budget:.1e}")
    assert error <= budget < 1e-4


@pytest.mark.parametrize("size", [7, 1], ids=["sevens", "tokens"])
def test_chunks(baseline: Any, text: Tensor, plain: Tensor, budget: float, size: int) -> None:
    got = feed(baseline, text, [200, *pieces(SHORT - 200, size)])
    assert relative(got, plain[:, :SHORT]) <= budget


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [7, 1], ids=["sevens", "tokens"])
def test_chunks_of_the_whole(baseline: Any, text: Tensor, plain: Tensor, budget: float, size: int) -> None:
    error = relative(feed(baseline, text, pieces(LONG, size)), plain)
    print(f"error {error:.1e} of {budget:.1e}")
    assert error <= budget


def test_left_padded_batch(loaded: Any, baseline: Any, text: Tensor, budget: float) -> None:
    """Three texts of 150, 97 and 12 tokens in one batch, against each alone in plain transformers."""
    size, lengths = 150, (150, 97, 12)
    ids, mask = torch.zeros(3, size, dtype=torch.int64), torch.zeros(3, size, dtype=torch.int64)
    for row, length in enumerate(lengths):
        ids[row, -length:] = text[0, 1000 * row : 1000 * row + length]
        mask[row, -length:] = 1
    got = feed(baseline, ids, [120, 1, 1, 7, 1, 20], mask)
    baseline.release()
    for row, length in enumerate(lengths):
        with torch.no_grad():
            own = loaded.model(ids[row : row + 1, -length:]).logits[0]
        assert relative(got[row, -length:], own) <= budget


def test_greedy_text(loaded: Any, baseline: Any) -> None:
    message = [{"role": "user", "content": "Why is the sky blue? Answer in two sentences."}]
    prompt = loaded.tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    expected, got = (
        m.generate(**prompt, max_new_tokens=48, do_sample=False) for m in (loaded.model, baseline)
    )
    assert torch.equal(got, expected) and got.shape[1] > prompt["input_ids"].shape[1] + 20


@pytest.mark.parametrize("recipe", ["int8", "int4", "streaming", "streaming_int8"])
def test_policies_equal_their_oracle(optimize: Callable[..., Any], front: Front, recipe: str) -> None:
    """Prompt, chunks and steps over the edge of a small ring; the budget is verify's."""
    more = {"max_tokens": 64} if recipe.startswith("int") else {"cache": {"retention": {"window": 16}}}
    fast = optimize(recipe, **more)
    check = check_program(lambda ids, mask: fast(ids, mask).logits, front, fast.plan)
    print(check)
    assert check.error <= check.budget


def perplexities(optimize: Callable[..., Any], ids: Tensor, budget: int, first: int) -> dict[str, float]:
    limit = {"max_tokens": ids.shape[1]}
    recipes: dict[str, tuple[str, dict[str, Any]]] = {
        "full": ("baseline", limit),
        "int8": ("int8", limit),
        "sinks": ("streaming", {"cache": window(4, budget - 4)}),
        "window": ("streaming", {"cache": window(0, budget)}),
    }
    found = {}
    for name, (recipe, more) in recipes.items():
        fast = optimize(recipe, **more)
        found[name] = math.exp(losses(fast, ids)[first - 1 :].mean())
        fast.release()
    print({name: round(value, 3) for name, value in found.items()})
    return found


def assert_in_order(ppl: dict[str, float]) -> None:
    assert abs(ppl["int8"] / ppl["full"] - 1) <= 0.01
    assert 1.0 < ppl["sinks"] / ppl["full"] <= 1.35
    assert ppl["window"] / ppl["sinks"] >= 1.5


def test_perplexities(optimize: Callable[..., Any], text: Tensor) -> None:
    """full ~ int8 < sinks 4 + window 124 << window 128: a window alone loses the sinks."""
    assert_in_order(perplexities(optimize, text[:, :1200], budget=128, first=256))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_perplexities_long(optimize: Callable[..., Any], text: Tensor) -> None:
    assert_in_order(perplexities(optimize, text[:, :3072], budget=256, first=512))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_endless_text(optimize: Callable[..., Any], text: Tensor) -> None:
    """10,000 tokens, past the 8,192 positions of the model, in the memory of 256 slots.

    Each 1,000 tokens are as probable as when a full cache reads them afresh after 256 tokens.
    """
    import psutil

    count, block, context = 10_250, 1000, 256
    fast = optimize("streaming", cache=window(4, 252, "in_cache"))
    full = optimize("baseline", max_tokens=block + context)
    fast(text[:, :600])
    buffers = {name: buffer.data_ptr() for name, buffer in fast.cache.buffers.items()}
    process = psutil.Process()
    before = process.memory_info().rss
    nll = losses(fast, text[:, :count])
    grown = process.memory_info().rss - before
    assert {name: buffer.data_ptr() for name, buffer in fast.cache.buffers.items()} == buffers
    assert fast.cache.nbytes == fast.plan.bytes(1) == 256 * fast.plan.bytes_per_token
    # The logits of one pass come and go (512 x 49,152 floats: 100 MB); a full cache of the text would be 472 MB.
    assert grown < 300 * 2**20
    ratios = []
    for start in range(context, count - block, block):
        fresh = losses(full, text[:, start - context : start + block], chunk=block + context)
        afresh = fresh[context - 1 : context - 1 + block].mean()
        ratios.append(math.exp(nll[start - 1 : start - 1 + block].mean() - afresh))
    print("grown", grown >> 20, "MiB; perplexity over that of a full cache:", [round(r, 3) for r in ratios])
    assert len(ratios) == 9 and all(0.8 < ratio < 1.35 for ratio in ratios)
