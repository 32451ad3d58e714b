"""Mask and bias of one block over all lengths: closed forms confirmed at every length, or tables up to one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from kvcompile.kernels import policy
from kvcompile.passes import bias as biases
from kvcompile.passes.bias import Bias
from kvcompile.passes.masks import LENGTHS, Constant, check_causal, classify
from kvcompile.passes.probe import Prober, Refused
from kvcompile.types import MaskSpec

_LINEAR = 2**24  # elements of the evaluation that confirms a slope at a long distance
_TABLE = 2**27  # elements of the one that tabulates a bias, in the model's dtype: 2,048 positions of 32 heads
_UNKNOWN_LIMIT = 4096  # positions that are tabulated where the model does not say how many it was made for

Level = Callable[
    [int, Constant | None], Tensor
]  # (length, constants) -> softmax input of zero scores [H, S, S]


@dataclass(frozen=True)
class Positional:
    """Mask and bias of one block: functions of the positions alone."""

    mask: MaskSpec
    bias: Bias | None


class _Explicit(Exception):
    """The mask or the bias has no closed form: it must be tabulated."""


def positional(
    prober: Prober, at: Level, first: Tensor, region: set[Node], heads: int
) -> Positional | Refused:
    """Mask and bias over all lengths, or why not.

    first: the softmax input for zero scores at LENGTHS[0], for two rows of a batch, [B, H, S, S]
    """
    try:
        visible = biases.shown(first)
        if not torch.equal(visible, visible[:1].expand_as(visible)):
            raise Refused("the mask differs between the sequences of a batch")
        if visible.shape[-1] != visible.shape[-2]:
            raise Refused(f"the mask has {visible.shape[-2]} queries for {visible.shape[-1]} keys")
        level, visible = first[0], visible[0]
        allowed = biases.tolerance(level, visible)
        for row in first[1:]:
            if not biases.is_flat(torch.where(visible, row - level, 0), visible, allowed):
                raise Refused("the bias of the scores differs between the sequences of a batch")
        check_causal(visible)
        slope = None if biases.is_flat(level, visible, allowed) else biases.slopes(level, visible)
        mask = MaskSpec("explicit")
        if slope is not None or biases.is_flat(level, visible, allowed):
            mask = _mask(prober, at, slope, visible, region, heads, confirm=True)
        if mask.kind != "explicit" and (slope is None or _is_linear(prober, at, slope, heads)):
            return Positional(mask, None if slope is None else Bias("alibi", slope.float()))
        return _tabulated(prober, at, (level, visible), slope, region, heads)
    except Refused as refused:
        return refused


def _mask(
    prober: Prober,
    at: Level,
    slope: Tensor | None,
    visible: Tensor,
    region: set[Node],
    heads: int,
    confirm: bool,
) -> MaskSpec:
    """The mask under an ALiBi of these slopes, or "explicit".

    confirm: the bias must be that ALiBi (or none) at every length that is evaluated.
    """

    def pattern(length: int, constant: Constant | None) -> Tensor:
        level = at(length, constant)
        rest = biases.without(level, slope)
        seen = biases.shown(rest)
        if confirm and constant is None and not biases.is_flat(rest, seen, biases.tolerance(level, seen)):
            raise _Explicit
        return _one(seen)

    try:
        return classify(prober, pattern, region, heads, _one(visible))
    except _Explicit:
        return MaskSpec("explicit")


def _one(visible: Tensor) -> Tensor:
    """The pattern [S, S] that all heads share."""
    if not torch.equal(visible, visible[:1].expand_as(visible)):
        raise _Explicit
    return visible[0]


def _is_linear(prober: Prober, at: Level, slope: Tensor, heads: int) -> bool:
    """Whether the slopes hold at long distances too: a bias that is rounded to bfloat16 bends from 257 on."""
    level = at(min(prober.max_seq_len, max(math.isqrt(_LINEAR // heads), LENGTHS[1])), None)
    rest = biases.without(level, slope)
    seen = biases.shown(rest)
    return biases.is_flat(rest, seen, biases.tolerance(level, seen))


def _tabulated(
    prober: Prober,
    at: Level,
    known: tuple[Tensor, Tensor],
    slope: Tensor | None,
    region: set[Node],
    heads: int,
) -> Positional:
    """Mask and bias as tables, evaluated at the longest length that is affordable.

    Exact up to there, where a shorter sequence shows the same corner of them.

    known: the softmax input at LENGTHS[0] and what it shows; slope: what the bias nearly is, so that a key far
    away is told from a hidden one.
    """
    limit = min(prober.made_for or _UNKNOWN_LIMIT, prober.max_seq_len)
    reach = max(min(math.isqrt(_TABLE // heads), limit), min(LENGTHS[1], prober.max_seq_len))
    level = at(reach, None)
    visible = biases.shown(biases.without(level, slope))
    check_causal(visible)
    short = at(min(LENGTHS[1], reach), None)
    for corner, seen in (known, (short, biases.shown(short))):
        _check_corner(level, visible, corner, seen)
    mask = _mask(prober, at, slope, known[1], region, heads, confirm=False)
    if mask.kind != "explicit":
        wanted = policy.shown(mask, torch.arange(reach, device=visible.device))
        mask = mask if bool((visible == wanted).all()) else MaskSpec("explicit")
    return Positional(mask, biases.tabulated(level, visible, mask.kind == "explicit"))


def _check_corner(level: Tensor, visible: Tensor, corner: Tensor, seen: Tensor) -> None:
    """Raises Refused unless a short sequence [H, S, S] has the mask and the bias of a long one's beginning."""
    long, size = visible.shape[-1], corner.shape[-1]
    first = visible[:, :size, :size]
    if not torch.equal(first, seen):
        head, query, key = (int(i) for i in (first != seen).nonzero()[0])
        where, not_where = (long, size) if first[head, query, key] else (size, long)
        raise Refused(
            f"the mask changes with the length: query {query} sees key {key} of {where} tokens, not of {not_where}"
        )
    change = biases.centered(level[:, :size, :size], first) - biases.centered(corner, seen)
    if float(change.abs().max()) > biases.tolerance(level, visible):
        raise Refused("the bias of the scores changes with the length of the sequence")
