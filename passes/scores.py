"""Scores: what happens between Q K^T and the softmax, found by evaluating the graph, never assumed.

The value that enters the softmax, as a function of the raw scores T = Q K^T, is evaluated for concrete T, lengths
and tokens, and must be

    f(T)_ij = phi(T_ij) + bias_ij + (row constant)    where the mask shows key j to query i,
    f(T)_ij <= -1000 below the row's largest          where it hides it,
    phi(t) = sm_scale * t    or    softcap * tanh(sm_scale * t / softcap),

with mask and bias functions of positions alone (two token inputs must agree, two rows of a batch too), and one
more column, a constant per head, where the block has sink logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from kvcompile.passes import bias as biases
from kvcompile.passes.base import ancestors, expr, shape
from kvcompile.passes.bias import Bias
from kvcompile.passes.evaluate import depends_on
from kvcompile.passes.masks import LENGTHS, Constant
from kvcompile.passes.positional import Positional, positional
from kvcompile.passes.probe import DependsOnTokens, Prober, Refused
from kvcompile.passes.response import response
from kvcompile.passes.softmax_input import (
    Sink,
    SoftmaxInput,
    keys,
    rows,
    sink_logits,
    stand_in,
    wide,
)
from kvcompile.types import MaskSpec


@dataclass(frozen=True)
class Probed:
    """What a probe found out about one attention block. sinks: measured logits, float64 [H]."""

    sm_scale: float
    mask: MaskSpec
    softcap: float | None = None
    bias: Bias | None = None
    sinks: Tensor | None = None


def probe_scores(
    prober: Prober, raw: Node, final: Node, sink: Sink | None, head_dim: int, dynamic: Node | None = None
) -> Probed:
    """Scale, softcap, mask, bias and sinks between the raw scores [.., S, S] and the softmax input.

    sink: what else takes part in the softmax, if anything.
    dynamic: a mask that depends on activations and is added to the scaled and capped scores; it is left out.
    Raises Refused with what no canonical attention expresses.
    """
    f = SoftmaxInput(prober, raw, final, dynamic)
    seq = LENGTHS[0]
    zero, again = f(2, seq), f(2, seq, seed=1)
    level, other = keys(zero, sink), keys(again, sink)
    visible = biases.shown(level)
    if not torch.equal(visible, biases.shown(other)):
        raise DependsOnTokens("the mask depends on the tokens or on activations, not on positions alone")
    sinks = None if sink is None else _sinks(f, sink, (zero, again))
    if not torch.equal(torch.where(visible, level, 0), torch.where(visible, other, 0)):
        raise DependsOnTokens("the scores get a bias that depends on the tokens or on activations")

    def at(length: int, constant: Constant | None) -> Tensor:
        return keys(f(1, length, constant=constant), sink)[0]

    memo = prober.memo
    if f.signature not in memo:
        memo[f.signature] = positional(prober, at, level, ancestors([final], {raw}), f.heads)
    found = memo[f.signature]
    if isinstance(found, Refused):
        raise found
    scale, softcap = response(f, sink, visible, head_dim)
    if dynamic is not None:
        _check_added(f, dynamic, sink, visible)
    return Probed(scale, found.mask, softcap, found.bias, sinks)


def dynamic_leaf(prober: Prober, raw: Node, final: Node) -> Node | None:
    """The one mask [.., S, S] between scores and softmax that the tokens decide, where it is added to the scores."""
    found = [
        leaf
        for leaf in SoftmaxInput(prober, raw, final).leaves
        if sum(expr(size) == prober.seq for size in shape(leaf)) > 1 and depends_on(leaf, ("input_ids",))
    ]
    return found[0] if len(found) == 1 and found[0].meta["val"].is_floating_point() else None


def _check_added(f: SoftmaxInput, dynamic: Node, sink: Sink | None, visible: Tensor) -> None:
    """Whatever the mask holds must come out added to what the scores alone give."""
    batch, seq = visible.shape[0], visible.shape[-1]
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(f.prober.concrete(f.raw, batch, seq), generator=generator, dtype=torch.float64)
    causal = stand_in(f.prober, dynamic, batch, seq)
    drawn = torch.randn(causal.shape, generator=generator, dtype=torch.float64).to(causal.device)
    alone = keys(f(batch, seq, scores.to(causal.device)), sink)
    # float64 as in f: a mask of the model's own dtype would round the sum
    values = {f.raw: scores.to(causal.device), dynamic: causal.double() + drawn}
    values |= {leaf: f.prober.run([leaf], batch, seq)[0] for leaf in f.leaves if leaf is not dynamic}
    found = keys(rows(wide(f.prober.run([f.final], batch, seq, values)[0]), batch, f.row), sink)
    change = found - alone
    change = change - change.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    wanted = (drawn - drawn.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)).expand_as(change)
    if float((change - wanted)[visible].abs().max()) > 1e-4:
        raise Refused("the mask depends on activations and is not added to the scaled scores")


def probe_mask(prober: Prober, node: Node) -> Positional:
    """Mask and bias that an attn_mask argument (boolean, or added to the scores) is; raises Refused."""

    def raw(batch: int, seq: int, seed: int, constant: Constant | None) -> Tensor:
        found: Tensor = prober.run([node], batch, seq, None, seed, constant)[0]
        if found.dtype == torch.bool:
            found = torch.zeros(found.shape, device=found.device).masked_fill_(~found, -torch.inf)
        while found.dim() < 4:
            found = found[None]
        return wide(found).expand(*found.shape[:2], seq, -1)

    if node not in prober.memo:
        first, second = (raw(2, LENGTHS[0], seed, None) for seed in (0, 1))
        if not torch.equal(first, second):
            raise DependsOnTokens("the mask depends on the tokens or on activations, not on positions alone")
        heads = math.prod(prober.concrete(node, 1, 1))
        region = ancestors([node])
        prober.memo[node] = positional(
            prober, lambda length, constant: raw(1, length, 0, constant)[0], first, region, heads
        )
    found = prober.memo[node]
    if isinstance(found, Refused):
        raise found
    assert isinstance(found, Positional)
    return found


def _sinks(f: SoftmaxInput, sink: Sink, probes: tuple[Tensor, Tensor]) -> Tensor:
    """The sink logits [H] relative to a zero score at the query's own key; raises Refused where they vary."""

    def measured(probe: Tensor) -> Tensor:
        return sink_logits(probe, sink) - keys(probe, sink).diagonal(dim1=-2, dim2=-1)

    one, other = (measured(probe) for probe in probes)
    first = one[0, :, 0]
    allowed = 1e-6 + 8 * torch.finfo(torch.float32).eps * float(first.abs().max())
    if float((one - other).abs().max()) > allowed:
        raise Refused("the sink logits depend on the tokens or on activations, not on weights alone")
    for found in (one, measured(f(1, min(LENGTHS[1], f.prober.max_seq_len)))):
        if float((found - first[:, None]).abs().max()) > allowed:
            raise Refused("the sink logits depend on the position, not on weights alone")
    return first
