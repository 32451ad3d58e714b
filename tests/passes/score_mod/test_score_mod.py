"""Translation and proofs: an element's expression is the element, what is proved is true, and mistakes in either show.

Every operator that has a rule is in one of `CASES`, tensors over queries and keys that one graph computes. Each is
translated, and its expression, evaluated for all queries and keys at once, must be the tensor. Then each rule is made
wrong in turn, and some case must fail. So with proofs: claims are compared with all pairs of positions of a short text,
also where a rule of the solver's terms is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import z3
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import Node

from kvcompile.expression import B, Expr, H, K, Q, ScoreMod, const, integer, program
from kvcompile.kernels.shared.expression import Places, evaluate
from kvcompile.passes.graph import shape
from kvcompile.passes.probe.evaluate import evaluate as run
from kvcompile.passes.probe.probe import Prober
from kvcompile.passes.records import Leaf
from kvcompile.passes.rewrite.clean import clean
from kvcompile.passes.score_mod.leaves import LeafRef
from kvcompile.passes.score_mod.make import add, cast, equal, le, lt, make, not_, sub
from kvcompile.passes.score_mod.prove import Prover
from kvcompile.passes.score_mod.rules import RULES
from kvcompile.passes.score_mod.translate import Translator

LONG, HEADS, SIZE = 64, 3, 37


class Given:
    """What a case may use: positions, tokens, tables."""

    def __init__(self, ids: Tensor, module: Masks):
        self.n, self.ids, self.m = ids.shape[1], ids, module
        self.p = torch.arange(self.n)
        self.i, self.j = self.p[:, None], self.p[None, :]
        self.d = self.i - self.j
        self.f = self.d.float()
        self.past = self.j <= self.i


# [S, S], [H, S, S] or [B, 1, S, S]
CASES: dict[str, Callable[[Given], Tensor]] = {
    "compare": lambda g: (g.d >= 3) & (g.d > 1) | (g.d <= -4) ^ (g.d < -9) | (g.d == 2) & (g.i != 7),
    "logical": lambda g: torch.logical_xor(
        torch.logical_and(g.past, g.d > 2), torch.logical_or(g.d < -5, g.d == 9)
    ),
    "not": lambda g: torch.logical_not(g.past) & ~(g.d < -5),
    "divide": lambda g: g.i // 5 - g.j // 3 + torch.div(g.d, 4, rounding_mode="floor"),
    "truncate": lambda g: torch.div(g.d, 4, rounding_mode="trunc") + torch.floor_divide(g.i, 3),
    "remainder": lambda g: (g.d % 7) * 2 + torch.remainder(g.i, 4),
    "shifts": lambda g: (g.i >> 2) + (g.j << 1),
    "bits": lambda g: (
        (g.i & g.j) + (g.i ^ g.j) + (g.i | 3) + torch.bitwise_and(g.i, 5) + torch.bitwise_or(g.j, 8)
    ),
    "bits of more": lambda g: (
        torch.bitwise_xor(g.i, 6) + (~g.j) + torch.bitwise_left_shift(g.i, 1) + (g.j.bitwise_right_shift(1))
    ),
    "float": lambda g: (g.f * 0.5 + 1.25 - g.j.float() / 3) * -2.0,
    "reversed": lambda g: (
        3
        - g.f
        - torch.rsub(g.f, 2.0)
        + torch.true_divide(g.f, 7)
        + torch.divide(g.f, 2)
        + torch.multiply(g.f, 3)
    ),
    "unary": lambda g: (
        torch.exp(-g.f.abs() / 9) + torch.tanh(g.f) + torch.sigmoid(g.f) + torch.neg(g.f) + torch.sign(g.f)
    ),
    "logarithms": lambda g: (
        (g.f.abs() + 1).log() + (g.f.abs() + 1).log2() + (g.f.abs() + 1).log10() + g.f.abs().log1p()
    ),
    "powers": lambda g: (
        (g.f.abs() + 1).sqrt() + (g.f.abs() + 1).rsqrt() + torch.exp2(-g.f.abs()) + torch.expm1(g.f / 50)
    ),
    "more": lambda g: (
        g.f.pow(3)
        + g.f.pow(2)
        + torch.square(g.f)
        + (g.f + 0.5).reciprocal()
        + torch.erf(g.f)
        + torch.atan(g.f)
    ),
    "waves": lambda g: torch.sin(g.f) + torch.cos(g.f) + nn.functional.silu(g.f) + torch.relu(g.f),
    "rounding": lambda g: (g.f / 3).floor() + (g.f / 7).ceil() + (g.f / 5).trunc() + (g.f / 2).round(),
    "clamps": lambda g: (
        g.d.clamp(-3, 8)
        + g.d.clamp_min(2)
        + g.d.clamp_max(-1)
        + torch.clip(g.d, 0, 5)
        + nn.functional.hardtanh(g.f)
    ),
    "extremes": lambda g: (
        torch.minimum(g.d, g.j) + torch.maximum(g.d, g.i) + torch.max(g.i, g.j) + torch.min(g.i, g.d)
    ),
    "leaky": lambda g: nn.functional.leaky_relu(g.f, 0.2),
    "where": lambda g: torch.where(g.past, g.f, -7.5),
    "fill": lambda g: g.f.masked_fill(~g.past, -9.0),
    "halves": lambda g: (g.d.to(torch.bfloat16) * 0.3).float() + g.f.half().type_as(g.f),
    "tril": lambda g: torch.ones(g.n, g.n).tril(2) + torch.ones(g.n, g.n).triu(-3) + torch.eye(g.n),
    "full": lambda g: (
        torch.full((g.n, g.n), 4.0)
        + torch.full_like(g.f, 2.0)
        + torch.fill(g.f, 1.5)
        + g.f.new_full((g.n, g.n), 3.0)
        + g.f.new_zeros(g.n, g.n)
    ),
    "likes": lambda g: (
        torch.zeros_like(g.f) + torch.ones_like(g.f) + g.f.new_ones(g.n, g.n) + torch.zeros(g.n, g.n) + g.f
    ),
    "views": lambda g: (
        g.d.reshape(g.n, g.n).unsqueeze(0).squeeze(0).flatten().view(g.n, g.n).unflatten(0, (1, g.n))[0]
    ),
    "turns": lambda g: (
        g.d.T
        + g.d.permute(1, 0)
        + g.d.transpose(0, 1)
        + g.d.mT
        + g.d.swapaxes(0, 1)
        + g.d.movedim(0, 1)
        + g.d.t()
    ),
    "expand": lambda g: (
        g.p.expand(g.n, g.n) + g.p[:, None].expand_as(g.d) + g.p.broadcast_to(g.n, g.n) + g.d.view_as(g.d)
    ),
    "repeat": lambda g: (
        g.p[None].repeat(g.n, 1) + g.p[:, None].repeat(1, g.n) + g.p[None].tile(g.n, 1) + g.d.reshape_as(g.d)
    ),
    "slices": lambda g: (
        torch.arange(g.n + 5)[3 : 3 + g.n] + g.m.table[::2][g.i % 4] + g.d[:, :].narrow(0, 0, g.n)
    ),
    "select": lambda g: (
        torch.stack([g.d, g.d * 2, g.i + g.j])[1] + torch.stack([g.i + 0 * g.j, g.d], -1).select(-1, 0)
    ),
    "flip": lambda g: torch.stack([g.d, g.d * 3]).flip(0)[1],
    "pieces": lambda g: sum(
        (a + b for a, b in zip(g.m.slopes.chunk(3), g.m.slopes.split(1), strict=True)), g.f
    ),
    "more pieces": lambda g: (
        g.m.slopes.split([1, 2])[1][0] * g.f
        + g.m.slopes.unbind()[2]
        + torch.stack([g.f, g.f * 2]).unbind(0)[1]
    ),
    "grid": lambda g: (
        torch.meshgrid(g.p, g.p * 2, indexing="ij")[0] + torch.meshgrid(g.p, g.p * 2, indexing="ij")[1]
    ),
    "cat": lambda g: (
        torch.cat([torch.full((g.n, 3), -1.0), g.f], 1)[:, 3:] + torch.cat([g.f[:1], g.f[1:] * 2])
    ),
    "pad": lambda g: nn.functional.pad(g.f, (2, 0), value=5.0)[:, : g.n] if g.n else g.f,
    "roll": lambda g: torch.stack([g.f, g.f * 2, g.f * 3]).roll(1, 0)[0],
    "index": lambda g: g.m.table[g.d.clamp(0, 7)] + g.m.table[-1] + g.m.square[g.i % 8, g.j % 8],
    "select by index": lambda g: (
        g.m.table.index_select(0, (g.p % 8))[:, None] + g.m.table.gather(0, g.p % 8)[None]
    ),
    "along": lambda g: torch.gather(g.m.table[None].expand(g.n, 8), 1, g.d.clamp(0, 7)),
    "embedding": lambda g: nn.functional.embedding(g.d.clamp(0, 7), g.m.buckets).movedim(-1, 0),
    "trained": lambda g: g.m.slopes[:, None, None] * g.f,
    "outer": lambda g: torch.outer(g.p.float(), g.p.float() + 1),
    "diff": lambda g: torch.diff(g.p * 3, prepend=g.p[:1] * 3 - 4)[:, None] + g.d,
    "cumsum": lambda g: torch.ones_like(g.d).cumsum(1) + torch.full((g.n, g.n), 2).cumsum(0),
    "reductions": lambda g: (
        torch.stack([g.f, g.f * 2, g.f.abs()]).sum(0)
        + torch.stack([g.f, -g.f]).amax(0)
        + torch.stack([g.f, -g.f]).amin(0)
    ),
    "more reductions": lambda g: (
        torch.stack([g.f, g.f * 4]).mean(0)
        + torch.stack([g.f, -g.f]).max(0).values
        + torch.stack([g.f, -g.f]).min(0)[0]
    ),
    "some": lambda g: torch.stack([g.past, g.d == -3]).any(0) & torch.stack([g.d < 9, g.d > -8]).all(0),
    "isin": lambda g: torch.isin(g.d, g.m.few),
    "tokens": lambda g: (g.ids[:, :, None] == g.ids[:, None, :])[:, None] & g.past,
    "clone": lambda g: g.d.clone().contiguous().detach() + nn.functional.dropout(g.f, 0.5, False),
    "in between": lambda g: torch.stack([g.f, g.f * 2]).repeat_interleave(2, 0)[3],
    "scalar": lambda g: g.f * torch.scalar_tensor(2.5),
}
# Other names of what is in a case, which tracing writes in one way, and what only softmax inputs have.
ALIASES = {
    "alias", "lift_fresh", "lift_fresh_copy", "_to_copy", "bitwise_xor", "moveaxis", "swapdims", "numpy_T", "concat",
    "constant_pad_nd", "logsumexp", "softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax", "nan_to_num",
    "divide", "rsub", "multiply", "clip", "scalar_tensor", "take_along_dim", "reshape_as", "view_as", "tile",
    "_unsafe_view", "view", "detach", "dropout", "contiguous", "clone", "relu", "square", "logical_not", "true_divide",
    "broadcast_to", "matrix_H", "outer", "swapaxes", "expand_as", "zeros_like", "minimum", "maximum",
}  # fmt: skip


class Masks(nn.Module):
    table: Tensor
    square: Tensor
    few: Tensor

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.slopes = nn.Parameter(torch.rand(HEADS, generator=generator))
        self.buckets = nn.Parameter(torch.rand(8, HEADS, generator=generator))
        self.register_buffer("table", torch.rand(8, generator=generator))
        self.register_buffer("square", torch.rand(8, 8, generator=generator))
        self.register_buffer("few", torch.tensor([-3, 0, 11]))

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        given = Given(input_ids, self)
        return tuple(case(given) for case in CASES.values())


class Graph:
    """The graph of all cases, and what it gives for a text."""

    def __init__(self) -> None:
        ids = torch.randint(0, 9, (2, 11), generator=torch.Generator().manual_seed(1))
        sizes = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
        exported = torch.export.export(Masks(), (ids,), dynamic_shapes=sizes, strict=False)
        self.module: Any = exported.module(check_guards=False)
        graph = self.module.graph
        for node in list(graph.nodes):
            if node.op == "call_module":
                graph.erase_node(node)
            if node.op == "output":
                node.args = (tuple(node.args[0]),)
        graph.set_codegen(torch.fx.graph.CodeGen())
        clean(self.module)
        output = next(node for node in graph.nodes if node.op == "output")
        self.nodes: dict[str, Node] = dict(zip(CASES, output.args[0], strict=True))
        self.prober = Prober(self.module)
        self.ids = torch.randint(0, 9, (2, SIZE), generator=torch.Generator().manual_seed(2))
        found = run(self.module, list(self.nodes.values()), {"input_ids": self.ids})
        self.wanted: dict[str, Tensor] = dict(zip(CASES, found, strict=True))

    def translator(self, rules: dict[str, Any]) -> Translator:
        ctx = self.prober.dependence.ctx
        made = Translator(self.prober.dependence, Prover(HEADS), rules, (ctx.batch, ctx.seq))
        made.behind = set(self.module.graph.nodes)  # nothing is run again: what has no rule is no translation
        return made

    def holds(self, case: str, rules: dict[str, Any]) -> bool:
        """Whether the expression of a case, evaluated everywhere, is the case."""
        node = self.nodes[case]
        named = {2: (Q, K), 3: (H, Q, K), 4: (B, integer(0), Q, K)}[len(shape(node))]
        expression = self.translator(rules).element(node, named)
        leaves: list[LeafRef] = []

        def number(leaf: LeafRef) -> int:
            if leaf not in leaves:
                leaves.append(leaf)
            return leaves.index(leaf)

        instructions, numbers = program({"it": expression}, number)
        mod = ScoreMod(instructions, tuple(leaf.kind for leaf in leaves))
        found = run(self.module, [leaf.node for leaf in leaves], {"input_ids": self.ids}) if leaves else []
        orders = [Leaf(leaf.kind, leaf.node, leaf.dims).order for leaf in leaves]
        tensors = [tensor.permute(order) for tensor, order in zip(found, orders, strict=True)]
        place = torch.arange(SIZE).expand(2, -1)
        (found,) = evaluate(mod, [numbers["it"] or 0], Places(place, place, (HEADS, 1), tensors))
        found = torch.as_tensor(found).expand(2, HEADS, 1, SIZE, SIZE)[:, :, 0]
        wanted = self.wanted[case]
        wanted = (
            wanted
            if wanted.dim() == 4
            else wanted.expand(1, HEADS, SIZE, SIZE)
            if wanted.dim() == 3
            else wanted
        )
        return torch.equal(found.to(wanted.dtype), wanted.expand_as(found))


@pytest.fixture(scope="module")
def graph() -> Iterator[Graph]:
    with torch.no_grad():
        yield Graph()


@pytest.mark.parametrize("case", CASES)
def test_an_expression_is_its_element(graph: Graph, case: str) -> None:
    assert graph.holds(case, RULES)


def test_every_rule_made_wrong_is_seen(graph: Graph) -> None:
    """A rule that gives another element changes some case; one that no case goes through is never traced."""
    unseen = []
    for name, rule in RULES.items():
        called = []

        def wrong(t: Any, node: Any, places: Any, rule: Any = rule, called: Any = called) -> Expr:
            called.append(node)
            found: Expr = rule(t, node, places)
            if found.is_bool:
                return not_(found)
            return make("add", found.dtype, found, const(1, found.dtype))

        rules = RULES | {name: wrong}
        if not any(not graph.holds(case, rules) for case in _through(graph, name)):
            unseen.append(name)
    assert set(unseen) <= ALIASES


def _through(graph: Graph, name: str) -> list[str]:
    from kvcompile.passes.graph import ancestors, target_name

    return [
        case
        for case, node in graph.nodes.items()
        if any(target_name(used) == name for used in ancestors([node]))
        or (name == "getitem" and any("getitem" in str(used.target) for used in ancestors([node])))
    ]


# Proofs.

INTEGERS = st.integers(-6, 12)


@st.composite
def numbers(draw: st.DrawFn, depth: int = 3) -> Expr:
    """An integer expression of q and k."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return draw(st.sampled_from([Q, K, integer(draw(INTEGERS))]))
    one = draw(numbers(depth - 1))
    match draw(
        st.sampled_from(
            ["add", "sub", "mul", "floordiv", "mod", "truncdiv", "shr", "abs", "sign", "min", "max", "float"]
        )
    ):
        case "add" | "sub" | "min" | "max" as op:
            return make(op, torch.int64, one, draw(numbers(depth - 1)))
        case "mul":
            return make("mul", torch.int64, one, integer(draw(INTEGERS)))
        case "floordiv" | "mod" | "truncdiv" as op:
            return make(op, torch.int64, one, integer(draw(st.integers(1, 9))))
        case "shr":
            return make("shr", torch.int64, one, integer(draw(st.integers(0, 3))))
        case "float":
            half = make("mul", torch.float32, cast(one, torch.float32), const(0.5, torch.float32))
            return cast(
                make(draw(st.sampled_from(["floor", "ceil", "trunc"])), torch.float32, half), torch.int64
            )
        case op:
            return make(op, torch.int64, one)


@st.composite
def claims(draw: st.DrawFn) -> Expr:
    compare = draw(st.sampled_from([le, lt, equal]))
    return compare(draw(numbers()), draw(numbers()))


def everywhere(claim: Expr, size: int = 33) -> bool:
    """Whether a claim is true of all queries and keys of a short text."""
    instructions, found = program({"claim": claim}, lambda _: 0)
    place = torch.arange(size)[None]
    (value,) = evaluate(ScoreMod(instructions), [found["claim"] or 0], Places(place, place, (1, 1)))
    return bool(torch.as_tensor(value).all())


@settings(max_examples=300, deadline=None, derandomize=True)
@given(claims())
def test_what_is_proved_is_true(claim: Expr) -> None:
    prover = Prover(1)
    if prover.holds(claim):
        assert everywhere(claim)
    if prover.never(claim):
        assert everywhere(not_(claim))


def _claim(op: str, by: int, value: int) -> Expr:
    """op(q, by) == value, where q is 7 or k - 9 or less: false of some position."""
    return equal(make(op, torch.int64, sub(K, integer(9)), integer(by)), integer(value))


# What is true of all positions, and what is not: in both, the solver must agree with a short text.
TRUE = {
    "floordiv": le(
        make("mul", torch.int64, make("floordiv", torch.int64, sub(Q, K), integer(5)), integer(5)), sub(Q, K)
    ),
    "floordiv from above": lt(
        sub(Q, K),
        add(
            make("mul", torch.int64, make("floordiv", torch.int64, sub(Q, K), integer(5)), integer(5)),
            integer(5),
        ),
    ),
    "mod": le(integer(0), make("mod", torch.int64, sub(Q, K), integer(6))),
    "mod below": lt(make("mod", torch.int64, sub(Q, K), integer(6)), integer(6)),
    "truncdiv": equal(
        make("truncdiv", torch.int64, make("neg", torch.int64, K), integer(4)),
        make("neg", torch.int64, make("floordiv", torch.int64, K, integer(4))),
    ),
    "shr": equal(
        make("shr", torch.int64, sub(Q, K), integer(2)), make("floordiv", torch.int64, sub(Q, K), integer(4))
    ),
    "shl": equal(make("shl", torch.int64, K, integer(2)), make("mul", torch.int64, K, integer(4))),
    "and": equal(make("and", torch.int64, K, integer(7)), make("mod", torch.int64, K, integer(8))),
    "min": le(make("min", torch.int64, Q, K), K),
    "max": le(K, make("max", torch.int64, Q, K)),
    "max and min": equal(add(make("max", torch.int64, Q, K), make("min", torch.int64, Q, K)), add(Q, K)),
    "abs and max": le(make("abs", torch.int64, sub(Q, K)), make("max", torch.int64, Q, K)),
    "abs": le(sub(Q, K), make("abs", torch.int64, sub(Q, K))),
    "sign": le(make("sign", torch.int64, sub(Q, K)), integer(1)),
    "sign of more": equal(make("sign", torch.int64, add(K, integer(1))), integer(1)),
    "cast": equal(
        cast(
            make(
                "floor",
                torch.float32,
                make("mul", torch.float32, cast(K, torch.float32), const(0.5, torch.float32)),
            ),
            torch.int64,
        ),
        make("floordiv", torch.int64, K, integer(2)),
    ),
}


@pytest.mark.parametrize("name", TRUE)
def test_what_is_true_is_proved(name: str) -> None:
    assert everywhere(TRUE[name]) and Prover(1).holds(TRUE[name])


@pytest.mark.parametrize(
    "op", ["floordiv", "mod", "truncdiv", "shr", "shl", "and", "min", "max", "abs", "sign", "cast"]
)
def test_every_rule_of_the_solver_made_wrong_is_seen(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    inner = Prover._integer

    def wrong(self: Prover, e: Expr, args: list[Any]) -> Any:
        found = inner(self, e, args)
        return found + 1 if e.op == op and found is not None else found

    monkeypatch.setattr(Prover, "_integer", wrong)
    assert not all(Prover(1).holds(claim) for claim in TRUE.values())


def test_what_rounds_or_overflows_is_not_reasoned_about() -> None:
    place = cast(K, torch.bfloat16)
    rounded = make("eq", torch.bool, make("add", torch.bfloat16, place, const(1, torch.bfloat16)), place)
    assert not Prover(1).never(rounded)  # from 256 on it is so
    large = make("shl", torch.int32, cast(K, torch.int32), const(25, torch.int32))
    assert not Prover(1).holds(le(integer(0), cast(large, torch.int64)))
    assert isinstance(Prover(1).term(large), z3.ExprRef)
