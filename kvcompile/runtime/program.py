"""What the runtime must know of a rewritten graph to call it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Program:
    """The graph's interface.

    caches:    placeholder names of each layer's buffers, in layout order
    constants: placeholders with a fixed value (rope tables)
    rebuild:   the original's output class around the graph's flat outputs
    logits:    which of the flat outputs are the logits
    """

    caches: tuple[tuple[str, ...], ...]
    constants: dict[str, Tensor]
    rebuild: Callable[[Sequence[Any]], Any]
    logits: int
    takes_position_ids: bool
    takes_logits_to_keep: bool
    takes_past_length: bool
    device: torch.device
