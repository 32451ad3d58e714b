"""Verified texts: ids of the whole vocabulary, and those that the model treats apart, wherever it says so.

A rewrite that forgets what an id means is caught by `quick`, also where ids do not go straight into a table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from transformers import AutoModelForCausalLM, LlamaConfig

from kvcompile import pipeline
from kvcompile.errors import VerificationError
from kvcompile.pipeline import Front, plan_for, understand
from kvcompile.recipe import Recipe
from kvcompile.verify import verify
from kvcompile.verify.ids import Vocabulary, bounds, vocabulary
from kvcompile.verify.runs import probe
from tests.support.models import NanoGPT, TinyConfig, make

VOCAB = 3000


class Words(nn.Module):
    """A small decoder with something before its table, and something that some ids add to their vectors."""

    table: Tensor
    apart: Tensor

    def __init__(
        self, before: Callable[[Words, Tensor], Tensor], mark: Callable[[Words, Tensor], Tensor] | None
    ):
        super().__init__()
        sizes = TinyConfig(num_layers=1, vocab_size=VOCAB, max_seq_len=512)
        self.inner = make(NanoGPT, sizes)
        self.before, self.mark = before, mark
        self.extra = nn.Parameter(torch.randn(48))
        self.register_buffer("table", (torch.arange(9000) * 7 + 5) % 101)
        self.register_buffer("apart", torch.tensor([57, 2500]))

    def forward(self, input_ids: Tensor) -> Tensor:
        inner, ids = self.inner, self.before(self, input_ids)
        x = inner.wte(ids) + inner.wpe(torch.arange(ids.shape[1]))
        if self.mark is not None:
            x = x + self.mark(self, input_ids)[..., None] * self.extra
        for block in inner.h:
            x = block(x)
        logits = inner.lm_head(inner.ln_f(x))
        assert isinstance(logits, Tensor)
        return logits


def _as_it_is(model: Words, ids: Tensor) -> Tensor:
    return ids


BEFORE: dict[str, tuple[Callable[[Words, Tensor], Tensor], int]] = {
    "straight": (_as_it_is, VOCAB),
    "clamped": (lambda model, ids: ids.clamp(0, VOCAB - 1), 4 * VOCAB),
    "wrapped": (lambda model, ids: ids % VOCAB, 4 * VOCAB),
    "hashed": (lambda model, ids: (ids * 31 + 7) % 2111, 4 * VOCAB),
    "cast": (lambda model, ids: ids.to(torch.int32), VOCAB),
    "looked up": (lambda model, ids: model.table[ids], 9000),
    "shifted": (lambda model, ids: ids + 1, VOCAB - 1),
    "in another shape": (lambda model, ids: ids.view(-1, ids.shape[1]), VOCAB),
}
MARKS: dict[str, tuple[Callable[[Words, Tensor], Tensor], tuple[int, ...]]] = {
    "equal": (lambda model, ids: ids == 57, (57,)),
    "not equal": (lambda model, ids: ids != 57, (57,)),
    "a range": (lambda model, ids: (ids >= 2990) & (ids < 2993), (2989, 2990, 2992, 2993)),
    "a float": (lambda model, ids: ids.float() > 2998.5, (2998, 2999)),
    "one of several": (lambda model, ids: (ids[..., None] == model.apart).any(-1), (57, 2500)),
    "of a hash": (lambda model, ids: ids * 31 % 2111 == 5, ()),
    "of a table": (lambda model, ids: model.table[ids] == 100, ()),
    "where": (lambda model, ids: torch.where(ids == 57, 2, 1), (57,)),
    "of the token before": (lambda model, ids: nn.functional.pad(ids, (1, 0))[:, :-1] == 57, (57,)),
}


@lru_cache
def subject(before: str, mark: str | None = None) -> tuple[Words, Front]:
    torch.manual_seed(0)
    model = Words(BEFORE[before][0], None if mark is None else MARKS[mark][0]).eval()
    return model, understand(model)


@pytest.mark.parametrize("before", BEFORE)
def test_all_ids_that_the_model_takes(before: str) -> None:
    model, front = subject(before)
    words = vocabulary(front, model)
    assert words.taken.tolist() == list(range(BEFORE[before][1]))
    with torch.no_grad():
        model(words.taken[None, -400:])
        if before in ("straight", "cast", "looked up", "shifted"):
            with pytest.raises(IndexError):
                model(words.taken[None, -1:] + 1)


@pytest.mark.parametrize("before", BEFORE)
def test_ids_beyond_a_table_are_told_where_they_go_into_it_as_they_are(before: str) -> None:
    as_they_are = dict.fromkeys(("straight", "cast", "in another shape"), (0, VOCAB - 1))
    indexed = {"looked up": (-9000, 8999)}  # as the original takes them: an index may count from the end
    assert bounds(subject(before)[1]) == (as_they_are | indexed).get(before)


@pytest.mark.parametrize("mark", [mark for mark in MARKS if mark != "of the token before"])
def test_ids_on_both_sides_of_a_comparison(mark: str) -> None:
    model, front = subject("straight", mark)
    special, (marks, named) = vocabulary(front).special, MARKS[mark]
    assert set(named) <= set(special)
    assert len(marks(model, torch.tensor([special])).unique()) == 2


def test_special_ids_of_a_configuration() -> None:
    sizes = {"hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 1, "vocab_size": 1000}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, pad_token_id=700, eos_token_id=[701, 702])
    config.image_token_id, config.boa_token_id = 703, 5000
    config.audio_config = {"sep_token_id": 704, "token_idle": 705}
    model = AutoModelForCausalLM.from_config(config)
    words = vocabulary(understand(model), model)
    assert {700, 701, 702, 703, 704} <= set(words.special) and not {705, 5000} & set(words.special)
    assert len(words.taken) == 1000


def test_texts_have_special_ids_in_both_rows_and_stretches_that_come_again() -> None:
    words = Vocabulary(torch.arange(30_000), (57, 2500, 9))
    ids = words.text(2, 400)
    for row in ids.tolist():
        assert all(row.count(special) >= 2 for special in words.special)
        assert any(a == b for a, b in pairwise(row))
        pairs = list(pairwise(row))
        assert len(set(pairs)) < len(pairs) - 10
    assert not torch.equal(*ids) and torch.equal(ids, words.text(2, 400))
    assert len(ids.unique()) > 600 and int(ids.max()) > 29_000


def test_short_texts_are_not_all_special() -> None:
    ids = Vocabulary(torch.arange(30_000), tuple(range(64))).text(2, 18)
    assert [int((row < 64).sum()) for row in ids] == [4, 4]
    assert not set(ids[0].tolist()) & set(ids[1].tolist())


def _forgets(names: tuple[str, ...], number: float) -> Callable[[pytest.MonkeyPatch], None]:
    """In the rewritten graph, these comparisons are with another number."""

    def change(module: GraphModule) -> None:
        found = [n for n in module.graph.nodes if str(n.target).split(".")[1:2] in [[name] for name in names]]
        assert found
        for node in found:
            node.args = (*node.args[:-1], number)
        module.recompile()

    def apply(patch: pytest.MonkeyPatch) -> None:
        inner = pipeline.insert_cache

        def broken(*args: Any) -> Any:
            rewritten = inner(*args)
            change(rewritten.graph_module)
            return rewritten

        patch.setattr(pipeline, "insert_cache", broken)

    return apply


BROKEN: dict[str, tuple[str, str | None, Callable[[pytest.MonkeyPatch], None]]] = {
    "an id is forgotten": ("straight", "equal", _forgets(("eq",), -1)),
    "an id is forgotten, clamped": ("clamped", "equal", _forgets(("eq",), -1)),
    "an id is forgotten, wrapped": ("wrapped", "equal", _forgets(("eq",), -1)),
    "an id is forgotten, looked up": ("looked up", "equal", _forgets(("eq",), -1)),
    "a hash is forgotten": ("straight", "of a hash", _forgets(("eq",), -1)),
    "the end of a range": ("straight", "a range", _forgets(("lt",), 2992)),
    "a float": ("straight", "a float", _forgets(("gt",), 2999.5)),
    "ids are clamped lower": ("clamped", None, _forgets(("clamp",), 2)),
    "ids are wrapped lower": ("wrapped", None, _forgets(("remainder",), VOCAB // 2)),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_for_some_ids(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    before, mark, breaks = BROKEN[what]
    model, front = subject(before, mark)
    plan = plan_for(front, Recipe.load("baseline", max_tokens=480))
    verify(model, front, plan, "quick")
    breaks(monkeypatch)
    with pytest.raises(VerificationError):
        verify(model, front, plan, "quick")


def test_probes_of_a_program_draw_from_all_ids() -> None:
    """Where there is no model at hand, as for an artifact, the graph says which ids there are."""
    _, front = subject("wrapped", "equal")
    ids, _ = probe(front, 400)
    assert int(ids.max()) > 3 * VOCAB and int((ids == 57).sum()) >= 4
