"""A Hadamard transform before quantization: channels that stand out are spread over their block (QuaRot, 2024).

    y = H x / sqrt(n)      H of entries +-1, symmetric, H H = n I

Blocks of n channels, the largest power of two that divides head_dim. Scores do not change if queries are transformed
as keys are; what the probabilities weigh is transformed back once per query.
"""

from __future__ import annotations

_SMALLEST = 4


def block(dim: int) -> int:
    """Channels that are mixed with each other: the largest power of two that divides `dim`."""
    return dim & -dim


def check(dim: int) -> str | None:
    """Why vectors of `dim` channels cannot be transformed, or None."""
    if block(dim) >= _SMALLEST:
        return None
    return (
        f"rotate: hadamard turns blocks of a power of two that divides head_dim; {dim} has none of {_SMALLEST} or "
        "more: use rotate: none"
    )
