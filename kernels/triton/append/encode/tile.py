"""What encoders are given and give back: a tile of vectors, and what becomes of it in the parts of the cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcompile.kernels.triton.device import Fp8Form
from kvcompile.layouts.storage.scale import Scale, ScaleDtype


@dataclass(frozen=True)
class Tile:
    """The variable `x`, float32 [rows, width]: a vector per row, of `dim` channels and zeros after them.

    side:  "keys" or "values"
    dtype: what the elements of x are rounded to, by name
    heads: 0: rows are tokens of the head `head`; else rows are the heads `head` [rows] of one token, of so many
    """

    side: str
    rows: int
    width: int
    dim: int
    dtype: str
    fp8: Fp8Form
    interpreted: bool
    heads: int = 0

    @property
    def several(self) -> bool:
        """Whether rows are heads."""
        return self.heads > 0

    @property
    def surplus(self) -> bool:
        """Whether rows may be of no head: `there` says which are."""
        return self.heads % self.rows > 0

    def among(self, flag: str) -> str:
        """Which rows are of a head and, by `flag`, of a token that is wanted."""
        return f"({flag} & there)" if self.surplus else flag

    def row(self, name: str) -> str:
        """Pointers [rows, 1] to the vectors called `name`, of the tokens `token`."""
        at = f"{name}_ptr + batch * {name}_s0 + {self.head(name)}"
        return at if self.several else f"{at} + token[:, None] * {name}_s2"

    def head(self, name: str) -> str:
        """How far the rows' heads are from the first, in a tensor of vectors called `name`."""
        return f"(head * {name}_s1)[:, None]" if self.several else f"head * {name}_s1"

    @property
    def padded(self) -> bool:
        return self.dim != self.width


@dataclass(frozen=True)
class Store:
    """A value that goes to every row of a part.

    part:  its name ("data", "scale", ...)
    value: an expression [rows], or [rows, width] where `count` of the width are elements
    first: where in the part's row they begin
    """

    part: str
    value: str
    count: int = 0
    first: int = 0

    @property
    def width(self) -> int:
        return power_of_two(self.count)


@dataclass(frozen=True)
class Encoded:
    """lines: statements, after which the expressions of `stores` mean something.

    decoded: an expression, float32 [rows, width]: what is read of it
    """

    lines: tuple[str, ...]
    stores: tuple[Store, ...]
    decoded: str


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def clipped(x: str, largest: float, smallest: float | None = None) -> str:
    """smallest: None: -largest"""
    return f"tl.minimum(tl.maximum({x}, {-largest if smallest is None else smallest!r}), {largest!r})"


def quotient(over: str, by: str) -> str:
    """A true division, as torch has it: Triton's own is approximate on a GPU."""
    return f"tl.math.div_rn({over}, {by})"


def kept_scale(x: str, name: ScaleDtype) -> str:
    """float32 `x` in a scale's dtype, at most its largest number."""
    if name == "float32":
        return x
    largest = torch.finfo(Scale(dtype=name).torch_dtype).max
    return f"{clipped(x, largest)}.to(tl.{name})"


def divisor(scale: str) -> str:
    """What a vector is divided by: its scale as it is kept, or 1 for a vector of one value."""
    return f"tl.where({scale} == 0.0, 1.0, {scale}.to(tl.float32))"
