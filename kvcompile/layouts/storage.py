"""Storage: how the K or V vectors of a layer are encoded in their slots. K's and V's are chosen apart.

| storage | what it keeps | file |
|---|---|---|
| ModelDtype, Float, Fp8 | floating-point numbers | `storages/floats.py` |
| Int8, Affine | integers of 2, 3, 4 or 8 bits, every vector by itself | `storages/integers.py` |
| Recent, PerChannel | KIVI: the newest tokens, or the first, in full, the others rounded | `storages/residual.py` |
| Rotated | any of them, of vectors that were turned first | `storages/rotated.py` |
| InKeys | nothing: values that are the first channels of the keys | here |

A storage is data; `kernels/codec.py` encodes and decodes by it. To add one, see CONTRIBUTING.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import sympy
import torch

from kvcompile.layouts.storages.floats import Float, Fp8, ModelDtype
from kvcompile.layouts.storages.integers import Affine, Int8
from kvcompile.layouts.storages.part import Part, PerToken
from kvcompile.layouts.storages.residual import PerChannel, Recent
from kvcompile.layouts.storages.rotated import Rotated


@dataclass(frozen=True)
class InKeys(PerToken):
    """For values only: they are the first `channels` channels of the keys as those are stored (MLA's latent)."""

    channels: int
    kind: Literal["in_keys"] = "in_keys"

    def parts(self, dim: int, model_dtype: torch.dtype) -> tuple[Part, ...]:
        return ()

    def bytes_per_vector(self, dim: sympy.Expr) -> sympy.Expr:
        return sympy.Integer(0)

    def exact(self, model_dtype: torch.dtype) -> bool:
        return True

    def __str__(self) -> str:
        return "in the keys"


Storage = ModelDtype | Float | Fp8 | Int8 | Affine | Recent | PerChannel | Rotated | InKeys
STORAGES: tuple[type[Storage], ...] = (
    ModelDtype,
    Float,
    Fp8,
    Int8,
    Affine,
    Recent,
    PerChannel,
    Rotated,
    InKeys,
)


def storage_from(data: dict[str, Any]) -> Storage:
    """Rebuild a storage from `dataclasses.asdict`."""
    fields: dict[str, Any] = {k: storage_from(v) if k == "inner" else v for k, v in data.items()}
    return next(cls for cls in STORAGES if cls.kind == data["kind"])(**fields)


def as_kept(storage: Storage) -> Storage:
    """The storage of what is in the parts, without the rotation before it."""
    return storage.inner if isinstance(storage, Rotated) else storage


__all__ = [
    "STORAGES",
    "Affine",
    "Float",
    "Fp8",
    "InKeys",
    "Int8",
    "ModelDtype",
    "Part",
    "PerChannel",
    "Recent",
    "Rotated",
    "Storage",
    "as_kept",
    "storage_from",
]
