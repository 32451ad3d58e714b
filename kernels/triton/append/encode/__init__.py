"""Parts of kernels that encode a tile of vectors, a file per kind of code: what `kernels/reference/codec.py`
computes."""

from __future__ import annotations

from kvcompile.kernels.triton.append.encode.codebook import codebook
from kvcompile.kernels.triton.append.encode.floats import as_float, fp8
from kvcompile.kernels.triton.append.encode.integers import affine, int8
from kvcompile.kernels.triton.append.encode.tile import Encoded, Store, Tile
from kvcompile.layouts import Storage

__all__ = ["Encoded", "Store", "Tile", "encoded"]


def encoded(storage: Storage, model_dtype: str, tile: Tile) -> Encoded:
    """Statements and values that make of the tile what a token's slot holds.

    storage: what is in the slots (`Storage.of_slots`), each token by itself
    """
    match storage.element.kind:
        case "float":
            return as_float(tile, model_dtype if storage.code == "model" else storage.code)
        case "fp8":
            return fp8(storage, tile)
        case "int":
            return int8(storage, tile)
        case "uint":
            return affine(storage, tile)
        case "codebook":
            return codebook(storage, tile)
