"""Cause 19: Python that asks whether it is traced goes another way then; the graph is of the way that calls go."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_exporting

import kvcompile
from kvcompile.errors import CaptureError
from kvcompile.passes.capture.as_eager import _codes, _names
from tests.support.models import NanoGPT, make

RARE = 59
IDS = torch.randint(0, 50, (1, 40), generator=torch.Generator().manual_seed(0))


class Strict:
    """What stands in a module's names and answers none that it does not know (as pytest.mark does, when strict)."""

    def __getattr__(self, name: str) -> Any:
        raise SystemError(f"{name} is not known here")


strict = Strict()


class Asking(nn.Module):
    """Doubles the logits of texts with a rare token, unless it is traced."""

    def __init__(self, asks: Callable[[], bool], by_value: bool):
        super().__init__()
        self.inner, self.asks, self.by_value = make(NanoGPT), asks, by_value

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.inner(input_ids)
        if self.asks():
            return logits
        if self.by_value:
            return 2 * logits if bool((input_ids == RARE).any()) else logits
        return torch.where((input_ids == RARE)[..., None], 2 * logits, logits)


def named() -> bool:
    return is_exporting()


def by_attribute() -> bool:
    return torch.compiler.is_exporting()


def compiling() -> bool:
    return is_compiling()


def of_transformers() -> bool:
    from transformers.utils import is_torchdynamo_compiling

    found: bool = is_torchdynamo_compiling()
    return found


ASKS = [named, by_attribute, compiling, of_transformers]
OPTIONS: dict[str, Any] = {"verify": "off", "max_tokens": 64, "compile": {"mode": "none"}}


@pytest.mark.few(2)
@pytest.mark.parametrize("asks", ASKS)
def test_what_is_computed_without_tracing_is_what_is_captured(asks: Callable[[], bool]) -> None:
    model = Asking(asks, by_value=False).eval()
    fast = kvcompile.optimize(model, **OPTIONS)
    ids = IDS.clone()
    ids[0, 17] = RARE
    with torch.no_grad():
        torch.testing.assert_close(fast(ids), model(ids), atol=1e-5, rtol=1e-4)


@pytest.mark.few(2)
@pytest.mark.parametrize("wrap", [staticmethod, classmethod, property, cached_property, lru_cache, partial])
def test_questions_are_found_in_whatever_wraps_them(wrap: Callable[..., Any]) -> None:
    codes = list(_codes(type("Written", (), {"asks": wrap(lambda *_: torch.compiler.is_exporting())})))
    assert len(codes) == 1 and _names(codes[0])


@pytest.mark.few(2)
@pytest.mark.parametrize("asks", ASKS)
def test_what_cannot_be_traced_without_the_question_is_refused(asks: Callable[[], bool]) -> None:
    with pytest.raises(CaptureError, match=r"asks whether it is traced.*test_19_asking\.py"):
        kvcompile.optimize(Asking(asks, by_value=True).eval(), **OPTIONS)
