"""One type of the coverage table: captured, detected, rewritten by each recipe, and compared by its logits.

The comparison is this module's own: the original's logits for 27 tokens of two sequences, in one pass, against
the rewritten model's in a prompt, a chunk and single tokens. No recipe forgets anything within 27 tokens, so all but
`int8` must agree to rounding, and `int8` to what eight bits explain.
"""

from __future__ import annotations

import time
import traceback
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.coverage.configs import tiny_model

RECIPES = ("baseline", "int8", "streaming")
CHUNKS = (11, 1, 1, 7, 1, 1, 5)
TOKENS = sum(CHUNKS)
# Relative RMS error of the logits. Float32 rounding was seen below 3e-6, int8 between 1e-3 and 3e-2.
TOLERANCE = {"baseline": 1e-4, "streaming": 1e-4, "int8": 1e-1}


@dataclass
class Row:
    """What is known of one type.

    outcome: "verified", "refused" (with the reason), "no attention" (and so refused), "wrong" (the logits differ:
             never acceptable), "error" (anything but kvcompile's own errors) or "not built"
    """

    type: str
    cls: str = ""
    outcome: str = ""
    reason: str = ""
    route: str = ""
    expected: int = -1
    sites: int = -1
    masks: list[str] = field(default_factory=list)
    rope: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # recipes that do not fit a type that others do
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_type(model_type: str, recipes: tuple[str, ...] = RECIPES, attn: str | None = None) -> Row:
    """Build the type's tiny model and put it through every recipe."""
    row = Row(model_type)
    started = time.perf_counter()
    try:
        model = tiny_model(model_type, attn)
    except Exception as error:  # configuration classes raise anything
        row.outcome, row.reason = "not built", _line(error)
        return row
    row.cls = type(model).__name__
    try:
        _check(model, row, recipes)
    except Exception as error:
        row.outcome = "error"
        row.reason = (
            _line(error) + " at " + traceback.format_tb(error.__traceback__)[-1].strip().splitlines()[0]
        )
    row.seconds = time.perf_counter() - started
    return row


def _check(model: nn.Module, row: Row, recipes: tuple[str, ...]) -> None:
    from kvcompile import api
    from kvcompile.errors import KVCompileError, PlanError, VerificationError
    from kvcompile.pipeline import understand
    from kvcompile.recipe import Recipe

    ids = torch.randint(3, 61, (2, TOKENS), generator=torch.Generator().manual_seed(5))
    try:
        with _Count(TOKENS) as count, torch.no_grad():
            reference = model(ids, use_cache=False).logits
    except Exception as error:
        row.outcome, row.reason = "not built", f"does not run from token ids alone: {_line(error)}"
        return
    row.expected = count.blocks
    stage = "capture"
    try:
        front = understand(model)
        row.route, row.sites = front.captured.route, len(front.sites)
        row.masks = list(dict.fromkeys(str(site.mask) for site in front.sites))
        row.rope = list(dict.fromkeys(site.rope.style if site.rope else "none" for site in front.sites))
        row.notes = [*front.captured.reasons]
        for name in recipes:
            stage = name
            overrides: dict[str, Any] = {"compile": {"mode": "none"}}
            # Positions in the cache need a rotary embedding: elsewhere the recipe's other kind.
            fixed = [
                site.layer
                for site in front.sites
                if site.rope is None and not site.positionless and site.mask.kind != "sliding"
            ]
            if name == "streaming" and fixed:
                retention = {"kind": "sink_window", "sinks": 4, "window": 1020, "positions": "original"}
                layers = [{"where": {"attention": "sliding"}, "cache": {"retention": {"kind": "window"}}}]
                layers += [{"where": {"index": fixed}, "cache": {"retention": retention}}]
                overrides["layers"] = layers
                row.notes.append(
                    f"streaming: original positions in {len(fixed)} of {len(front.sites)} layers"
                )
            recipe = Recipe.load(name, max_batch=2, max_tokens=64, **overrides)
            try:
                fast = api.build(model, front, recipe)
            except PlanError as error:
                if name != "streaming":  # there are layers that must not forget
                    raise
                row.refused[name] = str(error)
                continue
            error = _compare(fast, ids, reference)
            row.errors[name] = error
            if not error <= TOLERANCE[name]:
                row.outcome, row.reason = "wrong", f"{name}: the logits differ by {error:.1e}"
                return
    except VerificationError as error:
        row.outcome, row.reason = "refused", f"verification of {stage}: {error}"
        return
    except KVCompileError as error:
        row.outcome = "refused" if row.expected else "no attention"
        row.reason = str(error)
        return
    row.outcome = "verified"


def _compare(fast: Any, ids: Tensor, reference: Tensor) -> float:
    """Relative RMS error of the rewritten model's logits over all chunks."""
    outs, start = [], 0
    for size in CHUNKS:
        outs.append(fast(ids[:, start : start + size]).logits)
        start += size
    found = torch.cat(outs, dim=1)
    return float(
        (found - reference).double().square().mean().sqrt() / reference.double().square().mean().sqrt()
    )


class _Count(TorchFunctionMode):
    """Counts attention over the sequence in an eager run: SDPA calls, and softmaxes of one row per token."""

    def __init__(self, tokens: int):
        super().__init__()
        self.tokens, self.blocks = tokens, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            key = args[1] if len(args) > 1 else kwargs["key"]
            self.blocks += key.shape[-2] >= self.tokens
        elif name in ("softmax", "_softmax"):
            scores = args[0] if args else kwargs["input"]
            rows, columns = (scores.shape[-2], scores.shape[-1]) if scores.dim() > 2 else (0, 0)
            self.blocks += (
                rows >= self.tokens and columns >= self.tokens
            )  # more: a sink, a prompt of the model's
        return func(*args, **(kwargs or {}))


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}"
