"""Tensors as views of pieces of memory, so that each piece is saved once.

The compiled code of a region holds for the strides that its weights had, and weights may share memory (tied
embeddings, a transposed view): both are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class View:
    """A tensor within a piece of memory: of the tensor `base`, `offset` elements from its first."""

    base: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, base: Tensor) -> Tensor:
        """The tensor; raises ValueError where it is not within the base, which must be contiguous."""
        if min((self.offset, *self.shape, *self.stride)) < 0 or self.offset + self._extent > base.numel():
            raise ValueError(f"a tensor of shape {list(self.shape)} is not within {self.base}")
        whole = self.offset == 0 and self.shape == tuple(base.shape) and self.stride == base.stride()
        return (
            base if whole else base.as_strided(self.shape, self.stride, base.storage_offset() + self.offset)
        )

    @property
    def _extent(self) -> int:
        return _extent(self.shape, self.stride)


def packed(tensors: Mapping[str, Tensor]) -> tuple[dict[str, View], dict[str, Tensor]]:
    """Each tensor as a view of a base, and the bases, contiguous and apart from each other.

    A base has the name of the first tensor that is all of it, else that of the first tensor in it.
    """
    together: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        # Empty ones have no address; what has two dtypes is kept twice.
        memory = (tensor.device, tensor.dtype, storage.data_ptr() or name)
        together.setdefault(memory, []).append(name)
    views: dict[str, View] = {}
    bases: dict[str, Tensor] = {}
    for names in together.values():
        members = [tensors[name].detach() for name in names]
        first = min(int(tensor.storage_offset()) for tensor in members)
        end = max(t.storage_offset() + _extent(tuple(t.shape), t.stride()) for t in members)
        base_name = names[0]
        base = members[0].as_strided((end - first,), (1,), first)
        for name, tensor in zip(names, members, strict=True):
            if tensor.is_contiguous() and tensor.storage_offset() == first and tensor.numel() == end - first:
                base_name, base = name, tensor
                break
        bases[base_name] = base
        for name, tensor in zip(names, members, strict=True):
            offset = int(tensor.storage_offset()) - first
            views[name] = View(base_name, offset, tuple(tensor.shape), tuple(tensor.stride()))
    return views, bases


def _extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from the first to the last one."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
