"""One type over several ranks: its graphs run in step, in one process, against the original and the oracle.

The logits are compared twice: by `verify`, site by site and within its budgets, and here against what the original
computes without a cache. Whatever stays whole or is gathered is in the row: a type counts as verified where each rank
has a part of the heads at every site.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.coverage.check import TOLERANCE
from tests.coverage.compare import CHUNKS, recipe_for
from tests.coverage.original import error, text, whole
from tests.coverage.settings import settings
from tests.coverage.sizes import TEXT


@dataclass
class TensorRow:
    """What is known of one type over `ranks` ranks.

    outcome: "verified", "refused" (by tensor parallelism, with the reason), "not rewritten" (on one rank neither),
             "whole" (exact, but some site is on all ranks whole), "wrong", "error" or "not built"
    whole:   linear layers that every rank computes all of, each with its reason; weights: a rank's part of the bytes
    """

    type: str
    ranks: int = 2
    outcome: str = ""
    reason: str = ""
    sites: int = 0
    by_columns: int = 0
    by_rows: int = 0
    sums: int = 0
    gathers: int = 0
    weights: float = 1.0
    cache: float = 1.0
    error: float = -1.0
    whole: list[str] = field(default_factory=list)
    seconds: float = 0.0

    # what the harness that tells rows asks of any row
    expected: int = -1
    tested: list[Any] = field(default_factory=list)

    @property
    def errors(self) -> dict[str, float]:
        return {"baseline": self.error} if self.error >= 0 else {}

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        return {name: item for name, item in data.items() if name not in ("expected", "tested", "seconds")}


def not_rewritten(path: Path, types: Sequence[str], row_of: Callable[..., Any]) -> list[Any]:
    """Rows of the types that the table of one rank has no rewritten model of: there is nothing to divide.

    row_of: makes a row of a type's name, its outcome and its reason
    """
    known = {row["type"]: row for row in json.loads(path.read_text())["rows"]}
    found = [known[name] for name in types if name in known and known[name]["outcome"] != "verified"]
    names = {"not built": "not built"}
    return [
        row_of(row["type"], outcome=names.get(row["outcome"], "not rewritten"), reason=row["reason"])
        for row in found
    ]


def check_tensor(model_type: str, ranks: int = 2) -> TensorRow:
    """Build the type's tiny model, shard it, and compare."""
    row = TensorRow(model_type, ranks)
    started = time.perf_counter()
    try:
        row.outcome, row.reason = _check(row, ranks)
    except Exception as failed:
        frame = traceback.format_tb(failed.__traceback__)[-1].strip().splitlines()[0]
        row.outcome, row.reason = "error", f"{line_of(failed)} at {frame}"
    row.seconds = time.perf_counter() - started
    return row


def _check(row: TensorRow, ranks: int) -> tuple[str, str]:
    from kvcompile.errors import KVCompileError, PlanError, VerificationError
    from kvcompile.passes.shard.shard import localized
    from kvcompile.pipeline import plan_for, sharded, understand
    from kvcompile.verify import verify

    try:
        model = settings(row.type)[0].model
        ids = text()[:, :TEXT]
        right = whole(model, ids)
    except Exception as failed:  # models raise anything
        return "not built", line_of(failed)
    try:
        front = understand(model)
        plan = plan_for(front, recipe_for("baseline", front, TEXT)[0])
    except KVCompileError as refusal:
        return "not rewritten", str(refusal)
    try:
        front = sharded(front, plan, ranks)
    except PlanError as refusal:
        return "refused", str(refusal)
    found = front.sharding
    assert found is not None
    row.sites, row.by_columns, row.by_rows = len(front.sites), found.by_columns, found.by_rows
    row.sums, row.gathers = found.sums, found.gathers
    row.weights = max(found.weight_bytes) / max(found.whole_bytes, 1)
    row.cache = localized(plan, found, 0).bytes(1) / max(plan.bytes(1), 1)
    row.whole = [str(each) for each in found.whole]
    try:
        verify(model, front, plan, "quick")
    except VerificationError as wrong:
        return "wrong", str(wrong)
    row.error = error(in_step(front, plan, ids), right)
    if not row.error <= TOLERANCE["baseline"]:
        return "wrong", f"the logits differ by {row.error:.1e}"
    undivided = [division.because for division in found.divisions if not division.divided]
    return ("whole", undivided[0]) if undivided else ("verified", "")


def in_step(front: Any, plan: Any, ids: Tensor) -> Tensor:
    """The logits of all ranks together, in a prompt, single tokens and chunks."""
    from kvcompile.pipeline import rewrite
    from kvcompile.verify.cached import cached_run

    rewritten, constants = rewrite(front, plan)
    pads = torch.zeros(len(ids), dtype=torch.int64)
    return cached_run(front, plan, rewritten, constants, ids, pads, CHUNKS).logits


def summary(rows: Sequence[Any]) -> str:
    """How many of each outcome."""
    outcomes = [row.outcome for row in rows]
    return ", ".join(f"{outcomes.count(name)} {name}" for name in dict.fromkeys(sorted(outcomes)))


def write(rows: Sequence[Any], versions: str, path: Path) -> None:
    """The rows as JSON."""
    content = {"versions": versions, "rows": [row.to_dict() for row in rows]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def line_of(failed: Exception) -> str:
    return f"{type(failed).__name__}: {' '.join(str(failed).split())[:400]}"
