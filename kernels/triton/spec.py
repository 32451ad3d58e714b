"""KernelSpec: all that one generated kernel is specialised for. Equal specs are one source file.

Its role says what it does: `roles.py` lists them.

Names in a kernel: q, k, v are new vectors, `keys_*` and `values_*` the parts of the cache by `Part.name`
(`keys_data`, `keys_scale`, `keys_minimum`, `keys_full`, ...). A tensor `x` comes as `x_ptr` and its strides in elements
as `x_s0`, `x_s1`, ... (of all dimensions but the last, which is dense); sizes are plain names (`tokens`, `splits`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Literal

import torch

from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.device import Fp8Form
from kvcompile.layouts import CacheLayout, Contiguous, InKeys, Scale, Storage
from kvcompile.layouts import symbols as sy

Role = str  # a key of ROLES
# What products are computed in. The interpreter has no bfloat16 products: there it is float32.
DotType = Literal["float16", "bfloat16", "float32"]
_PREFIX = 16  # characters of `key`
# The option that says that slots come as rows of numbers (`attend/decoded_rows.py`), whatever the layout keeps in them.
ROWS = "rows"


def as_rows(layout: CacheLayout) -> CacheLayout:
    """A layout whose slots hold the same tokens in the model's dtype, in the basis of its storage, not in pages."""
    sides = (layout.keys, layout.values)
    keys, values = (
        side if isinstance(side, InKeys) else replace(side, code="model", scale=Scale()) for side in sides
    )
    assert isinstance(keys, Storage)
    return replace(layout, keys=keys, values=values, placement=Contiguous())


@dataclass(frozen=True)
class KernelSpec:
    """One kernel.

    site:     the attention site's constants: layout, mask, scores, rotary form
    num_qo_heads, num_kv_heads, head_dim, v_head_dim: of the site, as its cache has them
    dtype:    the model's, by name ("bfloat16"); that of q, k, v, the output and rows in full
    block_m:  rows of a tile of queries (query heads of a group x tokens)
    block_n:  slots of a tile, or tokens
    fp8:      how fp8 numbers are converted
    options:  what else a role is specialised for, sorted names; each role's module says which it knows
    stages:   of the main loop's pipeline, where its text has to say so (`attend/`); 0: it is the launch that says
    """

    role: Role
    site: SiteSpec
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    block_m: int = 16
    block_n: int = 64
    fp8: Fp8Form = "native"
    options: tuple[str, ...] = ()
    stages: int = 0

    @property
    def layout(self) -> CacheLayout:
        return self.site.layout

    @property
    def as_read(self) -> CacheLayout:
        """The layout of what slots hold when they are read; `layout` says which of their tokens are."""
        return as_rows(self.layout) if ROWS in self.options else self.layout

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def score_heads(self) -> int:
        """Heads that have scores of their own, of a retention by scores."""
        return int(self.layout.state_heads.subs(sy.H, self.num_kv_heads))

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def to_json(self) -> str:
        """A stable text of the spec: it is what kernels are looked up by."""
        data = {
            "role": self.role,
            "site": json.loads(self.site.to_json()),
            "heads": [self.num_qo_heads, self.num_kv_heads],
            "dims": [self.head_dim, self.v_head_dim],
            "dtype": self.dtype,
            "block": [self.block_m, self.block_n],
            "fp8": self.fp8,
            "options": list(self.options),
        }
        if self.stages:
            data["stages"] = self.stages
        return json.dumps(data, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> KernelSpec:
        data = json.loads(text)
        (qo_heads, kv_heads), (dim, v_dim), (block_m, block_n) = data["heads"], data["dims"], data["block"]
        return KernelSpec(
            data["role"],
            SiteSpec.from_json(json.dumps(data["site"], sort_keys=True)),
            qo_heads,
            kv_heads,
            dim,
            v_dim,
            data["dtype"],
            block_m,
            block_n,
            data["fp8"],
            tuple(data["options"]),
            data.get("stages", 0),
        )

    @property
    def key(self) -> str:
        """A short name for the spec, stable over processes and versions."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:_PREFIX]
