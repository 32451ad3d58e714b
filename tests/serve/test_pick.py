"""Tokens of logits: against transformers' processors, against plain oracles, and alone as in any batch."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvcompile.errors import LogitsError
from kvcompile.serve import choose
from kvcompile.serve import pick as picking
from kvcompile.serve.pick import Picker, pick
from kvcompile.serve.sampling import Sampling

INF = float("inf")


def one(
    logits: Any, sampling: Sampling, prompt: list[int] | None = None, index: int = 0, taken: Any = ()
) -> int:
    picker = Picker(sampling, prompt or [], index)
    for token in taken:
        picker.took(token)
    return pick(torch.as_tensor(logits, dtype=torch.float32)[None], [picker]).tokens[0]


def drawn(logits: Any, sampling: Sampling, count: int) -> Counter[int]:
    """What a text gets from the same logits, step after step."""
    picker, found = Picker(sampling, [], 0), Counter[int]()
    row = torch.as_tensor(logits, dtype=torch.float32)[None]
    for _ in range(count):
        token = pick(row, [picker]).tokens[0]
        found[token] += 1
        picker.took(token)
    return found


# ---- which tokens are kept, and how likely each is


def probabilities(logits: torch.Tensor, s: Sampling) -> torch.Tensor:
    """By transformers' processors, in their order, on float64."""
    scores = TemperatureLogitsWarper(s.temperature)(None, logits.double()[None])
    if s.top_k:
        scores = TopKLogitsWarper(s.top_k)(None, scores)
    if s.top_p < 1:
        scores = TopPLogitsWarper(s.top_p)(None, scores)
    if s.min_p > 0:
        scores = MinPLogitsWarper(s.min_p)(None, scores)
    return scores.softmax(-1)[0]


def found(logits: torch.Tensor, s: Sampling) -> torch.Tensor:
    """The probability of each token, [V]."""
    row = logits.numpy()
    ids, weights = choose.kept(row, float(row.max()), s)
    places = np.arange(len(row)) if ids is None else ids
    assert (np.diff(places) > 0).all()
    all_of_them = torch.zeros(len(row), dtype=torch.float64)
    all_of_them[places] = torch.from_numpy(weights / weights.sum())
    return all_of_them


@st.composite
def rows(draw: st.DrawFn) -> torch.Tensor:
    size = draw(st.integers(1, 60))
    seed = draw(st.integers(0, 2**31))
    scale = draw(st.sampled_from([0.0, 0.01, 1.0, 5.0, 100.0]))
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale
    if draw(st.booleans()):
        logits = (logits * 2).round() / 2  # ties
    if draw(st.booleans()) and size > 1:
        gone = torch.rand(size, generator=torch.Generator().manual_seed(seed + 1)) < 0.4
        gone[draw(st.integers(0, size - 1))] = False
        logits[gone] = -INF
    return logits


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.01, 0.5, 0.8, 1.0, 3.0, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 20, 59, 60, 1000]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]),
)


@given(rows(), samplings, st.sampled_from([0, 4096]))
@settings(max_examples=600)
def test_probabilities_are_those_of_transformers(logits: torch.Tensor, s: Sampling, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "_SORTED", most)  # 0: everything by the histogram
        mine = found(logits, s)
    expected = probabilities(logits, s)
    if (s.top_p < 1 and near_the_edge(logits, s)) or (s.min_p > 0 and near_the_smallest(logits, s)):
        return  # rounding decides
    # Both are float64 from the same float32 logits: exp has the rounding of its argument, a sum that of its terms.
    scaled = float(logits[logits > -INF].abs().max()) / s.temperature
    rtol = min(1e-9, 4 * torch.finfo(torch.float64).eps * (2 * scaled + len(logits)))
    # Of tokens that tie, transformers keeps any: their probabilities are compared as a set.
    for value in logits.unique():
        if value == -INF:
            assert not mine[logits == value].any()
            continue
        ours, theirs = mine[logits == value], expected[logits == value]
        assert torch.allclose(ours.sort()[0], theirs.sort()[0], rtol=rtol, atol=1e-300), (ours, theirs)


def near_the_edge(logits: torch.Tensor, s: Sampling) -> bool:
    """Whether rounding decides about top-p: a mass is top_p to 1e-12."""
    left = probabilities(logits, s.model_copy(update={"top_p": 1.0, "min_p": 0.0}))
    masses = left.sort(descending=True)[0].cumsum(0)
    return bool(((masses - s.top_p).abs() < 1e-12).any())


def near_the_smallest(logits: torch.Tensor, s: Sampling) -> bool:
    left = probabilities(logits, s.model_copy(update={"top_p": 1.0, "min_p": 0.0}))
    ratios = left / left.max()
    return bool(((ratios - s.min_p).abs()[ratios != 1] < 1e-12).any())


# ---- the draw


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "s",
    [
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=0.7, top_p=0.9, seed=2),
        Sampling(temperature=2.0, top_k=5, seed=3),
        Sampling(temperature=1.0, min_p=0.2, seed=4),
        Sampling(temperature=1.5, top_k=6, top_p=0.8, min_p=0.1, seed=5),
    ],
    ids=["all", "top-p", "top-k", "min-p", "all three"],
)
def test_tokens_come_as_often_as_they_are_likely(s: Sampling) -> None:
    logits = torch.tensor([1.0, 0.5, -INF, 2.0, 1.5, -1.0, 0.5, 3.0])
    count = 20_000
    seen, expected = drawn(logits, s, count), probabilities(logits, s)
    for token, p in enumerate(expected.tolist()):
        spread = math.sqrt(count * p * (1 - p))
        assert abs(seen[token] - count * p) <= 5 * spread  # one in two million, and the seeds are fixed
        assert p > 0 or not seen[token]


@given(rows(), st.floats(0, 1, exclude_max=True))
@settings(max_examples=300)
def test_a_draw_takes_the_first_token_whose_mass_is_enough(logits: torch.Tensor, u: float) -> None:
    logits = logits.repeat(20)  # several blocks
    row = logits.numpy()
    token = choose.choose(row, float(row.max()), Sampling(temperature=1.0), u)
    p = logits.double().softmax(0)
    mass = p.cumsum(0)
    assert p[token] > 0
    assert mass[token] - p[token] <= u + 1e-12
    assert mass[token] >= u - 1e-12


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
def test_the_ends_of_a_draw_take_what_can_come(u: float) -> None:
    row = np.full(1000, -np.inf, np.float32)
    row[[300, 301, 700]] = [0.0, 1.0, 0.3]
    for s in (
        Sampling(temperature=1.0),
        Sampling(temperature=1.0, top_p=0.99),
        Sampling(temperature=1.0, min_p=0.01),
    ):
        assert choose.choose(row, 1.0, s, u) == (300 if u == 0 else 700)


def test_a_seed_gives_the_same_text_and_every_text_its_own() -> None:
    logits, s = torch.zeros(1000), Sampling(temperature=1.0, seed=7)

    def text(s: Sampling, index: int) -> list[int]:
        picker, tokens = Picker(s, [1], index), []
        for _ in range(20):
            tokens.append(pick(logits[None], [picker]).tokens[0])
            picker.took(tokens[-1])
        return tokens

    assert text(s, 0) == text(s, 0)
    texts = [
        text(s, 0),
        text(s, 1),
        text(s.model_copy(update={"seed": 8}), 0),
        text(s.model_copy(update={"seed": -7}), 0),
    ]
    fresh = s.model_copy(update={"seed": None})
    texts += [text(fresh, 0), text(fresh, 0)]
    assert len({tuple(tokens) for tokens in texts}) == len(texts)
    assert all(len(set(tokens)) > 10 for tokens in texts)


def test_a_fork_has_the_past_and_a_seed_of_its_own() -> None:
    for seed in (7, None):
        first = Picker(Sampling(temperature=1.0, seed=seed, frequency_penalty=1.0), [1, 2], 0)
        first.took(5)
        second, third = first.forked(1), first.forked(2)
        assert len({first.uniform(), second.uniform(), third.uniform()}) == 3
        assert first.forked(1).uniform() == second.uniform()
        before = first.changed(np.zeros(9, np.float32)).tolist()
        second.took(5)
        assert first.changed(np.zeros(9, np.float32)).tolist() == before
        assert second.changed(np.zeros(9, np.float32)).tolist() == [0, 0, 0, 0, 0, -2, 0, 0, 0]
    built, forked = (
        Picker(Sampling(temperature=1.0, seed=7), [], 3),
        Picker(Sampling(temperature=1.0, seed=7), [], 0),
    )
    assert forked.forked(3).uniform() == built.uniform()


def test_picking_twice_gives_the_same() -> None:
    logits, pickers = torch.randn(3, 50), [Picker(Sampling(temperature=1.0), [], i) for i in range(3)]
    assert pick(logits, pickers) == pick(logits, pickers)


# ---- rows and their neighbours


everything = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 100.0]),
    top_k=st.sampled_from([0, 1, 7, 10_000]),
    top_p=st.sampled_from([0.2, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    seed=st.integers(-(1 << 63), (1 << 63) - 1),
    logprobs=st.sampled_from([None, 0, 5]),
)


@given(
    st.lists(everything, min_size=1, max_size=6), st.integers(0, 2**31), st.sampled_from([1, 33, 700, 5003])
)
@settings(max_examples=200)
def test_a_row_is_the_same_alone_and_in_any_batch(samplings: list[Sampling], seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(samplings), size, generator=generator) * 4
    before = logits.clone()
    pickers = [Picker(s, [0, size - 1], i) for i, s in enumerate(samplings)]
    for picker in pickers:
        picker.took(size // 2)
    together = pick(logits, pickers)
    for i, picker in enumerate(pickers):
        alone = pick(logits[i : i + 1].clone(), [picker])
        assert (alone.tokens[0], alone.logprobs[0]) == (together.tokens[i], together.logprobs[i])
    order = torch.randperm(len(pickers), generator=generator).tolist()
    shuffled = pick(logits[order], [pickers[i] for i in order])
    assert shuffled.tokens == [together.tokens[i] for i in order]
    strided = torch.cat([logits, logits], -1).t().contiguous().t()[:, :size]
    assert pick(strided, pickers) == together
    assert torch.equal(logits, before)


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    assert one([1, 3, 3, 2], Sampling()) == 1
    assert one([-INF, -5, -INF], Sampling()) == 1
    assert one([4], Sampling()) == 0
    assert one([1, 2], Sampling(temperature=1e-300, seed=1)) == 1
    assert one([1, 2, 2.0000002, 2], Sampling(temperature=1e-12, top_p=0.9, seed=1)) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_dtype(dtype: torch.dtype) -> None:
    logits = torch.randn(4, 300).to(dtype)
    pickers = [Picker(Sampling(temperature=float(i), seed=i, logprobs=2), [], i) for i in range(4)]
    assert pick(logits, pickers) == pick(logits.float(), pickers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_devices_give_what_hosts_do(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(6, 3001, generator=torch.Generator().manual_seed(1)).to(dtype)
    samplings = [Sampling(), Sampling(temperature=1.0, seed=1), Sampling(logprobs=3), Sampling(), Sampling()]
    pickers = [Picker(s, [1], i) for i, s in enumerate([*samplings, Sampling(presence_penalty=1.0)])]
    expected = pick(logits, pickers)
    monkeypatch.setattr(picking, "_on_host", picking._from_device)
    assert pick(logits, pickers) == expected
    assert pick(logits[3:5], pickers[3:5]).tokens == expected.tokens[3:5]
    logits[4, 7] = float("nan")
    with pytest.raises(LogitsError, match="row 4: their largest is nan"):
        pick(logits, pickers)


# ---- penalties


@given(
    rows(), st.lists(st.integers(0, 59), max_size=30), st.lists(st.integers(0, 59), max_size=30), everything
)
@settings(max_examples=200)
def test_penalties(logits: torch.Tensor, prompt: list[int], text: list[int], s: Sampling) -> None:
    size = len(logits)
    prompt, text = [t % size for t in prompt], [t % size for t in text]
    picker = Picker(s, prompt, 0)
    for token in text:
        picker.took(token)
    if s.repetition_penalty != 1 and prompt + text:
        processor = RepetitionPenaltyLogitsProcessor(s.repetition_penalty)
        expected = processor(torch.tensor([prompt + text]), logits[None].clone())[0]
    else:
        expected = logits.clone()
    for token, count in Counter(text).items():
        expected[token] -= np.float32(s.presence_penalty + count * s.frequency_penalty)
    row = logits.numpy().copy()
    assert picker.changed(row).tolist() == expected.tolist()
    assert row.tolist() == logits.tolist()


def test_penalties_change_what_is_taken() -> None:
    assert one([2, 1.9], Sampling(repetition_penalty=1.2), prompt=[0]) == 1
    assert one([2, 1.9], Sampling(presence_penalty=1.0), prompt=[0]) == 0
    assert one([2, 1.9], Sampling(presence_penalty=1.0), taken=[0]) == 1
    assert one([2, 1.9], Sampling(frequency_penalty=-1.0), taken=[1]) == 1


# ---- log-probabilities


@given(rows(), st.integers(0, 20), everything)
@settings(max_examples=300)
def test_log_probabilities_are_of_the_logits_as_they_came(
    logits: torch.Tensor, count: int, s: Sampling
) -> None:
    s = s.model_copy(update={"logprobs": count})
    picked = pick(logits[None], [Picker(s, [0], 0)])
    found = picked.logprobs[0]
    assert found is not None and found.token == picked.tokens[0]
    expected = logits.double().log_softmax(0)
    close = pytest.approx(expected[found.token].item(), rel=1e-12, abs=1e-12)
    assert found.logprob == close
    order = sorted(range(len(logits)), key=lambda token: (-logits[token].item(), token))[:count]
    assert [token for token, _ in found.top] == order
    assert [value for _, value in found.top] == pytest.approx(expected[order].tolist(), rel=1e-12, abs=1e-12)


# ---- what cannot be chosen from


@pytest.mark.parametrize("bad", [float("nan"), INF])
@pytest.mark.parametrize(
    "s", [Sampling(), Sampling(temperature=1.0, top_p=0.5), Sampling(repetition_penalty=2.0)]
)
def test_rows_that_are_no_numbers_are_named(bad: float, s: Sampling) -> None:
    logits = torch.randn(4, 9)
    logits[1, 3] = bad
    logits[3, 8] = bad
    with pytest.raises(LogitsError, match=r"row 1: their largest is (nan|inf); row 3") as caught:
        pick(logits, [Picker(s, [0], i) for i in range(4)])
    assert list(caught.value.rows) == [1, 3]


def test_rows_of_which_nothing_is_left_are_named() -> None:
    logits = torch.randn(2, 9)
    logits[0] = -INF
    with pytest.raises(LogitsError, match="row 0: their largest is -inf"):
        pick(logits, [Picker(Sampling(), [], i) for i in range(2)])
    with pytest.raises(LogitsError, match="row 0: their largest is inf after masks and penalties"):
        pick(torch.ones(1, 3), [Picker(Sampling(repetition_penalty=1e-45), [0], 0)])
    with pytest.raises(LogitsError, match="row 1: it has no entries"):
        pick(torch.ones(2, 0), [Picker(Sampling(), [], i) for i in range(2)])
    with pytest.raises(ValueError, match="expected logits of 1 rows"):
        pick(torch.ones(2, 3), [Picker(Sampling(), [], 0)])
    assert pick(torch.ones(0, 3), []).tokens == []


# ---- large vocabularies


@pytest.mark.parametrize("scale", [0.0, 1e-3, 3.0, 30.0])
@pytest.mark.parametrize("top_p", [0.3, 0.95, 0.99999])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 100.0])
def test_top_p_of_a_large_vocabulary(scale: float, top_p: float, temperature: float) -> None:
    logits = torch.randn(49_152, generator=torch.Generator().manual_seed(3)) * scale
    s = Sampling(temperature=temperature, top_p=top_p)
    mine = found(logits, s) > 0
    p = (logits.double() / temperature).softmax(0)
    order = torch.sort(p, descending=True, stable=True).indices
    before = p[order].cumsum(0) - p[order]
    expected = torch.zeros(len(p), dtype=torch.bool)
    expected[order] = before < top_p
    edge = (before - top_p).abs() < 1e-12  # rounding decides
    expected[order[edge]] = mine[order[edge]]
    assert torch.equal(mine, expected)
