"""What weighs the values, compared with the softmax that it is said to be, and with what a site makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvcompile.expression import SCORE, Expr, K, Q, const, walk
from kvcompile.kernels.reference.score_mod import Applied, modified
from kvcompile.passes.detect.refused import Refused
from kvcompile.passes.score_mod.prove import Prover
from kvcompile.passes.score_mod.site import Scores, scores_of
from kvcompile.passes.score_mod.weights import NoSoftmax, Weights, weights_of
from kvcompile.specs import MaskSpec
from tests.proofs.classes import F32, GATE, LOGITS, PAST, SHORT, SLOPES, mask, shows, value
from tests.proofs.draw import BOOL, INT64, Drawn, simplified
from tests.proofs.values import HEADS, NEAR, Text

_SHIFT = 5000  # how far a text is moved whose positions are said to enter as distances alone


def _op(op: str, *args: Expr) -> Expr:
    return Expr(op, F32, args)


def _number(value: float) -> Expr:
    return const(value, F32)


def _body(d: Drawn) -> Expr:
    """A softmax input over the past, whose shown keys have finite scores: of others, a finite fill is the larger."""
    hidden = _number(d.random.choice((-math.inf, -math.inf, -3.4028234663852886e38, -1e9, -1e4)))
    shown = mask(d) if d.chance(0.6) else PAST
    inner = value(d) if d.chance(0.6) else SCORE
    if any(node.op == "log" for node in walk(inner)):
        inner = _op("mul", SCORE, _number(0.125))
    if d.chance(0.5):
        return Expr("where", F32, (shown, inner, hidden))
    return _op("add", inner, Expr("where", F32, (shown, _number(0.0), hidden)))


def _factor(d: Drawn) -> Expr:
    """What a probability is multiplied by."""
    distance = Expr("cast", F32, (Expr("sub", INT64, (Q, K)),))
    near = Expr("gt", BOOL, (const(d.random.choice((3, 9, 40)), INT64), Expr("sub", INT64, (Q, K))))
    ramp = _op("max", _op("min", _op("mul", distance, _number(-0.1)), _number(1.0)), _number(0.0))
    return d.random.choice(
        (
            GATE,
            LOGITS,
            _number(0.5),
            ramp,
            _op("exp", _op("neg", _op("abs", distance))),
            Expr("where", F32, (near, _number(1.0), _number(0.0))),
            _op("mul", GATE, ramp),
            _op("add", SCORE, _number(1.0)),
        )
    )


def _spelled(d: Drawn, x: Expr) -> Expr:
    """The softmax of x, or nearly."""
    other = d.random.choice((x, _op("add", x, _number(1.0)), _op("mul", x, _number(2.0))))
    largest, total = _op("reduce_max", x), _op("reduce_lse", d.random.choice((x, x, x, other)))
    lowered = _op("sub", x, d.random.choice((largest, largest, _op("reduce_max", other))))
    top = _op("exp", d.random.choice((x, lowered, lowered)))
    below = _op("reduce_sum", d.random.choice((top, top, top, _op("exp", other))))
    sink = d.random.choice((LOGITS, _number(0.5), _op("add", LOGITS, GATE), SLOPES))
    more = d.random.choice(
        (
            _number(1e-9),
            _number(1.0),
            _number(1e-3),
            _op("exp", sink),
            _op("exp", _op("sub", sink, largest)),
            SCORE,
        )
    )
    spelled = (
        *(_op("softmax", x),) * 3,
        *(_op("softmax", x, sink), _op("exp", _op("log_softmax", x)), _op("exp", _op("sub", x, total))),
        *(
            _op("div", top, below),
            _op("div", top, _op("add", below, more)),
            _op("div", top, _op("add", more, below)),
        ),
        *(
            _op("log_softmax", x),
            _op("exp", x),
            _op("exp2", _op("sub", x, total)),
            _op("exp", _op("add", x, total)),
        ),
        *(_op("nan_to_num", _op("softmax", x)), _op("div", top, _op("reduce_max", top))),
    )
    return d.random.choice(spelled)


def weighing(d: Drawn) -> Expr:
    """Probabilities, weighed, perhaps renormalised, or nearly."""
    found = _spelled(d, _body(d))
    for _ in range(d.random.choice((0, 0, 1, 2))):
        found = _changed(d, found, _factor(d))
    return found


def _changed(d: Drawn, p: Expr, w: Expr) -> Expr:
    """Probabilities times a factor, hidden again, or divided by their sum."""
    total = _op("reduce_sum", d.random.choice((p, p, _op("mul", p, w))))
    kinds: tuple[Callable[[], Expr], ...] = (
        lambda: _op("mul", *((p, w) if d.chance(0.5) else (w, p))),
        lambda: Expr("where", F32, (mask(d), p, _number(0.0))),
        lambda: Expr("where", F32, (mask(d), _number(0.0), p)),
        lambda: Expr("where", F32, (mask(d), p, _number(0.5))),
        lambda: _op("div", p, _number(2.0)),
        lambda: _op("div", p, total),
        *(lambda: _op("div", p, _op("add", total, _number(1e-3))),) * 2,
        lambda: _op("add", p, w),
    )
    return d.random.choice(kinds)()


def softmaxes(seed: int) -> str | None:
    """What weighs the values is the softmax that is found in it."""
    raw = weighing(Drawn(seed, wild=False))
    try:
        found = weights_of(simplified(raw))
    except NoSoftmax:
        return None
    return _unequal(raw, found, _weighed(found, SHORT), SHORT.whole(found.body))


def _weighed(found: Weights, text: Text) -> Tensor:
    logits = [text.whole(found.body), *([] if found.sink is None else [text.whole(found.sink)[..., :1]])]
    p = torch.cat(logits, -1).softmax(-1)[..., : len(text.at)]
    p = p.nan_to_num() if found.zeros else p
    if found.weight is not None:
        p = p * text.whole(found.weight)
    if found.renormalise is not None:
        p = p / (p.sum(-1, keepdim=True) + found.renormalise)
    return p


def _unequal(raw: Expr, found: object, given: Tensor, body: Tensor) -> str | None:
    """Where other weights come out than those of an expression, in rows in which exp overflows nowhere."""
    right = SHORT.whole(raw)
    some = body.amax(-1, keepdim=True)
    sound = right.isfinite().all(-1, keepdim=True) & (some.abs() < 80.0)
    size = right.abs().where(sound, 0.0).amax(-1, keepdim=True).clamp(min=1e-3)
    wrong = sound & ~((given - right).abs() <= 1e-4 * size)
    if not wrong.any():
        return None
    h, i, j = wrong.nonzero()[0].tolist()
    return f"{raw} is no {found} at head {h}, query {i}, key {j}: {given[h, i, j]} and {right[h, i, j]}"


def blocks(seed: int) -> str | None:
    """What a site has and carries is what weighs the values, and is that of distances alone where it says so."""
    d = Drawn(seed, wild=False)
    raw = weighing(d)
    tables: Any = SimpleNamespace(value=lambda leaf: SHORT.leaf(leaf))
    try:
        weights = weights_of(simplified(raw))
        found = scores_of(weights, HEADS, 64, Prover(HEADS), tables)
    except (NoSoftmax, Refused):
        return None
    problem = _unequal(raw, found, _of_site(found, SHORT), SHORT.whole(weights.body))
    if problem is None and found.mod is not None and found.mod.by_distance:
        here, alone = SHORT, replace(found, mask=MaskSpec("causal"))
        there = Text(tuple(at + _SHIFT for at in NEAR), SHORT.score, SHORT.leaves)
        if not torch.equal(*(_of_site(alone, text).nan_to_num() for text in (here, there))):
            return f"{raw} is not of distances alone: {found}"
    return problem


def _of_site(found: Scores, text: Text) -> Tensor:
    """The weights that a cache computes: [H, S, S]."""
    score = text.score * found.sm_scale
    if found.softcap is not None:
        score = found.softcap * torch.tanh(score / found.softcap)
    place = text.place
    if found.slopes is not None:
        score = score + found.slopes.float()[:, None, None] * (place - place[:, None])
    mod = None
    if found.mod is not None:
        mod = Applied(
            found.mod, place[None], place[None], (HEADS, 1), [text.leaf(ref) for ref in found.leaves]
        )  # type: ignore[arg-type]
    seen = shows(found.mask, text)[None, None, None]
    sinks = None if found.sinks is None else found.sinks.float()
    return modified(mod, score[None, :, None], seen, sinks)[0, :, 0]
