"""Models that give the logits of the last token alone, as many hand-written decoders do: taken, exact, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kvcompile
from kvcompile.errors import KVCompileError
from tests.support.marks import cases
from tests.support.models import NanoGPT, TinyLlama, make

EAGER: dict[str, Any] = {"compile": {"mode": "none"}, "max_tokens": 64, "max_batch": 2}
Head = Callable[["Decoder", Tensor], Tensor]


class Decoder(NanoGPT):
    """As nanoGPT's forward: without targets, the head sees the last token alone."""

    def __init__(self, head: Head):
        super().__init__()
        self.head = head
        self.norm = nn.LayerNorm(self.wte.weight.shape[0])
        self.other = nn.Linear(self.wte.weight.shape[1], self.wte.weight.shape[0])

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        if targets is not None:
            logits = self.lm_head(self.ln_f(x))
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return self.head(self, x), None


def decoder(head: Head) -> Decoder:
    torch.manual_seed(0)
    return Decoder(head).eval()


HEADS: dict[str, Head] = {
    "[:, [-1], :]": lambda m, x: m.lm_head(m.ln_f(x)[:, [-1], :]),
    "[:, -1:]": lambda m, x: m.lm_head(m.ln_f(x)[:, -1:]),
    "[:, -1]": lambda m, x: m.lm_head(m.ln_f(x[:, -1])),
    "of logits": lambda m, x: m.lm_head(m.ln_f(x))[:, -1],
    "T - 1": lambda m, x: m.lm_head(m.ln_f(x[:, x.shape[1] - 1])),
    "squeezed": lambda m, x: m.lm_head(m.ln_f(x[:, -1:, :].squeeze(1))),
    "two of them": lambda m, x: m.lm_head(m.ln_f(x)[:, -1]) + m.other(x[:, -1, :]),
    "of all, less the first layer's": lambda m, x: torch.log_softmax(
        m.lm_head(x[:, [-1]]).float() / 0.7, dim=-1
    ),
    "softcap": lambda m, x: 5 * torch.tanh(m.norm(m.lm_head(x[:, -1])) / 5),
}


def ids(count: int, rows: int = 2) -> Tensor:
    return torch.randint(0, 61, (rows, count), generator=torch.Generator().manual_seed(count))


def exact(model: nn.Module, fast: Any) -> None:
    """In a prompt, a chunk and single tokens, each call gives what the model gives for the text so far."""
    text = ids(40)
    fast.reset()
    end = 0
    for count in (17, 1, 5, 1, 1, 15):
        end += count
        found = fast(text[:, end - count : end])[0]
        with torch.no_grad():
            wanted = model(text[:, :end])[0]
        assert found.shape == wanted.shape
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.few(3)
@pytest.mark.parametrize("verify", ["off", "quick"])
@pytest.mark.parametrize("head", HEADS)
def test_the_last_token_alone(head: str, verify: str) -> None:
    model = decoder(HEADS[head])
    fast = kvcompile.optimize(model, **EAGER, verify=verify)
    assert any("logits of the last token only" in reason for reason in fast.analysis.reasons)
    exact(model, fast)
    text = ids(9, 1)
    with torch.no_grad():
        for _ in range(6):
            logits = model(text)[0]
            text = torch.cat([text, logits.reshape(1, -1).argmax(-1)[:, None]], 1)
    assert torch.equal(fast.generate(ids(9, 1), max_new_tokens=6), text)


@pytest.mark.parametrize("recipe", ["int8", "h2o"])
def test_recipes_and_thorough_checks(recipe: str) -> None:
    model = decoder(HEADS["[:, -1]"])
    fast = kvcompile.optimize(model, recipe, **EAGER, verify="thorough")
    whole = kvcompile.optimize(decoder(lambda m, x: m.lm_head(m.ln_f(x))), recipe, **EAGER, verify="off")
    for part in ids(30).split((20, 1, 9), 1):
        assert torch.allclose(fast(part)[0], whole(part)[0][:, -1], atol=1e-5)


@pytest.mark.parametrize("compiled", cases((False, True), ()))
def test_saved_and_exported(compiled: bool, tmp_path: Path) -> None:
    model = decoder(HEADS["[:, -1]"])
    fast = kvcompile.optimize(model, **(EAGER | ({"compile": {}} if compiled else {})))
    exact(model, fast)
    fast.save(tmp_path / "m")
    back = kvcompile.load(tmp_path / "m")
    exact(model, back)
    assert not back.executor.compile_seconds
    kvcompile.export(model, tmp_path / "a", "onnx", max_tokens=64)
    session = kvcompile.load(tmp_path / "a")
    assert torch.equal(
        torch.as_tensor(session.generate(ids(9, 1), max_new_tokens=6)),
        fast.generate(ids(9, 1), max_new_tokens=6),
    )


REFUSED: dict[str, tuple[Head, str]] = {
    "the mean": (lambda m, x: m.lm_head(x.mean(1)), "no logits|mix"),
    "the mean besides": (lambda m, x: m.lm_head(x[:, -1] + x.mean(1)), "mean|mixes|made for one token"),
    "the second to last besides": (lambda m, x: m.lm_head(x[:, -1] - x[:, -2]), "token -2|mixes|made for"),
    "added to all": (lambda m, x: m.lm_head((x + x[:, -1:])[:, -1]), "made for one token|mixes"),
    "asked of all": (
        lambda m, x: m.lm_head(((x @ x[:, -1:].mT).softmax(1) * x).sum(1)),
        "no logits|made for one token|mixes",
    ),
    "the length": (lambda m, x: m.lm_head(x[:, -1] * x.shape[1]), "length"),
    "another way besides": (
        lambda m, x: m.lm_head(x[:, -1:] + m.ln_f(x).transpose(1, 2)[..., -1:].transpose(1, 2)),
        "every token meets the last one",
    ),
    "over rows": (lambda m, x: m.lm_head(x[:, -1]).softmax(0), "batch|row|mix"),
    "by its place in the batch": (
        lambda m, x: m.lm_head(x[:, -1]) + torch.arange(x.shape[0])[:, None],
        "batch|row|made for",
    ),
    "sorted": (lambda m, x: m.lm_head(x[:, -1]).sort(0).values, "batch|row|mix|sort"),
    "the last layer's query": (
        lambda m, x: m.lm_head(
            F.scaled_dot_product_attention(*(t[:, None] for t in (x[:, -1:], x, x)))[:, 0]
        ),
        ".",
    ),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("verify", ["off", "quick"])
@pytest.mark.parametrize("head", REFUSED)
def test_what_is_more_than_the_last_token_is_refused(head: str, verify: str) -> None:
    made, reason = REFUSED[head]
    with pytest.raises(KVCompileError, match=reason):
        kvcompile.optimize(decoder(made), **EAGER, verify=verify)


def test_a_broken_choice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The original is asked for the text up to each of several tokens."""
    model = decoder(HEADS["[:, -1]"])
    from kvcompile.verify import runs

    asked: list[int] = []
    inner = runs._logits

    def noted(of: Any, front: Any, text: Tensor, more: Any) -> Tensor:
        asked.append(text.shape[1])
        return inner(of, front, text, more)

    monkeypatch.setattr(runs, "_logits", noted)
    kvcompile.optimize(model, **EAGER)
    assert len(set(asked)) > 8 and len(asked) < 120


def test_all_logits_stay_all_logits() -> None:
    fast = kvcompile.optimize(make(TinyLlama), **EAGER)
    assert fast(ids(7)).shape[:2] == (2, 7) and fast.program.last is False
