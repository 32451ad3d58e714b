"""The softmax input of one block as a function of its raw scores, evaluated at concrete sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from kvcompile.passes.base import ancestors, expr, shape
from kvcompile.passes.masks import LENGTHS, Constant
from kvcompile.passes.probe import Prober, Refused

SHORT = 2 * LENGTHS[1]  # up to here evaluations are in float64


@dataclass(frozen=True)
class Sink:
    """A share of each row's probability that weighs no value.

    column: which column of the softmax input has it, 0 or -1; or, where the softmax has none,
    logits: what an additional column would hold, [H]
    """

    column: int | None = None
    logits: Tensor | None = None


class SoftmaxInput:
    """The softmax input as a function of the raw scores, in the dimensions [B, H, S, columns]."""

    def __init__(self, prober: Prober, raw: Node, final: Node, dynamic: Node | None = None):
        """
        raw:     [.., S, S] scores
        final:   [.., S, .., S or S + 1], the last dimension normalised by the softmax
        dynamic: a mask [.., S, S] that is added and depends on activations: a causal one stands in for it
        """
        self.prober, self.raw, self.final, self.dynamic = prober, raw, final, dynamic
        self.row = row_dimension(prober, final)
        self.chain = _between(raw, final)
        leaves = [
            n for node in self.chain for n in node.all_input_nodes if n not in self.chain and n is not raw
        ]
        self.leaves = list(dict.fromkeys(leaf for leaf in leaves if leaf.op != "get_attr" and shape(leaf)))
        self.heads = math.prod(prober.concrete(raw, 1, 1))

    def __call__(
        self,
        batch: int,
        seq: int,
        scores: Tensor | None = None,
        seed: int = 0,
        constant: Constant | None = None,
    ) -> Tensor:
        """f(scores) [B, H, S, columns] for scores of raw's shape (None: zeros), in float64 or float32."""
        prober, raw = self.prober, self.raw
        if scores is None:
            scores = torch.zeros(prober.concrete(raw, batch, seq), dtype=torch.float64, device=prober.device)
        native = raw.meta["val"].dtype
        # float64 finds the scale exactly even where the model computes in bfloat16; some operators decline it
        for dtype in (native,) if seq > SHORT else (torch.float64, native):
            try:
                known = (
                    {} if constant else dict(zip(self.leaves, self._shared(batch, seq, seed), strict=True))
                )
                if self.dynamic is not None:
                    known[self.dynamic] = stand_in(prober, self.dynamic, batch, seq)
                found = prober.run(
                    [self.final], batch, seq, {raw: scores.to(dtype), **known}, seed, constant
                )[0]
                return rows(wide(found), batch, self.row)
            except Refused:
                if dtype != torch.float64:
                    raise
        raise AssertionError

    def _shared(self, batch: int, seq: int, seed: int) -> list[Any]:
        """Values of the nodes that enter the scores from outside; layers share them."""
        if not self.leaves or seq > 256:  # large masks are not worth keeping
            return self.prober.run(self.leaves, batch, seq, None, seed) if self.leaves else []
        key = ("leaves", tuple(self.leaves), batch, seq, seed)
        if key not in self.prober.memo:
            self.prober.memo[key] = self.prober.run(self.leaves, batch, seq, None, seed)
        found: list[Any] = self.prober.memo[key]
        return found

    @property
    def signature(self) -> Any:
        """Two layers with equal signatures have equal masks and biases."""
        return tuple(self.leaves), self.row, tuple(_signature(n, self.raw, self.leaves) for n in self.chain)


def stand_in(prober: Prober, mask: Node, batch: int, seq: int) -> Tensor:
    """A causal mask in the shape and dtype of `mask`, which is added to scores."""
    hidden = torch.ones(seq, seq, dtype=torch.bool, device=prober.device).triu(1)
    size = prober.concrete(mask, batch, seq)
    dtype = mask.meta["val"].dtype
    return torch.zeros(size, dtype=dtype, device=prober.device).masked_fill(hidden, torch.finfo(dtype).min)


def keys(found: Tensor, sink: Sink | None) -> Tensor:
    """The columns of the keys."""
    if sink is None or sink.column is None:
        return found
    return found[..., 1:] if sink.column == 0 else found[..., :-1]


def sink_logits(found: Tensor, sink: Sink) -> Tensor:
    """The sink logit of each row of a softmax input, [B, H, S]."""
    if sink.column is not None:
        return found[..., sink.column]
    assert sink.logits is not None
    return sink.logits[None, :, None].expand(found.shape[:-1])


def row_dimension(prober: Prober, final: Node) -> int:
    """Which dimension of a softmax input runs over the queries; raises Refused where that is not clear."""
    sizes = [expr(size) for size in shape(final)]
    found = [i for i, size in enumerate(sizes[:-1]) if size == prober.seq]
    if len(found) != 1:
        raise Refused(f"the softmax input of shape {tuple(sizes)} has no dimension for the queries alone")
    return found[0]


def rows(found: Tensor, batch: int, row: int) -> Tensor:
    """Dimension `row` behind the others but the last, and those as [B, H]: [B, H, S, columns]."""
    found = found.movedim(row, -2)
    if found.dim() == 2:
        return found.expand(batch, 1, *found.shape)
    return found.reshape(batch, -1, *found.shape[-2:])


def wide(found: Tensor) -> Tensor:
    """Short evaluations in float64; long ones as they are, halves in float32."""
    if found.shape[-1] <= SHORT:
        return found.double()
    return found.float() if found.dtype in (torch.float16, torch.bfloat16) else found


def _between(raw: Node, final: Node) -> list[Node]:
    """The nodes computed from `raw` that `final` needs, in graph order."""
    behind = ancestors([final], {raw})
    inside = {raw}
    chain = []
    for node in raw.graph.nodes:
        if node in behind and node not in inside and any(used in inside for used in node.all_input_nodes):
            inside.add(node)
            chain.append(node)
    return chain


def _signature(node: Node, raw: Node, leaves: list[Node]) -> Any:
    """A node of a score chain without its identity: two layers with equal signatures mask alike."""
    plain = [
        leaf if not isinstance(leaf, Node) or leaf in leaves else "chain"
        for leaf in torch.utils._pytree.tree_leaves((node.args, dict(node.kwargs)))
    ]
    names = [n.target for n in node.all_input_nodes if n.op == "get_attr"]
    return (str(node.target), str(plain), str(names))
