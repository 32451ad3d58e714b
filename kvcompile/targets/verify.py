"""`kvcompile verify ARTIFACT --model M`: what an artifact's sessions give, against the eager oracle of its plan.

The plan is made again from the model and the recipe in the manifest: another model, recipe or version of kvcompile
gives another digest, and is refused. Then every session that can run here, runs: ONNX Runtime, AOTInductor, and the
TensorRT engine where there is a GPU for it; what cannot is told with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from kvcompile.errors import ArtifactError
from kvcompile.original.digest import of_weights
from kvcompile.original.inference_tensors import as_normal
from kvcompile.recipe import Recipe
from kvcompile.recipe.yaml_text import YamlProblems, read_yaml
from kvcompile.runtime.load import openers
from kvcompile.runtime.session import Session
from kvcompile.targets.manifest import Manifest
from kvcompile.targets.source import Source, source_of
from kvcompile.verify import check_program
from kvcompile.verify.compare import Check
from kvcompile.verify.lengths import MINIMUM
from kvcompile.verify.long import program_chunks

# A prompt, a chunk that goes on with it, and decode steps: the first pieces of every run.
CHUNKS = (17, 5, *(1 for _ in range(30)))


@dataclass(frozen=True)
class Outcome:
    """One session: what was measured, or why it did not run."""

    session: str
    check: Check | None
    reason: str = ""


def verify_artifact(
    path: str | Path, model: nn.Module, *, chunks: Sequence[int] | None = None, scales: str | None = None
) -> tuple[Outcome, ...]:
    """Run the artifact at `path` and compare it with the model that it was made of.

    Args:
        model: the original, as for `kvcompile.export`.
        chunks: how many tokens come together, pass by pass; None: at least `lengths.MINIMUM`, in pieces that the plan's
            groups, pages, windows and budgets want.
        scales: the file of calibrated scales, where the recipe names one that stands elsewhere now.

    Raises:
        ArtifactError: damaged, or not of this model and this version of kvcompile.
        VerificationError: a session disagrees.
    """
    with as_normal(model):
        return _verified(path, model, chunks, scales)


def _verified(
    path: str | Path, model: nn.Module, chunks: Sequence[int] | None, scales: str | None
) -> tuple[Outcome, ...]:
    manifest = Manifest.read(path)
    source = source_for(manifest, model, scales)
    outcomes = []
    sessions = tuple(openers(manifest))
    for name, opened in sessions:
        try:
            session = opened(path)
        except ArtifactError as error:
            if len(sessions) == 1:  # then nothing would be compared
                raise
            outcomes.append(Outcome(name, None, str(error)))
            continue
        outcomes.append(Outcome(name, check_session(session, source, chunks)))
    return tuple(outcomes)


def source_for(manifest: Manifest, model: nn.Module, scales: str | None = None) -> Source:
    """The plan that the artifact was made of, made again.

    Raises:
        ArtifactError: it comes out different.
    """
    recipe = recipe_of(manifest, scales)
    source = source_of(model, recipe, lambda *_: None, {}, manifest.target, verified=False)
    if source.front.model.digest != manifest.model.digest:
        raise ArtifactError(
            f"the artifact is of another model: {manifest.model.architecture} with digest {manifest.model.digest} (of "
            f"its weights' names and shapes), and this is {source.front.model.architecture} with "
            f"{source.front.model.digest}"
        )
    if source.plan.dtype != manifest.model.dtype:
        raise ArtifactError(
            f"the artifact is in {manifest.model.dtype}, and the model in {source.plan.dtype}: load it with "
            f"dtype={manifest.model.dtype}"
        )
    if manifest.model.weights not in (None, found := of_weights(source.model)):
        raise ArtifactError(
            f"not this checkpoint: the artifact was made of {manifest.model.architecture} with weights "
            f"{manifest.model.weights}, and these are {found}: give the model that it was made of, or export again"
        )
    made_by = manifest.versions.get("kvcompile", "unknown")
    if source.plan.digest() != manifest.plan.digest:
        raise ArtifactError(
            f"recipe {manifest.recipe.name!r} gives plan {source.plan.digest()} here, and the artifact was made of "
            f"plan {manifest.plan.digest} (by kvcompile {made_by}): export it again"
        )
    return source


def recipe_of(manifest: Manifest, scales: str | None = None) -> Recipe:
    """The recipe that the artifact was made with.

    scales: the file of calibrated scales, where it stands elsewhere now

    Raises:
        ArtifactError: what the manifest has is none; RecipeError: no file of scales where the recipe names one.
    """
    try:
        data = read_yaml(manifest.recipe.text)
    except YamlProblems as error:
        raise ArtifactError(f"the manifest's recipe {error}: it is damaged; export again") from error
    if not isinstance(data, dict):
        raise ArtifactError(
            f"the manifest's recipe is damaged: expected a mapping, got {type(data).__name__}; export again"
        )
    return Recipe.load(data if scales is None else data | {"scales": scales})


def check_session(session: Session, source: Source, chunks: Sequence[int] | None = None) -> Check:
    """A session against the oracle; it is reset before and after.

    chunks: as in `verify_artifact`

    Raises:
        VerificationError: it disagrees by more than rounding explains.
    """

    def step(ids: Tensor, mask: Tensor | None) -> Tensor:
        return session.prefill(ids, mask, keep=None)

    chunks = chunks or program_chunks(source.front, source.plan, CHUNKS, MINIMUM)
    session.reset()
    try:
        return check_program(
            step, source.front, source.plan, chunks, buffers=lambda: session.cache.buffers, name=session.name
        )
    finally:
        session.reset()
