"""Whether the original's weights are still those that an optimized module computes with.

Weights are shared, so what is written into them in place is seen. Four things are not, and are told:

| what happens to the original | at the next call |
|---|---|
| a weight becomes another tensor (`module.w = Parameter(..)`, `w.data = ..`) | InputError: the old one would be used |
| a weight changes in place that something was computed from when the model was optimized | InputError |
| a weight's numbers stand otherwise in its memory (`w.t_()`) | InputError |
| the model is moved, to another device or dtype | a warning, once: the optimized module keeps the old weights |
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvcompile.errors import InputError


@dataclass(frozen=True)
class _Known:
    """One weight: where it stands in the model, what it was.

    address: None of a tensor subclass, which has its data in tensors of its own
    form:    of one that has an address: its sizes and strides
    version: of a weight that is read in another form
    """

    name: str
    home: dict[str, Any]
    key: str
    tensor: Tensor
    address: int | None
    form: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device
    version: int | None

    def replaced(self) -> bool:
        found = self.home.get(self.key)
        return found is not self.tensor or (self.address is not None and found.data_ptr() != self.address)

    def reordered(self) -> bool:
        return self.address is not None and _form(self.tensor) != self.form

    def changed(self) -> bool:
        written = self.version is not None and self.tensor._version != self.version
        return self.replaced() or self.reordered() or written


def _form(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(tensor.shape), tensor.stride()


class Weights:
    """The parameters of a model, and the buffers that are saved with it."""

    def __init__(self, model: nn.Module, used: Iterable[Tensor]):
        """used: the tensors that the graph reads, as they are"""
        addresses = {tensor.data_ptr() for tensor in used}
        self.moved = False
        self._known: list[_Known] = []
        for path, module in model.named_modules():
            saved = {n: t for n, t in module._buffers.items() if n not in module._non_persistent_buffers_set}
            for home, tensors in ((module._parameters, module._parameters), (module._buffers, saved)):
                for key, tensor in tensors.items():
                    if tensor is None:
                        continue
                    plain = type(tensor.data) is Tensor
                    address = tensor.data_ptr() if plain else None
                    direct = not plain or address in addresses
                    version = None if direct or tensor.is_inference() else tensor._version
                    name = f"{path}.{key}" if path else key
                    form = _form(tensor) if plain else ((), ())
                    self._known.append(
                        _Known(name, home, key, tensor, address, form, tensor.dtype, tensor.device, version)
                    )
        # The same, a list each, so that asking for hundreds of weights at every call takes little.
        self._homes = [known.home for known in self._known]
        self._keys = [known.key for known in self._known]
        self._ids = [id(known.tensor) for known in self._known]
        self._plain = [known.tensor for known in self._known if known.address is not None]
        self._addresses = [known.address for known in self._known if known.address is not None]
        self._shapes = [tensor.shape for tensor in self._plain]
        self._strides = [tensor.stride() for tensor in self._plain]
        self._read = [known.tensor for known in self._known if known.version is not None]
        self._versions = [known.version for known in self._known if known.version is not None]

    def check(self) -> None:
        """Raises InputError where a weight is not any more what the module computes with."""
        if self.moved or self._unchanged():
            return
        for known in self._known:
            if known.changed():
                self._tell(known)
                return

    def stamp(self) -> int:
        """Another number whenever something was written into a weight, as PyTorch counts it."""
        return sum(tensor._version for tensor in self._plain if not tensor.is_inference())

    def _unchanged(self) -> bool:
        """Quick: this is asked at every call."""
        return (
            list(map(id, map(dict.get, self._homes, self._keys))) == self._ids
            and list(map(Tensor.data_ptr, self._plain)) == self._addresses
            and list(map(Tensor.stride, self._plain)) == self._strides
            and [tensor.shape for tensor in self._plain] == self._shapes
            and [tensor._version for tensor in self._read] == self._versions
        )

    def _tell(self, known: _Known) -> None:
        found = known.home.get(known.key)
        if isinstance(found, Tensor) and (found.dtype != known.dtype or found.device != known.device):
            self.moved = True
            warnings.warn(
                f"the original model was moved ({known.name} was {known.dtype} on {known.device}, and is {found.dtype} "
                f"on {found.device}): the optimized module keeps the weights that it had, and the memory that they "
                "take; call kvcompile.optimize again for the model as it is now",
                stacklevel=5,
            )
            return
        if not known.replaced() and known.reordered():
            size, stride = known.form
            what = (
                f"stands otherwise in its memory: sizes {size}, strides {stride} became {_form(known.tensor)}"
            )
        elif not known.replaced():
            what = "was changed in place, and what was computed from it when the model was optimized was not"
        else:
            what = "is another tensor now, and the optimized module has the old one"
        raise InputError(
            f"the original's {known.name} {what}; call kvcompile.optimize again. (In place, as by "
            "`load_state_dict` or `w.copy_(..)`, most weights may change: they are shared)"
        )
