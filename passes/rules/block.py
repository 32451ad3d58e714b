"""What an anchor rule returns: the operands of one attention block, before heads are resolved."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from kvcompile.expression import ScoreMod
from kvcompile.passes.graph import module_path, source_line
from kvcompile.passes.records import Leaf, NoMatch
from kvcompile.specs import MaskSpec


@dataclass(frozen=True)
class Block:
    """One attention block as the graph spells it.

    q: [.., S, D], v: [.., S, Dv] operands; k: [.., D, S] when `k_transposed`, else [.., S, D]
    out: the node whose value is the attention's result
    scores: q's product with k [.., S, S], where the graph has one: q and k are in its batch layout, else in out's
    slopes: ALiBi's, [Hq]; sinks: a logit per query head [Hq]
    grouped: whether the operator itself repeats k and v, which then may have fewer heads than q
    mod, leaves: what becomes of the scores besides, and what that reads
    """

    idiom: str
    q: Node
    k: Node
    v: Node
    out: Node
    k_transposed: bool
    sm_scale: float
    mask: MaskSpec
    scores: Node | None = None
    softcap: float | None = None
    slopes: Tensor | None = None
    sinks: Node | None = None
    mod: ScoreMod | None = None
    leaves: tuple[Leaf, ...] = ()
    grouped: bool = False


def no_match(rule: str, reason: str, node: Node) -> NoMatch:
    """A miss at `node`, with its module and source line."""
    return NoMatch(rule, reason, node.name, source_line(node), module_path(node))
