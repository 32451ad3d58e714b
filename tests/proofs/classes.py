"""What a mask or a value is said to be, compared with what it is: `None` where both agree, else where they do not.

Masks are spelled in many ways, in integers and in floats of every width, and half of them are near misses of a class.
A softmax input has a normal form, and a value a class, if the softmax of both is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kvcompile.expression import SCORE, Expr, H, K, Q, const, walk
from kvcompile.passes.score_mod import classify, hiding
from kvcompile.passes.score_mod.normal_form import NoNormalForm, normal_form
from kvcompile.passes.score_mod.prove import Prover
from kvcompile.specs import MaskSpec
from tests.proofs.draw import BOOL, FLOATS, INT64, Drawn, simplified
from tests.proofs.values import FAR, HEADS, NEAR, Named, Text

F32 = torch.float32
_TABLES = {
    "slopes": torch.tensor([0.5, 0.25, -0.125]),
    "logits": torch.tensor([0.3, -1.0, 2.0]),
    "bias": torch.randn(64, generator=torch.Generator().manual_seed(4)),
    "gate": torch.rand(1, len(FAR), generator=torch.Generator().manual_seed(5)),
}
SHORT, LONG = Text.of(NEAR, 1, _TABLES), Text.of(FAR, 2, _TABLES)
SLOPES = Expr("leaf", F32, (H,), Named("table", "slopes"))
LOGITS = Expr("leaf", F32, (H,), Named("table", "logits"))
GATE = Expr("leaf", F32, (), Named("query", "gate"))
PAST = Expr("ge", BOOL, (Q, K))


def _int(value: int) -> Expr:
    return const(value, INT64)


def _op(op: str, *args: Expr) -> Expr:
    return Expr(op, BOOL if op in ("ge", "gt", "eq", "and", "or", "not") else args[-1].dtype, args)


def _to(e: Expr, dtype: torch.dtype) -> Expr:
    return e if e.dtype is dtype else Expr("cast", dtype, (e,))


# Masks.


def _window(d: Drawn) -> Expr:
    """q - k < w, or nearly, in one spelling."""
    w = d.random.choice((1, 2, 3, 4, 7, 8, 16, 17, 33, 64, 100))
    distance, back = _op("sub", Q, K), _op("sub", K, Q)
    far = d.random.choice((Q, K, distance))
    f = d.random.choice(FLOATS)
    beside = float(w) + d.random.choice((-1.0, -0.5, -1e-3, -1e-10, 0.0, 1e-10, 1e-3, 0.5))
    spelled: dict[str, Callable[[], Expr]] = {
        "gt": lambda: _op("gt", _int(w), distance),
        "ge": lambda: _op("ge", K, _op("sub", Q, _int(w - 1))),
        "abs": lambda: _op("gt", _int(w), _op("abs", distance)),
        "back": lambda: _op("gt", back, _int(-w)),
        "clamped": lambda: _op(
            "ge", K, _op("max", _op("sub", Q, _int(w - 1)), _int(d.random.choice((0, 0, 1, 3))))
        ),
        "twice": lambda: _op("gt", _int(2 * w), _op("mul", _int(2), distance)),
        "float": lambda: _op(d.one("gt", "ge"), const(beside, f), _to(distance, f)),
        "halves": lambda: _op(d.one("gt", "ge"), const(beside, f), _op("sub", _to(Q, f), _to(K, f))),
        "scaled": lambda: _op("gt", const(w / 8, f), _op("div", _to(distance, f), const(8.0, f))),
        "by thirds": lambda: _op("gt", const(w / 3, f), _op("div", _to(distance, f), const(3.0, f))),
        "floored": lambda: _op(
            "gt", const(1.0, f), _op("floor", _op("div", _to(distance, f), const(float(w), f)))
        ),
        "divided": lambda: _op("gt", _int(1), _op("floordiv", distance, _int(w))),
        "rounded up": lambda: _op("ge", _int(1), _op("floordiv", _op("add", distance, _int(w - 1)), _int(w))),
        "in 32 bits": lambda: _op("gt", const(w, torch.int32), _to(distance, torch.int32)),
        "in 16 bits": lambda: _op("gt", const(w, torch.int16), _to(distance, torch.int16)),
        "in 8 bits": lambda: _op("gt", const(w, torch.uint8), _to(distance, torch.uint8)),
        "wide": lambda: _op(
            "gt",
            _op("mul", _int(2**58), _int(w)) if False else _int(w * 2**50),
            _op("mul", distance, _int(2**50)),
        ),
        "wider": lambda: _op(
            "ge",
            _int(0),
            _op("mul", _op("sub", distance, _int(w - 1)), _int(2 ** d.random.choice((40, 41, 42, 60)))),
        ),
        "shifted": lambda: _op("eq", _op("shr", far, _int(3)), _op("shr", K, _int(3))),
        "product": lambda: _op("gt", _int(w * w), _op("mul", distance, distance)),
    }
    return spelled[d.one(*spelled)]()


def _chunk(d: Drawn) -> Expr:
    """q // c == k // c, or nearly, in one spelling."""
    c = d.random.choice((2, 3, 4, 8, 16, 31, 64))
    f = d.random.choice(FLOATS)

    def part(place: Expr, by: int = c) -> Expr:
        return _op("floordiv", place, _int(by))

    def floored(place: Expr) -> Expr:
        return _op("floor", _op("div", _to(place, f), const(float(c), f)))

    shift = d.random.choice((0, 0, 1, c))
    spelled: dict[str, Callable[[], Expr]] = {
        "eq": lambda: _op("eq", part(Q), part(K)),
        "ge": lambda: _op("ge", part(K), part(Q)),
        "shifted": lambda: _op("eq", part(_op("add", Q, _int(shift))), part(_op("add", K, _int(shift)))),
        "first": lambda: _op("ge", K, _op("mul", part(Q), _int(c))),
        "rest": lambda: _op("ge", K, _op("sub", Q, _op("mod", Q, _int(c)))),
        "floats": lambda: _op("eq", floored(Q), floored(K)),
        "truncated": lambda: _op("eq", _op("truncdiv", Q, _int(c)), part(K)),
        "two sizes": lambda: _op("eq", part(Q), part(K, d.random.choice((c, c + 1)))),
        "bits": lambda: _op("eq", _op("shr", Q, _int(3)), _op("shr", K, _int(3))),
        "neighbours": lambda: _op("gt", _int(2), _op("sub", part(Q), part(K))),
    }
    return spelled[d.one(*spelled)]()


def mask(d: Drawn) -> Expr:
    """A mask, which shows nothing of the future, or nearly."""
    parts = [PAST if d.chance(0.85) else _op("gt", _op("add", Q, _int(d.random.choice((-1, 0, 1, 2)))), K)]
    for _ in range(d.random.choice((1, 1, 1, 2))):
        parts.append(d.random.choice((_window, _window, _chunk))(d) if d.chance(0.85) else d.claim(1))
    if d.chance(0.3):
        other = d.random.choice(
            (
                _op("gt", _int(d.random.choice((1, 2, 4))), K),
                _op("eq", _op("mod", _op("sub", Q, K), _int(d.random.choice((1, 3, 4)))), _int(0)),
                _op("eq", Q, K),
                _op("gt", H, _int(d.random.choice((-1, 0, 1)))),
                d.claim(1),
            )
        )
        where = d.random.randrange(len(parts))
        parts[where] = _op(d.one("or", "or", "and"), parts[where], other)
    d.random.shuffle(parts)
    found = parts[0]
    for part in parts[1:]:
        found = _op("and", found, part)
    return found


def shows(spec: MaskSpec, text: Text) -> Tensor:
    """What a class of masks shows: [S, S]."""
    q, k = text.place[:, None], text.place
    seen = k <= q
    if spec.kind == "sliding":
        assert spec.window is not None
        seen = seen & (q - k < spec.window)
    if spec.kind == "chunked":
        assert spec.window is not None
        seen = seen & (q // spec.window == k // spec.window)
    return seen


def masks(seed: int) -> str | None:
    """A mask is its class and what else hides; one that is proved to show no later key shows none."""
    raw = mask(Drawn(seed))
    seen = simplified(raw)
    prover = Prover(HEADS)
    if not prover.never(seen, classify.lt(Q, K)):
        return None
    found = classify.mask_of(seen, prover)
    for text in (SHORT, LONG):
        right = text.value(raw)
        given = shows(found.mask, text).expand_as(right)
        if found.rest is not None:
            given = given & text.value(found.rest)
        if not torch.equal(given, right):
            h, i, j = (given != right).nonzero()[0].tolist()
            return f"{raw} is no {found} at head {h}, query {text.at[i]}, key {text.at[j]}"
    return None


# Values.


def _distance(d: Drawn, dtype: torch.dtype) -> Expr:
    """k - q as a float, or nearly."""
    back, away = _op("sub", K, Q), _op("sub", Q, K)
    q, k = _to(Q, dtype), _to(K, dtype)
    i32 = torch.int32
    wrapped = _op("mul", _to(back, i32), const(2**20, i32))
    spelled = (
        *(_to(back, dtype),) * 3,
        *(_op("sub", k, q), _op("neg", _to(away, dtype)), k, _op("add", k, q)),
        *(_op("neg", _to(_op("abs", away), dtype)), _op("neg", _to(_op("max", away, _int(0)), dtype))),
        *(_to(_op("floordiv", back, _int(2)), dtype), _op("floor", _op("mul", k, const(0.5, dtype)))),
        *(
            _op("div", _to(wrapped, dtype), const(2.0**20, dtype)),
            _op("mul", _to(away, dtype), _to(back, dtype)),
        ),
        *(
            _op("where", PAST, _to(back, dtype), const(0.0, dtype)),
            _op("sub", k, _op("mul", q, const(2.0, dtype))),
        ),
        *(
            _to(_to(_op("mul", k, const(1.5, dtype)), INT64), dtype),
            _op("add", _op("sub", k, q), const(1.0, dtype)),
        ),
    )
    return d.random.choice(spelled)


def _bias(d: Drawn) -> Expr:
    """slope * (k - q), or nearly."""
    dtype = d.random.choice((F32, F32, F32, torch.float64, torch.float16))
    distance = _distance(d, dtype)
    slope = d.random.choice(
        (
            _to(SLOPES, dtype),
            _to(SLOPES, dtype),
            const(0.25, dtype),
            const(-1.0, dtype),
            _to(GATE, dtype),
            _op("mul", _to(SLOPES, dtype), const(2.0, dtype)),
            _op("neg", _to(SLOPES, dtype)),
        )
    )
    found = _op(d.one("mul", "mul", "mul", "div"), distance, slope) if d.chance(0.8) else distance
    if d.chance(0.2):
        found = _op("mul", slope, distance)
    if d.chance(0.15):
        found = _op("mul", const(d.random.choice((0.5, -2.0)), dtype), found)
    return _to(found, F32)


def _response(d: Drawn) -> Expr:
    """What becomes of the score itself."""
    a = const(d.random.choice((0.125, 0.3, 2.0, 1.0, -0.5)), F32)
    cap = const(d.random.choice((5.0, 30.0, -5.0, 1.0)), F32)
    scaled = d.random.choice(
        (SCORE, _op("mul", SCORE, a), _op("div", SCORE, const(4.0, F32)), _op("neg", SCORE))
    )
    tanh = _op("tanh", d.random.choice((scaled, _op("div", scaled, cap))))
    spelled = (
        *(scaled,) * 3,
        *(_op("mul", tanh, cap), _op("mul", cap, tanh), tanh, _op("neg", _op("mul", cap, tanh))),
        *(_to(_to(_op("mul", tanh, cap), INT64), F32), _op("mul", cap, _to(_to(tanh, INT64), F32))),
        *(_op("mul", scaled, SLOPES), _op("max", scaled, const(-1.0, F32)), _op("mul", scaled, SCORE)),
        *(_op("add", scaled, _op("mul", SCORE, a)), _op("mul", _to(_to(scaled, torch.float64), F32), a)),
        *(_op("div", tanh, cap), _op("div", cap, _op("add", SCORE, const(9.0, F32)))),
        _op("where", _op("gt", _op("sub", Q, K), _int(9)), scaled, _op("mul", scaled, a)),
    )
    return d.random.choice(spelled)


def _added(d: Drawn) -> Expr:
    """What one adds to a score."""
    kinds = (
        *(lambda: _bias(d),) * 4,
        lambda: const(d.random.choice((0.0, 1.5, -3.0)), F32),
        lambda: GATE,
        lambda: _to(_op("mul", Q, _int(3)), F32),
        lambda: _op("log", _to(Q, F32)),
        lambda: _op("log", _op("add", _to(Q, F32), const(1.0, F32))),
        lambda: LOGITS,
        lambda: Expr(
            "leaf",
            F32,
            (_op("min", _op("max", _op("sub", Q, K), _int(0)), _int(63)),),
            Named("table", "bias"),
        ),
    )
    return d.random.choice(kinds)()


def value(d: Drawn) -> Expr:
    found = _response(d)
    for _ in range(d.random.choice((0, 1, 1, 2))):
        more = _added(d)
        found = _op(d.one("add", "add", "sub"), *((found, more) if d.chance(0.7) else (more, found)))
    return found


def probabilities(x: Tensor, sink: Tensor | None) -> Tensor:
    """The softmax over the keys, beside a column of a sink."""
    x = x.double()
    if sink is None:
        return x.softmax(-1)
    return torch.cat([x, sink.double()[..., :1]], -1).softmax(-1)[..., :-1]


def values(seed: int) -> str | None:
    """A value is what its class says of it, up to what a row shares; beside a sink, all of it."""
    d = Drawn(seed)
    raw = value(d)
    sinks = d.chance(0.3)
    prover = Prover(HEADS)
    found = classify.value_of(simplified(raw), sinks, 0.125, prover)
    for text in (SHORT, LONG):
        right = text.value(raw).double()
        base = text.score.double() * found.sm_scale
        if found.softcap is not None:
            base = found.softcap * torch.tanh(base / found.softcap)
        given = base
        if found.rest is not None:
            given = _with_score(text, base).value(found.rest).double()
        if found.slope is not None:
            steps = (text.place - text.place[:, None]).double()
            given = base + text.value(found.slope).double() * steps
        sound = right.isfinite() & given.isfinite()
        difference = (given - right).where(sound, 0.0)
        if not sinks:
            difference = difference - difference[..., :1]
            sound = sound & sound[..., :1]
        size = right.abs().where(sound, 0.0).amax(-1, keepdim=True).clamp(min=1.0)
        wrong = sound & (difference.abs() > 1e-5 + 1e-6 * size)
        if wrong.any() or not torch.equal(right.isfinite(), given.isfinite()):
            h, i, j = (wrong | (right.isfinite() != given.isfinite())).nonzero()[0].tolist()
            return f"{raw} is no {found} at head {h}, query {text.at[i]}, key {text.at[j]}, sinks: {sinks}"
    return None


def _with_score(text: Text, score: Tensor) -> Text:
    return Text(text.at, score.float(), text.leaves)


# Softmax inputs.


def _hidden(d: Drawn) -> Expr:
    return const(
        d.random.choice((-math.inf, -math.inf, -3.4028234663852886e38, -1e9, -1e4, -900.0, 0.0)), F32
    )


def _condition(d: Drawn) -> Expr:
    return d.random.choice((lambda: PAST, lambda: mask(d), lambda: _window(d), lambda: d.claim(1)))()


def _input(d: Drawn, depth: int) -> Expr:
    """A softmax input: scores that are scaled, biased, masked in every way."""
    if depth == 0:
        return d.random.choice((SCORE, _op("mul", SCORE, const(0.5, F32)), _response(d)))
    x = _input(d, depth - 1)
    zero, one = const(0.0, F32), const(1.0, F32)

    def chosen(yes: Expr, no: Expr) -> Expr:
        return _op("where", _condition(d), yes, no)

    def steep() -> Expr:
        """What places add: enough to show what was to be hidden."""
        by = const(d.random.choice((10.0, -10.0, 0.5, 1e3)), F32)
        return _op("mul", _to(d.random.choice((Q, K, _op("sub", K, Q))), F32), by)

    kinds: tuple[Callable[[], Expr], ...] = (
        *(lambda: chosen(x, _hidden(d)),) * 3,
        *(lambda: _op("add", x, chosen(zero, _hidden(d))),) * 2,
        lambda: _op("add", x, _op("mul", _op("sub", one, chosen(one, zero)), const(-1e4, F32))),
        lambda: _op(
            "sub", _op("mul", x, (m := chosen(one, zero))), _op("mul", _op("sub", one, m), const(1e9, F32))
        ),
        lambda: _op("max", x, const(d.random.choice((-1e38, -3e38, -5.0)), F32)),
        lambda: _op("min", x, const(d.random.choice((5.0, -1e9)), F32)),
        lambda: _op("mul", x, const(d.random.choice((0.5, -1.0, 1e-4, 0.0)), F32)),
        lambda: _op("div", x, const(d.random.choice((2.0, 1000.0)), F32)),
        lambda: _op("mul", x, chosen(one, zero)),
        lambda: _op(d.one("tanh", "floor", "abs", "sigmoid"), x),
        lambda: _op("exp", _op("min", x, const(1.0, F32))),
        lambda: _op("add", x, _added(d)),
        lambda: _op(
            "add", x, chosen(_added(d), _op("sub", steep(), const(d.random.choice((1e9, 1e4, 2000.0)), F32)))
        ),
        lambda: chosen(
            x, _op("add", x, _op("sub", steep(), const(d.random.choice((1e9, 1e4, 2000.0)), F32)))
        ),
        lambda: chosen(x, _op("sub", _op("mul", _to(GATE, F32), const(1e4, F32)), const(1e4, F32))),
        lambda: chosen(x, _input(d, depth - 1)),
        lambda: _op("neg", x),
        lambda: _op("add", x, _op("mul", chosen(zero, one), _hidden(d))),
    )
    return d.random.choice(kinds)()


def inputs(seed: int) -> str | None:
    """The softmax of a normal form is the softmax of what it was made from, in every row of which a key is seen."""
    d = Drawn(seed, wild=False)
    raw = _input(d, d.random.randrange(1, 4))
    sink = d.random.choice((None, None, LOGITS, _op("add", LOGITS, GATE)))
    if sink is not None and d.chance(0.5):
        raw, sink = (_op("add", x, GATE) for x in (raw, sink))
    prover = Prover(HEADS)
    try:
        form = normal_form(simplified(raw), None if sink is None else simplified(sink), prover)
    except NoNormalForm:
        return None
    for text in (SHORT, LONG):
        right, seen = text.value(raw), text.value(form.seen)
        # A row with an infinity or no number is none in the model either.
        rows = ~(right.isnan() | (right == math.inf)).any(-1) & (torch.tensor(text.at) < form.reach)
        columns = torch.tensor(text.at) < form.reach
        right, seen = right[..., columns], seen[..., columns]
        if form.infinite and (~seen & (right > -math.inf) & rows[..., None]).any():
            return f"{raw} hides by more than -inf what {form.seen} does not show"
        made = text.value(form.value)[..., columns].masked_fill(~seen, -math.inf)
        # A row whose keys are all far down is another matter.
        rows = rows & seen.any(-1) & (right.amax(-1) > -500.0)
        a = probabilities(right, None if sink is None else text.value(sink))
        b = probabilities(made, None if form.sink is None else text.value(form.sink))
        size = right.where(seen & right.isfinite(), 0.0).abs().amax(-1, keepdim=True)
        wrong = rows[..., None] & ~((a - b).abs() <= 1e-4 + 1e-6 * size)
        if wrong.any():
            h, i, j = wrong.nonzero()[0].tolist()
            return (
                f"{raw} beside {sink} became {form.value} where {form.seen} beside {form.sink}, which is another at "
                f"head {h}, query {text.at[i]}, key {text.at[j]}: {a[h, i, j]} and {b[h, i, j]}"
            )
    return None


# What hides.


def bounds(seed: int) -> str | None:
    """A value lies within its bounds in texts of so many tokens, besides its score, whatever leaves of one are."""
    d = Drawn(seed, wild=False)
    longest = d.random.choice((2, 17, 33, 1000, 4096, 2**22))
    raw = _positional(d, d.random.randrange(1, 4))
    e = simplified(raw)
    low, high = hiding._Bound(longest).of(e)
    still = Text(LONG.at, torch.zeros_like(LONG.score), LONG.leaves)
    inside = LONG.place < longest
    values = still.value(e)[:, inside][..., inside].double()
    values = values[values.isfinite()]
    slack = 1e-2 + 1e-2 * abs(high)  # floats round
    if values.numel() and not low - 1e-2 * (1 + abs(low)) <= values.min() <= values.max() <= high + slack:
        return f"{e} lies between {values.min()} and {values.max()} in {longest} tokens, not {low} and {high}"
    if hiding.is_finite(e) and not still.value(e).isfinite().all() and not _half(raw):
        return f"{e} is said to be finite, and is not"
    return None


def _half(e: Expr) -> bool:
    return any(node.dtype is torch.float16 for node in walk(e))


def _positional(d: Drawn, depth: int) -> Expr:
    """What a model may add to a score: of positions, leaves and scores."""
    if depth == 0:
        return d.random.choice(
            (
                SCORE,
                GATE,
                SLOPES,
                _to(Q, F32),
                _to(K, F32),
                _to(_op("sub", Q, K), F32),
                _bias(d),
                _to(d.integer(1), F32),
            )
        )
    x = _positional(d, depth - 1)
    y = (
        _positional(d, depth - 1)
        if d.chance(0.5)
        else const(d.random.choice((0.5, -2.0, 10.0, 1e-3, -1e4)), F32)
    )
    match d.random.randrange(10):
        case 0 | 1 | 2:
            return _op(d.one("add", "sub", "mul"), *((x, y) if d.chance(0.6) else (y, x)))
        case 3:
            return _op("mul", x, x)
        case 4:
            return (
                _op("div", x, y)
                if d.chance(0.5)
                else _op("div", y, _op("add", _op("abs", x), const(0.5, F32)))
            )
        case 5:
            return _op(d.one("min", "max"), x, y)
        case 6:
            return _op(d.one("neg", "abs", "floor", "ceil", "trunc", "round"), x)
        case 7:
            return _op(d.one("tanh", "sigmoid", "sin", "cos", "erf", "sign"), x)
        case 8:
            above = _op("add", _op("abs", x), const(d.random.choice((0.0, 0.5, 1.0)), F32))
            return _op(d.one("sqrt", "log", "log2", "log10", "log1p", "rsqrt"), above if d.chance(0.8) else x)
        case _:
            if d.chance(0.5):
                return _op("where", d.claim(1), x, y)
            return _op(d.one("exp", "exp2", "expm1"), _op("min", x, const(3.0, F32)))


def reaches(seed: int) -> str | None:
    """What hides in texts of so many tokens is far below a score of zero in all of them."""
    d = Drawn(seed, wild=False)
    amount = const(-d.random.choice((1500.0, 1e4, 1e5, 1e9, 3.4e38, math.inf)), F32)
    e = simplified(_op("add", _op("add", SCORE, _positional(d, d.random.randrange(1, 3))), amount))
    try:
        tokens = hiding.reach(e)
    except ValueError:
        return None
    still = Text(LONG.at, torch.zeros_like(LONG.score), LONG.leaves)
    inside = LONG.place < tokens
    values = still.value(e)[:, inside][..., inside]
    broken = ~values.isfinite() if _half(e) or amount.value < -1e38 else torch.zeros(1, dtype=BOOL)
    if tokens and (~broken & ~(values <= -999.0)).any():
        return f"{e} is said to hide in texts of {tokens} tokens, and reaches {values.max()}"
    if tokens and hiding.is_infinite(e) and (values > -math.inf).any():
        return f"{e} is said to be -inf, and reaches {values.max()}"
    return None
