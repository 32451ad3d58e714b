"""What is run and what that gives: random tokens, the chunks they come in, and the original model's logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.fx import Node

from kvcompile.kernels.policy_scored import Choice
from kvcompile.passes.capture import eval_mode
from kvcompile.passes.state import attributes_restored
from kvcompile.pipeline import Front

REPORT = "The rewritten model was not returned. Please report this model; verify: off skips the check"


@dataclass(frozen=True)
class Run:
    """Outputs of a run over [B, T] tokens: logits [B, T, V], and each site's [B, Hq, T, Dv].

    kept:    by layer whose retention goes by scores: after each chunk, its tokens [B, Hs, N], -1 for none
    choices: by such a layer, what an oracle would have chosen by
    """

    logits: Tensor
    sites: tuple[Tensor, ...]
    kept: Mapping[int, Sequence[Tensor]] = field(default_factory=dict)
    choices: Mapping[int, Sequence[Choice]] = field(default_factory=dict)


def probe(front: Front, tokens: int) -> tuple[Tensor, Tensor]:
    """Token ids [2, T] (two different rows), and padding [2]: ragged where the model takes positions."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, _vocabulary(front), (2, tokens), generator=generator).to(front.device)
    pads = [0, min(5, tokens - 1)] if front.ragged else [0, 0]
    return ids, torch.tensor(pads, device=front.device)


def _vocabulary(front: Front) -> int:
    """Rows of the table that input_ids select from."""
    start = next(n for n in front.canonical.graph.nodes if n.name == "input_ids")
    for user in start.users:
        if user.target is torch.ops.aten.embedding.default and user.args[1] is start:
            table = user.args[0]
            assert isinstance(table, Node)
            return int(table.meta["val"].shape[0])
    return 2


def original_logits(model: nn.Module, front: Front, ids: Tensor) -> Tensor:
    """The original model's logits, by the door that its users take."""
    with eval_mode(model), attributes_restored(model), torch.no_grad():
        out = model(ids, use_cache=False) if hasattr(model, "config") else model(ids)
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
    return leaves[front.captured.logits_index]


def fit(chunks: Sequence[int], limit: int | None) -> tuple[int, ...]:
    """As many of the chunks as a small limit of tokens has room for."""
    kept: list[int] = []
    for size in chunks:
        if limit is not None and sum(kept) + size > limit:
            size = limit - sum(kept)
        if size > 0:
            kept.append(size)
    return tuple(kept)


def pieces(tokens: int, chunk: int) -> list[int]:
    """Sizes of at most `chunk` that sum to `tokens`."""
    return [min(chunk, tokens - start) for start in range(0, tokens, chunk)]
