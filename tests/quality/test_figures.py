"""Every figure against plain sums over plain `transformers`; needles stand where they should; what is shown."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcompile
from kvcompile.api import build
from kvcompile.errors import QualityError
from kvcompile.layouts import CacheLayout
from kvcompile.pipeline import Front, plan_for
from kvcompile.recipe import shipped_recipes
from kvcompile.report.quality import bench, haystack
from kvcompile.report.quality import needle as asking
from kvcompile.report.quality import perplexity as scoring
from kvcompile.report.quality import run as running
from kvcompile.report.quality.feed import feed
from kvcompile.report.quality.needle import answer, found_in
from kvcompile.report.quality.perplexity import compare
from kvcompile.report.quality.report import Memory, PerplexityScore, QualityReport, RecipeQuality
from kvcompile.report.quality.settings import Settings
from kvcompile.report.quality.text import tokens_of
from kvcompile.runtime.module import CachedModel
from kvcompile.runtime.parallel.options import Parallel
from tests.quality.models import HIDDEN, SCORED, SINKS, TEXT, WINDOW, byte_tokenizer
from tests.support.marks import cases


def logits_of(model: Any, ids: Tensor, shown: Tensor | None = None) -> Tensor:
    """float64 [S, V] of plain transformers; shown: bool [S, S], by query and key; None: causal."""
    size = len(ids)
    mask = None
    if shown is not None:
        mask = torch.full((1, 1, size, size), float("-inf")).masked_fill(shown, 0.0)
    with torch.no_grad():
        return model(ids[None], attention_mask=mask).logits[0].double()


def by_hand(full: Tensor, own: Tensor, ids: Tensor, first: int) -> tuple[float, float, float]:
    """Perplexity, KL and agreement of the tokens from `first` on, with a loop and Python's floats."""
    loss = kl = same = 0.0
    for target in range(first, len(ids)):
        p, q = full[target - 1].softmax(-1).tolist(), own[target - 1].softmax(-1).tolist()
        loss -= math.log(q[ids[target]])
        kl += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        same += p.index(max(p)) == q.index(max(q))
    count = len(ids) - first
    return math.exp(loss / count), kl / count, same / count


# ---- Perplexity


def test_figures_are_those_of_plain_transformers(model: Any, tokenizer: Any) -> None:
    ids = tokens_of(tokenizer, TEXT)[:120]
    report = kvcompile.quality(model, tokenizer, [WINDOW, SINKS], TEXT, **SCORED)
    query, key = torch.arange(120)[:, None], torch.arange(120)[None]
    near = (key <= query) & (key > query - 24)
    shown = {
        "baseline": key <= query,
        "window": near,
        "sinks": (key <= query) & ((key < 3) | (key > query - 21)),
    }
    full = logits_of(model, ids)
    assert [row.recipe for row in report.rows] == list(shown)
    for row in report.rows:
        score = row.perplexity
        assert score is not None and score.tokens == 80
        expected = by_hand(full, logits_of(model, ids, shown[row.recipe]), ids, 40)
        assert (score.perplexity, score.kl) == pytest.approx(expected[:2], rel=1e-4, abs=1e-9)
        assert score.agreement == expected[2]
        assert math.log(score.perplexity) == pytest.approx(score.nll)
    window = report.rows[1].perplexity
    assert window is not None and window.kl > 0.1 and window.agreement < 0.9  # the test can tell


def test_segments_make_up_the_whole(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "SEGMENT", 32)
    report = kvcompile.quality(model, tokenizer, [WINDOW], TEXT, **SCORED)
    for row in report.rows:
        score = row.perplexity
        assert score is not None
        assert [(s.start, s.tokens) for s in score.segments] == [(40, 32), (72, 32), (104, 16)]
        for mean in ("nll", "kl"):
            whole = sum(getattr(s, mean) * s.tokens for s in score.segments) / 80
            assert whole == pytest.approx(getattr(score, mean))


@pytest.mark.parametrize("recipe", ["kivi2", SINKS], ids=["kivi2", "sinks"])
def test_the_step_changes_nothing_that_is_invariant(model: Any, tokenizer: Any, recipe: object) -> None:
    scores = [
        kvcompile.quality(model, tokenizer, [recipe], TEXT, step=step, compile="none", **SCORED)
        .rows[1]
        .perplexity
        for step in ("auto", 1, 7)
    ]
    assert [score.step for score in scores if score] == [256, 1, 7]
    assert len({score.tokens for score in scores if score}) == 1
    first, *others = [score for score in scores if score]
    for other in others:
        assert (other.nll, other.kl) == pytest.approx((first.nll, first.kl), rel=1e-4)


def test_what_depends_on_steps_gets_single_tokens(
    model: Any, front: Front, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the prompt, and in an answer. Compiled, when so many steps come."""
    monkeypatch.setattr(
        CacheLayout, "chunk_invariant", property(lambda layout: layout.retention.kind != "window")
    )
    calls: dict[str, list[int]] = {}
    plain = CachedModel._call

    def call(self: Any, ids: Tensor, mask: Any, keep: Any) -> Any:
        calls.setdefault(self.plan.recipe, []).append(ids.shape[1])
        return plain(self, ids, mask, keep)

    monkeypatch.setattr(CachedModel, "_call", call)
    more = {
        **SCORED,
        "metrics": ("perplexity", "needle"),
        **{k: v for k, v in HIDDEN.items() if k != "metrics"},
    }
    report = kvcompile.quality(model, tokenizer, [WINDOW], TEXT, **more, compile="none")
    steps = [row.perplexity.step for row in report.rows if row.perplexity]
    assert steps == [256, 1]
    of_text = calls["window"][:80]
    assert of_text == [40, *[1] * 79] and calls["baseline"][:2] == [40, 79]
    assert all(size == 1 or size > 160 for size in calls["window"][80:])  # a whole prompt, then single tokens
    assert any(1 < size < 160 for size in calls["baseline"][2:])  # the words that an answer begins with
    jobs = running.plan_jobs(
        model,
        front,
        running.load_recipes([WINDOW]),
        tokens_of(tokenizer, TEXT),
        {},
        Settings(**SCORED),
        Parallel(),
    )
    assert [job.recipe.compile.mode for job in jobs] == ["none", "default"]
    with pytest.raises(QualityError, match="depends on how tokens come, so they must come one by one"):
        kvcompile.quality(model, tokenizer, [WINDOW], TEXT, step=2, **SCORED)


@pytest.mark.parametrize("keep", [None, 1, 5, 20])
def test_pieces_give_the_last_logits(model: Any, front: Front, keep: int | None) -> None:
    recipe = kvcompile.Recipe.load("baseline", max_tokens=64, compile={"mode": "none"}, verify="off")
    fast = build(model, front, recipe)
    ids = torch.arange(2, 22)
    expected = logits_of(model, ids)[-(keep or 20) :]
    for step in (1, 7, 20):
        fast.reset()
        got = feed(fast, ids[None], step, keep)
        assert got.shape == expected.shape
        assert torch.allclose(got.double(), expected, rtol=1e-3, atol=1e-3)


def test_what_depends_on_how_tokens_come(front: Front) -> None:
    by_score = {"h2o", "h2o_int8", "sinks_h2o_fp8", "snapkv", "long_context"}
    for name in set(shipped_recipes()) - {"auto"}:
        plan = plan_for(front, kvcompile.Recipe.load(name))
        assert plan.chunk_invariant == (name not in by_score), name


def test_a_token_that_cannot_come_has_no_part_in_kl() -> None:
    full = torch.tensor([[0.0, 1.0, float("-inf")]])
    nll, kl, same = compare(torch.tensor([[1.0, 0.0, 0.0]]), full, torch.tensor([1]))
    p, q = torch.tensor([0.0, 1.0]).softmax(0).tolist(), torch.tensor([1.0, 0.0, 0.0]).softmax(0).tolist()
    assert float(nll) == pytest.approx(-math.log(q[1]))
    assert float(kl) == pytest.approx(sum(a * math.log(a / b) for a, b in zip(p, q[:2], strict=True)))
    assert float(same) == 0


QUICK = ("chat", "kivi2", "streaming_int8")


@pytest.mark.parametrize(
    "recipe",
    # "auto" is one of the others.
    cases(sorted(set(shipped_recipes()) - {"auto"}), QUICK),
)
def test_memory_is_what_estimate_says(model: Any, tokenizer: Any, recipe: str) -> None:
    report = kvcompile.quality(
        model, tokenizer, [recipe], TEXT, metrics=("perplexity",), prompt=100, tokens=156
    )
    row = report.rows[-1]
    cost = kvcompile.estimate(model, recipe, tokens=256, max_tokens=256)
    assert row.memory == Memory(256, cost.bytes, cost.bytes)
    assert row.bytes_per_token == cost.bytes_per_token


def test_a_difference_from_the_estimate_is_said(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "memory_of", lambda fast: Memory(120, 1000, 900))
    report = kvcompile.quality(model, tokenizer, [], TEXT, **SCORED)
    assert "baseline: 1,000 bytes in the buffers, and 900 by estimate" in report.notes
    assert "900 by estimate" in str(report)


# ---- Needles


def needles_of(tokenizer: Any, ask: str = "after", seed: int = 0, **more: Any) -> tuple[haystack.Needle, ...]:
    settings = Settings(depths=(0, 0.25, 0.5, 1), needles=2, seed=seed, **more)
    return haystack.needles(tokenizer, tokens_of(tokenizer, TEXT), 400, ask, settings)


def test_needles_stand_where_they_should(tokenizer: Any) -> None:
    for needle in needles_of(tokenizer):
        prompt = tokenizer.decode(needle.prompt)
        lead = tokenizer.decode(needle.lead)
        fact = f"{lead} {needle.number}."
        assert prompt.startswith("<user>") and prompt.endswith("</user><model>")
        text, _, question = prompt.removeprefix("<user>").rpartition("\n\n")
        city = lead.split()[5]
        assert question == f"What is the secret number of the {city} archive?</user><model>"
        assert text.count(fact) == prompt.count(needle.number) == 1
        assert 380 <= len(tokenizer(text, add_special_tokens=False)["input_ids"]) <= 400
        before, _, after = text.partition(fact)
        assert len(before) / (len(before) + len(after)) == pytest.approx(needle.depth, abs=0.1)
        assert needle.depth in (0, 1) or before.endswith(".\n\n")  # at the end of a sentence
        assert needle.behind == len(prompt) - prompt.index(fact) - len(fact)  # a byte is a token


def test_both_orders_have_the_same_haystacks(tokenizer: Any) -> None:
    for after, before in zip(needles_of(tokenizer), needles_of(tokenizer, "before"), strict=True):
        first, second = (tokenizer.decode(needle.prompt) for needle in (after, before))
        assert after.number == before.number and after.lead == before.lead
        question = first[first.rindex("\n\n") :].removesuffix("</user><model>").strip()
        assert second.startswith(f"<user>{question} The answer is somewhere in this text:\n\n")
        text = first.removeprefix("<user>").partition(f"\n\n{question}")[0]
        assert second.endswith(f"{text}</user><model>")


def test_a_seed_is_a_set_of_needles(tokenizer: Any) -> None:
    first, again, other = needles_of(tokenizer), needles_of(tokenizer), needles_of(tokenizer, seed=1)
    assert first == again and haystack.digest(first) == haystack.digest(again) != haystack.digest(other)
    assert len({needle.number for needle in (*first, *other)}) == 16
    assert {len(needle.number) for needle in first} == {5}


def test_without_a_chat_template(model: Any) -> None:
    plain = byte_tokenizer(chat=False)
    (needle, *_) = needles_of(plain)
    assert needle.prompt[0] == plain.bos_token_id and needle.lead[0] != plain.bos_token_id
    assert plain.decode(needle.prompt).endswith(" archive?\n\n")
    report = kvcompile.quality(model, plain, [], TEXT, **HIDDEN)
    assert "the tokenizer has no chat template: questions are put as plain text" in report.notes


def test_answers_are_the_models_own(model: Any, tokenizer: Any, front: Front) -> None:
    """Greedy, word for word, as plain transformers goes on behind the same tokens."""
    recipe = kvcompile.Recipe.load("baseline", max_tokens=600, compile={"mode": "none"}, verify="off")
    fast = build(model, front, recipe)
    for needle in needles_of(tokenizer)[:3]:
        ids = torch.tensor([[*needle.prompt, *needle.lead]])
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=needle.room,
                do_sample=False,
                pad_token_id=1,
            )[0, ids.shape[1] :]
        expected = tokenizer.decode(out, skip_special_tokens=True)
        got = answer(fast, tokenizer, needle)
        assert got and expected.startswith(got)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (" 48213.", True),
        ("48213", True),
        ("is 48213 and not 5", True),
        (" 148213", False),
        (" 482130", False),
        (" 4821", False),
        ("12, or 48213", False),
        ("", False),
    ],
)
def test_exact_digits(text: str, found: bool) -> None:
    assert found_in(text, "48213") is found


def test_a_needle_counts_where_its_number_is_said(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The share by depth and in all, with a model that knows the numbers at the end of the text only."""
    monkeypatch.setattr(
        asking,
        "answer",
        lambda fast, tokenizer, needle: f" {needle.number}." if needle.depth == 1 else " 1.",
    )
    (row,) = kvcompile.quality(model, tokenizer, [], TEXT, **HIDDEN).rows
    assert [(score.tokens, score.ask) for score in row.needles] == [(160, "after"), (160, "before")]
    for score in row.needles:
        assert score.by_depth() == {0: 0.0, 0.5: 0.0, 1: 1.0} and score.accuracy == pytest.approx(1 / 3)
        assert [a.found for a in score.answers] == [False, False, True]


# ---- What is shown


def row(recipe: str, size: int, perplexity: float) -> RecipeQuality:
    memory = Memory(10, size, size)
    score = PerplexityScore(5, perplexity, math.log(perplexity), 0.1, 0.5, 1, memory, (), 0.0)
    return RecipeQuality(recipe, "layout", 1, score, ())


def test_frontier() -> None:
    """Nobody is smaller and better: of equals both, of the same size the better one."""
    rows = (row("a", 100, 2.0), row("b", 50, 2.5), row("c", 50, 2.4), row("d", 60, 2.4), row("e", 10, 9.0))
    report = QualityReport("m", "float32", {}, {}, {}, (*rows, row("f", 10, 9.0)), ())
    assert [r.recipe for r in report.frontier()] == ["e", "f", "c", "a"]


@pytest.fixture(scope="module")
def saved(model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[QualityReport, Path]:
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("quality")
    more = {**SCORED, **HIDDEN, "metrics": ("perplexity", "needle")}
    return kvcompile.quality(
        model, tokenizer, [WINDOW, "int8"], TEXT, out=folder, name="tiny", **more
    ), folder


def test_files(saved: tuple[QualityReport, Path]) -> None:
    report, folder = saved
    data = json.loads((folder / "quality.json").read_text())
    assert QualityReport.from_dict(data) == QualityReport.from_dict(report.to_dict()) == report
    assert data["frontier"] == [r.recipe for r in report.frontier()]
    assert data["rows"][0]["needles"][0]["accuracy"] == report.rows[0].needles[0].accuracy
    page = (folder / "quality.md").read_text()
    assert page.startswith("# Quality of caches: tiny, float32\n") and "](quality.png)" in page
    rows = [line for line in page.splitlines() if line.startswith("| baseline")]
    assert len(rows) == 3 and rows[0].count("|") == 10
    picture = (folder / "quality.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and 10_000 < len(picture) < 200_000
    assert "matplotlib.pyplot" not in sys.modules  # which would choose a display for the whole process


def test_the_table_in_a_terminal(saved: tuple[QualityReport, Path]) -> None:
    report, _ = saved
    text = str(report)
    assert max(map(len, text.splitlines())) <= 100
    for part in (
        "tiny, float32",
        "× full",
        "same top",
        "160 before",
        "needles found in 160 tokens",
        "KL(full",
    ):
        assert part in text
    assert report.rows[1].perplexity is not None
    assert f"{report.rows[1].perplexity.perplexity:.2f}" in text


def test_the_page_has_the_figures_of_the_benchmark() -> None:
    """docs/quality.md and benchmarks/results/quality.json are of one run."""
    root = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location("benchmark_quality", root / "benchmarks/quality.py")
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    result = json.loads((root / "benchmarks/results/quality.json").read_text("utf-8"))
    page = (root / "docs/quality.md").read_text("utf-8")
    made = benchmark.page(result)
    assert set(made) == set(benchmark.PARTS) == set(result)
    assert benchmark.fill(page, made) == page
    assert all(text in page for text in made.values())
    measured = {row["recipe"] for row in result["table"]["rows"]}
    assert measured >= set(benchmark.VARIANTS)
    assert {row["recipe"] for row in result["scores"]["rows"]} == {"baseline", *benchmark.SCORES}
    for part in result.values():
        assert all(
            row["perplexity"] is None or row["perplexity"]["memory"]["measured"] > 0 for row in part["rows"]
        )


def test_one_value_stands_for_itself(model: Any, tokenizer: Any) -> None:
    one = {"metrics": "needle", "needle_tokens": 160, "depths": 1, "needles": 1, "ask": "after"}
    (row,) = kvcompile.quality(model, tokenizer, [], TEXT, **one).rows
    (score,) = row.needles
    assert (score.tokens, score.ask, len(score.answers)) == (160, "after", 1)


def test_what_is_no_report_is_refused(saved: tuple[QualityReport, Path]) -> None:
    data = json.loads((saved[1] / "quality.json").read_text())
    with pytest.raises(ValueError, match="expected the fields of QualityReport"):
        QualityReport.from_dict({**data, "more": 1})
    data["rows"][0]["perplexity"]["step"] = "one"
    with pytest.raises(ValueError, match="got 'one'"):
        QualityReport.from_dict(data)
