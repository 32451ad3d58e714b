"""manifest.json of a saved module: which module it is, and what its files hold.

| file | what |
|---|---|
| graph.json | the regions of the rewritten graph, and the order in which they are called |
| weights.safetensors | the original's parameters and saved buffers; not there where they are given when it is loaded |
| constants.safetensors | what else the graph reads: tables of positions, weights in another form |
| code/ | what Inductor compiled, of the classes of shapes that had come |
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from kvcompile.errors import ArtifactError
from kvcompile.targets import seal
from kvcompile.targets.manifest import FILE, FORMAT_VERSION, FileInfo
from kvcompile.util.console import shown

GRAPH, WEIGHTS, CONSTANTS, CODE = "graph.json", "weights.safetensors", "constants.safetensors", "code"


class Record(BaseModel):
    """
    versions: of kvcompile, torch and Python: compiled code is of one of each
    kind:     whose `generate` it has
    weights:  a digest of every byte of the weights; model: of the config, too, as saved caches have it
    inside:   whether weights.safetensors is there
    recipe:   as `Recipe.load` reads it
    outputs:  the original's output as a pytree, with its constants
    plan, program, programs, analysis: as `values.py` writes them; the analysis without its plan
    machine:  that the code is compiled for (`targets/machine.py`); vectors: its instruction sets, as Inductor calls
              them, and what it tells the compiler of each; threads: of the process that compiled it, which it goes on
              using wherever it is loaded
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["kvcompile"] = "kvcompile"
    format_version: Literal[1] = 1
    target: Literal["module"] = "module"
    versions: dict[str, str]
    kind: Literal["plain", "huggingface"]
    architecture: str
    weights: str
    model: str
    inside: bool
    recipe: dict[str, Any]
    plan: dict[str, Any]
    program: dict[str, Any]
    outputs: dict[str, Any]
    programs: list[Any]
    machine: dict[str, Any]
    vectors: dict[str, str] = {}
    threads: int | None = None
    report: dict[str, Any]
    analysis: dict[str, Any] | None
    config: dict[str, Any] | None = None
    generation: dict[str, Any] | None = None
    files: dict[str, FileInfo] = {}

    def to_json(self) -> str:
        return json.dumps(seal.sealed(self.model_dump(mode="json")), indent=1) + "\n"

    @staticmethod
    def read(folder: Path) -> Record:
        """
        Raises:
            ArtifactError: no saved module, or one of another format.
        """
        path = folder / FILE
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ArtifactError(
                f"{path} cannot be read: {' '.join(str(error).split())}; save the module again"
            ) from error
        if not isinstance(data, dict) or data.get("format_version") != FORMAT_VERSION:
            raise ArtifactError(f"{path}: expected format version {FORMAT_VERSION}; save the module again")
        try:
            record = Record.model_validate(seal.unsealed(data))
        except ValidationError as error:
            places = ", ".join(
                f"{'.'.join(map(str, e['loc']))} is {shown(e.get('input'))}" for e in error.errors()[:5]
            )
            raise ArtifactError(
                f"{path}: damaged or edited by hand: {places}; save the module again"
            ) from error
        if not seal.holds(data):
            raise ArtifactError(
                f"{path}: damaged or edited by hand: its {seal.KEY} is not that of what it says; take it from the "
                "original again, or save the module again"
            )
        if wrong := next(
            (name for name in record.files if ".." in Path(name).parts or name.startswith("/")), None
        ):
            raise ArtifactError(f"{path}: damaged or edited by hand: files: {wrong!r} is not in this folder")
        return record
