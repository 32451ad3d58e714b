"""What a model takes as a prompt, and where its texts end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from kvcompile.errors import InputError
from kvcompile.runtime.program import Program

Prompt = str | Sequence[int]


def ids_of(prompt: Prompt, tokenizer: Any | None, bounds: tuple[int, int]) -> tuple[int, ...]:
    """The token ids of a prompt; bounds: the least and the largest that the model has.

    Raises:
        InputError: a text without a tokenizer, no tokens, or what are no ids of the model.
    """
    given: Any = prompt
    if isinstance(given, str):
        if tokenizer is None:
            raise InputError("prompt: a text, and the engine has no tokenizer: give it one, or token ids")
        given = tokenizer(given)["input_ids"]
    try:
        ids: tuple[Any, ...] = tuple(given.tolist() if isinstance(given, Tensor) else given)
    except TypeError:
        raise InputError(f"prompt: expected a text or token ids, got {type(given).__name__}") from None
    if not ids:
        raise InputError("prompt: expected at least one token, got none")
    least, most = bounds
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise InputError(f"prompt: expected token ids, got {token!r}")
        if not least <= token <= most:
            raise InputError(f"prompt: expected ids from {least} to {most}, got {token}")
    return ids


def bounds_of(program: Program, model: nn.Module) -> tuple[int, int]:
    """The least and the largest id: of the table that they go into, or as the configuration and the tables say."""
    if program.ids is not None:
        return program.ids
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    size = getattr(text, "vocab_size", None)
    if not isinstance(size, int):
        tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
        size = max(tables, default=1 << 31)
    return 0, size - 1


def ends_of(model: nn.Module, tokenizer: Any | None) -> frozenset[int]:
    """Ids that end a text, as the model's generation config, its config and the tokenizer say."""
    found: set[int] = set()
    for owner in (getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        if isinstance(ids, (int, list, tuple)):
            found |= {ids} if isinstance(ids, int) else set(ids)
    return frozenset(found)
