"""What is said of one expression or claim, compared with its values: `None` where all is so, else what is not.

Each check draws one example from its seed. Nothing that is proved may be false at any query and key tried; what is not
proved is not looked at, but for some of which each prover must be capable (`tests/passes/score_mod/test_score_mod.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction

import torch
import z3
from torch import Tensor

from kvcompile.expression import Expr, H, K, Q, const, walk
from kvcompile.passes.score_mod.prove import Prover
from kvcompile.passes.score_mod.ranges import Ranges, negative_zero
from tests.proofs.draw import BOOL, FLOATS, INT64, INTEGERS, Drawn, simplified
from tests.proofs.edges import Edges, exactly
from tests.proofs.values import FAR, HEADS, NEAR, Named, Text, same

Check = Callable[[int], "str | None"]
TEXTS = (Text.of(NEAR), Text.of(FAR))
_POINTS = 3  # places of a text at which a term is looked at


def drawn(seed: int) -> tuple[Drawn, Expr]:
    """An expression of any dtype."""
    d = Drawn(seed)
    depth = d.random.randrange(1, 4)
    match d.random.randrange(3):
        case 0:
            return d, d.integer(depth, d.random.choice(INTEGERS))
        case 1:
            return d, d.floating(depth, d.random.choice(FLOATS))
        case _:
            return d, d.claim(depth)


def normal(seed: int) -> str | None:
    """An expression that `make` simplifies is the same to the last bit."""
    _, raw = drawn(seed)
    made = simplified(raw)
    for text in TEXTS:
        wrong = ~same(text.value(raw), text.value(made))
        if wrong.any():
            return f"{raw} became {made}, which is another {_where(text, wrong)}"
    return None


def ranges(seed: int) -> str | None:
    """Values lie in the range that is said, and are what arithmetic says; what is no -0.0 is none."""
    d = Drawn(seed)
    node = simplified(Edges(d).any())
    value = TEXTS[1].value(node)
    if node.is_float and not negative_zero(node) and ((value == 0) & value.signbit()).any():
        return f"{node} is -0.0 {_where(TEXTS[1], (value == 0) & value.signbit())}"
    found = Ranges().exact(node)
    if found is None:
        return None
    if node.is_float and not value.isfinite().all():
        return f"{node} is said to be exact, in {found}, and is none {_where(TEXTS[1], ~value.isfinite())}"
    low, high = Fraction(value.min().item()), Fraction(value.max().item())
    if not found.low <= low <= high <= found.high:
        return f"{node} lies between {low} and {high}, and in {found} is said"
    ends = [value.argmin(), value.argmax(), *(d.random.randrange(value.numel()) for _ in range(4))]
    for end in ends:
        h, i, j = (int(place) for place in torch.unravel_index(torch.tensor(int(end)), value.shape))
        at = (h, TEXTS[1].at[i], TEXTS[1].at[j])
        own = exactly(node, at[1], at[2], h, lambda e, at=(h, i, j): Fraction(TEXTS[1].value(e)[at].item()))
        right = Fraction(value[h, i, j].item())
        if right != own or own % found.step:
            return f"{node} is said to be exact, in {found}, and is {right}, not {own}, at {at}"
    return None


def terms(seed: int) -> str | None:
    """A term of the solver has the value of its expression."""
    d, raw = drawn(seed) if seed % 2 else (own := Drawn(seed), Edges(own).any())
    e = simplified(raw)
    prover = Prover(HEADS)
    for node in walk(e) if seed % 2 else (e,):
        if node.args:
            problem = _elsewhere(d, prover, node, [text.value(node) for text in TEXTS])
            if problem:
                return problem
    return None


def _elsewhere(d: Drawn, prover: Prover, node: Expr, values: list[Tensor]) -> str | None:
    if node.is_float and prover.exact(node) is None:
        return None  # what stands for it is compared with nothing
    term = prover.term(node)
    for text, value in zip(TEXTS, values, strict=True):
        for _ in range(_POINTS):
            h, i, j = d.random.randrange(HEADS), *(d.random.randrange(len(text.at)) for _ in range(2))
            at = {prover.q: text.at[i], prover.k: text.at[j], prover.h: h}
            found = _number(z3.simplify(z3.substitute(term, *((v, z3.IntVal(x)) for v, x in at.items()))))
            right = value[h, i, j].item()
            if found is None:  # a function of which nothing is known
                continue
            if not math.isfinite(right) or found != Fraction(right):
                return f"the solver takes {node} for {found}, and it is {right} at {at}"
    return None


def _number(term: z3.ExprRef) -> Fraction | None:
    if z3.is_true(term) or z3.is_false(term):
        return Fraction(z3.is_true(term))
    if z3.is_int_value(term):
        return Fraction(term.as_long())
    if z3.is_rational_value(term):
        return Fraction(term.numerator_as_long(), term.denominator_as_long())
    return None


def _where(text: Text, wrong: Tensor) -> str:
    h, i, j = wrong.nonzero()[0].tolist()
    return f"at head {h}, query {text.at[i]}, key {text.at[j]}"


# Claims.


def proofs(seed: int) -> str | None:
    """What is proved of a claim is so everywhere; of one beside another, wherever the other is."""
    d = Drawn(seed)
    prover = Prover(HEADS)
    for raw in _claims(d):
        claim = simplified(raw)
        given = simplified(d.claim(1)) if d.chance(0.4) else None
        values = [text.value(raw) for text in TEXTS]
        wheres = [torch.ones(1, dtype=BOOL) if given is None else text.value(given) for text in TEXTS]
        for text, value, where in zip(TEXTS, values, wheres, strict=True):
            others = () if given is None else (given,)
            if (~value & where).any() and prover.holds(claim, *others):
                return f"{claim} is proved where {given} and is false {_where(text, ~value & where)}"
            if (value & where).any() and prover.never(claim, *others):
                return (
                    f"{claim} is proved never to be where {given} and is true {_where(text, value & where)}"
                )
    return None


def _claims(d: Drawn) -> Iterator[Expr]:
    """Claims that are nearly always true, or never, and so are worth a proof."""
    yield d.claim(2)
    e = Edges(d).any() if d.chance(0.7) else d.integer(2, d.random.choice(INTEGERS))
    dtype = e.dtype
    values = torch.cat([text.value(e).flatten() for text in TEXTS])
    low, high = values.min().item(), values.max().item()
    for value in (low, high) if math.isfinite(low) and math.isfinite(high) else ():
        for beside in (value, *_hair(value, dtype)):
            op = d.one("ge", "gt", "eq")
            number = const(beside, dtype)
            yield Expr(op, BOOL, (e, number) if d.chance(0.5) else (number, e))


def _hair(value: float, dtype: torch.dtype) -> tuple[float, ...]:
    """Numbers right beside one; of floats also one that its dtype does not hold."""
    if not dtype.is_floating_point:
        ends = torch.iinfo(dtype)
        return tuple(int(min(max(value + d, ends.min), ends.max)) for d in (-1, 1))
    size = max(abs(value), 1e-3) * (1e-12 if dtype is torch.float64 else 1e-9)
    return (value - size, value + size)


# Functions of which nothing is known: equal arguments, equal values, and no more than that.

_LEAVES = {
    "x": torch.randint(-2, 3, (1, len(NEAR)), generator=torch.Generator().manual_seed(1)),
    "m": torch.randint(-1, 2, (1, len(NEAR), len(NEAR)), generator=torch.Generator().manual_seed(2)),
    "t": torch.randint(-2, 3, (8,), generator=torch.Generator().manual_seed(3)),
}
TOKENS = Text.of(NEAR, 1, _LEAVES)


def _leaf(kind: str, name: str, *places: Expr, dims: tuple[int, int, int] = (-1, -1, -1)) -> Expr:
    return Expr("leaf", INT64, places, Named(kind, name, dims))  # type: ignore[arg-type]


_OF_TOKENS = (
    _leaf("query", "x"),
    _leaf("key", "x"),
    _leaf("pair", "m", dims=(0, 1, 2)),
    _leaf("pair", "m", dims=(0, 2, 1)),
    _leaf("table", "t", Expr("mod", INT64, (Q, const(8, INT64)))),
    _leaf("table", "t", Expr("mod", INT64, (K, const(8, INT64)))),
)


def _twins(d: Drawn) -> tuple[Expr, Expr]:
    """Two expressions that are equal, or nearly."""
    f32 = torch.float32

    def lifted(e: Expr) -> Expr:
        return Expr("cast", f32, (e,))

    def row(op: str, e: Expr) -> Expr:
        return Expr(op, f32, (e,))

    distance, back = Expr("sub", INT64, (Q, K)), Expr("sub", INT64, (K, Q))
    score = Expr("score", f32)
    past = Expr("where", f32, (Expr("ge", BOOL, (Q, K)), score, const(-9.0, f32)))
    kinds = {
        "a zero's sign": (lifted(distance), Expr("neg", f32, (lifted(back),))),
        "a zero by a product": (
            Expr("mul", f32, (lifted(K), const(0.0, f32))),
            Expr("mul", f32, (lifted(K), const(-0.0, f32))),
        ),
        "a literal": (
            Expr("mul", torch.float16, (Expr("cast", torch.float16, (K,)), const(0.1, torch.float16))),
            Expr(
                "mul",
                torch.float16,
                (Expr("cast", torch.float16, (K,)), const(0.0999755859375, torch.float16)),
            ),
        ),
        "rows": (row("reduce_max", score), row("reduce_max", past)),
        "rows, summed": (row("reduce_sum", past), row("reduce_sum", score)),
        "scores": (score, Expr("neg", f32, (Expr("neg", f32, (score,)),))),
        "tokens": tuple(d.random.sample(_OF_TOKENS, 2)),
        "pairs": (_OF_TOKENS[2], _OF_TOKENS[3]),
        "tokens and places": (
            _OF_TOKENS[0],
            _leaf("table", "t", Expr("mod", INT64, (d.random.choice((Q, K, H)), const(8, INT64)))),
        ),
        "far apart": (
            Expr("mul", INT64, (K, const(2**62, INT64))),
            Expr("mul", INT64, (Q, const(2**62, INT64))),
        ),
        "bits": (
            Expr("xor", INT64, (Q, K)),
            Expr("sub", INT64, (Expr("or", INT64, (Q, K)), Expr("and", INT64, (K, Q)))),
        ),
        "kinds": (
            Expr("sqrt", f32, (lifted(K),)),
            Expr("cast", f32, (Expr("sqrt", torch.float64, (Expr("cast", torch.float64, (K,)),)),)),
        ),
    }
    return kinds[d.one(*kinds)]


def functions(seed: int) -> str | None:
    """Nothing is said of two functions but what equal arguments say, and of a row what its own operand does."""
    d = Drawn(seed)
    a, b = _twins(d)
    if a.is_float:
        op = d.one("reciprocal", "div", "rsqrt", "exp", "same", "same")
        if op == "div":
            a, b = (Expr("div", x.dtype, (const(1.0, x.dtype), x)) for x in (a, b))
        elif op != "same":
            a, b = (Expr(op, x.dtype, (x,)) for x in (a, b))
        bound = const(d.random.choice((-1e4, -2.0, 0.0, 0.25, 1.0, 3.0)), a.dtype)
    else:
        bound = const(d.random.choice((-1, 0, 1, 2)), INT64)
    compare = d.one("ge", "gt", "eq")
    one, other = (Expr(compare, BOOL, (x, bound)) for x in (a, b))
    raw = d.random.choice(
        (
            Expr("or", BOOL, (one, Expr("not", BOOL, (other,)))),
            Expr("or", BOOL, (Expr("not", BOOL, (one,)), other)),
            Expr("eq", BOOL, (one, other)),
            Expr(d.one("ge", "eq"), BOOL, (a, b)),
            Expr("not", BOOL, (Expr("gt", BOOL, (a, b)),)),
        )
    )
    given = d.random.choice((None, Expr("ge", BOOL, (Q, K)), Expr("eq", BOOL, (Q, K))))
    value, where = TOKENS.whole(raw), torch.ones(1, dtype=BOOL) if given is None else TOKENS.whole(given)
    prover = Prover(HEADS)
    others = () if given is None else (simplified(given),)
    claim = simplified(raw)
    if (~value & where).any() and prover.holds(claim, *others):
        return f"{claim} is proved where {given} and is false {_where(TOKENS, ~value & where)}"
    if (value & where).any() and prover.never(claim, *others):
        return f"{claim} is proved never to be where {given} and is true {_where(TOKENS, value & where)}"
    return None


def some(seed: int) -> str | None:
    """Where a query is proved to see some key of its past, it does."""
    d = Drawn(seed, wild=False)
    raw = d.claim(2)
    if d.chance(0.5):
        raw = Expr(d.one("and", "or"), BOOL, (d.claim(1), raw))
    if d.chance(0.25):  # whether a score is seen is another question for every key
        positive = Expr("gt", BOOL, (Expr("score", torch.float32), const(0.0, torch.float32)))
        even = Expr("eq", BOOL, (Expr("mod", INT64, (K, const(2, INT64))), const(0, INT64)))
        raw = Expr("xor", BOOL, (positive, even))
    past = Expr("ge", BOOL, (Q, K))
    seen = (TOKENS.value(raw) & TOKENS.value(past)).any(-1)
    seen &= (Text.of(NEAR, 5).value(raw) & TOKENS.value(past)).any(-1)
    if not seen.all() and Prover(HEADS).some_key(simplified(raw)):
        return f"{raw} is proved to show every query some key, and query {NEAR[int((~seen).nonzero()[0, 1])]} sees none"
    return None


def decided(seed: int) -> str | None:
    """A claim that is taken for always or never is that."""
    d = Drawn(seed)
    raw = d.claim(2)
    found = Prover(HEADS).decided(simplified(raw))
    for text in TEXTS:
        wrong = text.value(raw) != text.value(found)
        if wrong.any():
            return f"{raw} was decided to be {found}, which is another {_where(text, wrong)}"
    return None
