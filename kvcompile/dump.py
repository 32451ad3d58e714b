"""KVCOMPILE_DUMP=dir: the graph before and after each pass, the plan, the regions, the recipe."""

from __future__ import annotations

import json
import os
from pathlib import Path

import yaml
from torch.fx import GraphModule

from kvcompile.emit.regions import Regions
from kvcompile.passes.insert_cache import Rewritten
from kvcompile.pipeline import Front
from kvcompile.plan import Plan
from kvcompile.recipe import Recipe

VARIABLE = "KVCOMPILE_DUMP"


class Dump:
    """Writes files into `<dir>/<plan digest>/`; does nothing where the variable is not set."""

    def __init__(self, folder: Path | None, plan: Plan):
        self.folder = folder
        self.plan = plan

    @classmethod
    def from_environment(cls, plan: Plan) -> Dump:
        root = os.environ.get(VARIABLE)
        return cls(Path(root) / plan.digest() if root else None, plan)

    def front(self, front: Front) -> None:
        """The captured and the canonical graph, and the plan."""
        self._graph("1_captured", front.captured.graph_module)
        self._graph("2_canonical", front.canonical)
        self._text("plan.txt", f"{self.plan}\n")
        self._text("plan.json", json.dumps(self.plan.to_dict(), indent=2))

    def back(self, rewritten: Rewritten, regions: Regions, recipe: Recipe) -> None:
        """The cached graph, its distinct regions, and the recipe."""
        self._graph("3_cached", rewritten.graph_module)
        for index, module in enumerate(regions.modules):
            calls = sum(call.region == index for call in regions.calls)
            self._graph(f"4_region_{index}", module, f"called {calls} times")
        self._text("recipe.yaml", yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))

    def _graph(self, name: str, module: GraphModule, note: str = "") -> None:
        if self.folder is not None:
            code = module.print_readable(print_output=False, include_stride=False, include_device=False)
            self._text(f"{name}.py", f"# {name} {note}\n{code}\n")

    def _text(self, name: str, text: str) -> None:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text, "utf-8")
