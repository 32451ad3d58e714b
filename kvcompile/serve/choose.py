"""Choosing one token of one row of logits: temperature, top-k, top-p, min-p, and a draw.

With w = exp((x - max) / temperature) in float64, and tokens in order of their logits, equal ones by id:

    top-k   keeps x >= the k-th largest x (all that tie with it)
    top-p   keeps tokens before which less than top_p of the mass of what top-k left has come
    min-p   keeps w >= min_p, the largest w being 1
    draw    takes the first token, by id, at which the mass so far exceeds u times the mass of what is kept

The sets are those of transformers' TopKLogitsWarper, TopPLogitsWarper and MinPLogitsWarper in this order; of tokens
that tie at the edge of top-p, those of lower ids stay, where transformers leaves it to its sort.

No vocabulary is sorted where it need not be: top-k and min-p compare; top-p sorts what is within a few temperatures of
the largest logit where that has the mass, and else the one bucket of a histogram where the edge is. Every function here
sees one row, so what it gives cannot depend on a neighbour.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvcompile.serve.sampling import Sampling

Row = NDArray[np.float32]  # [V] logits
Ids = NDArray[np.intp]  # increasing
Mass = NDArray[np.float64]

_REACHES = (6.0, 12.0, 24.0)  # temperatures below the largest logit; e^-6 is 0.25 %
_SORTED = 4096  # so many at once are sorted; of more, there is a histogram
_BUCKETS = 1024
_DEEPEST = 40.0  # temperatures that buckets share; all below is in the last one
_BLOCK = 256


def choose(row: Row, best: float, sampling: Sampling, u: float) -> int:
    """The token that `u` in [0, 1) draws.

    Args:
        row:  [V] float32 logits after penalties and masks; -inf is never drawn
        best: the largest of them, finite
    """
    ids, weights = kept(row, best, sampling)
    place = _drawn(weights, u)
    return place if ids is None else int(ids[place])


def kept(row: Row, best: float, sampling: Sampling) -> tuple[Ids | None, Mass]:
    """The tokens that can be drawn, by id (None: all), and the weight of each."""
    temperature = sampling.temperature
    ids: Ids
    if 0 < sampling.top_k < len(row):
        ids = _largest(row, _at_least(row, best, temperature, sampling.top_k), sampling.top_k)
        weights = _weights(row[ids], best, temperature)
        if sampling.top_p < 1:
            wanted = sampling.top_p * float(weights.sum())
            inside = _nucleus(row[ids], best, temperature, weights, wanted)
            ids, weights = ids[inside], weights[inside]
    elif sampling.top_p < 1:
        ids, weights = _top_p(row, best, sampling)
    elif sampling.min_p > 0:
        deepest = best + temperature * (math.log(sampling.min_p) - 1e-3)
        ids = np.flatnonzero(row >= np.nextafter(np.float32(deepest), np.float32(-np.inf)))
        weights = _weights(row[ids], best, temperature)
    else:
        return None, _weights(row, best, temperature)
    if sampling.min_p > 0:
        enough = weights >= sampling.min_p
        ids, weights = ids[enough], weights[enough]
    return ids, weights


def likeliest(row: Row, best: float, count: int) -> Ids:
    """The `count` tokens of the largest logits, in order; fewer where the vocabulary is smaller."""
    count = min(count, len(row))
    ids = _at_least(row, best, 1.0, count)
    if len(ids) < count:  # the others are -inf
        ids = np.arange(len(row))
    ids = _largest(row, ids, count)
    ordered: Ids = ids[np.argsort(-row[ids], kind="stable")][:count]
    return ordered


def log_total(row: Row, best: float) -> float:
    """log sum exp of a row, in float64."""
    return best + math.log(float(_weights(row, best, 1.0).sum()))


def _weights(values: Row, best: float, temperature: float) -> Mass:
    with np.errstate(over="ignore"):  # a temperature near zero: -inf, weight 0
        weights: Mass = np.subtract(values, best, dtype=np.float64)
        weights /= temperature
        return np.exp(weights, out=weights)


def _beginnings(row: Row, best: float, temperature: float) -> Iterator[Ids]:
    """More and more of the largest, with all that tie; at last all but -inf."""
    for reach in _REACHES:
        yield np.flatnonzero(row >= np.float32(best - reach * temperature))
    yield np.flatnonzero(row > -np.inf)


def _at_least(row: Row, best: float, temperature: float, count: int) -> Ids:
    """`count` of the largest or more, with all that tie; fewer where the others are -inf."""
    for ids in _beginnings(row, best, temperature):
        if len(ids) >= count:
            break
    return ids


def _largest(row: Row, ids: Ids, count: int) -> Ids:
    """Those of `ids` that are at least the `count`-th largest of them."""
    if len(ids) <= count:
        return ids
    values = row[ids]
    kept: Ids = ids[values >= np.partition(values, len(ids) - count)[len(ids) - count]]
    return kept


def _top_p(row: Row, best: float, sampling: Sampling) -> tuple[Ids, Mass]:
    """What top-p keeps of a whole row, and its weights."""
    temperature = sampling.temperature
    everything = _weights(row, best, temperature)
    wanted = sampling.top_p * float(everything.sum())
    for ids in _beginnings(row, best, temperature):
        if len(ids) > _SORTED:
            kept = np.flatnonzero(_by_buckets(row, best, temperature, everything, wanted))
            return kept, everything[kept]
        weights = everything[ids]
        if weights.sum() > wanted * (1 + 1e-9):  # the edge is in it
            break
    inside = _by_order(row[ids], weights, wanted)
    return ids[inside], weights[inside]


def _nucleus(values: Row, best: float, temperature: float, weights: Mass, wanted: float) -> NDArray[np.bool_]:
    """Before which values less than `wanted` has come, the largest first."""
    if len(values) <= _SORTED:
        return _by_order(values, weights, wanted)
    return _by_buckets(values, best, temperature, weights, wanted)


def _by_order(values: Row, weights: Mass, wanted: float) -> NDArray[np.bool_]:
    order = np.argsort(-values, kind="stable")
    before = np.cumsum(weights[order])[:-1]
    inside = np.zeros(len(values), np.bool_)
    inside[order[: 1 + int(np.searchsorted(before, wanted, side="left"))]] = True
    return inside


def _by_buckets(
    values: Row, best: float, temperature: float, weights: Mass, wanted: float
) -> NDArray[np.bool_]:
    depth = np.subtract(best, values, dtype=np.float64)
    deepest = min(float(depth.max()), _DEEPEST * temperature) or 1.0
    depth *= min((_BUCKETS - 1) / deepest, 1e300)  # 0 of a temperature near zero stays 0
    bucket = np.minimum(depth, _BUCKETS - 1, out=depth).astype(np.intp)
    mass = np.cumsum(np.bincount(bucket, weights, _BUCKETS))
    edge = int(np.searchsorted(mass, wanted, side="left"))  # the bucket in which it is reached
    inside: NDArray[np.bool_] = bucket < edge
    there = np.flatnonzero(bucket == edge)
    there = there[np.argsort(-values[there], kind="stable")]
    so_far = float(mass[edge - 1]) if edge else 0.0
    before = so_far + np.concatenate([[0.0], np.cumsum(weights[there])])[:-1]
    inside[there[before < wanted]] = True
    return inside


def _drawn(weights: Mass, u: float) -> int:
    """The place that `u` draws: a block first, then one of it."""
    blocks = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)))
    wanted = u * float(blocks[-1])
    block = _reached(blocks, wanted)
    start = block * _BLOCK
    before = float(blocks[block - 1]) if block else 0.0
    return start + _reached(np.cumsum(weights[start : start + _BLOCK]), max(wanted - before, 0.0))


def _reached(mass: Mass, wanted: float) -> int:
    """The first place where the mass exceeds what is wanted; where rounding has it nowhere, the last with a weight."""
    place = int(np.searchsorted(mass, wanted, side="right"))
    return place if place < len(mass) else int(np.searchsorted(mass, mass[-1], side="left"))
