"""What is no decoder, told before anything is traced."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn

from kvcompile.errors import ModelError
from kvcompile.util.listed import listed

GLOBAL_HOOKS: tuple[Mapping[int, Any], ...] = (
    nn.modules.module._global_forward_pre_hooks,
    nn.modules.module._global_forward_hooks,
)
_HEADS = ("Classification", "QuestionAnswering", "MultipleChoice", "RewardModel")


def check_model(model: Any) -> None:
    """Refuse what can be told from the module alone.

    Raises:
        ModelError: no module, an optimized one, one without memory, or with a head for something else.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"expected a torch.nn.Module, got {type(model).__name__}")
    name = type(model).__name__
    if hasattr(model, "program") and hasattr(model, "executor"):
        raise ModelError(
            f"{name} is optimized already; optimize its original again: kvcompile.optimize(fast.model, recipe)"
        )
    missing: Any = getattr(model, "missing", None)
    if hasattr(model, "saved_as") and missing is not None:
        raise ModelError(missing("optimize or export it"))
    if away := offloaded(model):
        raise ModelError(
            f"{name} has weights that accelerate loads when a layer runs, and takes away after it "
            f"({listed(away, 1)}): a graph reads weights where they stand. Load the model with all of them in "
            "memory (no 'disk' or 'cpu' beside a GPU in device_map), or give each process a part of it: "
            'parallel={"stages": 2} or {"tensor": 2} under torchrun'
        )
    empty = [n for n, tensor in chain(model.named_parameters(), model.named_buffers()) if tensor.is_meta]
    if empty:
        raise ModelError(
            f"{name} has no weights yet: {listed(empty, 1)} {'is' if len(empty) == 1 else 'are'} on the meta device; "
            "load or initialise them first (from_pretrained does, and model.to_empty() gives them memory)"
        )
    if type(model).__module__.startswith("transformers.") and name.endswith(_HEADS):
        raise ModelError(
            f"{name} gives no logits of a next token; expected a causal language model, such as "
            "AutoModelForCausalLM makes"
        )


def offloaded(model: nn.Module) -> list[str]:
    """Parameters that hooks of accelerate bring from the disk, or from another device, while their layer runs."""
    found = []
    for path, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        hooks = getattr(hook, "hooks", None) or (hook,)
        if any(getattr(each, "offload", False) for each in hooks):
            names = (name for name, tensor in module.named_parameters(recurse=False) if tensor.is_meta)
            found += [f"{path}.{name}" if path else name for name in names]
    return found


def hooks_of(model: nn.Module) -> list[str]:
    """Forward hooks that a user has put on modules: "path (function)"; not those that transformers puts itself."""
    found = []
    for path, module in model.named_modules():
        found += _told(path or type(module).__name__, module._forward_pre_hooks, module._forward_hooks)
    return [*found, *_told("every module", *GLOBAL_HOOKS)]


def _told(where: str, *hooks: Mapping[int, Any]) -> list[str]:
    found = []
    for hook in chain.from_iterable(each.values() for each in hooks):
        if not str(getattr(hook, "__module__", "")).startswith(("transformers.", "torch.")):
            name = getattr(hook, "__qualname__", type(hook).__name__)
            found.append(f"{where} ({name.rsplit('.', 1)[-1]})")
    return found


def not_finite(model: nn.Module) -> str | None:
    """The name of a weight with NaN or infinite values, or None; reads all weights."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if _is_number(tensor) and bool(tensor.isnan().any()):
            return f"{name} has {int(tensor.isnan().sum())} values that are NaN"
    for name, tensor in model.named_parameters():
        if _is_number(tensor) and bool(tensor.isinf().any()):
            return f"{name} has {int(tensor.isinf().sum())} infinite values"
    return None


def _is_number(tensor: Tensor) -> bool:
    return type(tensor.data) is Tensor and tensor.is_floating_point() and tensor.element_size() > 1
