"""Makes the specs of a site's kernels on one device: what is known of a launch before there are tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.append import append as append_role
from kvcompile.kernels.triton.append import slots
from kvcompile.kernels.triton.attend import cascade, needs_stages
from kvcompile.kernels.triton.config import Case, Config, case_of, config
from kvcompile.kernels.triton.device import Fp8Form, device_of, fp8_of, interpreted
from kvcompile.kernels.triton.retention import evict
from kvcompile.kernels.triton.roles import ROLES
from kvcompile.kernels.triton.spec import ROWS, KernelSpec, Role, as_rows


@dataclass(frozen=True)
class Kernels:
    """The specs of a site's kernels on one device, by role."""

    site: SiteSpec
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: torch.device
    one_bias: bool = False

    def config(self, role: Role, options: Sequence[str] = ()) -> Config:
        site = replace(self.site, layout=as_rows(self.site.layout)) if ROWS in options else self.site
        return config(self._case(role, site), site, device_of(self.device))

    def case(self, role: Role) -> Case:
        """What the configuration of a role is looked up by, where slots are read as they stand."""
        return self._case(role, self.site)

    def _case(self, role: Role, site: SiteSpec) -> Case:
        dims = (self.num_qo_heads, self.num_kv_heads, self.head_dim, self.v_head_dim)
        return case_of(role, site, *dims, self.dtype)

    def spec(self, role: Role, options: Sequence[str] = ()) -> KernelSpec:
        """The spec of a role; options that the device decides are added."""
        tiled = ROLES[role].tiled
        own = self.config(role, options) if tiled else Config()
        found = [*options, *(["interpreted"] if interpreted() else [])]
        if tiled and self.one_bias:
            found.append("one_bias")
        return KernelSpec(
            role,
            self.site,
            self.num_qo_heads,
            self.num_kv_heads,
            self.head_dim,
            self.v_head_dim,
            str(self.dtype).removeprefix("torch."),
            own.block_m,
            own.block_n,
            fp8=self.fp8,
            options=tuple(sorted(found)),
            stages=own.num_stages if needs_stages(role, self.site.layout) else 0,
        )

    def appends(self, options: Sequence[str], sequences: Any = 1) -> KernelSpec:
        """The spec of an append to so many sequences, a number or a symbol of one."""
        one, dims = "one" in options, (self.head_dim, self.v_head_dim)
        block = append_role.block_n(*dims, one)
        if one:
            places = append_role.PLACES * device_of(self.device).multiprocessors
            few = sequences * (self.num_qo_heads + 2 * self.num_kv_heads) <= places
            # Of a number that a graph leaves open, as of many.
            block = 1 if statically_known_true(few) else append_role.heads(*dims)
        made = replace(self.spec("append", options), block_n=block)
        if "prefixes" in options:
            made = replace(made, block_m=cascade.most(self.spec("decode")))
        if slots.evicts(made):
            # It has the warps of a search, which queries of one head alone would leave idle.
            made = replace(made, block_n=append_role.heads(*dims))
            made = replace(made, block_m=evict.block(int(made.layout.retention.budget())))
        return made

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def fp8(self) -> Fp8Form:
        return fp8_of(device_of(self.device).arch)

    def transforms(self, one: bool) -> tuple[str, ...]:
        """Options of append that say what happens to queries, `one` a sequence or many, before they meet keys."""
        site, found = self.site, []
        if site.rotates_on_append:
            found.append("rope")
        if site.layout.rotates_on_read and site.rotary:
            found.append("rope_q")
            if site.layout.retention.in_cache:
                found.append("capped" if one else "based")
        if found or site.layout.keys.hadamard:
            found.append("q_out")
        return tuple(found)

    @property
    def in_full(self) -> bool:
        """Whether any vectors stand in full beside their slots."""
        return self.site.layout.in_full

    def outs(self) -> tuple[str, ...]:
        """Options of append for k and v as they are kept, where that is not as they come."""
        found = ["k_out"] if self.site.layout.keys.hadamard or self.site.rotates_on_append else []
        return (*found, *(["v_out"] if self.site.layout.values.hadamard else []))

    @property
    def grouped(self) -> tuple[str, ...]:
        """The sides whose tokens share scales."""
        found = (("keys", self.site.layout.keys), ("values", self.site.layout.values))
        return tuple(name for name, storage in found if storage.channelwise)


@lru_cache(maxsize=1024)
def kernels_of(
    site: SiteSpec,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    one_bias: bool,
) -> Kernels:
    return Kernels(site, *heads, *dims, dtype, device, one_bias)
