"""Says which keys a retention by positions has kept for each query of a whole sequence: no slots, no rings.

One function per retention. It shares nothing with `kernels/reference/visibility.py`, which says the same of slots.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvcompile.layouts import Full, Retention, SinkWindow, Window

Kept = Callable[[Retention, Tensor, Tensor], Tensor]


def _all(retention: Retention, query: Tensor, key: Tensor) -> Tensor:
    return torch.ones_like(query + key, dtype=torch.bool)


def _newest(retention: Retention, query: Tensor, key: Tensor) -> Tensor:
    assert isinstance(retention, Window)
    return key > query - retention.size


def _first_and_newest(retention: Retention, query: Tensor, key: Tensor) -> Tensor:
    assert isinstance(retention, SinkWindow)
    return (key > query - retention.window) | (key < retention.sinks)


# Queries' positions [Q, 1] and keys' [1, K] -> bool [Q, K], by the kind of the retention.
KEPT: dict[str, Kept] = {Full.kind: _all, Window.kind: _newest, SinkWindow.kind: _first_and_newest}


def kept_keys(retention: Retention, query: Tensor, key: Tensor) -> Tensor:
    """Which of the keys at positions [K] the retention has kept for the queries at positions [Q]: bool [Q, K].

    Raises:
        KeyError: the retention has no words here; one by scores is in `kernels/oracle/retention/`.
    """
    return KEPT[retention.kind](retention, query[:, None], key[None])
