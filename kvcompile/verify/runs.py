"""What is run and what that gives: the text, the pieces it comes in, and the original model's logits."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from kvcompile.errors import ModelError
from kvcompile.kernels.oracle.choice import Choice
from kvcompile.passes.capture.settings import eval_mode
from kvcompile.passes.recurrent.state import attributes_restored
from kvcompile.pipeline import Front
from kvcompile.util.serial import as_the_caller
from kvcompile.verify.ids import Vocabulary, vocabulary

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


def probe(front: Front, tokens: int, words: Vocabulary | None = None) -> tuple[Tensor, Tensor]:
    """Token ids [2, T] (two different rows), and padding [2]: ragged where the model takes positions."""
    ids = (words or vocabulary(front)).text(2, tokens).to(front.device)
    pads = [0, min(5, tokens - 1)] if front.ragged else [0, 0]
    return ids, torch.tensor(pads, device=front.device)


def original_logits(
    model: nn.Module, front: Front, ids: Tensor, keep: Tensor | None = None, pads: Tensor | None = None
) -> Tensor:
    """The original model's logits [B, T or K, V], by the door that its users take.

    keep: positions [K] whose logits are wanted, all between them
    pads: [B]; each row then runs alone, without its padding, and has zeros there

    Raises:
        ModelError: what comes out is no logits of every token.
    """
    if pads is None or not bool(pads.any()):
        return _original(model, front, ids, keep)
    rows = []
    for row, pad in zip(ids, pads.tolist(), strict=True):
        own = None if keep is None else keep[keep >= pad] - pad
        logits = _original(model, front, row[None, pad:], own)
        missing = (ids.shape[1] if keep is None else len(keep)) - logits.shape[1]
        rows.append(torch.nn.functional.pad(logits, (0, 0, missing, 0)))
    return torch.cat(rows)


def _original(model: nn.Module, front: Front, ids: Tensor, keep: Tensor | None) -> Tensor:
    if front.captured.last is not None:
        return _of_last_tokens(model, front, ids, range(ids.shape[1]) if keep is None else keep.tolist())
    # A model over several devices refuses an index on another device than that of its last layer.
    fewer = keep is not None and front.captured.inputs.logits_to_keep and not front.spread
    logits = _logits(model, front, ids, {"logits_to_keep": keep} if fewer else {})
    if not fewer:
        return chosen(logits, ids, keep)
    assert keep is not None
    return of_every_token(logits, ids[:, : len(keep)])


def _of_last_tokens(model: nn.Module, front: Front, ids: Tensor, positions: Iterable[int]) -> Tensor:
    """What a model that gives the last token's logits gives for the text up to each of some positions [B, K, V]."""
    found = [_logits(model, front, ids[:, : position + 1], {}) for position in positions]
    return torch.stack([logits if logits.dim() == 2 else logits[:, -1] for logits in found], dim=1)


def _logits(model: nn.Module, front: Front, ids: Tensor, more: dict[str, Any]) -> Tensor:
    """The output that holds logits, as it is."""
    options = {"use_cache": False} if _takes_use_cache(model) else {}
    with eval_mode(model), attributes_restored(model), torch.no_grad(), as_the_caller():
        out = model(ids, **options, **more)
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
    # Of a model over several devices, they may be elsewhere.
    return leaves[front.captured.logits_index].to(ids.device)


def _takes_use_cache(model: nn.Module) -> bool:
    """Whether the model may be told to keep no cache; a `config` of its own says nothing about that (nanoGPT)."""
    named = "use_cache" in inspect.signature(model.forward).parameters
    return named or isinstance(getattr(model, "config", None), PretrainedConfig)


def chosen(logits: Tensor, ids: Tensor, keep: Tensor | None) -> Tensor:
    """The logits of every token of ids [B, T], or of those at positions `keep` among them.

    Raises:
        ModelError: as `of_every_token`.
    """
    logits = of_every_token(logits, ids)
    return logits if keep is None else logits[:, keep]


def of_every_token(logits: Tensor, ids: Tensor) -> Tensor:
    """`logits`, if they are of every token of `ids` [B, T].

    Raises:
        ModelError: they have another shape.
    """
    if logits.dim() == 3 and logits.shape[:2] == ids.shape:
        return logits
    batch, tokens = ids.shape
    last = " It seems that the model returns those of the last token only: return those of all."
    alone = logits.dim() in (2, 3) and (logits.dim() == 2 or logits.shape[1] == 1)
    raise ModelError(
        f"expected logits of every token, [{batch}, {tokens}, vocabulary] for {batch} x {tokens} token ids, and the "
        f"model gave {list(logits.shape)}: it cannot be verified.{last if alone else ''}"
    )


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
