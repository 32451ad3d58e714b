"""What was found in a model, what a recipe chose for each layer, why, and what it costs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kvcompile.report.released import released_notes
from kvcompile.util.console import WIDTH, format_bytes, format_layers, render, table

# Light on purpose: torch is imported when explain() is called.
if TYPE_CHECKING:
    import torch
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from kvcompile.layouts.sharing import Sharing
    from kvcompile.passes.records import NoMatch
    from kvcompile.pipeline import Analysis
    from kvcompile.plan import Decision, Plan

_MISSES_SHOWN = 12


@dataclass(frozen=True)
class Explanation:
    """The plan of a model under a recipe, and how it was reached.

    misses:  the nearest misses of detection, with the source lines of the model's own code
    route:   how the model was captured; `reasons`: what led there
    seconds: of capture and detection
    """

    plan: Plan
    misses: tuple[NoMatch, ...]
    route: str
    reasons: tuple[str, ...]
    capture_seconds: float
    detect_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: the plan with its digest and sizes in bytes, and the rest of the fields."""
        limits = self.plan.limits
        per_sequence = None if limits.max_tokens is None and not self.plan.bounded else self.plan.bytes(1)
        return {
            "plan": self.plan.to_dict(),
            "digest": self.plan.digest(),
            "lossless": self.plan.lossless,
            "bytes_per_token": self.plan.bytes_per_token,
            "bytes_per_sequence": per_sequence,
            "texts_share": str(sharing_of(self.plan)),
            "released_windows": list(released_notes(self.plan)),
            "state_bytes_per_sequence": self.plan.state_bytes,
            "bytes_at_max_batch": None if per_sequence is None else self.plan.bytes(limits.max_batch),
            "route": self.route,
            "reasons": list(self.reasons),
            "capture_seconds": self.capture_seconds,
            "detect_seconds": self.detect_seconds,
            "misses": [asdict(miss) for miss in self.misses],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def render(self, full: bool = False, width: int = WIDTH) -> str:
        """Plain text of at most `width` columns; `full`: one row per layer instead of one per run."""
        from rich.console import Group

        return render(Group(*self.parts(full)), width)

    def __str__(self) -> str:
        return self.render()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.parts()

    def parts(self, full: bool = False) -> Iterator[RenderableType]:
        """What `render` shows, as rich renderables."""
        from rich.markup import escape
        from rich.padding import Padding

        plan = self.plan
        exact = "exact" if plan.lossless else "lossy"
        yield f"recipe [bold]{escape(plan.recipe)}[/bold], {plan.dtype}, {exact} · plan {plan.digest()}"
        for note in plan.notes:
            yield Padding(escape(note), (0, 0, 0, 2))
        yield ""
        yield self._layers(full)
        yield ""
        yield self._totals()
        seconds = f"{self.capture_seconds:.1f} s, detected in {self.detect_seconds:.1f} s"
        yield f"captured by {escape(self.route)} in {seconds}"
        for reason in self.reasons:
            yield Padding(escape(reason), (0, 0, 0, 2))
        if self.misses:
            yield ""
            yield "[bold]nearest misses[/bold]"
            for miss in self.misses if full else self.misses[:_MISSES_SHOWN]:
                yield Padding(escape(str(miss)), (0, 0, 0, 2))
            if not full and len(self.misses) > _MISSES_SHOWN:
                yield f"  and {len(self.misses) - _MISSES_SHOWN} more"

    def _layers(self, full: bool) -> RenderableType:
        from rich.markup import escape

        itemsize = self.plan.torch_dtype.itemsize
        number = "bytes/token"
        made = table(
            "layers", "attention", "cache, because", number, right=(number,), grow=("cache, because",)
        )
        made.columns[0].no_wrap = True
        for run in _runs(self.plan.decisions, full):
            first = run[0]
            dim = str(first.head_dim)
            if first.v_head_dim != first.head_dim:
                dim += f"/{first.v_head_dim}"
            found = [
                _path(first, len(run) > 1),
                f"{first.num_qo_heads}/{first.num_kv_heads} heads x {dim}",
                f"{first.attention} ({first.idiom}, {first.evidence})",
            ]
            made.add_row(
                format_layers(tuple(decision.layer for decision in run)),
                escape("\n".join((*found, first.source) if full else found)),
                f"{escape(str(first.layout))}\n{escape(', '.join(first.ops))}\n"
                f"[dim]because {escape('; '.join(first.because))}[/dim]",
                format_bytes(len(run) * first.bytes_per_token(itemsize)),
            )
        return made

    def _totals(self) -> RenderableType:
        from rich.markup import escape

        plan, limits = self.plan, self.plan.limits
        made = table("", "")
        made.show_header = False
        made.add_row("kernels", "\n".join(_kernels(plan)))
        if plan.backend_because:
            made.add_row("compiled by", escape(plan.backend_because))
        if plan.step_because:
            how = "one CUDA graph" if plan.step == "cudagraph" else "region by region"
            made.add_row("a decode step", f"{how}: {escape(plan.step_because)}")
        if plan.devices:
            made.add_row("devices", escape("\n".join(_devices(plan))))
        if plan.states:
            count = f"{len(plan.states)} module{'s' if len(plan.states) > 1 else ''}"
            made.add_row(
                "recurrent state", f"{format_bytes(plan.state_bytes)} a sequence of any length, {count}"
            )
        shared = sharing_of(plan)
        made.add_row("texts may share", escape(str(shared)))
        made.add_row("a text without room", escape(shared.given_up))
        for note in released_notes(plan):
            made.add_row("released windows", escape(note))
        until = " until the budget is full, then nothing" if plan.bounded else ""
        made.add_row("a token takes", f"[bold]{format_bytes(plan.bytes_per_token)}[/bold]{until}")
        if limits.max_tokens is None and not plan.bounded:
            return made
        length = "of any length" if limits.max_tokens is None else f"of {limits.max_tokens:,} tokens"
        made.add_row(f"a sequence {length}", f"[bold]{format_bytes(plan.bytes(1))}[/bold]")
        if limits.max_batch > 1:
            made.add_row(
                f"{limits.max_batch} of them (max_batch)", format_bytes(plan.bytes(limits.max_batch))
            )
        return made


def sharing_of(plan: Plan) -> Sharing:
    """What texts that are served with a plan can share."""
    from kvcompile.layouts.sharing import sharing

    masked = any(decision.mask_rows for decision in plan.decisions)
    return sharing((decision.layout for decision in plan.decisions), bool(plan.states), masked)


def explain(
    model: object, recipe: object = None, *, parallel: object = None, **overrides: Any
) -> Explanation:
    """Trace a model, plan a recipe for it, and say all about it; nothing is compiled.

    Args:
        model: an nn.Module, or what `optimize` returned: then its own plan is shown if no recipe is given.
        recipe: anything `Recipe.load` takes; default: baseline.
        parallel: {"tensor": n, "stages": m}: what each of n ranks of m stages would have; no other process is needed.
        overrides: over the recipe, e.g. `max_tokens=4096`.

    Raises:
        CaptureError, DetectionError, PlanError, RecipeError: as `optimize` would.
    """
    from kvcompile.pipeline import analyze
    from kvcompile.recipe import Recipe
    from kvcompile.runtime.parallel.options import Parallel

    known: Analysis | None = getattr(model, "analysis", None)
    if known is not None and recipe is None and parallel is None and not overrides:
        return _explanation(known)
    loaded = Recipe.load("baseline" if recipe is None else recipe, **overrides)
    # An optimized module has a cache inside; what can be traced is the model it was made from.
    original = getattr(model, "model", model) if known is not None else model
    over = Parallel.of(parallel)
    return _explanation(analyze(original, loaded, over.tensor, over.stages))  # type: ignore[arg-type]


def _explanation(analysis: Analysis) -> Explanation:
    return Explanation(
        plan=analysis.plan,
        misses=tuple(analysis.misses),
        route=analysis.route,
        reasons=tuple(analysis.reasons),
        capture_seconds=analysis.capture_seconds,
        detect_seconds=analysis.detect_seconds,
    )


def _runs(decisions: tuple[Decision, ...], full: bool) -> list[list[Decision]]:
    """Consecutive layers that differ in nothing but their number."""
    if full:
        return [[decision] for decision in decisions]

    def kind(d: Decision) -> object:
        dims = (d.num_qo_heads, d.num_kv_heads, d.head_dim, d.v_head_dim)
        return _path(d, True), dims, d.attention, d.layout, d.idiom, d.because, d.ops

    return [list(run) for _, run in groupby(decisions, key=kind)]


def _kernels(plan: Plan) -> list[str]:
    """What runs which layers, and why."""
    from rich.markup import escape

    found: dict[tuple[str, str, str], list[int]] = {}
    for d in plan.decisions:
        step = _step(d, plan.torch_dtype) if d.kernels == "triton" else ""
        found.setdefault((d.kernels, d.kernels_because, step), []).append(d.layer)
    return [
        kernels
        + ("" if len(found) == 1 else f" in {format_layers(tuple(layers))}")
        + (f": {escape(because)}" if because else "")
        + (f"; {step}" if step else "")
        for (kernels, because, step), layers in found.items()
    ]


def _devices(plan: Plan) -> Iterator[str]:
    """The layers of each device of a model over several, and their bytes for a sequence."""
    bounded = plan.bounded or plan.limits.max_tokens is not None
    sizes = plan.bytes_by_device(1) if bounded else {}
    for device in plan.devices:
        layers = tuple(d.layer for d in plan.decisions if d.device == device)
        size = f", {format_bytes(sizes[device])} a sequence" if sizes else ""
        yield f"{device}: {'layers ' + format_layers(layers) if layers else 'recurrent state'}{size}"


def _step(decision: Decision, dtype: torch.dtype) -> str:
    """How generated kernels share a step out over a GPU, and what sequences have in common."""
    from kvcompile.kernels.triton.attend.cascade import told
    from kvcompile.kernels.triton.attend.work_list import SAID, sharing

    d = decision
    common = told(d.site_spec(), (d.num_qo_heads, d.num_kv_heads), (d.head_dim, d.v_head_dim), dtype)
    return f"{SAID} ({sharing(1).because})" + (f"; {common}" if common else "")


def _path(decision: Decision, many: bool) -> str:
    """The module path; for many layers with a star for what counts them."""
    if not many:
        return decision.module_path
    return ".".join("*" if part.isdigit() else part for part in decision.module_path.split("."))
