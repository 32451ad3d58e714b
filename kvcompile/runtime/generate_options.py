"""What a generation config may ask of a module with one cache inside, whose graph gives logits only."""

from __future__ import annotations

from typing import Any

from kvcompile.errors import InputError

# Ways to guess tokens that need the original's own modules.
_INSIDE = ("assistant_early_exit", "use_mtp", "speculation_type", "dola_layers")
# What makes one text of two, and the values with which it does not.
_BESIDE: dict[str, tuple[Any, ...]] = {"guidance_scale": (None, 1), "token_healing": (None, False)}


def check_count(name: str, count: Any) -> None:
    """Refuse what is no count.

    Raises:
        InputError: neither None nor a whole number of at least 1.
    """
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise InputError(f"{name}: expected a whole number of at least 1, got {count!r}")


def check_options(config: Any) -> None:
    """Refuse a generation config, with all defaults in it, that asks for more than that.

    Raises:
        InputError: an option that needs the original model, or a count that is none.
    """
    for name in ("num_beams", "num_return_sequences"):
        check_count(name, getattr(config, name))
    for name in _INSIDE:
        if getattr(config, name, None):
            raise InputError(
                f"{name}: it runs some of the model's layers, or reads what is between them, and the rewritten "
                "graph gives logits only; call the original model"
            )
    for name, without in _BESIDE.items():
        if (value := getattr(config, name, None)) not in without:
            raise InputError(
                f"{name}={value}: it runs another text beside this one, and this module has one cache; call the "
                "original model"
            )
    # "paged" asks for batches of transformers' own, which the module refuses by their name.
    if config.cache_implementation not in (None, "paged"):
        raise InputError(
            f"cache_implementation={config.cache_implementation!r}: the recipe has chosen the cache; leave it out"
        )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name):
            raise InputError(f"{name}: the rewritten graph gives logits only; call the original model")
