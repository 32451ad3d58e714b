"""Expressions of masks, biases and scales: Python text over a few names, compiled once, with its source kept.

i [S, 1], j [S], h [H, 1, 1], d = i - j, n = S, ids [B, S], and c, the `Context`, for what needs weights or buffers.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from tests.fuzz.decoder import Fuzzed


_COMPILED: dict[str, Callable[..., Tensor]] = {}


def compiled(text: str) -> Callable[..., Tensor]:
    """The expression as a function; tracebacks and traced graphs show its text."""
    if text not in _COMPILED:
        source = f"lambda i, j, h, d, n, ids, c: {text}"
        name = f"expression_{len(_COMPILED)}.py"
        linecache.cache[name] = (len(source), None, [source + "\n"], name)
        _COMPILED[text] = eval(compile(source, name, "eval"), {"torch": torch, "F": F, "math": math})
    return _COMPILED[text]


@dataclass
class Context:
    """What an expression sees of the decoder that is running.

    x: the block's normed input [B, S, W]; places [B, S]: the positions that masks count in, None: 0, 1, 2, ..
    given: [B, S] that forward was given
    """

    model: Fuzzed
    layer: int
    ids: Tensor
    x: Tensor
    places: Tensor | None = None
    given: Tensor | None = None
    kept: dict[str, Tensor] = field(default_factory=dict)  # of this forward: what later layers use again

    @property
    def n(self) -> int:
        return self.ids.shape[1]

    @property
    def heads_count(self) -> int:
        return self.model.spec.heads

    def of(self, text: str) -> Tensor:
        """The value of an expression."""
        if self.places is None:
            place = torch.arange(self.n)
            i, j = place[:, None], place
        else:
            i, j = self.at_q(self.places), self.at_k(self.places)
        h = torch.arange(self.heads_count)[:, None, None]
        return compiled(text)(i, j, h, i - j, self.n, self.ids, self)

    # What belongs to the query's token and to the key's: [B, S] -> [B, 1, S, 1] and [B, 1, 1, S]; [B, S, H] with heads.
    def at_q(self, t: Tensor) -> Tensor:
        return t[:, None, :, None] if t.dim() == 2 else t.transpose(1, 2)[..., None]

    def at_k(self, t: Tensor) -> Tensor:
        return t[:, None, None, :] if t.dim() == 2 else t.transpose(1, 2)[:, :, None]

    # Numbers in tensors.
    def buf(self, value: float) -> Tensor:
        return self.model.constant(f"buf_{value}", torch.tensor(value))

    def one(self, value: float) -> Tensor:
        return self.model.constant(f"one_{value}", torch.tensor([value]))

    def heads(self, *values: float) -> Tensor:
        chosen = [values[head % len(values)] for head in range(self.heads_count)]
        name = "heads_" + "_".join(str(value) for value in chosen)
        return self.model.constant(name, torch.tensor(chosen)[:, None, None])

    def attr(self, value: int) -> int:
        """A number that is an attribute of a module."""
        return self.model.numbers.get(str(value), value)

    def tril(self, shift: int = 0) -> Tensor:
        size = self.model.longest
        whole = self.model.constant(f"tril_{shift}", torch.ones(size, size, dtype=torch.bool).tril(shift))
        return whole[: self.n, : self.n]

    # Weights.
    def table(self, rows: int, index: Tensor) -> Tensor:
        """Learned scores [rows, H] by an index [.., S, S] -> [.., H, S, S]."""
        index = index[:, 0] if index.dim() == 4 else index
        return F.embedding(index, self.weight(f"table_{rows}", rows, self.heads_count)).movedim(-1, -3)

    def bits(self, rows: int, index: Tensor) -> Tensor:
        """A table of booleans by an index; row 0 is shown."""
        made = torch.arange(rows) * 7 % 5 != 3
        return self.model.constant(f"bits_{rows}", made)[index]

    def weight(self, name: str, *shape: int, gain: float = 1.0) -> Tensor:
        return self.model.weight(f"layer{self.layer}_{name}", *shape, gain=gain)

    def linear(self, name: str, out: int, x: Tensor | None = None) -> Tensor:
        x = self.x if x is None else x
        return x @ self.weight(name, x.shape[-1], out, gain=x.shape[-1] ** -0.5)

    def slopes(self) -> Tensor:
        chosen = 2.0 ** -torch.arange(1.0, self.heads_count + 1)
        return self.model.constant("slopes", chosen[:, None, None].to(self.model.dtype))

    # What token ids decide.
    def doc(self) -> Tensor:
        """The number of the document that a token is of [B, S]; a separator begins one."""
        return (self.ids == self.model.spec.special.sep).cumsum(1)

    def doc_after(self) -> Tensor:
        """The same where a separator ends one."""
        ends = (self.ids == self.model.spec.special.sep).long()
        return ends.cumsum(1) - ends

    def since(self) -> Tensor:
        """Tokens since the last separator [B, S]."""
        place = torch.arange(self.n)
        starts = torch.where(self.ids == self.model.spec.special.sep, place, 0)
        return place - starts.cummax(1).values

    def image(self) -> Tensor:
        return self.ids == self.model.spec.special.image

    def span(self) -> Tensor:
        """The number of the image span that a token is of [B, S], 0 outside of images."""
        image = self.image()
        starts = image & ~F.pad(image, (1, 0))[:, :-1]
        return starts.cumsum(1) * image

    def hidden(self) -> Tensor:
        return self.ids == self.model.spec.special.hidden
