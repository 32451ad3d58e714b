"""Parts of kernels that encode a tile of vectors, a file per kind of storage: what `kernels/codec.py` computes."""

from __future__ import annotations

from kvcompile.kernels.triton.encode.floats import as_float, float_, fp8
from kvcompile.kernels.triton.encode.integers import affine, int8
from kvcompile.kernels.triton.encode.tile import Encoded, Store, Tile
from kvcompile.layouts import Affine, Float, Fp8, Int8, ModelDtype, Storage

__all__ = ["Encoded", "Store", "Tile", "encoded"]


def encoded(storage: Storage, model_dtype: str, tile: Tile) -> Encoded:
    """Statements and values that make of the tile what a token's slot holds.

    storage: what is in the slots: neither turned nor with tokens in full beside
    """
    match storage:
        case ModelDtype():
            return as_float(tile, model_dtype)
        case Float():
            return float_(storage, tile)
        case Fp8():
            return fp8(storage, tile)
        case Int8():
            return int8(storage, tile)
        case Affine():
            return affine(storage, tile)
        case _:
            raise ValueError(f"{storage}: not what a slot holds of one token")
