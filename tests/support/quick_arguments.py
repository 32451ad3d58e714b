"""Operators' arguments are taken apart and put together as what they are: the same leaves in the same order, sooner.

Tracing runs some thousand operators on fake tensors, and PyTorch takes the arguments of each for a tree of any
containers. They are a tuple and a dict of leaves and lists of leaves; what is more goes PyTorch's own way. That is a
twentieth of what tracing takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.utils import _pytree

LEAVES = frozenset(
    (
        *(Tensor, torch.nn.Parameter, fake_tensor.FakeTensor),
        *(int, float, bool, str, type(None), torch.SymInt, torch.SymFloat, torch.SymBool),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    )
)
PLAIN = SimpleNamespace(flatten=_pytree.tree_flatten, unflatten=_pytree.tree_unflatten, map=_pytree.tree_map)


class Form:
    """What is needed to put arguments together: of each the kind and length of its list, or None; and names."""

    __slots__ = ("kinds", "names", "positional")

    def __init__(self, kinds: list[tuple[type, int] | None], positional: int, names: tuple[str, ...]) -> None:
        self.kinds, self.positional, self.names = kinds, positional, names


def taken_apart(tree: Any, is_leaf: Any = None) -> tuple[list[Any], Any]:
    """In place of `tree_flatten`."""
    if is_leaf is not None or type(tree) is not tuple or len(tree) != 2:
        return PLAIN.flatten(tree, is_leaf)  # type: ignore[no-any-return]
    given, named = tree
    if type(given) is not tuple or type(named) is not dict:
        return PLAIN.flatten(tree)  # type: ignore[no-any-return]
    leaves: list[Any] = []
    kinds: list[tuple[type, int] | None] = []
    for value in (*given, *named.values()) if named else given:
        kind = type(value)
        if kind in LEAVES:
            leaves.append(value)
            kinds.append(None)
        elif (kind is list or kind is tuple) and all(type(each) in LEAVES for each in value):
            leaves.extend(value)
            kinds.append((kind, len(value)))
        else:
            return PLAIN.flatten(tree)  # type: ignore[no-any-return]
    return leaves, Form(kinds, len(given), tuple(named))


def put_together(leaves: Sequence[Any], form: Any) -> Any:
    """In place of `tree_unflatten`."""
    if type(form) is not Form:
        return PLAIN.unflatten(leaves, form)
    values: list[Any] = []
    place = 0
    for kind in form.kinds:
        if kind is None:
            values.append(leaves[place])
            place += 1
        else:
            values.append(kind[0](leaves[place : place + kind[1]]))
            place += kind[1]
    named = dict(zip(form.names, values[form.positional :], strict=True)) if form.names else {}
    return tuple(values[: form.positional]), named


def mapped(function: Any, tree: Any, *more: Any, **options: Any) -> Any:
    """In place of `tree_map`: of one tensor, that is the function of it."""
    if type(tree) in LEAVES and not more and not options:
        return function(tree)
    return PLAIN.map(function, tree, *more, **options)


def install() -> None:
    """For this process, and all that it forks."""
    own = {"tree_flatten": taken_apart, "tree_unflatten": put_together, "tree_map": mapped}
    fake_tensor.pytree = SimpleNamespace(**vars(_pytree) | own)  # type: ignore[attr-defined]
    fake_tensor.tree_map = mapped  # type: ignore[attr-defined]
