"""What is exported: an understood and verified model, its plan, and what the manifest says of both."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from kvcompile.errors import ExportError
from kvcompile.kernels.cpp.available import compiled
from kvcompile.original.adapters import base_of
from kvcompile.original.digest import of_weights
from kvcompile.pipeline import Front, absorbed, plan_for, understand
from kvcompile.plan import Plan
from kvcompile.recipe import Recipe
from kvcompile.runtime.module import CachedModel
from kvcompile.targets.caches import caches_of, pages_of
from kvcompile.targets.functional import Functional
from kvcompile.targets.manifest import (
    Graph,
    LimitsInfo,
    Manifest,
    ModelInfo,
    PlanInfo,
    RecipeInfo,
)
from kvcompile.targets.registry import TARGETS, Target
from kvcompile.verify import verify

Tell = Callable[[str, int, int], None]
TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class Source:
    """A model that may be exported."""

    model: nn.Module
    front: Front
    plan: Plan
    recipe: Recipe
    generation: Any = None  # the generation config of what was given to `export`

    def metadata(self) -> dict[str, str]:
        """Where it comes from, as ONNX models say it of themselves."""
        return {
            "kvcompile.version": _version("kvcompile"),
            "kvcompile.recipe": self.recipe.name,
            "kvcompile.recipe_digest": self.recipe.digest(),
            "kvcompile.plan_digest": self.plan.digest(),
            "torch.version": _version("torch"),
        }

    def manifest(
        self,
        target: Target,
        function: Functional,
        graphs: tuple[Graph, ...],
        packages: tuple[str, ...],
        **more: Any,
    ) -> Manifest:
        """The manifest without its files; packages: whose versions it tells, besides torch and kvcompile."""
        plan, front = self.plan, self.front
        config = self.generation
        ends = getattr(config, "eos_token_id", None)
        ends = () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)
        return Manifest(
            target=target,
            versions={name: _version(name) for name in ("kvcompile", "torch", *packages)},
            model=ModelInfo(
                architecture=front.model.architecture,
                digest=front.model.digest,
                weights=of_weights(self.model),
                dtype=plan.dtype,
                vocab_size=int(graphs[0].outputs[0].shape[-1]),
                bos_token_id=getattr(config, "bos_token_id", None),
                eos_token_ids=ends,
            ),
            recipe=RecipeInfo(
                name=self.recipe.name,
                digest=self.recipe.digest(),
                text=yaml.safe_dump(self.recipe.model_dump(mode="json", exclude_unset=True), sort_keys=False),
                scales=plan.scales,
            ),
            plan=PlanInfo(
                digest=plan.digest(),
                text=str(plan),
                lossless=plan.lossless,
                bytes_per_token=plan.bytes_per_token,
            ),
            limits=LimitsInfo(
                max_batch=plan.limits.max_batch,
                max_tokens=plan.limits.max_tokens,
                prefill_chunk=plan.limits.prefill_chunk,
                whole_prompts=plan.whole_prompts,
            ),
            ragged=front.ragged,
            slots=function.shape.span,
            graphs=graphs,
            caches=caches_of(function),
            pages=pages_of(function),
            **more,
        )

    @staticmethod
    def write_tokenizer(tokenizer: Any, made: Path) -> str:
        """Save a tokenizer of transformers; its folder's name in the artifact.

        Raises:
            ExportError: it is none, or cannot be saved.
        """
        if not hasattr(tokenizer, "save_pretrained"):
            raise ExportError(
                f"tokenizer: expected one of transformers, got {type(tokenizer).__name__}; "
                "without, sessions take token ids"
            )
        try:
            tokenizer.save_pretrained(made / TOKENIZER)
        except OSError:  # told by whoever made the folder
            raise
        except Exception as error:  # tokenizers, written in Rust, has no kind of its own for a full disk
            raise ExportError(
                f"tokenizer: {type(tokenizer).__name__} cannot be saved: {' '.join(str(error).split())}"
            ) from error
        return TOKENIZER


def source_of(
    model: nn.Module,
    recipe: object,
    tell: Tell,
    overrides: dict[str, Any],
    target: Target,
    *,
    verified: bool = True,
) -> Source:
    """Understand, plan and verify, as `optimize` does; of the targets, some have generated kernels in their graphs.

    verified: whether the rewrite is compared with the model, as the recipe says

    Raises:
        RecipeError, ModelError, PlanError, VerificationError: as `optimize`.
    """
    generation = getattr(model, "generation_config", None)  # an optimized module may have its own
    model = base_of(model)
    if isinstance(model, CachedModel):
        model.check_alone("exported", ExportError)
        recipe = model.recipe if recipe is None else recipe
        model = model.model
    checked = Recipe.load("baseline" if recipe is None else recipe, **overrides)
    if not TARGETS[target].generated:
        options = checked.compile.model_copy(update={"kernels": "reference", "mode": "default"})
        checked = checked.model_copy(update={"compile": options})
    tell("capture and detect", 0, 1)
    model = base_of(model)
    front = understand(model)
    # What verifies an artifact plans as who made it, and that took a compiler.
    with nullcontext() if verified else compiled():
        plan = plan_for(front, checked)
    if plan.devices:
        raise ExportError(
            f"the model's layers are on {', '.join(plan.devices)}, and an artifact runs on one: load the model on "
            "one device to export it"
        )
    front = absorbed(front, plan)
    tell("capture and detect", 1, 1)
    if verified:
        tell(f"verify ({checked.verify})", 0, 1)
        verify(model, front, plan, checked.verify)
        tell(f"verify ({checked.verify})", 1, 1)
    return Source(model, front, plan, checked, generation)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
