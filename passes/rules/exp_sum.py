"""Rule `exp_sum`: attention whose softmax is spelled with exp.

    p = exp(x) / sum(exp(x)),   exp(x - max) / sum(..),   exp(x) / (1 + sum(..)),   exp(x - logsumexp(x))

Only where to look is matched here; what it computes is checked by evaluating (`rules/weighing.py`).
"""

from __future__ import annotations

from torch.fx import Node

from kvcompile.passes.graph import expr, shape, target_name
from kvcompile.passes.probe.probe import Prober
from kvcompile.passes.records import NoMatch
from kvcompile.passes.rules.block import Block, no_match
from kvcompile.passes.rules.weighing import around

NAME = "exp_sum"
_CASTS = ("to", "_to_copy", "clone", "contiguous")
_LOGARITHMS = ("logsumexp", "log", "log_softmax", "_log_softmax")


def is_candidate(node: Node, prober: Prober) -> bool:
    """exp over queries and keys that is divided by something, or whose exponent is a logarithm's difference."""
    sizes = [expr(size) for size in shape(node)]
    if len(sizes) < 3 or sizes[-1] != prober.seq or prober.seq not in sizes[:-1]:
        return False
    if target_name(node) == "div":
        return target_name(_uncast(node.args[0])) == "exp"
    return target_name(node) == "exp" and any(target_name(n) in _LOGARITHMS for n in _near(node))


def match(node: Node, prober: Prober) -> Block | NoMatch | tuple[Block, ...]:
    """The block around probabilities made with exp, or why there is none."""
    exponent = _uncast(node.args[0] if target_name(node) == "exp" else _uncast(node.args[0]).args[0])
    found: Block | NoMatch | tuple[Block, ...] = no_match(NAME, "exp has no exponent", node)
    for final in _inputs(exponent):
        found = around(NAME, node, final, prober)
        if not isinstance(found, NoMatch):
            return found
    return found


def _inputs(exponent: Node) -> list[Node]:
    """What may be the softmax input: x of x - max(x) or of log_softmax(x) before what is computed from it."""
    first = exponent.args[0] if exponent.args else None
    derived = target_name(exponent) in ("sub", *_LOGARITHMS) and isinstance(first, Node)
    return [_uncast(first), exponent] if derived else [exponent]


def _near(node: Node) -> list[Node]:
    """The exponent of an exp, and what that is computed from."""
    exponent = _uncast(node.args[0])
    return [exponent, *(_uncast(n) for n in exponent.all_input_nodes)]


def _uncast(value: object) -> Node:
    assert isinstance(value, Node)
    while target_name(value) in _CASTS and isinstance(value.args[0], Node):
        value = value.args[0]
    return value
