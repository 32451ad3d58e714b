"""Tells a layer's K from its V: their buffers, where values stand, and the basis in which vectors are read.

Vectors that a storage keeps turned stay turned: queries turn instead, and so does the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from kvcompile.kernels.reference import codec, residual
from kvcompile.kernels.shared.hadamard import hadamard
from kvcompile.layouts import CacheLayout, InKeys, Storage


def as_read(layout: CacheLayout, rope: bool, head_dim: int) -> CacheLayout:
    """The layout whose vectors are those that attention uses: turned ones stay so, but for keys before RoPE."""
    values = layout.values.without_hadamard
    if rope or not layout.keys.hadamard:
        return replace(layout, values=values)
    # The first channels of turned keys are not those of the keys: all are weighed, and then turned back.
    return replace(
        layout, keys=layout.keys.without_hadamard, values=InKeys(head_dim) if layout.in_keys else values
    )


def turned_back(out: Tensor, layout: CacheLayout, read: CacheLayout) -> Tensor:
    """The result [B, Hq, S, Dv] in the model's basis."""
    if isinstance(layout.values, InKeys):
        return out if read.keys == layout.keys else hadamard(out)[..., : layout.values.channels]
    return codec.turned(layout.values, out)


def weighed(
    layout: CacheLayout,
    p: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    key_positions: Tensor,
    length: Tensor,
    ordered: bool = False,
) -> Tensor:
    """Values weighed by p fp32 [B, Hkv, G, T], from V's parts or from those of the keys that hold them.

    Returns fp32 [B, Hkv, G, Dv]; key_positions, length, ordered: as `residual.weigh_values` has them.
    """
    storage = layout.values
    if isinstance(storage, InKeys):
        if layout.keys.residual or layout.keys.sinks:
            # The rows in full have all channels of a key, so all are weighed.
            out = residual.weigh_values(layout.keys, p, keys, key_positions, length, ordered)
            return out[..., : storage.channels]
        storage, values = codec.leading(layout.keys, keys, storage.channels)
    return residual.weigh_values(storage, p, values, key_positions, length, ordered)


def sides(
    layout: CacheLayout, k: Tensor, v: Tensor, buffers: list[Tensor]
) -> Iterator[tuple[Storage, Tensor, list[Tensor]]]:
    """Storage, new vectors and buffers of K, and of V where they are its own."""
    yield layout.keys, k, buffers[: layout.num_key_parts]
    if not isinstance(layout.values, InKeys):
        yield layout.values, v, buffers[layout.num_key_parts :]
