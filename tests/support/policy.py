"""The oracle as tests call it: its result alone, or with the choices of what stays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvcompile.kernels.oracle.attention import attention
from kvcompile.kernels.oracle.choice import Choice
from kvcompile.kernels.spec import SiteSpec


def policy_attention(*args: Any, **kwargs: Any) -> Tensor:
    """The result of `attention`, which has the arguments."""
    return attention(*args, **kwargs)[0]


def scored_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: SiteSpec,
    rope: list[Tensor],
    chunks: Sequence[int],
    padding: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    held: Sequence[Tensor] | None = None,
    **rest: Any,
) -> tuple[Tensor, list[Choice]]:
    """`attention` of tokens that came in `chunks`."""
    return attention(q, k, v, spec, rope, padding, sinks, bias, chunks=chunks, held=held, **rest)
