"""What the dependence analysis says is never less than what is true; and it says it where and why."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export import Dim, export
from torch.fx import GraphModule, Node
from transformers.integrations import moe

from kvcompile.passes.dependence import Dependence, Fact, Level, analysis, normalisation, slices
from kvcompile.passes.dependence.context import Context, Result
from kvcompile.passes.dependence.pointwise import pointwise
from kvcompile.passes.rewrite.clean import clean
from tests.proofs.broken import broken
from tests.support.dependence_graphs import grown, violations
from tests.support.dependence_templates import MISSING, TEMPLATES
from tests.support.marks import cases
from tests.support.models import NanoGPT, TinyConfig

assert moe  # importing it registers the product of groups


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer function that fails is a mistake, here."""
    monkeypatch.setattr(Dependence, "strict", True)


def test_every_transfer_function_is_called() -> None:
    assert not MISSING


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**31))
def test_influence_is_never_outside_of_what_is_declared(seed: int) -> None:
    assert violations(grown(seed, TEMPLATES, 7).finish(), seed) == []


@pytest.mark.parametrize("seed", cases(range(2), (0,)))
@pytest.mark.parametrize("template", TEMPLATES, ids=str)
def test_influence_of_each_operator(template: Any, seed: int) -> None:
    assert violations(grown(seed, TEMPLATES, 2, template).finish(), seed) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 3000, 300))
def test_influence_in_many_graphs(first: int) -> None:
    for seed in range(first, first + 300):
        assert violations(grown(seed, TEMPLATES, 8).finish(), seed) == []


# Each transfer function made wrong in turn


def careless(ctx: Context, node: Node) -> Result:
    """Dimensions from their sizes alone, and a token's value whatever is done to it."""
    facts = [ctx.fact(n) for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
    dims, values = ctx.created(node), node.meta["val"]
    level = min(max((fact.level for fact in facts), default=Level.CONSTANT), Level.TOKEN)
    if isinstance(values, (list, tuple)):
        sizes = [[ctx.size(size) for size in value.shape] for value in values]
        each = [tuple(ctx.roles(size) for size in shape if size is not None) for shape in sizes]
        return tuple(Fact(tuple(dim or () for dim in dims), level) for dims in each)
    return Fact(dims or (), level)


def constant(right: Callable[[Context, Node], Result]) -> Callable[[Context, Node], Result]:
    """The right dimensions, and values that depend on nothing."""

    def rule(ctx: Context, node: Node) -> Result:
        found = right(ctx, node)
        if isinstance(found, tuple):
            return tuple(replace(fact, level=Level.CONSTANT, why=None) for fact in found)
        return found if found.level > Level.TOKEN else replace(found, level=Level.CONSTANT, why=None)

    return rule


MIXING = (
    *(
        "cumsum",
        "cumprod",
        "logcumsumexp",
        "cummax",
        "flip",
        "roll",
        "sum",
        "amax",
        "argmax",
        "softmax",
        "log_softmax",
    ),
    *(
        "layer_norm",
        "rms_norm",
        "group_norm",
        "conv1d",
        "sort",
        "argsort",
        "gather",
        "slice",
        "cat",
        "scatter_add",
    ),
    *("index", "index_select", "reshape", "any"),
)
# These lose the dimension of the tokens: the invariant alone refuses what such a function says.
LOSING = ("mean", "max", "logsumexp", "einsum", "topk", "linalg_vector_norm", "select")
CONSTANT = (
    *("mul", "where", "masked_fill", "to", "embedding", "linear", "matmul", "add", "cat", "stack", "reshape"),
    *(
        "permute",
        "expand",
        "slice",
        "select",
        "softmax",
        "layer_norm",
        "sum",
        "sort",
        "gather",
        "index",
        "split",
    ),
    *("repeat", "unsqueeze", "cumsum", "one_hot", "einsum", "squeeze", "unbind", "tril", "arange"),
)


def found_wrong(key: str) -> bool:
    """Whether some random graph shows that a transfer function is wrong."""
    chosen = [template for template in TEMPLATES if template.key == key]
    for seed in range(60):
        template = chosen[seed % len(chosen)]
        if violations(grown(seed, SIMPLE, 1 + seed % 2, template).finish(), seed):
            return True
    return False


SIMPLE = [t for t in TEMPLATES if t.key in ("aten::mul", "aten::unsqueeze", "aten::transpose", "aten::add")]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MIXING)
def test_a_transfer_function_that_sees_no_mixing_is_caught(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(analysis.RULES, f"aten::{name}", careless)
    assert found_wrong(f"aten::{name}")


@pytest.mark.parametrize("name", LOSING)
def test_the_invariant_is_a_second_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(analysis.RULES, f"aten::{name}", careless)
    monkeypatch.setattr(analysis, "settled", lambda fact, node: fact)
    assert found_wrong(f"aten::{name}")


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CONSTANT)
def test_a_transfer_function_that_loses_a_dependence_is_caught(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        analysis.RULES, f"aten::{name}", constant(analysis.RULES.get(f"aten::{name}", pointwise))
    )
    assert found_wrong(f"aten::{name}")


# A transfer function, its module, what is right in it and what is made of that.
WRONG: dict[str, tuple[str, ModuleType, str, str]] = {
    "tokens are normalised like channels": (
        "layer_norm",
        normalisation,
        "if not all(source.only_free(dim) for dim in last) or nodes_in(shapes):",
        "if False:",
    ),
    "every token is the last": ("select", slices, 'return bool(given["index"] == -1)', "return True"),
    "every place that is counted is the last": (
        "select",
        slices,
        ' or expr(index.meta["val"]) != ctx.seq - 1',
        "",
    ),
    "the last token's place is the last of everything": (
        "select",
        slices,
        "own != (_tokens(ctx),) or expr(",
        "expr(",
    ),
}


@pytest.mark.parametrize("rule", WRONG)
def test_a_wrong_rule_is_caught(rule: str) -> None:
    name, module, right, wrong = WRONG[rule]
    with broken(module, right, wrong):
        assert found_wrong(f"aten::{name}")


# Whole decoders: hits, and refusals with their reasons


class Placed(NanoGPT):
    """NanoGPT with its last hidden states changed by a function of itself."""

    def __init__(self, place: Callable[[Tensor, Tensor], Tensor]):
        super().__init__(TinyConfig(num_layers=1))
        self.place = place
        self.register_buffer("weight", torch.randn(61, 61, 5))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.place(super().forward(input_ids), input_ids)


def local(x: Tensor) -> Tensor:
    """Experts by a loop of masks: every expert for every token."""
    return torch.stack([x * (x.argmax(-1, keepdim=True) % 3 == e) * (e + 1) for e in range(3)]).sum(0)


def routed(x: Tensor, ordered: bool = True) -> Tensor:
    """Tokens in the order of their experts and back; not ordered: back to the places of others."""
    flat = x.flatten(0, 1)
    choice = flat[:, :4].topk(2).indices.flatten()
    order = choice.argsort()
    rows = flat[order // 2] * 2
    back = order.argsort() if ordered else order
    return rows[back].unflatten(0, (-1, 2)).sum(1).view_as(x)


def chosen(x: Tensor, ids: Tensor, other: bool = False) -> Tensor:
    """Experts by masks: x[mask] through an expert, and back to where the mask (or another) shows."""
    found = torch.zeros_like(x)
    for expert in range(2):
        mask = ids % 2 == expert
        back = (ids + 1) % 2 == expert if other else mask
        found = found.index_put((back,), x[mask] * (expert + 1))
    return found


def capacity(x: Tensor, ids: Tensor) -> Tensor:
    """Experts that take no more than 40 tokens of all rows."""
    hot = F.one_hot(x.flatten(0, 1)[:, :4].argmax(-1), 4)
    kept = hot * (hot.cumsum(0) <= 40)
    return x * kept.sum(-1).view(x.shape[0], x.shape[1], 1)


ACCEPTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plain": lambda x, ids: x,
    "a gate of the token": lambda x, ids: x * ids.ne(3)[..., None],
    "rows flattened": lambda x, ids: x.flatten(0, 1).softmax(-1).unflatten(0, (x.shape[0], -1)),
    "channels rolled": lambda x, ids: x.roll(1, -1) + x.flip(-1) + x.cumsum(-1),
    "channels sorted": lambda x, ids: x.sort(-1).values + x.topk(3, -1).values[..., :1],
    "convolution over channels": lambda x, ids: F.conv1d(
        x.flatten(0, 1)[:, None], torch.ones(1, 1, 3), padding=1
    ).view_as(x),
    "positions masked": lambda x, ids: torch.where(torch.arange(x.shape[1])[:, None] % 7 < 3, x, -x),
    "dense experts": lambda x, ids: local(x),
    "sorted experts": lambda x, ids: routed(x),
    "chosen by masks": lambda x, ids: chosen(x, ids),
    "one row each": lambda x, ids: x[torch.arange(x.shape[0])],
    "an id looked up": lambda x, ids: x + torch.arange(61.0)[ids][..., None],
    "a mask of ids written": lambda x, ids: x + ids.clone().masked_fill(ids == 3, 0)[..., None],
}
REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "causal convolution, dilated": (
        lambda x, ids: F.conv1d(F.pad(x.mT, (32, 0)), torch.ones(61, 1, 2), dilation=32, groups=61).mT,
        "aten.pad.*it pads",
    ),
    "convolution of three tokens": (
        lambda x, ids: F.conv1d(x.mT, torch.ones(61, 1, 3), padding=1, groups=61).mT,
        "aten.conv1d.*a kernel of 3, dilated by 1, over|aten.conv1d.*a kernel of 3, dilated by 1 over",
    ),
    "shift by 20": (
        lambda x, ids: x + F.pad(x, (0, 0, 20, 0))[:, : x.shape[1]],
        "aten.pad.*along rows or tokens",
    ),
    "rolled": (lambda x, ids: x + x.roll(1, 1), r"aten.roll.*it rolls \[batch, token, 61\]"),
    "mean over tokens": (lambda x, ids: x - x.mean(1, keepdim=True), "aten.mean.*over the sequence"),
    "mean over rows": (lambda x, ids: x - x.mean(0, keepdim=True), "aten.mean.*over"),
    "the greatest of all tokens": (
        lambda x, ids: x + x.topk(1, 1).values,
        "aten.topk.*the greatest of .* along rows or tokens",
    ),
    "the greatest so far": (lambda x, ids: x + x.cummax(1).values, "aten.cummax.*along rows or tokens"),
    "any separator": (lambda x, ids: x * (ids == 7).any(1)[:, None, None], "aten.any.*over the sequence"),
    "a triangle of averages": (
        lambda x, ids: torch.ones(x.shape[1], x.shape[1]).tril() @ x,
        "aten.matmul.*over rows or tokens",
    ),
    "restarts at a separator": (
        lambda x, ids: x + torch.where(ids == 7, torch.arange(x.shape[1]), 0).cummax(1).values[..., None],
        "aten.cummax",
    ),
    "expert capacity": (capacity, r"aten.cumsum.*of \[batch x token, 4\] along rows or tokens"),
    "experts, back to others' places": (lambda x, ids: routed(x, False), "."),
    "back to where another mask shows": (lambda x, ids: chosen(x, ids, True), "it writes .* where a mask"),
    "the first row for all": (lambda x, ids: x + x[:1], "a slice along the rows of the batch"),
    "the first token for all": (lambda x, ids: x + x[:, 0][:, None], "token 0 is taken for all"),
    "sorted tokens": (lambda x, ids: x.sort(1).values, "aten.sort.*along rows or tokens"),
    "tokens by ids": (
        lambda x, ids: x.gather(1, (ids % 3)[..., None].expand_as(x)),
        "index the tokens' own values",
    ),
    "rows and tokens swapped": (
        lambda x, ids: x.transpose(0, 1).reshape(x.shape[0], x.shape[1], 61),
        r"aten.reshape.*it cuts \[token, batch, 61\] into",
    ),
    "tokens of one order added to those of another": (
        lambda x, ids: (x.flatten(0, 1) + x.transpose(0, 1).flatten(0, 1)).unflatten(0, (x.shape[0], -1)),
        r"aten.add.*it aligns \[batch x token, 61\] with \[token x batch, 61\]",
    ),
    "attention beside": (
        lambda x, ids: x + torch.softmax(x @ x.mT, -1).sum(-1, keepdim=True),
        "every token meets every other",
    ),
    "the length as a number": (lambda x, ids: x * x.shape[1], "the sequence length enters mul as a number"),
    "the length as a place": (
        lambda x, ids: x * torch.arange(61.0)[x.shape[1] - 1],
        "the sequence length enters select as a number",
    ),
    "an operator that is not known": (
        lambda x, ids: x + torch.cdist(x, x).sum(-1, keepdim=True),
        "not known|over rows",
    ),
}


def captured_logits(place: Callable[[Tensor, Tensor], Tensor]) -> tuple[Dependence, Node]:
    """The analysis of a decoder, with its attention cut, and its logits."""
    model: nn.Module = Placed(place).eval()
    dims = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    with torch.no_grad():
        module = export(model, (torch.randint(0, 61, (3, 11)),), dynamic_shapes=dims).module(
            check_guards=False
        )
    assert isinstance(module, GraphModule)
    for node in list(module.graph.nodes):
        if node.op == "call_module":
            module.graph.erase_node(node)
    placeholder = next(node for node in module.graph.nodes if node.op == "placeholder")
    placeholder.target = placeholder.name = "input_ids"
    clean(module)
    found = Dependence(module)
    for node in module.graph.nodes:
        if "scaled_dot_product" in str(node.target):
            found.cut(node)
    output = next(node for node in module.graph.nodes if node.op == "output")
    return found, output.args[0][0]  # type: ignore[index, return-value]


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_is_a_function_of_each_token_is_accepted(case: str) -> None:
    found, logits = captured_logits(ACCEPTED[case])
    assert found.problem([], [logits]) is None
    assert found.is_local(logits) and found.token_dim(logits) == 1 and found.batch_dim(logits) == 0
    assert found.limit([logits]) is None


@pytest.mark.parametrize("case", REFUSED)
def test_what_mixes_tokens_or_rows_is_refused_with_its_operator_and_line(case: str) -> None:
    place, reason = REFUSED[case]
    found, logits = captured_logits(place)
    problem = found.problem([], [logits])
    assert problem is not None
    assert re.search(reason, problem.reason), problem.reason
    assert problem.source.startswith("test_dependence.py:")


def test_the_last_token_alone_is_its_own_level() -> None:
    found, logits = captured_logits(lambda x, ids: x[:, -1:])
    assert found.is_last(logits) and found.problem([], [logits]) is None
    problem = found.problem([logits])
    assert problem is not None and "only the last token is used" in problem.reason


def test_a_comparison_of_the_length_is_a_limit() -> None:
    def scaled(x: Tensor, ids: Tensor) -> Tensor:
        longest = torch.arange(x.shape[1]).max() + 1
        return torch.where(longest > 100, 0.5 * x, x)

    found, logits = captured_logits(scaled)
    assert found.problem([], [logits]) is None
    limit = found.limit([logits])
    assert limit is not None and limit[0] == 100 and "test_dependence.py:" in limit[1]


def test_a_cut_makes_what_follows_anew() -> None:
    found, logits = captured_logits(lambda x, ids: x.cumsum(1) * 2)
    assert found.problem([], [logits]) is not None
    mixed = next(node for node in found.graph_module.graph.nodes if "cumsum" in str(node.target))
    found.cut(mixed)
    assert found.problem([], [logits]) is None


def test_half_precision_positions_hold_as_far_as_torch_rounds_them_alike() -> None:
    found, logits = captured_logits(
        lambda x, ids: x + torch.arange(x.shape[1], dtype=torch.bfloat16)[:, None].float()
    )
    limit = found.limit([logits])
    assert found.problem([], [logits]) is None
    own = torch.arange(20_000, dtype=torch.bfloat16)
    first = (own != torch.arange(20_000).bfloat16()).nonzero().flatten()
    assert (limit[0] if limit else None) == (int(first[0]) if len(first) else None)
