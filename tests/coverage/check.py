"""One type of the coverage table: captured, detected, rewritten by each recipe, and compared by its logits.

The comparison is this module's own: the original's logits of a text, in one pass without a cache, against the
rewritten model's in a prompt, chunks and single tokens. No recipe forgets anything within the longest text, so all but
`int8` must agree to rounding, and `int8` to what eight bits explain. `settings.py` says which configurations of a type
there are, `sizes.py` which texts go with them; the second has no other form of attention, so one recipe is enough.
"""

from __future__ import annotations

import time
import traceback
from dataclasses import asdict, dataclass, field
from typing import Any

from torch.overrides import TorchFunctionMode

from tests.coverage import ends
from tests.coverage.compare import difference, recipe_for
from tests.coverage.original import original, text, whole
from tests.coverage.settings import Setting, settings
from tests.coverage.sizes import TEXT, Tried, lengths

RECIPES = ("baseline", "int8", "streaming")
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
    # Recipes that do not fit a type that others do, and configurations (`MORE`) beside the default one.
    refused: dict[str, str] = field(default_factory=dict)
    tested: list[Tried] = field(default_factory=list)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_type(model_type: str, recipes: tuple[str, ...] = RECIPES, attn: str | None = None) -> Row:
    """Build the type's tiny models and put the first through every recipe, the others through the first recipe."""
    row = Row(model_type)
    started = time.perf_counter()
    try:
        found = settings(model_type, attn)
    except Exception as failed:  # configuration classes raise anything
        row.outcome, row.reason = "not built", _line(failed)
        return row
    row.cls = type(found[0].model).__name__
    for setting in found:
        if setting.name in row.refused:
            continue
        first = setting is found[0]
        try:
            outcome, reason = _check(setting, row, recipes if first else recipes[:1], first)
        except Exception as failed:
            frame = traceback.format_tb(failed.__traceback__)[-1].strip().splitlines()[0]
            outcome, reason = "error", f"{_line(failed)} at {frame}"
        if setting.name and outcome == "refused":  # the type as it is by default is something else
            row.refused[setting.name] = reason
        elif not row.outcome or _WORST.index(outcome) < _WORST.index(row.outcome):
            row.outcome, row.reason = outcome, reason if first else f"{setting}: {reason}"
    row.seconds = time.perf_counter() - started
    return row


_WORST = ("wrong", "error", "not built", "refused", "no attention", "verified")


def _check(setting: Setting, row: Row, recipes: tuple[str, ...], first: bool) -> tuple[str, str]:
    """The outcome of one configuration, and its reason; everything else goes into the row."""
    from kvcompile import api
    from kvcompile.errors import KVCompileError, PlanError, VerificationError
    from kvcompile.pipeline import understand

    ids = text()
    try:
        with _Count(TEXT) as count:
            whole(setting.model, ids[:, :TEXT])
    except Exception as failed:
        return "not built", f"does not run from token ids alone: {_line(failed)}"
    if first:
        row.expected = count.blocks
    stage = "capture"
    try:
        front = understand(setting.model)
        if first:
            row.route, row.sites = front.captured.route, len(front.sites)
            row.masks = list(dict.fromkeys(str(site.mask) for site in front.sites))
            row.rope = list(dict.fromkeys(site.rope.style if site.rope else "none" for site in front.sites))
            row.notes = [*front.captured.reasons]
        most = ends.limit(front)
        texts = lengths((*setting.sizes.values(), *(() if most is None else (most,))))
        right = original(setting.model, ids, texts).up_to(most)
        for name in recipes:
            stage = name
            recipe, note = recipe_for(name, front, max(right.logits))
            row.notes += [note] if note else []
            try:
                fast = api.build(setting.model, front, recipe)
            except PlanError as refusal:
                if name != "streaming":  # there are layers that must not forget
                    raise
                row.refused[name] = str(refusal)
                continue
            if name == "baseline" and (problem := ends.problem(setting, front, fast, ids, right)):
                return "wrong", problem
            found = difference(fast, ids, right, long=name != "int8", prompt=name == "baseline")
            row.errors[name] = max(found, row.errors.get(name, 0.0))
            if not found <= TOLERANCE[name]:
                return "wrong", f"{name}: the logits differ by {found:.1e}"
    except VerificationError as refusal:
        return "refused", f"verification of {stage}: {refusal}"
    except KVCompileError as refusal:
        return "refused" if count.blocks else "no attention", str(refusal)
    row.tested.append(
        Tried(
            name=setting.name,
            sizes=dict(setting.sizes),
            texts=sorted(right.logits),
            end=right.end,
            limit=most,
        )
    )
    return "verified", ""


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
            # More: a sink, a prompt of the model's.
            self.blocks += rows >= self.tokens and columns >= self.tokens
        return func(*args, **(kwargs or {}))


def _line(error: Exception) -> str:
    told = " ".join(str(error).split())
    return f"{type(error).__name__}: {told[:400]}"
