"""The oracle: each row alone, over the whole text, by the original; what was cached is exact or refused.

exact: equal up to rounding, in a prompt, odd chunks and single tokens, and beside a padded row where padding is taken
refused: a KVCompileError with a reason; discarded: the original itself computes no numbers, or fails
"""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kvcompile
from kvcompile.errors import KVCompileError
from tests.fuzz.decoder import build
from tests.fuzz.outputs import logits_of
from tests.fuzz.spec import DecoderSpec

ROWS = 2
# Relative root mean square: over the whole text, and of the worst token.
TOLERANCE = {
    "float64": (1e-9, 1e-8),
    "float32": (1e-5, 1e-4),
    "float16": (1e-2, 6e-2),
    "bfloat16": (3e-2, 2e-1),
}


@dataclass(frozen=True)
class Outcome:
    """kind: exact, refused, WRONG, CRASH or discarded. told: the reason, the error, or the traceback."""

    kind: str
    told: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return self.kind in ("exact", "refused", "discarded")


def text(spec: DecoderSpec) -> Tensor:
    """Ids [2, T] over the whole vocabulary; separators every 60 tokens or so, images in spans, hidden ones rarely."""
    generator = torch.Generator().manual_seed(spec.seed + 1)
    ids = torch.randint(0, spec.vocab, (ROWS, spec.tokens), generator=generator)
    chance = torch.rand(ROWS, spec.tokens, generator=generator)
    special = spec.special
    ids = torch.where(ids == special.sep, (special.sep + 1) % spec.vocab, ids)
    ids = ids.masked_fill(chance < 1 / 60, special.sep).masked_fill(chance > 59 / 60, special.hidden)
    for row in range(ROWS):
        for start in torch.randint(0, spec.tokens, (3,), generator=generator).tolist():
            ids[row, start : start + 11] = special.image
    return ids


def original(spec: DecoderSpec, ids: Tensor) -> Tensor:
    """What a model that was just built computes, each row by itself. [B, ..]"""
    with torch.no_grad():
        return torch.cat([logits_of(build(spec)(row[None])) for row in ids])


def expected(spec: DecoderSpec, ids: Tensor, whole: Tensor) -> Tensor:
    """What the chunks of this text must give, one after another."""
    if whole.dim() == 3 and whole.shape[1] == ids.shape[1]:
        return whole
    ends = torch.tensor(spec.chunks).cumsum(0).tolist()  # only the last token's: of every prefix
    outs = [original(spec, ids[:, :end]) for end in ends]
    return torch.cat([out if out.dim() == 3 else out[:, None] for out in outs], 1)


def feed(fast: Any, spec: DecoderSpec, ids: Tensor) -> Tensor:
    outs = [logits_of(fast(part)) for part in ids.split(list(spec.chunks), 1)]
    return torch.cat([out if out.dim() == 3 else out[:, None] for out in outs], 1)


def difference(found: Tensor, right: Tensor) -> tuple[float, Tensor]:
    """Relative root mean square over all, and of each token [B, S]. inf where shapes or finiteness differ."""
    if found.shape != right.shape or not bool(found.isfinite().all()):
        return float("inf"), torch.full((1, 1), float("inf"))
    found, right = found.double(), right.double()
    size = right.square().mean().sqrt() + 1e-300
    return float((found - right).square().mean().sqrt() / size), (found - right).square().mean(
        -1
    ).sqrt() / size


def allowed(spec: DecoderSpec) -> tuple[float, float]:
    return TOLERANCE["bfloat16" if spec.habit.name == "autocast" else spec.dtype]


def wrong(found: Tensor, right: Tensor, spec: DecoderSpec) -> str:
    """Nothing where both are equal up to rounding; else how they differ and from where on."""
    whole, by_token = difference(found, right)
    most, most_token = allowed(spec)
    if spec.chooses:  # a near tie may go either way; what is wrong is so in more than a few tokens
        worst = float(by_token.flatten().quantile(0.98))
        whole = min(whole, worst * most / most_token)
    else:
        worst = float(by_token.max())
    if whole <= most and worst <= most_token:
        return ""
    if found.shape != right.shape:
        return f"shape {tuple(found.shape)} instead of {tuple(right.shape)}"
    first = (by_token > most_token).any(0).nonzero()
    at = f", from token {int(first[0])} on" if len(first) else ""
    return f"the logits differ by {whole:.1e}, {worst:.1e} at the worst token{at}"


def optimized(model: nn.Module, spec: DecoderSpec, verify: str) -> Any:
    return kvcompile.optimize(
        model,
        recipe=spec.recipe,
        max_batch=ROWS,
        max_tokens=spec.tokens,
        compile={"mode": "none"},
        verify=verify,
    )


def check(spec: DecoderSpec, verify: str = "off") -> Outcome:
    """Exact, refused, or a failure. verify: off tests what is detected; otherwise the second line, too."""
    started = time.perf_counter()
    kind, told = _check(spec, verify)
    return Outcome(kind, told, time.perf_counter() - started)


def _check(spec: DecoderSpec, verify: str) -> tuple[str, str]:
    ids = text(spec)
    try:
        whole = original(spec, ids)
    except (IndexError, RuntimeError) as error:  # such as a table of positions that is shorter than the text
        return "discarded", f"the original itself fails: {error}"
    if not bool(whole.isfinite().all()):
        return "discarded", "the original's own output is not finite"
    try:
        fast = optimized(build(spec), spec, verify)
        found = feed(fast, spec, ids)
    except KVCompileError as error:
        return _refused(error)
    except Exception as error:
        return "CRASH", _crashed(error)
    problem = wrong(found, expected(spec, ids, whole), spec)
    if problem:
        return "WRONG", problem
    try:
        problem = padded(fast, spec, ids, whole)
    except Exception as error:
        return "CRASH", "with padding: " + _crashed(error)
    return ("WRONG", f"with padding: {problem}") if problem else ("exact", "")


def padded(fast: Any, spec: DecoderSpec, ids: Tensor, whole: Tensor) -> str:
    """A left-padded row equals the row alone, where padding is taken."""
    if whole.dim() != 3 or whole.shape[1] != ids.shape[1]:
        return ""
    size, tokens = spec.pads, spec.tokens
    moved = torch.cat([torch.full((1, size), min(spec.pad_id, spec.vocab - 1)), ids[1:, : tokens - size]], 1)
    batch = torch.cat([ids[:1], moved])
    mask = torch.ones_like(batch)
    mask[1, :size] = 0
    fast.reset()
    first = max(spec.chunks[0], size + 1)
    sizes = [first, *_rest(tokens - first)]
    outs, start = [], 0
    try:
        for count in sizes:
            stop = start + count
            outs.append(logits_of(fast(batch[:, start:stop], attention_mask=mask[:, :stop])))
            start = stop
    except KVCompileError as error:
        return "" if str(error).strip() else "an empty reason"
    found = torch.cat(outs, 1)
    problem = wrong(found[:1], whole[:1], spec)
    return problem or wrong(found[1:, size:], whole[1:, : tokens - size], spec)


def _rest(left: int) -> list[int]:
    return [] if left <= 0 else [left] if left < 3 else [1, left - 2, 1]


def _refused(error: KVCompileError) -> tuple[str, str]:
    told = str(error).strip()
    if "NameError" in told:
        # No model of the grammar raises it: a mistake of ours that capture takes for the model's.
        return "CRASH", told
    return ("refused", told) if told else ("CRASH", f"{type(error).__name__} without a reason")


def _crashed(error: Exception, count: int = 4) -> str:
    """What was raised, and the last places in kvcompile that it came through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _ours(frame.filename)]
    where = " < ".join(
        f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames[: -count - 1 : -1]
    )
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} [{where}]"


def _ours(filename: str) -> bool:
    return (
        bool({"kvcompile", "passes", "kernels"} & set(Path(filename).parts))
        and "site-packages" not in filename
    )
