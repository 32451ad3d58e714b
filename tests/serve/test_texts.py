"""Everything between logits and text together: random requests, side by side, on random logits.

Each text is checked against what its tokens alone say: which could be chosen, where it had to end, what it shows.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from kvcompile.serve.ends import Ends
from kvcompile.serve.pick import Picker, pick
from kvcompile.serve.sampling import Sampling, Structure
from kvcompile.serve.structure import matcher
from tests.serve.test_ends import cut, decode, text_after
from tests.serve.test_pick import probabilities
from tests.serve.tokenizers import tokenizer

pytest.importorskip("xgrammar")

NAME = "bytes"
REGEX = "([ab]|é)*c{0,3}"

requests = st.builds(
    Sampling,
    max_tokens=st.integers(1, 25),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 5.0]),
    top_k=st.sampled_from([0, 0, 1, 5, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.3, 0.9]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.2]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -1.0]),
    seed=st.one_of(st.none(), st.integers(0, 99)),
    stop=st.lists(st.sampled_from(["a", "ab", "é", "zz", "b a"]), max_size=2).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 258), max_size=2).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 0, 3]),
    n=st.integers(1, 3),
    structure=st.sampled_from([None, None, Structure(kind="regex", text=REGEX)]),
)


class Text:
    """One text, with all that is needed to judge it."""

    def __init__(self, s: Sampling, picker: Picker, ends: Ends, prompt: list[int]):
        self.s, self.picker, self.ends, self.prompt = s, picker, ends, prompt
        self.tokens: list[int] = []
        self.text = ""
        self.finish: str | None = None

    def take(self, token: int) -> None:
        self.tokens.append(token)
        self.picker.took(token)
        piece = self.ends.take(token)
        self.text, self.finish = self.text + piece.text, piece.finish


def could_come(text: Text, row: torch.Tensor, token: int, allowed: np.ndarray[Any, Any]) -> bool:
    """By transformers' processors and OpenAI's formula, after the mask of the text's grammar."""
    s = text.s
    scores = torch.where(torch.from_numpy(allowed), row, -torch.inf)
    seen = text.prompt + text.tokens
    if s.repetition_penalty != 1 and seen:
        scores = RepetitionPenaltyLogitsProcessor(s.repetition_penalty)(
            torch.tensor([seen]), scores[None].clone()
        )[0]
    counts = torch.bincount(torch.tensor(text.tokens, dtype=torch.long), minlength=len(row))
    scores = scores - ((counts > 0) * s.presence_penalty + counts * s.frequency_penalty)
    if s.greedy:
        return bool(scores[token] >= scores.max() - 1e-5)
    looser = s.model_copy(update={"top_p": min(1.0, s.top_p + 1e-6), "min_p": s.min_p * (1 - 1e-6)})
    return bool(probabilities(scores, looser)[token] > 0)


@given(st.lists(requests, min_size=1, max_size=4), st.integers(0, 2**31), st.data())
@settings(max_examples=60)
def test_random_requests_on_random_logits(samplings: list[Sampling], seed: int, data: st.DataObject) -> None:
    made = tokenizer(NAME)
    size, eos = len(made) + 3, frozenset({made.bos_token_id})
    generator = torch.Generator().manual_seed(seed)
    texts: list[Text] = []
    for s in samplings:
        prompt = data.draw(st.lists(st.integers(0, len(made) - 1), min_size=1, max_size=5))
        state = s.structure and matcher(s.structure, made, size, eos)
        first = Picker(s, prompt, 0, matcher=state)
        ends = Ends(s, eos, made, prompt, room=data.draw(st.sampled_from([None, 7])))
        texts += [
            Text(s, first.forked(i) if i else first, ends.forked() if i else ends, prompt) for i in range(s.n)
        ]
    rooms = {id(text): text.ends._left for text in texts}
    while going := [text for text in texts if text.finish is None]:
        logits = torch.randn(len(going), size, generator=generator) * 3
        for row, text in zip(logits, going, strict=True):
            if text.s.structure is None:
                row[len(made) :] -= 100.0  # ids that the tokenizer has not
        picked = pick(logits, [text.picker for text in going])
        for row, text, token, logprob in zip(logits, going, picked.tokens, picked.logprobs, strict=True):
            allowed = np.zeros(size, np.float32)
            if text.picker._matcher is not None:
                text.picker._matcher.mask(allowed)
            assert could_come(text, row, token, allowed == 0)
            assert (logprob is None) == (text.s.logprobs is None)
            text.take(token)
    for text in texts:
        judge(text, rooms[id(text)], eos)


def judge(text: Text, room: int, eos: frozenset[int]) -> None:
    s, tokens = text.s, text.tokens
    ends = {*s.stop_token_ids, *(eos if not s.ignore_eos or s.structure else ())}
    assert not ends & {*tokens[:-1]}
    shown = tokens[:-1] if tokens[-1] in ends else tokens
    whole = text_after(NAME, text.prompt, shown)
    stopped = cut(whole, s.stop)
    assert text.text == (whole if stopped is None else stopped)
    by_stop = tokens[-1] in ends or stopped is not None
    assert text.finish == ("stop" if by_stop else "length")
    assert len(tokens) <= room
    assert by_stop or len(tokens) == room
    if s.structure and tokens[-1] in eos:
        assert re.fullmatch(REGEX, decode(NAME, shown))
