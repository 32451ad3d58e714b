"""CppSpec: all that one generated C++ kernel is specialised for. Equal specs are one source file.

What machine it runs on is not among it: the instruction set is chosen when it is compiled (`isa.py`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import torch

from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import CacheLayout, Paged
from kvcompile.layouts import symbols as sy

Role = str  # a key of ROLES
WIDE = "wide"  # of any role: numbers of half precision are multiplied as floats
_PREFIX = 16  # characters of `key`


@dataclass(frozen=True)
class CppSpec:
    """One kernel.

    site:    the attention site's constants: layout, mask, scores, rotary form
    num_qo_heads, num_kv_heads, head_dim, v_head_dim: of the site, as its cache has them
    dtype:   the model's, by name ("bfloat16"); that of q, k, v, the output and unquantized rows
    options: what else a role is specialised for, sorted names
    """

    role: Role
    site: SiteSpec
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    options: tuple[str, ...] = ()

    @property
    def layout(self) -> CacheLayout:
        return self.site.layout

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def units(self) -> int:
        """Groups of KV heads whose new token takes a slot of its own: by scores, those that share scores are one."""
        if not self.layout.retention.by_score:
            return self.num_kv_heads
        return int(self.layout.state_heads.subs(sy.H, self.num_kv_heads))

    @property
    def together(self) -> int:
        """KV heads whose slots are read by turns: those of a page lie together in memory."""
        paged = isinstance(self.layout.placement, Paged) and "chosen" not in self.options
        return self.num_kv_heads if paged else 1

    def to_json(self) -> str:
        """A stable text of the spec: graphs carry it, and kernels are looked up by it."""
        data = {
            "role": self.role,
            "site": json.loads(self.site.to_json()),
            "heads": [self.num_qo_heads, self.num_kv_heads],
            "dims": [self.head_dim, self.v_head_dim],
            "dtype": self.dtype,
            "options": list(self.options),
        }
        return json.dumps(data, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> CppSpec:
        data = json.loads(text)
        (qo_heads, kv_heads), (dim, v_dim) = data["heads"], data["dims"]
        site = SiteSpec.from_json(json.dumps(data["site"], sort_keys=True))
        return CppSpec(
            data["role"], site, qo_heads, kv_heads, dim, v_dim, data["dtype"], tuple(data["options"])
        )

    @property
    def key(self) -> str:
        """A short name for the spec, stable over processes and versions."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:_PREFIX]
