"""How a model is set while it is traced: in eval mode, with one attention implementation, with or without a cache.

All is put back as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode, with each module's own training flag put back."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


def configs(model: nn.Module) -> list[Any]:
    """Every config object of the model and its parts that chooses an attention implementation."""
    found = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) is not None:
            found[id(config)] = config
    return list(found.values())


def implementations(model: nn.Module, reasons: list[str]) -> list[str | None]:
    """The attention implementations to try, in order; [None] for a model that has no such setting."""
    present = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if present is None:
        return [None]
    if present in ("sdpa", "eager"):
        first = present
    else:
        # Softcapping exists in the flash and eager spellings; sdpa would drop it silently.
        softcap = any(getattr(config, "attn_logit_softcapping", None) for config in configs(model))
        first = "eager" if softcap or not getattr(model, "_supports_sdpa", True) else "sdpa"
        reasons.append(f"attention implementation {present!r} is opaque to export; traced under {first!r}")
    second = "eager" if first == "sdpa" else "sdpa"
    return [first] if second == "sdpa" and not getattr(model, "_supports_sdpa", False) else [first, second]


def is_another(model: nn.Module, implementation: str | None) -> bool:
    """Whether the model has an attention implementation that runs anywhere, and it is not this one.

    The two are not always the same: where transformers leaves a mask out for SDPA, its flag says what it is, and that
    may be another one (PaliGemma without token types).
    """
    own = {config._attn_implementation for config in configs(model)}
    return implementation is not None and own <= {"sdpa", "eager"} and own != {implementation}


@contextmanager
def configured(model: nn.Module, implementation: str | None) -> Iterator[None]:
    """The attention implementation on every config, and no cache by default, for the time of one export."""
    saved = [(config, dict(config.__dict__)) for config in configs(model)]
    try:
        for config, _ in saved:
            if implementation and config._attn_implementation != implementation:
                config._attn_implementation = implementation
            if getattr(config, "use_cache", False):  # some models do not pass the argument on
                config.use_cache = False
        yield
    finally:
        for config, attributes in saved:
            config.__dict__.clear()
            config.__dict__.update(attributes)


@contextmanager
def caching(model: nn.Module) -> Iterator[None]:
    """With a cache by default."""
    saved = [(config, config.use_cache) for config in configs(model) if hasattr(config, "use_cache")]
    try:
        for config, _ in saved:
            config.use_cache = True
        yield
    finally:
        for config, value in saved:
            config.use_cache = value
