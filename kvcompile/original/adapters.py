"""Models inside of wrappers: of torch.compile, and of peft, with which adapters were at work when it was optimized.

A LoRA layer is a module like any other, and its weights are read like any other's. Which of a layer's adapters are
active, or merged into its weight, is Python state that the graph has taken as it was: a change is refused at the next
call. Nothing of peft is imported: a wrapper is known by what it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcompile.errors import InputError, ModelError

if TYPE_CHECKING:  # estimate and calibrate are light to import
    from torch import nn


def base_of(model: Any) -> Any:
    """The model that a wrapper calls: of peft, with its adapters in place, or of torch.compile; any other as it is.

    Raises:
        ModelError: the adapter is no part of the model's layers (prompt or prefix tuning).
    """
    if type(model).__name__ == "OptimizedModule" and "_orig_mod" in vars(model).get("_modules", ()):
        return base_of(model._orig_mod)
    if not (hasattr(model, "get_base_model") and hasattr(model, "peft_config")):
        return model
    if model.active_peft_config.is_prompt_learning:
        raise ModelError(
            f"{type(model).__name__} with {model.active_peft_config.peft_type}: it puts keys, values or embeddings "
            "before the text, which no token ids stand for; kvcompile takes adapters that are layers, such as LoRA"
        )
    return base_of(model.get_base_model())


class Adapters:
    """Which adapters of a model's layers are active, merged or switched off; empty where it has none."""

    def __init__(self, model: nn.Module):
        self._layers: list[Any] = [
            module
            for module in model.modules()
            if hasattr(module, "merged_adapters") and hasattr(module, "active_adapters")
        ]
        self._known = self._state()

    def _state(self) -> list[tuple[tuple[str, ...], tuple[str, ...], bool]]:
        return [
            (tuple(each.active_adapters), tuple(each.merged_adapters), bool(each.disable_adapters))
            for each in self._layers
        ]

    def check(self) -> None:
        """Raises InputError where other adapters are at work than when the model was optimized."""
        if self._layers and (now := self._state()) != self._known:
            was, found = next(pair for pair in zip(self._known, now, strict=True) if pair[0] != pair[1])
            raise InputError(
                f"the original's adapters were {_told(was)} when it was optimized, and are {_told(found)}: call "
                "kvcompile.optimize again for them, or set them back"
            )


def _told(state: tuple[tuple[str, ...], tuple[str, ...], bool]) -> str:
    active, merged, off = state
    how = "switched off" if off else "active"
    return f"{', '.join(active) or 'none'} ({how}; merged: {', '.join(merged) or 'none'})"
