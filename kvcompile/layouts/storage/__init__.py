"""Storage: how the K or V vectors of a layer are encoded in their slots. K's and V's are chosen apart.

A storage is a product of five choices, each of which is data:

| choice | what it says | file |
|---|---|---|
| code | what an element becomes: a float, an integer, fp8, an entry of a codebook | `codes/` |
| scale | what shares a scale, and a minimum: a vector, a group of it, a channel, a head | `scale.py` |
| residual, sinks | how many of the newest and of the first tokens stay in the model's dtype | `storage.py` |
| hadamard | whether vectors are rotated before they are quantized | `hadamard.py` |

`supported.py` says which codes go with which scales. `InKeys` is what values have that are kept in the keys.
`named.py` has short names for the storages of the literature. To add a code, see CONTRIBUTING.md.
"""

from __future__ import annotations

from typing import Any

from kvcompile.layouts.storage.code import Code
from kvcompile.layouts.storage.codes import CODES
from kvcompile.layouts.storage.in_keys import InKeys
from kvcompile.layouts.storage.named import (
    float_dtype,
    fp8,
    int8,
    model_dtype,
    mxfp4,
    nf4,
    per_channel,
    uint,
    with_hadamard,
    with_residual,
)
from kvcompile.layouts.storage.part import Part, is_fp8
from kvcompile.layouts.storage.scale import Scale
from kvcompile.layouts.storage.storage import Storage


def storage_from(data: dict[str, Any]) -> Storage | InKeys:
    """Rebuild a storage from `dataclasses.asdict`."""
    if "channels" in data:
        return InKeys(**data)
    return Storage(**{**data, "scale": Scale(**data["scale"])})


__all__ = [
    "CODES",
    "Code",
    "InKeys",
    "Part",
    "Scale",
    "Storage",
    "float_dtype",
    "fp8",
    "int8",
    "is_fp8",
    "model_dtype",
    "mxfp4",
    "nf4",
    "per_channel",
    "storage_from",
    "uint",
    "with_hadamard",
    "with_residual",
]
