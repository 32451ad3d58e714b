"""KVCOMPILE_DUMP=dir: the graph after each stage, the plan, the regions, the recipe and a script that runs.

The files go to `<dir>/<plan digest>/`. The plan and the cached graph also go to torch's structured trace, where
tlparse shows them.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from torch._logging._internal import trace_structured
from torch.fx import GraphModule

from kvcompile.compile.regions import Regions
from kvcompile.passes.rewrite.insert_cache import Rewritten
from kvcompile.passes.table import PassRun, totals
from kvcompile.pipeline import Front
from kvcompile.plan import Plan
from kvcompile.recipe import Recipe
from kvcompile.util.archive_file import archive_file

log = logging.getLogger(__name__)

VARIABLE = "KVCOMPILE_DUMP"
_REPRO_LIMIT = 64 * 2**20  # bytes of weights of a plain module that are worth saving beside the script


class Dump:
    """Writes what `optimize` did; no files where the variable is not set, and no more of them once one failed."""

    def __init__(self, folder: Path | None, plan: Plan):
        self.folder = folder
        self.plan = plan

    @classmethod
    def from_environment(cls, plan: Plan) -> Dump:
        root = os.environ.get(VARIABLE)
        return cls(Path(root) / plan.digest() if root else None, plan)

    @staticmethod
    def asked() -> bool:
        """Whether the variable is set."""
        return bool(os.environ.get(VARIABLE))

    def passes(self, runs: Sequence[PassRun]) -> None:
        """What each pass left, in the order in which they ran, and how long they took."""
        if self.folder is None:
            return
        lines = []
        for number, run in enumerate(runs):
            nodes = "" if run.nodes is None else f"{run.nodes:,} nodes"
            lines.append(f"{number:3} {run.name:16} {run.seconds:8.3f} s  {nodes}".rstrip())
            if run.code is not None:
                self._text(f"passes/{number:03}_{run.name}.py", f"{run.code}\n")
        self._text("passes.txt", "\n".join((*lines, "", *map(str, totals(runs)), "")))

    def front(self, front: Front) -> None:
        """The captured and the canonical graph, and the plan."""
        _trace("kvcompile_plan", lambda: str(self.plan))
        if self.folder is None:
            return
        opaque = [f"{record.key}: {record}" for record in front.captured.opaques]
        if opaque:
            self._text("opaque.txt", "\n".join(("Modules that the graphs call as Python:", *opaque, "")))
        self._steps(front)
        self._graph("1_captured", front.captured.graph_module)
        self._graph("2_canonical", front.canonical)
        self._text("plan.txt", f"{self.plan}\n")
        self._text("plan.json", json.dumps(self.plan.to_dict(), indent=2))

    def back(self, model: nn.Module, rewritten: Rewritten, regions: Regions, recipe: Recipe) -> None:
        """The cached graph, its distinct regions, the recipe, and `repro.py`."""
        _trace("kvcompile_cached_graph", lambda: _code(rewritten.graph_module))
        if self.folder is None:
            return
        self._graph("3_cached", rewritten.graph_module)
        for index, module in enumerate(regions.modules):
            calls = sum(call.region == index for call in regions.calls)
            how = ", it calls a module as Python" if index in regions.eager else ""
            self._graph(f"4_region_{index}", module, f", called {calls} times{how}")
        self._text("recipe.yaml", yaml.safe_dump(_plain(recipe), sort_keys=False))
        self._repro(model)

    def _steps(self, front: Front) -> None:
        """The graphs of steps of modules that run as Python, each once, with the paths of the modules."""
        paths: dict[str, list[str]] = {}
        for record in front.captured.opaques:
            for one_sequence, step in record.steps.items():
                text = step if isinstance(step, str) else _code(step.graph_module)
                what = f"{record.path}, {'one sequence' if one_sequence else 'several'}"
                paths.setdefault(text, []).append(what)
        for number, (text, of) in enumerate(paths.items()):
            self._text(f"python_step_{number}.py", "\n".join((*(f"# {what}" for what in of), text, "")))

    def _repro(self, model: nn.Module) -> None:
        """A script that optimizes the same architecture with the same recipe and generates a few tokens."""
        if self.folder is None:  # none any more
            return
        script = (resources.files("kvcompile") / "repro.py.txt").read_text("utf-8")
        config: Any = getattr(model, "config", None)
        if hasattr(config, "to_json_string"):
            self._text("config.json", config.to_json_string(use_diff=False))
        elif sum(p.nbytes for p in model.parameters()) <= _REPRO_LIMIT:
            try:
                with archive_file(self.folder / "model.pt") as file:
                    torch.save(model, file)
            except Exception as error:  # a module may hold anything; a dump must not break optimize()
                script = f"# The model could not be saved ({error}): set `model` below yourself.\n{script}"
        self._text("repro.py", script)

    def _graph(self, name: str, module: GraphModule, note: str = "") -> None:
        self._text(f"{name}.py", f"# {name}{note}\n{_code(module)}\n")

    def _text(self, name: str, text: str) -> None:
        if self.folder is None:  # none any more
            return
        path = self.folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            log.warning("%s: %s cannot be written: %s; nothing more is", VARIABLE, path, error)
            self.folder = None


def _code(module: GraphModule) -> str:
    return str(module.print_readable(print_output=False))


def _plain(recipe: Recipe) -> dict[str, object]:
    return recipe.model_dump(mode="json", exclude_none=True, exclude_unset=True)


def _trace(name: str, payload: Callable[[], str]) -> None:
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=payload)
