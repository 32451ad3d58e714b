"""A detection rule that is added by its file and its place in `ANCHORS` has everything: rewriting and verification.

It does what the section "Add a detection rule" of CONTRIBUTING.md says, and nothing else. Two rules of the test: one
for a spelling of softmax, and one for the attention operator of a library, whose keys and values have fewer heads.
"""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

import kvcompile
from kvcompile.errors import DetectionError, VerificationError
from kvcompile.passes.detect import detect
from kvcompile.passes.graph import expr, shape, target_name
from kvcompile.passes.probe.probe import Prober, Refused
from kvcompile.passes.records import NoMatch
from kvcompile.passes.rules.block import Block, no_match
from kvcompile.passes.rules.leaves import leaves_of
from kvcompile.passes.rules.weighing import around
from tests.passes.score_mod.test_masks import DIM, One

# A spelling: exp(x - logsumexp(x)), whose sum lost its dimension and got it back


def by_logarithm(module: One, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    size = q.shape[2]
    scores = q @ k.transpose(-1, -2) * DIM**-0.5
    scores = scores.masked_fill(torch.ones(size, size, dtype=torch.bool).triu(1), -math.inf)
    return torch.exp(scores - scores.logsumexp(-1)[..., None]) @ v


def is_exp(node: Node, prober: Prober) -> bool:
    """exp over queries and keys of a difference."""
    if target_name(node) != "exp" or expr(shape(node)[-1]) != prober.seq:
        return False
    return target_name(node.all_input_nodes[0]) == "sub"


def around_exp(node: Node, prober: Prober) -> Block | NoMatch:
    scores = node.all_input_nodes[0].args[0]
    assert isinstance(scores, Node)
    return around("exp_logarithm", node, scores, prober)


# An operator: causal attention whose keys and values have fewer heads, as FlashAttention's has them


@torch.library.custom_op("kvtest_rule::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """q [B, Hq, S, D], k and v [B, Hkv, S, D]; window: tokens that a query sees; 0: all before it."""
    position = torch.arange(q.shape[2])
    distance = position[:, None] - position
    seen = (distance >= 0) & (distance < window) if window else distance >= 0
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    return torch.empty_like(q)


def of_a_library(module: One, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, 0)


def windowed(module: One, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, 7)


def is_attend(node: Node, prober: Prober) -> bool:
    return node.target is torch.ops.kvtest_rule.attend.default


def operands(node: Node, prober: Prober) -> Block | NoMatch:
    if node.args[3]:
        return no_match("library", f"a window of {node.args[3]} is not read", node)
    return without_window(node, prober)


def without_window(node: Node, prober: Prober) -> Block | NoMatch:
    q, k, v = node.args[:3]
    assert isinstance(q, Node) and isinstance(k, Node) and isinstance(v, Node)
    heads, dim = int(shape(q)[1]), int(shape(q)[-1])
    try:
        found = prober.reader.sdpa(None, True, dim**-0.5, heads, dim)
        leaves = leaves_of(found.leaves, prober)
    except Refused as refused:
        return no_match("library", str(refused), node)
    return Block(
        "library",
        q,
        k,
        v,
        node,
        False,
        found.sm_scale,
        found.mask,
        mod=found.mod,
        leaves=leaves,
        grouped=True,
    )


RULES = {"exp_logarithm": (is_exp, around_exp), "library": (is_attend, operands)}
MODELS = {"exp_logarithm": (by_logarithm, 4), "library": (of_a_library, 2)}
UNKNOWN = "no softmax attention over the sequence"


def add(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule in a module of its own, behind those of the tree."""
    module = ModuleType(name)
    module.NAME, (module.is_candidate, module.match) = name, RULES[name]  # type: ignore[attr-defined]
    monkeypatch.setattr(detect, "ANCHORS", (*detect.ANCHORS, module))


@pytest.mark.parametrize("name", RULES)
def test_a_new_rule_needs_its_file_and_its_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = One(*MODELS[name]).eval()
    recipe = {"cache": {"keys": {"dtype": "model"}}, "compile": {"mode": "none"}}
    with pytest.raises(DetectionError, match=UNKNOWN):
        kvcompile.optimize(model, recipe, max_tokens=64)
    add(name, monkeypatch)
    fast = kvcompile.optimize(model, recipe, max_tokens=64)  # which verifies it
    (decision,) = fast.plan.decisions
    assert decision.idiom == name and decision.num_kv_heads == MODELS[name][1]
    assert "lossless" in {check.name for check in fast.report["checks"]}
    ids = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        cached = torch.cat([fast(ids[:, :20]), *(fast(ids[:, i : i + 1]) for i in range(20, 24))], dim=1)
        torch.testing.assert_close(cached, model(ids), rtol=1e-4, atol=1e-5)


def test_a_near_miss_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    add("library", monkeypatch)
    with pytest.raises(DetectionError, match=r"1 of 1 attention blocks .*\n.*a window of 7 is not read"):
        kvcompile.optimize(One(windowed, 2).eval(), "baseline", max_tokens=64)


def test_a_rule_that_is_wrong_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "library", (is_attend, without_window))
    add("library", monkeypatch)
    with pytest.raises(VerificationError):
        kvcompile.optimize(One(windowed, 2).eval(), "baseline", max_tokens=64)
