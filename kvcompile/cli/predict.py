"""`kvcompile kernels --predict` and `kvcompile tune --predict`: what kernels are predicted to take on a GPU."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import typer

from kvcompile.cli.common import show, stages, stderr
from kvcompile.errors import InputError, KVCompileError
from kvcompile.util.console import table
from kvcompile.util.machines import Machine, machine

if TYPE_CHECKING:
    from rich.table import Table

    from kvcompile.kernels.spec import SiteSpec
    from kvcompile.kernels.triton.config import Config
    from kvcompile.kernels.triton.predict.cases import CaseTime
    from kvcompile.kernels.triton.predict.goals import Judged
    from kvcompile.kernels.triton.predict.launch import Predicted
    from kvcompile.kernels.triton.tools.tune import Subject

NOTE = "A model, not a measurement; how they compare: docs/kernels.md, Predicted times"
_SHOWN = 12  # candidates of a tuner
_EACH = "a token, each reading all"


@dataclass(frozen=True)
class Asked:
    """batch: sequences; context: tokens of each, the new ones among them; prompt: new tokens, 0: no prompt

    prefix: of the context, tokens that all sequences have on the same pages
    """

    batch: int
    context: int
    prompt: int
    prefix: int = 0


def machine_named(name: str, arch: int | None = None) -> Machine:
    """The machine of --predict.

    Raises:
        InputError: it is not in the table, or --arch is that of another.
    """
    try:
        found = machine(name)
    except KVCompileError as error:
        raise InputError(f"--predict: {error}") from None
    if arch not in (None, found.arch):
        raise InputError(f"--arch: {found.name} is sm_{found.arch}, got {arch}; leave it out with --predict")
    return found


def of_recipe(
    recipe: str, site: SiteSpec, heads: tuple[int, int], dim: int, asked: Asked, on: Machine, json: bool
) -> None:
    """Print what is predicted of a step of a layer, and of a prompt where it is asked for."""
    import torch

    from kvcompile.kernels.triton.attend import cascade
    from kvcompile.kernels.triton.predict.facts import facts
    from kvcompile.kernels.triton.predict.launch import predicted
    from kvcompile.kernels.triton.predict.memory import case_bytes
    from kvcompile.kernels.triton.predict.model import Model
    from kvcompile.kernels.triton.predict.recorded import Shape, recorded

    if asked.prompt > asked.context:
        raise InputError(
            f"--prompt: expected at most the {asked.context:,} tokens of --context, got {asked.prompt:,}"
        )
    _check_prefix(site, asked)
    lengths, dtype = (asked.context,) * asked.batch, torch.bfloat16
    step = Shape(site, heads, (dim, dim), dtype, lengths, prefix=asked.prefix)
    shapes = {"a token": step}
    made = {"a token": recorded(step, on)}
    if asked.prefix:
        with cascade.alone():
            shapes[_EACH], made[_EACH] = step, recorded(step, on)
    if asked.prompt:
        shapes["a prompt"] = Shape(site, heads, (dim, dim), dtype, lengths, asked.prompt)
        made["a prompt"] = recorded(shapes["a prompt"], on)
    with stages() as progress:
        found = facts((one.request for launches in made.values() for one in launches), progress)
    model = Model(on)
    times = {when: predicted(launches, shapes[when], found, model) for when, launches in made.items()}
    kept = {
        when: sum(one.seconds for one in predicted(launches, replace(step, kept=True), found, model))
        for when, launches in made.items()
        if asked.prefix and shapes[when] is step
    }
    if json:
        steps = {
            when: {
                "seconds": sum(one.seconds for one in launches),
                "attention_bytes": case_bytes(shapes[when]),
                **({"seconds_where_l2_keeps_the_prefix": kept[when]} if when in kept else {}),
                "launches": [one.to_json() for one in launches],
            }
            for when, launches in times.items()
        }
        head = {"recipe": recipe, **asdict(asked)}
        typer.echo(jsonlib.dumps({**head, **_about(on, model.assumed), "calls": steps}, indent=2))
        return
    show(_launches(times))
    for when, launches in times.items():
        us = sum(one.seconds for one in launches) * 1e6
        if when in kept:
            moved = sum(one.bytes for one in launches) / 1e6
            also = f"{kept[when] * 1e6:,.1f} us where the L2 cache keeps the prefix"
            typer.echo(f"{when}: {us:,.1f} us a layer, {moved:,.0f} MB; {also}")
            continue
        share = case_bytes(shapes[when]) / us * 1e6 / on.copied
        said = f"{when}: {us:,.1f} us a layer"
        typer.echo(f"{said}, {share:.0%} of a copy's bandwidth" if when == "a token" else said)
    stderr().print(NOTE, style="dim", highlight=False, soft_wrap=True)


def _check_prefix(site: SiteSpec, asked: Asked) -> None:
    """Refuse a prefix that sequences cannot have in common.

    Raises:
        InputError: says why.
    """
    from kvcompile.kernels.triton.attend.cascade import refusal

    if not asked.prefix:
        return
    if asked.prefix >= asked.context:
        raise InputError(
            f"--prefix: expected less than the {asked.context:,} tokens of --context, got {asked.prefix:,}"
        )
    if reason := refusal(site):
        raise InputError(f"--prefix: {reason}")


def of_goals(on: Machine, json: bool) -> None:
    """Print what is predicted of the goals that benchmarks judge, and of the cases that they are made of."""
    from kvcompile.kernels.triton.predict import step
    from kvcompile.kernels.triton.predict.assumptions import EXPECTED, HARSH, KIND
    from kvcompile.kernels.triton.predict.cases import prepared, times
    from kvcompile.kernels.triton.predict.goals import judged
    from kvcompile.kernels.triton.predict.model import Model

    with stages() as progress:
        made, found = prepared(on, progress=progress)
        steps = step.prepared(on, progress)
    models = [Model(on, assumed) for assumed in (EXPECTED, KIND, HARSH)]
    runs = [{**times(model, made, found), **step.times(model, steps)} for model in models]
    goals = judged(*(figures_of(run.values()) for run in runs))
    if json:
        rows = [
            {
                "goal": one.goal.number,
                "text": one.goal.text,
                "wanted": f"{one.goal.sign} {one.goal.wanted}",
                "value": one.value,
                "kind": one.kind,
                "harsh": one.harsh,
                "verdict": one.verdict,
            }
            for one in goals
        ]
        cases = [
            {**asdict(case), "launches": [launch.to_json() for launch in case.launches]}
            for case in runs[0].values()
        ]
        typer.echo(jsonlib.dumps({**_about(on, EXPECTED), "goals": rows, "cases": cases}, indent=2))
        return
    show(_cases(runs[0].values()))
    show(_goals(goals))
    stderr().print(NOTE, style="dim", highlight=False, soft_wrap=True)


def of_tuning(subjects: Iterable[Subject], on: Machine) -> None:
    """Print the candidates of a tuner by what is predicted of them, and what the table says now."""
    from kvcompile.kernels.triton.tools.tune import ranking

    shown = table("recipe", "role", "configuration", "microseconds", "", right=("microseconds",))
    for subject in subjects:
        with stages() as progress:
            found = ranking(subject, on, progress)
        order = found.order
        now = next(iter(found.seconds), None)
        rows = [*order[:_SHOWN], *([now] if now is not None and now not in order[:_SHOWN] else [])]
        for own in rows:
            name = subject.name if own is rows[0] else ""
            note = "the table's" if own is now else ""
            shown.add_row(
                name,
                subject.role if name else "",
                said(own, subject.role),
                f"{found.seconds[own] * 1e6:,.1f}",
                note,
            )
    show(shown)
    stderr().print(NOTE, style="dim", highlight=False, soft_wrap=True)


def said(own: Config, role: str) -> str:
    """A configuration in words."""
    text = f"{own.block_m} x {own.block_n}, {own.num_warps} warps, {own.num_stages} stages"
    return f"{text}, {own.waves:g} waves" if role == "decode" else text


def figures_of(cases: Iterable[CaseTime]) -> dict[str, Any]:
    """Predictions as goals take figures."""
    from kvcompile.kernels.triton.predict.goals import Figure

    return {case.name: Figure(case.seconds * 1e6, case.bytes, case.share) for case in cases}


def _about(on: Machine, assumed: Any) -> dict[str, Any]:
    return {"machine": asdict(on), "copied": on.copied, "assumed": asdict(assumed), "note": NOTE}


def _launches(times: dict[str, tuple[Predicted, ...]]) -> Table:
    right = ("us", "MB", "bandwidth", "programs", "places", "waves")
    shown = table("for", "role", *right, "most time goes to", right=right)
    for when, launches in times.items():
        for one in launches:
            shown.add_row(
                when,
                one.role,
                f"{one.seconds * 1e6:,.1f}",
                f"{one.bytes / 1e6:,.2f}",
                f"{one.share:.0%}",
                f"{one.programs:,}",
                f"{one.places} ({one.by})",
                f"{one.waves:.2f}",
                ", ".join(f"{name} {seconds * 1e6:,.1f}" for name, seconds in _most(one)),
            )
    return shown


def _most(one: Predicted) -> list[tuple[str, float]]:
    """The two that take the most."""
    return sorted(one.on.items(), key=lambda pair: -pair[1])[:2]


def _cases(cases: Iterable[CaseTime]) -> Table:
    right = ("us", "of copy bandwidth")
    shown = table(
        "case",
        *right,
        "launches (us: most time goes to)",
        right=right,
        grow=("launches (us: most time goes to)",),
    )
    for case in cases:
        parts = ", ".join(f"{one.role} {one.seconds * 1e6:,.1f}: {one.limit}" for one in case.launches)
        shown.add_row(case.name, f"{case.seconds * 1e6:,.1f}", f"{case.share:.0%}", parts)
    return shown


def _goals(goals: Iterable[Judged]) -> Table:
    shown = table("goal", "", "wanted", "predicted", "from", "to", "", right=("predicted", "from", "to"))
    colours = {"met": "green", "missed": "red", "open": "yellow"}
    for one in goals:
        ends = sorted((one.kind, one.harsh))
        shown.add_row(
            str(one.goal.number),
            one.goal.text,
            f"{one.goal.sign} {one.goal.wanted:g}",
            f"{one.value:.2f}",
            *(f"{end:.2f}" for end in ends),
            f"[{colours[one.verdict]}]{one.verdict}[/]",
        )
    return shown
