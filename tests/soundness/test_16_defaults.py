"""Cause 16: what a forward does where it is given no positions was compared with 0, 1, 2, .. at seven tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvcompile
from kvcompile.errors import DetectionError
from kvcompile.passes.capture.capture import capture
from tests.coverage.configs import tiny_model
from tests.support.marks import cases
from tests.support.models import NanoBlock, TinyConfig

SIZES = TinyConfig()
WIDTH = SIZES.num_heads * SIZES.head_dim
VOCAB, RARE, TOKENS = 5000, 4999, 320


class Positions(nn.Module):
    """A decoder with learned positions, which it counts itself where it is given none."""

    def __init__(self, own: Any, given: Any = lambda positions: positions):
        super().__init__()
        self.own, self.given = own, given
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(1024, WIDTH)
        self.block, self.head = NanoBlock(SIZES, eager=False), nn.Linear(WIDTH, 61)
        self.register_buffer("numbers", torch.arange(1024)[None])
        self.register_buffer("late", torch.arange(1024).clamp(max=200)[None])

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        positions = self.own(self, input_ids) if position_ids is None else self.given(position_ids)
        return self.head(self.block(self.wte(input_ids) + self.wpe(positions)))


def made(model: type[nn.Module] | Any, *args: Any) -> nn.Module:
    torch.manual_seed(0)
    return model(*args).eval()  # type: ignore[no-any-return]


def counted(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1])[None]


def after_separator(model: nn.Module, ids: Tensor) -> Tensor:
    """Positions that start again behind a rare id."""
    return counted(ids) - torch.where(ids == RARE, counted(ids), 0).cummax(1).values


# Positions of a model's own that are not 0, 1, 2, .. for ever.
OTHERS: dict[str, Any] = {
    "without padding": lambda m, ids: ((ids != RARE).long().cumsum(1) - 1).clamp(min=0),
    "a limit": lambda m, ids: counted(ids).clamp(max=200),
    "around": lambda m, ids: counted(ids) % 256,
    "rounded": lambda m, ids: counted(ids).bfloat16().long(),
    "scaled": lambda m, ids: (counted(ids) * 1.01).long(),
    "a table": lambda m, ids: m.late[:, : ids.shape[1]],
}
ZERO_ONE_TWO: dict[str, Any] = {
    "arange": lambda m, ids: counted(ids),
    "expanded": lambda m, ids: counted(ids).expand(ids.shape) + 0,
    "a table": lambda m, ids: m.numbers[:, : ids.shape[1]],
    "ones": lambda m, ids: (torch.ones(ids.shape).cumsum(1) * torch.ones(ids.shape) - 1).long(),
}


def text() -> Tensor:
    ids = torch.randint(0, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    ids[:, 100::90] = RARE
    return ids


def assert_equal(model: nn.Module, copy: nn.Module) -> None:
    """Whatever the users of `model` get from the ids alone, they get from its rewritten copy."""
    fast = kvcompile.optimize(copy, max_tokens=TOKENS, max_batch=2, compile={"mode": "none"}, verify="off")
    with torch.no_grad():
        wanted = model(text())
    found = torch.cat([fast(part) for part in text().split((70, 1, 1, TOKENS - 72), 1)], 1)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", OTHERS)
def test_positions_of_its_own(kind: str) -> None:
    own = OTHERS[kind]
    assert not capture(made(Positions, own)).inputs.position_ids
    assert_equal(made(Positions, own), made(Positions, own))


def test_positions_that_no_cache_holds() -> None:
    with pytest.raises(DetectionError, match="cummax"):
        kvcompile.optimize(made(Positions, after_separator), verify="off")


def test_positions_that_are_changed_where_they_are_given() -> None:
    around = made(Positions, ZERO_ONE_TWO["arange"], lambda positions: positions % 256)
    assert not capture(around).inputs.position_ids


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ZERO_ONE_TWO)
def test_positions_from_zero_are_an_input(kind: str) -> None:
    """So that padded sequences are taken."""
    assert capture(made(Positions, ZERO_ONE_TWO[kind])).inputs.position_ids


@pytest.mark.parametrize("name", cases(("llama", "gpt2", "opt", "gemma3n_text"), ("llama", "gpt2", "opt")))
def test_models_of_the_library(name: str) -> None:
    assert capture(tiny_model(name)).inputs.position_ids


class Kept(nn.Module):
    """Gives probabilities where only some are wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.block = nn.Embedding(VOCAB, WIDTH), NanoBlock(SIZES, eager=False)
        self.head = nn.Linear(WIDTH, 61)

    def forward(self, input_ids: Tensor, logits_to_keep: Tensor | None = None) -> Tensor:
        x = self.block(self.wte(input_ids))
        if logits_to_keep is None:
            return self.head(x)  # type: ignore[no-any-return]
        return self.head(x[:, logits_to_keep]).log_softmax(-1)  # type: ignore[no-any-return]


def test_logits_that_change_where_some_are_kept() -> None:
    assert not capture(made(Kept)).inputs.logits_to_keep
    assert_equal(made(Kept), made(Kept))
