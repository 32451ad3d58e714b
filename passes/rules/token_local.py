"""Rule `token_local`: outside its attention blocks, a decoder with a KV cache treats each token alone.

A convolution over the sequence, a token shift or a recurrence would need state of its own beside the KV
cache. Checked by evaluating: attention results are replaced by fixed random values, one token of each row changes
(in the middle, the first, the last), and every q, k, v and logit at the other positions must stay. Costs two
forward passes over 3 x 13 tokens.

Mixers (opaque modules whose state is carried, passes/state.py) mix tokens as attention does: their results are
held fixed, too, and their inputs must be local. So do running sums that count tokens (passes/running_sum.py). Any
other opaque module is evaluated like the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from kvcompile.kernels.opaque import find
from kvcompile.passes.base import ancestors, expr, shape
from kvcompile.passes.opaque import is_mixer
from kvcompile.passes.probe import Prober
from kvcompile.passes.rules.block import no_match
from kvcompile.passes.running_sum import is_running_sum
from kvcompile.types import AttentionSite, NoMatch

NAME = "token_local"
_BATCH, _SEQ = 3, 13
_CHANGED = (6, 0, _SEQ - 1)  # the token of each row that is changed


def check(sites: Sequence[AttentionSite], logits: Node, prober: Prober) -> NoMatch | None:
    """None when tokens only meet in the attention blocks, else where they meet first."""
    generator = torch.Generator().manual_seed(0)
    results: dict[Node, Tensor] = {}
    for site in sites:
        values = torch.randn(prober.concrete(site.out, _BATCH, _SEQ), generator=generator)
        results[site.out] = values.to(prober.device, site.dtype)
    mixers = [node for node in logits.graph.nodes if is_mixer(node)]
    for node in mixers:
        whole = _result_of_all_tokens(node)
        if whole is not None:
            return no_match(
                NAME, f"a result of the recurrent {find(str(node.args[1])).path} is for all tokens", whole
            )
    operands = [node for site in sites for node in (site.q, site.k, site.v)]
    operands += [node for site in sites if site.dynamic for node in site.dynamic.sources]
    needed = ancestors([*operands, logits], set(results))
    mixers += [node for node in logits.graph.nodes if node in needed and is_running_sum(node)]
    held: dict[Node, Any] = dict(results)
    held |= dict(zip(mixers, _evaluate(mixers, held, False, prober), strict=True))
    given = [source for node in mixers for source in node.all_input_nodes]
    wanted = list(dict.fromkeys([*operands, *given, logits]))
    pair = [_evaluate(wanted, held, changed, prober) for changed in (False, True)]
    counted = [
        node for node, a, b in zip(wanted, *pair, strict=True) if _differs(node, a, b, prober, exact=True)
    ]
    if not counted:
        return None
    # Only now, with a message to write: the first node of all at which another position changes.
    every = [
        node for node in logits.graph.nodes if node.op == "call_function" and shape(node) and node not in held
    ]
    pair = [_evaluate(every, held, changed, prober) for changed in (False, True)]
    first = next((n for n, a, b in zip(every, *pair, strict=True) if _differs(n, a, b, prober)), counted[0])
    return no_match(
        NAME, f"tokens mix outside attention, in {first.target}: that needs state besides K and V", first
    )


def _result_of_all_tokens(node: Node) -> Node | None:
    """A result of a mixer that is used and has no axis of tokens: it would be another for each chunk."""
    outputs = find(str(node.args[1])).outputs
    for user in node.users:
        index = user.args[1]
        assert isinstance(index, int)
        if outputs[index].axis("S") is None:
            return user
    return None


def _evaluate(wanted: list[Node], held: dict[Node, Any], changed: bool, prober: Prober) -> list[Tensor]:
    inputs = prober.inputs(_BATCH, _SEQ)
    inputs["input_ids"] = inputs["input_ids"].clone()
    for row, column in enumerate(_CHANGED if changed else ()):
        inputs["input_ids"][row, column] = 1 - inputs["input_ids"][row, column]
    if "logits_to_keep" in inputs:
        inputs["logits_to_keep"] = torch.arange(_SEQ, device=prober.device)
    return prober.evaluate(wanted, inputs, held)


def _differs(node: Node, before: Tensor, after: Tensor, prober: Prober, exact: bool = False) -> bool:
    """Whether anything but the changed position of each row changed; nodes without both axes say nothing.

    exact: of integers, too (elsewhere they are indices, of which an order says nothing).
    """
    sizes = [expr(size) for size in shape(node)]
    rows = [i for i, size in enumerate(sizes) if size == prober.batch]
    columns = [i for i, size in enumerate(sizes) if size in (prober.seq, prober.keep)]
    if len(rows) != 1 or len(columns) != 1 or not (exact or before.is_floating_point()):
        return False
    change = (after.float() - before.float()).abs().nan_to_num()
    change = change.movedim((rows[0], columns[0]), (0, 1)).reshape(_BATCH, _SEQ, -1).amax(-1)
    for row, column in enumerate(_CHANGED):
        change[row, column] = 0
    tolerance = 1e-4 if before.dtype in (torch.float32, torch.float64) else 3e-2
    return bool(change.max() > tolerance * before.float().abs().max().clamp(max=1e6))
