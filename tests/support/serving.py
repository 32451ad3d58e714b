"""An engine that a test steps by hand, and that notes the logits of every token it chooses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvcompile.runtime.module import CachedModel
from kvcompile.serve import Sampling
from kvcompile.serve.engine import Engine
from kvcompile.serve.live import LiveText
from kvcompile.serve.request import Handle, Result
from tests.support.serving_pages import check

Placed = tuple[str, int, int]  # a request, which of its texts, which of its new tokens


class Stepped(Engine):
    """Runs in no thread: `turn` takes a step."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.logits: dict[Placed, Tensor] = {}
        super().__init__(*args, **kwargs)

    def _start(self) -> None:
        """Nothing runs until it is told to."""

    def _choose(self, lives: Sequence[LiveText], logits: Tensor) -> None:
        for live, row in zip(lives, logits, strict=True):
            self.logits[live.request.handle.id, live.index, len(live.tokens)] = row.clone()
        super()._choose(lives, logits)

    def turn(self) -> None:
        while self._scheduler.texts and not self._has_work():  # files are being read
            time.sleep(0.001)
        self._turn()
        check(self._scheduler)

    def finish(self, handles: Sequence[Handle], most: int = 2000) -> list[Result]:
        """Step until all have ended."""
        for _ in range(most):
            if all(handle.done for handle in handles):
                return [handle.result(0) for handle in handles]
            self.turn()
        raise AssertionError(f"not done after {most} steps")

    def all(self, prompts: Sequence[Sequence[int]], sampling: Sampling | None = None) -> list[Result]:
        return self.finish([self.submit(prompt, sampling) for prompt in prompts])


def alone(module: CachedModel, text: Sequence[int], prompt: int, chunk: int, whole: bool) -> Tensor:
    """The module's logits [new tokens, V] of a text that comes alone, in the pieces that an engine takes of it."""
    ids = torch.tensor([list(text)])
    module.reset()
    size = prompt if whole else chunk
    pieces = [ids[:, start : min(start + size, prompt)] for start in range(0, prompt, size)]
    pieces += [ids[:, i : i + 1] for i in range(prompt, ids.shape[1])]
    found = [_logits(module(piece))[0, -1] for piece in pieces]
    module.reset()
    return torch.stack(found[len(found) - (len(text) - prompt) - 1 :]).float()


def _logits(out: Any) -> Tensor:
    found = out if isinstance(out, Tensor) else out.logits
    assert isinstance(found, Tensor)
    return found
