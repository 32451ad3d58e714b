"""Equal layers: whose forwards do the same, so that one of them needs to be traced.

Two layers are equal where their modules are of the same classes with weights of the same shapes, and every attribute in
which they differ (`layer_idx`) is one that the forward of the first did not read: which it reads is noted while it is
traced. It is called in the same way, too: the same numbers, tensors of the same sizes, under the same autocast.

What Python could read besides is not seen from outside (a dictionary by module, a counter in a closure), so only
layers are compared whose classes are those of transformers and torch, which do no such thing; all others are traced one
by one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from kvcompile.kernels.ops.opaque import Template
from kvcompile.passes.graph import expr

_KNOWN = (
    "transformers.models.",
    "transformers.activations",
    "transformers.pytorch_utils",
    "transformers.integrations.",
    "torch.nn.modules.",
)
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_TORCH = frozenset(nn.Module().__dict__)
ALL = "__dict__"  # read by something that may look at any of the attributes

Attribute = tuple[str, str]  # path of a module within its layer, and the attribute's name


@dataclass(frozen=True)
class Layer:
    """What a layer is made of, as it is before it is traced.

    parts:      path, class and mode of each of its modules
    weights:    form of each parameter and buffer by name; the number tells which names are one tensor
    attributes: what else each module holds, by path and name
    """

    path: str
    module: nn.Module
    parts: tuple[tuple[Any, ...], ...]
    weights: tuple[tuple[Any, ...], ...]
    attributes: Mapping[Attribute, Any]

    @staticmethod
    def of(path: str, module: nn.Module) -> Layer | None:
        """None: what its forward reads cannot be seen."""
        named = list(module.named_modules(remove_duplicate=False))
        known = all(
            type(part).__module__.startswith(_KNOWN) and "forward" not in vars(part) for _, part in named
        )
        weights = tensors(module)
        if not known or any(type(weight) not in (Tensor, nn.Parameter) for weight in weights.values()):
            return None
        numbers: dict[int, int] = {}
        forms = tuple(
            (
                name,
                numbers.setdefault(id(t), len(numbers)),
                type(t),
                t.shape,
                t.stride(),
                t.dtype,
                t.device,
                t.requires_grad,
            )
            for name, t in weights.items()
        )
        parts = tuple((where, type(part), part.training) for where, part in named)
        attributes = {
            (where, name): value
            for where, part in named
            for name, value in vars(part).items()
            if name not in _OF_TORCH
        }
        return Layer(path, module, parts, forms, attributes)

    def differences(self, other: Layer) -> frozenset[Attribute] | None:
        """The attributes that are not the same in both; None: they have other parts or weights."""
        if self.parts != other.parts or self.weights != other.weights:
            return None
        ours, theirs = self.attributes, other.attributes
        shared = ours.keys() & theirs.keys()
        return frozenset(ours.keys() ^ theirs.keys()) | {
            key for key in shared if not _same(ours[key], theirs[key])
        }

    def hooked(self) -> bool:
        """Whether something else runs where a part of it does, or in its place."""
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return True
        return any(
            any(vars(part).get(kind) for kind in _HOOKS)
            or (part is not self.module and "forward" in vars(part))
            for part in self.module.modules()
        )


def tensors(layer: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by all their names."""
    return {
        f"{path}.{name}" if path else name: tensor
        for path, module in layer.named_modules(remove_duplicate=False)
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]
        if tensor is not None
    }


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, _PLAIN):
        return bool(one == other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, partial):
        return one.func is other.func and _same((one.args, one.keywords), (other.args, other.keywords))
    if isinstance(one, (set, frozenset)):
        return bool(one == other) and all(isinstance(item, _PLAIN) for item in one)
    return False


@contextmanager
def reads(layer: nn.Module) -> Iterator[set[Attribute]]:
    """The attributes of a layer's modules that are read meanwhile; their parameters, buffers and parts are none."""
    paths = {id(module): path for path, module in layer.named_modules()}
    found: set[Attribute] = set()

    def noting(original: Any) -> Any:
        def read(self: Any, name: str) -> Any:
            path = paths.get(id(self))
            if path is not None and (name != ALL or sys._getframe(1).f_globals is not vars(torch_module)):
                found.add((path, name))
            return original(self, name)

        return read

    kinds = {type(module): type(module).__dict__.get("__getattribute__") for module in layer.modules()}
    originals: dict[Any, Any] = {kind: kind.__getattribute__ for kind in kinds}
    try:
        for kind, original in originals.items():
            kind.__getattribute__ = noting(original)
        yield found
    finally:
        for kind, own in kinds.items():
            if own is None:
                del kind.__getattribute__
            else:
                type.__setattr__(kind, "__getattribute__", own)


@dataclass(frozen=True)
class Called:
    """How a layer was called: its arguments without the tensors, and the forms of these."""

    arguments: Template
    forms: tuple[tuple[Any, ...], ...]
    sizes: tuple[tuple[Any, ...], ...]
    around: tuple[Any, ...]

    @staticmethod
    def of(arguments: Template, given: Sequence[Tensor]) -> Called | None:
        """None: by an argument of which it is not known what it holds."""
        known = (*_PLAIN, torch.SymInt, torch.SymFloat)
        numbers = {id(tensor): index for index, tensor in reversed(list(enumerate(given)))}
        for leaf in arguments.leaves:
            if type(leaf).__module__ != _ARGUMENT and not isinstance(leaf, known):
                return None
        forms = tuple((numbers[id(tensor)], *_form(tensor)) for tensor in given)
        return Called(arguments, forms, tuple(map(_sizes, given)), _around(given))

    def alike(self, other: Called) -> bool:
        """Whether two calls are the same but for the values of tensors."""
        ours, theirs = self.arguments, other.arguments
        return (
            ours.spec == theirs.spec
            and all(
                type(a) is type(b) and _number(a) == _number(b)
                for a, b in zip(ours.leaves, theirs.leaves, strict=True)
            )
            and self.forms == other.forms
            and all(map(_equal, self.sizes, other.sizes))
            and self.around == other.around
        )


_ARGUMENT = Template.__module__


def _number(leaf: Any) -> Any:
    return (
        expr(leaf)
        if isinstance(leaf, torch.SymInt)
        else leaf.node.expr
        if isinstance(leaf, torch.SymFloat)
        else leaf
    )


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return (type(tensor), tensor.dtype, tensor.device, tensor.requires_grad, tensor.dim())


def _sizes(tensor: Tensor) -> tuple[Any, ...]:
    return (*tensor.shape, *tensor.stride(), tensor.storage_offset())


def _equal(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> bool:
    """As they are now: two symbols may have become one since."""
    return all(expr(one) == expr(other) for one, other in zip(ours, theirs, strict=True))


def _around(given: Sequence[Tensor]) -> tuple[Any, ...]:
    """What torch is told for all operators."""
    kinds = sorted({tensor.device.type for tensor in given})
    casts = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    return (casts, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype())
