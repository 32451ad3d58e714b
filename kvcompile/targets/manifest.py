"""manifest.json: what an artifact's graphs take and give, and how its caches are kept. docs/artifacts.md tells how to
run one by it.

A shape's sizes are numbers or names: `batch`, `tokens`, `kept`, `slots`, `pages_0`, ...; a name means one size in all
inputs and outputs of a call. Dtypes are named as in torch.
"""

from __future__ import annotations

import json
import math
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvcompile.errors import ArtifactError
from kvcompile.targets import seal
from kvcompile.targets.registry import TARGETS, Target
from kvcompile.util.console import shown

FORMAT_VERSION = 1
FILE = "manifest.json"
Role = Literal["input_ids", "positions", "seq_lens", "keep", "slots", "page_table", "cache", "logits"]
Count = Annotated[int, Field(ge=0, lt=1 << 31)]  # graphs count in 32 bits, but for bytes
Positive = Annotated[Count, Field(ge=1)]
Size = Count | str
_MOST_BYTES = 1 << 48  # of one cache of one sequence: more than any machine has


def dtype_name(dtype: torch.dtype) -> str:
    """As the manifest has it: "float16", "int8", ..."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The inverse of `dtype_name`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _listed(target: Target) -> Target:
    if target not in TARGETS:
        raise ValueError(f"expected one of {', '.join(TARGETS)}")
    return target


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorInfo(_Record):
    """One input or output of a graph."""

    name: str
    role: Role
    dtype: str
    shape: tuple[Size, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return dtype_named(self.dtype)


class Alias(_Record):
    """A cache and what becomes of it. in_place: one address may, or must, be bound to both; else two, which swap.
    Where both have one name there is no such output: the graph itself writes to its input."""

    input: str
    output: str
    in_place: bool


class Span(_Record):
    """The shapes of one input that a profile admits."""

    min: tuple[Count, ...]
    opt: tuple[Count, ...]
    max: tuple[Count, ...]


class Profile(_Record):
    """A TensorRT optimization profile: shapes by input."""

    name: str
    shapes: dict[str, Span]


class Graph(_Record):
    """One graph: `step` is prefill and decode in one; entry: its name in a file that holds several."""

    phase: Literal["prefill", "decode", "step"]
    file: str
    entry: str | None = None
    inputs: Annotated[tuple[TensorInfo, ...], Field(min_length=1)]
    outputs: Annotated[tuple[TensorInfo, ...], Field(min_length=1)]
    aliases: tuple[Alias, ...]
    profiles: tuple[Profile, ...] = ()

    def takes(self, batch: int) -> bool:
        """Whether it is for so many sequences."""
        return self.inputs[0].shape[0] == batch or isinstance(self.inputs[0].shape[0], str)


class Cache(_Record):
    """One cache tensor.

    holds:    what its bytes mean, where that is not its dtype
    fill:     what it holds from the start, a number per KV head; null: zeros
    in_order: whether rows stand at their token's column
    """

    name: str
    dtype: str
    shape: tuple[Size, ...]
    holds: str | None = None
    fill: tuple[float, ...] | None = None
    in_order: bool = False
    state: bool = False


class Pages(_Record):
    """Layers whose sequences have the same pages; page 0 of every pool belongs to nobody.

    slots: of one sequence at the limit of tokens: a token at position p is in page table[p mod slots // page_size]
    pages: that a pool has in all; null: as many as are needed
    """

    table: str
    page_size: Positive
    slots: Positive
    pages: Positive | None
    dimension: str
    layers: tuple[Count, ...]
    caches: tuple[str, ...]


class LimitsInfo(_Record):
    """What one cache may hold; whole_prompts: a prompt must come in one call."""

    max_batch: Positive
    max_tokens: Positive | None
    prefill_chunk: Positive
    whole_prompts: bool


class ModelInfo(_Record):
    """Which model it was: its class, and digests of the names and shapes of its weights, and of all their bytes."""

    architecture: str
    digest: str
    weights: str | None = None
    dtype: str
    vocab_size: Positive
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


class RecipeInfo(_Record):
    """The recipe as it was used: `text` is YAML that `Recipe.load` reads."""

    name: str
    digest: str
    text: str
    scales: str | None = None


class PlanInfo(_Record):
    digest: str
    text: str
    lossless: bool
    bytes_per_token: int


class CheckInfo(_Record):
    """What was compared when the artifact was made: the relative RMS error, and what rounding explains."""

    session: str
    error: float
    budget: float
    tokens: int


class FileInfo(_Record):
    bytes: Annotated[int, Field(ge=0)]
    sha256: str


class Manifest(_Record):
    """All of manifest.json.

    slots:    the most that may be read of layers that are kept in order; 0 where there are none
    ragged:   whether sequences may start behind padding
    versions: of the packages that made it
    engine:   of the TensorRT engine: package, version, compute capabilities
    machine:  that an AOTInductor package is compiled for (`targets/machine.py`)
    """

    format: Literal["kvcompile"] = "kvcompile"
    format_version: Literal[1] = 1
    target: Annotated[Target, AfterValidator(_listed)]
    versions: dict[str, str]
    model: ModelInfo
    recipe: RecipeInfo
    plan: PlanInfo
    limits: LimitsInfo
    ragged: bool
    slots: Count
    graphs: tuple[Graph, ...]
    caches: tuple[Cache, ...]
    pages: tuple[Pages, ...] = ()
    files: dict[str, FileInfo] = {}
    tokenizer: str | None = None
    checks: tuple[CheckInfo, ...] = ()
    engine: dict[str, Any] | None = None
    machine: dict[str, Any] | None = None

    def graph(self, tokens: int, batch: int) -> Graph:
        """The first graph for so many new tokens of so many sequences."""
        wanted = "decode" if tokens == 1 else "prefill"
        graphs = [graph for graph in self.graphs if graph.takes(batch)]
        return next((graph for graph in graphs if graph.phase == wanted), graphs[0])

    def problem(self) -> str:
        """What types alone do not tell: files elsewhere, or names that nothing goes by; empty: nothing."""
        names = [*self.files, *([] if self.tokenizer is None else [self.tokenizer])]
        for name in names:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
                return f"files: {name!r} is not in this folder"
        if not self.graphs:
            return "graphs: there is none"
        caches = {cache.name for cache in self.caches}
        tensors = [info for graph in self.graphs for info in (*graph.inputs, *graph.outputs)]
        for name, dtype in [(of.name, of.dtype) for of in tensors] + [
            (of.name, of.dtype) for of in self.caches
        ]:
            if not isinstance(getattr(torch, dtype, None), torch.dtype):
                return f"{name}: no dtype {dtype!r}"
        for cache in self.caches:
            sizes = [size for size in cache.shape if isinstance(size, int)]
            if math.prod(sizes) * dtype_named(cache.dtype).itemsize >= _MOST_BYTES:
                return f"caches: {cache.name} of shape {list(cache.shape)} has room nowhere"
        for pages in self.pages:
            if not caches.issuperset(pages.caches):
                return f"pages: {pages.table} has caches that are none"
        for graph in self.graphs:
            if graph.inputs[0].role != "input_ids" or not graph.inputs[0].shape:
                return f"graphs: the first input of {graph.phase} is no input_ids"
            if graph.file not in self.files:
                return f"graphs: {graph.file!r} is not among the files"
            if {info.name for info in graph.inputs if info.role == "cache"} != caches:
                return f"caches: not those that {graph.phase} takes"
        return ""

    def to_json(self) -> str:
        return json.dumps(seal.sealed(self.model_dump(mode="json")), indent=1) + "\n"

    @model_validator(mode="before")
    @classmethod
    def _without_seal(cls, data: Any) -> Any:
        return seal.unsealed(data) if isinstance(data, dict) else data

    @staticmethod
    def read(folder: str | Path) -> Manifest:
        """The manifest of an artifact.

        Raises:
            ArtifactError: no artifact, or one of another format.
        """
        path = Path(folder) / FILE
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ArtifactError(
                f"{folder}: expected the folder of an artifact, with a {FILE}, and there is none; "
                "kvcompile.export(model, folder, target=...) writes one"
            ) from error
        except (OSError, ValueError, RecursionError) as error:
            raise ArtifactError(
                f"{path} cannot be read: {' '.join(str(error).split())}; export again"
            ) from error
        if not isinstance(data, dict) or data.get("format") != "kvcompile":
            raise ArtifactError(f"{path}: no manifest of kvcompile (its `format` is not 'kvcompile')")
        if data.get("format_version") != FORMAT_VERSION:
            versions = data.get("versions")
            by = versions.get("kvcompile", "unknown") if isinstance(versions, dict) else "unknown"
            raise ArtifactError(
                f"{path}: format version {data.get('format_version')!r}, and this kvcompile reads {FORMAT_VERSION}; "
                f"export again with this version, or run it with the one that wrote it ({by})"
            )
        try:
            manifest = Manifest.model_validate(data)
        except ValidationError as error:
            places = ", ".join(
                f"{'.'.join(map(str, e['loc']))} is {shown(e.get('input'))}" for e in error.errors()[:5]
            )
            raise ArtifactError(f"{path}: damaged or edited by hand: {places}; export again") from error
        problem = manifest.problem()
        if problem:
            raise ArtifactError(f"{path}: damaged or edited by hand: {problem}; export again")
        if not seal.holds(data):
            raise ArtifactError(
                f"{path}: damaged or edited by hand: its {seal.KEY} is not that of what it says, and the graphs are "
                "for what it said; take it from the original again, or export again"
            )
        return manifest
