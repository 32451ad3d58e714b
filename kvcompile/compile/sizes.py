"""Examples of what comes into a cached graph: tensors and numbers some of whose sizes go by a name."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Symbolic:
    """A placeholder's example: its dtype and device, and sizes of which some name a symbol."""

    def __init__(self, shape: Sequence[int | str], dtype: torch.dtype, device: torch.device):
        self.shape, self.dtype, self.device = tuple(shape), dtype, device


class Number:
    """A placeholder's example: a whole number that goes by a name; "span" is that of the class of shapes."""

    def __init__(self, name: str):
        self.name = name
