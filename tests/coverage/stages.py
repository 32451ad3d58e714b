"""One type over several stages: its graphs run one after the other, in one process, against the original.

The logits are compared twice: by `verify`, and here with what the original computes without a cache.
"""

from __future__ import annotations

import time
import traceback
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.coverage.check import TOLERANCE
from tests.coverage.compare import recipe_for
from tests.coverage.original import error, text, whole
from tests.coverage.settings import settings
from tests.coverage.sizes import TEXT
from tests.coverage.tensor import in_step, line_of


@dataclass
class StagesRow:
    """What is known of one type over `stages` stages.

    outcome: "verified", "refused" (no such cut, with the reason), "not rewritten" (in one process neither), "wrong",
             "error" or "not built"
    places:  where the graph could be cut; weights, cache: the largest stage's part of the bytes
    """

    type: str
    stages: int = 2
    outcome: str = ""
    reason: str = ""
    sites: int = 0
    places: int = 0
    weights: float = 1.0
    cache: float = 1.0
    error: float = -1.0
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


def check_stages(model_type: str, stages: int = 2) -> StagesRow:
    """Build the type's tiny model, cut it, and compare."""
    row = StagesRow(model_type, stages)
    started = time.perf_counter()
    try:
        row.outcome, row.reason = _check(row, stages)
    except Exception as failed:
        frame = traceback.format_tb(failed.__traceback__)[-1].strip().splitlines()[0]
        row.outcome, row.reason = "error", f"{line_of(failed)} at {frame}"
    row.seconds = time.perf_counter() - started
    return row


def _check(row: StagesRow, stages: int) -> tuple[str, str]:
    from kvcompile.errors import KVCompileError, PlanError, VerificationError
    from kvcompile.pipeline import divided, plan_for, understand
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
    row.sites = len(front.sites)
    try:
        front = divided(front, plan, 1, stages)
    except PlanError as refusal:
        return "refused", str(refusal)
    found = front.staging
    assert found is not None
    row.places = found.places
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    row.weights = max(stage.weight_bytes for stage in found.stages) / max(weights, 1)
    row.cache = max(stage.of(plan).bytes(1, TEXT) for stage in found.stages) / max(plan.bytes(1, TEXT), 1)
    try:
        verify(model, front, plan, "quick")
    except VerificationError as wrong:
        return "wrong", str(wrong)
    row.error = error(in_step(front, plan, ids), right)
    if not row.error <= TOLERANCE["baseline"]:
        return "wrong", f"the logits differ by {row.error:.1e}"
    return "verified", ""
