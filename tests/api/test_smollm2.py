"""A real model on real text: SmolLM2-135M-Instruct (30 layers, GQA 9/3) on Python's own documentation.

Logits are compared teacher-forced. The budget of a lossless cache is twice the error of plain transformers
against float64 (RMS over all logits), plus rounding. Perplexities belong to this text: only their ratios are
asserted.
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
from kvcompile.report.quality import run as running
from kvcompile.report.quality.report import QualityReport
from kvcompile.verify import check_program

LONG, SHORT = 300, 100
EAGER = {"compile": {"mode": "none"}, "verify": "off"}


@pytest.fixture(autouse=True)
def _threads(_quick: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """Two for the slow tests; beside the other quick ones, more than one only wait for each other."""
    torch.set_num_threads(2 if request.node.get_closest_marker("slow") else 1)
    yield
    torch.set_num_threads(1)


# The first layers have what all have, and take a fifth of the time.
some_layers = pytest.mark.parametrize("loaded", [6, pytest.param(30, marks=pytest.mark.slow)], indirect=True)


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest) -> Any:
    """SmolLM2, or its first layers, as many as the test asks for."""
    pytest.importorskip("transformers")
    try:
        whole = load_model("smollm2", "float32")
    except ModelError as error:
        pytest.skip(str(error))
    model: Any = whole.model
    count = getattr(request, "param", len(model.model.layers))
    model.model.layers = model.model.layers[:count]
    model.config.num_hidden_layers = count
    return whole


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
    patch.setattr(api, "understand", lambda model, *begun: front)

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


@some_layers
def test_one_piece(baseline: Any, text: Tensor, plain: Tensor, budget: float) -> None:
    error = relative(feed(baseline, text, [LONG]), plain)
    print(f"error {error:.1e} of {budget:.1e}")
    assert error <= budget < 1e-4


@some_layers
@pytest.mark.parametrize("size", [7, 1], ids=["sevens", "tokens"])
def test_chunks(baseline: Any, text: Tensor, plain: Tensor, budget: float, size: int) -> None:
    tokens = 200 + 8 * size
    got = feed(baseline, text, [200, *pieces(tokens - 200, size)])
    assert relative(got, plain[:, :tokens]) <= budget


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [7, 1], ids=["sevens", "tokens"])
def test_chunks_of_the_whole(baseline: Any, text: Tensor, plain: Tensor, budget: float, size: int) -> None:
    error = relative(feed(baseline, text, pieces(LONG, size)), plain)
    print(f"error {error:.1e} of {budget:.1e}")
    assert error <= budget


@some_layers
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


@pytest.mark.parametrize("loaded", [30], indirect=True)  # the whole of it, on every run
def test_greedy_text(loaded: Any, baseline: Any) -> None:
    message = [{"role": "user", "content": "Why is the sky blue? Answer in two sentences."}]
    prompt = loaded.tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    expected, got = (
        m.generate(**prompt, max_new_tokens=16, do_sample=False) for m in (loaded.model, baseline)
    )
    assert torch.equal(got, expected) and got.shape[1] > prompt["input_ids"].shape[1] + 12


@pytest.mark.slow  # tiny models have the quick ones
@pytest.mark.parametrize("recipe", ["int8", "int4", "streaming", "streaming_int8"])
def test_policies_equal_their_oracle(optimize: Callable[..., Any], front: Front, recipe: str) -> None:
    """Prompt, chunks and steps over the edge of a small ring; the budget is verify's."""
    more = {"max_tokens": 64} if recipe.startswith("int") else {"cache": {"retention": {"window": 16}}}
    fast = optimize(recipe, **more)
    check = check_program(lambda ids, mask: fast(ids, mask).logits, front, fast.plan)
    print(check)
    assert check.error <= check.budget


def recipes(budget: int) -> list[Any]:
    """A budget of tokens with and without the first four, and shipped ones. Verified elsewhere."""
    named = {"sinks": window(4, budget - 4), "window": window(0, budget)}
    own = [{"name": name, "cache": cache, "verify": "off"} for name, cache in named.items()]
    return [*own, *(kvcompile.Recipe.load(name, verify="off") for name in ("int8", "int4", "kivi2"))]


@pytest.fixture
def measure(loaded: Any, front: Front, monkeypatch: pytest.MonkeyPatch) -> Callable[..., QualityReport]:
    """kvcompile.quality of the model, which is captured only once, on Python's help topics."""
    monkeypatch.setattr(running, "understand", lambda model: front)

    def run(chosen: Sequence[Any], **more: Any) -> QualityReport:
        report = kvcompile.quality(loaded.model, loaded.tokenizer, chosen, compile="none", **more)
        print(report)
        return report

    return run


def ratios(report: QualityReport) -> dict[str, float]:
    """Perplexities over that of the full cache; what forgets the first tokens loses half as much again, at least."""
    scores = {row.recipe: row.perplexity for row in report.rows if row.perplexity}
    found = {name: score.perplexity / scores["baseline"].perplexity for name, score in scores.items()}
    assert found["window"] / found["sinks"] >= 1.5
    kl = [scores[name].kl for name in ("baseline", "int8", "int4", "sinks", "window") if name in scores]
    assert kl == sorted(kl) and kl[0] == 0 < kl[1]
    assert all(row.memory.measured == row.memory.estimated for row in report.rows)
    return found


@pytest.mark.slow  # tests/quality has the fast ones
def test_quality(measure: Callable[..., QualityReport]) -> None:
    """full ~ int8 < sinks 4 + window 124 << window 128: a window alone loses the sinks."""
    ratio = ratios(measure(recipes(128)[:3], metrics=("perplexity",), prompt=160, tokens=352))
    assert ratio["int8"] == pytest.approx(1, abs=0.01)


@pytest.mark.slow
def test_needles(measure: Callable[..., QualityReport]) -> None:
    """A full cache finds them all. Behind a window, none is found that has left it, and all that have not."""
    report = measure(recipes(128)[:1], metrics=("needle",), needle_tokens=(256,), depths=(0, 1), needles=1)
    assert_needles_leave_the_window(report, 124)


def assert_needles_leave_the_window(report: QualityReport, size: int) -> None:
    full, sinks = (row.needles for row in report.rows)
    for score in full:
        assert score.accuracy >= 0.9
    answers = [answer for score in sinks for answer in score.answers]
    inside = [a.found for a in answers if a.behind + 24 < size]  # the fact, and the words of the answer
    outside = [a.found for a in answers if a.behind > size]
    assert len(inside) >= 2 and len(outside) >= 2
    assert all(inside) and not any(outside)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_quality_long(measure: Callable[..., QualityReport]) -> None:
    # KIVI in 2 bits loses 18 to 28 % over the first 1,024 tokens, by excerpt, and 34 % over 3,072 of the first one.
    report = measure(recipes(256), metrics=("perplexity",), tokens=1024)
    ratio = ratios(report)
    assert ratio["int8"] == pytest.approx(1, abs=0.01)
    assert ratio["int4"] <= 1.10 and ratio["kivi2"] <= 1.30 and ratio["sinks"] <= 1.20
    sizes = {row.recipe: row.memory.measured for row in report.rows}
    assert sizes["sinks"] < sizes["kivi2"] < sizes["int4"] < sizes["int8"] < sizes["baseline"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_needles_long(measure: Callable[..., QualityReport]) -> None:
    report = measure(recipes(256)[:1], metrics=("needle",), needle_tokens=(768,), needles=2)
    assert_needles_leave_the_window(report, 252)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_positions_of_the_cache_hold_past_the_models_length(measure: Callable[..., QualityReport]) -> None:
    """As good as those of the sequence below 8,192 tokens, and no worse beyond."""
    named = {positions: window(4, 1020, positions) for positions in ("in_cache", "original")}
    chosen = [{"name": name, "cache": cache, "verify": "off"} for name, cache in named.items()]
    report = measure(chosen, metrics=("perplexity",), tokens=9728)
    scores = {row.recipe: row.perplexity for row in report.rows if row.perplexity}

    def mean(name: str, first: int, last: int) -> float:
        inside = [s for s in scores[name].segments if first <= s.start < last]
        return sum(s.nll * s.tokens for s in inside) / sum(s.tokens for s in inside)

    assert abs(mean("in_cache", 512, 8192) - mean("original", 512, 8192)) <= 0.02
    assert mean("in_cache", 8192, 10_240) - mean("original", 8192, 10_240) <= 0.02


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
