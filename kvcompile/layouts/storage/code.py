"""Code: what one element of a vector becomes, once it has been divided by its scale."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch

from kvcompile.layouts.storage.scale import ScaleDtype, Scales

Kind = Literal["float", "fp8", "int", "uint", "codebook"]
# Channels that share whole bytes: 3 bits are a plane of 2 and a plane of 1, of which a byte holds 4 and 8.
_TOGETHER = {2: 4, 3: 8, 4: 2, 8: 1}


@dataclass(frozen=True)
class Code:
    """A way to write a number, as data; `kernels/reference/codec.py` and the generated kernels know the kinds.

    name:    what storages call it
    kind:    "float" rounds to `dtype`; "fp8" too, and saturates; "int" and "uint" round to nearest even; "codebook"
             takes the nearest of `levels`
    bits:    of an element; 0: those of the model's dtype
    dtype:   of the tensor that holds elements, or of the bytes that they are packed into; None: the model's
    largest: the magnitude that the largest element of what shares a scale becomes
    scales:  what may share a scale, and whether a minimum is kept beside it (x ~ q * scale + minimum)
    recipe:  how recipes and reports call it
    scale_dtypes: what scales may be kept in
    groups:  how many channels may share a scale, where a group of them does; 0: all of a head
    levels:  of a codebook, the number of each code; where it is `signed`, those of the codes without the sign bit,
             which is the highest and says that the number is negative
    to_even: a number in the middle of two levels becomes the one with the even code (IEEE 754), else the lower one
    """

    name: str
    kind: Kind
    bits: int
    dtype: torch.dtype | None
    largest: float
    scales: Scales
    recipe: str = ""
    scale_dtypes: tuple[ScaleDtype, ...] = ("float16", "float32")
    groups: tuple[int, ...] = (0, 32, 64, 128)
    levels: tuple[float, ...] = ()
    signed: bool = False
    to_even: bool = False

    @property
    def title(self) -> str:
        return self.recipe or self.name

    @property
    def packed(self) -> bool:
        """Whether elements are unsigned integers that stand in bytes without gaps (`kernels/reference/packing.py`)."""
        return self.kind in ("uint", "codebook")

    @property
    def numbers(self) -> tuple[float, ...]:
        """Of a codebook, the number of every code, signs included."""
        return (*self.levels, *(-level for level in self.levels)) if self.signed else self.levels

    @property
    def thresholds(self) -> tuple[tuple[float, bool], ...]:
        """Of a codebook, what lies between its levels: float32, and whether a number on it belongs to the upper one."""
        found = []
        for lower, (below, above) in enumerate(pairwise(self.levels)):
            middle = float(np.float32((np.float32(below) + np.float32(above)) / 2))
            found.append((middle, self.to_even and lower % 2 == 1))
        return tuple(found)

    def check(self, dim: int) -> str | None:
        """Why `dim` elements do not fill whole bytes, or None."""
        together = _TOGETHER.get(self.bits, 1)
        if not self.packed or dim % together == 0:
            return None
        return f"{self.title} packs {together} channels together: head_dim must be a multiple of {together}, got {dim}"
