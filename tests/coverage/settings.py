"""The configurations that a type is tried in: one, and another for the sizes that have an effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from tests.coverage.configs import SIZES, Size, Sizes, tiny_model
from tests.coverage.original import ALIKE, error, text, whole
from tests.coverage.sizes import ABOVE, BELOW, PIECE, PIECES, SEEN, TABLE, TABLES, TEXT, seen

_WINDOW = {"sliding_window": Size("sliding_window")}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}
# What some types can do and do not by default, and what that is called: tried like another type.
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "minimax_m3_vl_text": (
        "with an indexer",
        {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": 2, "index_head_dim": 8},
    ),
    "mixtral": ("with windows", _WINDOW),
    "phi3": ("with longrope", {"rope_parameters": _LONGROPE}),
    "qwen2": ("with windows", {**_WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    "starcoder2": ("with windows", _WINDOW),
}


@dataclass(frozen=True)
class Setting:
    """A type's model, and what is special about it.

    name:    what it is called beside the type; empty for the type as it is by default
    changes: to that
    sizes:   those with an effect, in tokens, by name
    values:  of all names of sizes
    """

    model_type: str
    attn: str | None
    model: nn.Module
    name: str
    changes: Mapping[str, Any]
    sizes: Mapping[str, int]
    values: Mapping[str, Any]

    def longer(self) -> nn.Module | None:
        """The same model with tables of twice as many positions; None where that has other weights."""
        values = {**self.values, **dict.fromkeys(TABLES, 2 * TABLE)}
        model = tiny_model(self.model_type, self.attn, Sizes(values), self.changes)
        ours, theirs = ([p.shape for p in each.parameters()] for each in (self.model, model))
        return model if ours == theirs else None

    def __str__(self) -> str:
        sizes = [f"{name} {value}" for name, value in self.sizes.items()]
        return ", ".join([*([self.name] if self.name else []), *sizes])


def settings(model_type: str, attn: str | None = None) -> list[Setting]:
    """The type as it is by default, with sizes below the text and above it; then as it can be.

    Raises:
        Exception: whatever the type's classes raise where they cannot be built.
    """
    found = _pair(model_type, attn, "", {})
    if model_type in MORE:
        found += _pair(model_type, attn, *MORE[model_type])
    return found


def _pair(model_type: str, attn: str | None, called: str, changes: Mapping[str, Any]) -> list[Setting]:
    """Sizes below the text; and above it, where that is another model."""
    below = Sizes(SIZES)
    model = tiny_model(model_type, attn, below, changes)
    pieces = {name: PIECE for name in PIECES if name in below.used}
    names = [name for name in SEEN if name in below.used]
    live = [name for name in names if _matters(model, model_type, attn, name, changes)]
    first = Setting(model_type, attn, model, called, changes, dict.fromkeys(live, BELOW) | pieces, SIZES)
    if not live:
        return [first]
    values = SIZES | seen(ABOVE)
    above = tiny_model(model_type, attn, Sizes(values), changes)
    return [first, Setting(model_type, attn, above, called, changes, dict.fromkeys(live, ABOVE), values)]


def _matters(
    model: nn.Module, model_type: str, attn: str | None, name: str, changes: Mapping[str, Any]
) -> bool:
    """Whether the logits are others where this size alone is above the text."""
    other = tiny_model(model_type, attn, Sizes(SIZES | seen(ABOVE, (name,))), changes)
    ids = text(tokens=TEXT)
    try:
        return not error(whole(other, ids), whole(model, ids)) <= ALIKE
    except Exception:  # it does not run at all; the check says so
        return False
