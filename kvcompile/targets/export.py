"""`kvcompile.export`: a model with the cache of a recipe as files that run without it.

| target | files | runs on | module |
|---|---|---|---|
| onnx | prefill.onnx, decode.onnx, weights.bin | ONNX Runtime | `targets/onnx/session.py` |
| tensorrt | step.engine, and the step.onnx that it was built from | TensorRT | `targets/tensorrt/session.py` |
| aoti | model.pt2, weights.safetensors | PyTorch | `targets/aoti/session.py` |

And manifest.json, which says all that a runtime must know (docs/artifacts.md).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcompile.errors import ExportError
from kvcompile.targets.registry import TARGETS, Target
from kvcompile.util.progress import told
from kvcompile.util.serial import traces

if TYPE_CHECKING:  # torch comes when something is exported
    from torch import nn

    from kvcompile.targets.manifest import Manifest


@traces
def export(
    model: nn.Module,
    out: str | Path,
    target: Target,
    *,
    recipe: object = None,
    tokenizer: Any = None,
    progress: Callable[[str, int, int], None] | None = None,
    options: dict[str, Any] | None = None,
    **overrides: Any,
) -> Manifest:
    """Write `model` with the cache of `recipe` as an artifact for `target`.

    Args:
        model: what `kvcompile.optimize` takes, or what it returned: then with the recipe that it was optimized with.
        out: the artifact's folder. One that is there is replaced once the new one is complete.
        recipe: as for `optimize`; None: of an optimized module its own, else "baseline".
        tokenizer: of transformers; goes along, so that sessions take texts.
        progress: called as progress(stage, done, total); None: as `optimize` shows it.
        options: of the target: onnx {opset: 24 or 23}; tensorrt and aoti: see their modules.
        overrides: recipe sections or keys of `runtime`, as for `optimize`.

    Returns:
        The manifest.

    Raises:
        ExportError: the target cannot do this plan, lacks a package, or `out` cannot be written; `out` is as it was.
        VerificationError: also where the artifact, when it ran, disagreed with the oracle.
        RecipeError, ModelError, PlanError, VerificationError: as `optimize`.
    """
    from kvcompile.original.inference_tensors import as_normal
    from kvcompile.targets import folder
    from kvcompile.targets.check import checked
    from kvcompile.targets.manifest import FILE
    from kvcompile.targets.source import source_of

    if target not in TARGETS:
        raise ExportError(f"target: expected one of {', '.join(TARGETS)}, got {target!r}")
    folder.check_replaceable(folder.place(out))
    module = import_module(TARGETS[target].writer)  # and what it needs, before the model is looked at
    if hasattr(module, "ready"):
        module.ready(options or {})
    write: Callable[..., Manifest] = module.write
    with told(progress) as tell, as_normal(model):
        source = source_of(model, recipe, tell, overrides, target)
        with folder.writing(out) as made:
            name = None if tokenizer is None else source.write_tokenizer(tokenizer, made)
            manifest = write(source, made, options or {}, tell)
            manifest = manifest.model_copy(update={"tokenizer": name, "files": folder.infos(made)})
            (made / FILE).write_text(manifest.to_json(), encoding="utf-8")
            checks = checked(source, made, tell)
            manifest = manifest.model_copy(update={"checks": checks})
            (made / FILE).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


__all__ = ["TARGETS", "Target", "export"]
