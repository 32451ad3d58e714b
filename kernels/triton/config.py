"""Tile sizes, warps, stages and splits of a kernel: looked up in a table when a plan or a graph is made, never tuned
while it runs.

    the user's table, measured on this GPU by `kvcompile tune`   (<cache>/tuned/<GPU>.json)
    the shipped table, `tuned.json`                               reasoned defaults, or what was measured on a GPU

A graph serves any batch and any length, so neither is a condition: into how many shares a decode step is cut follows
from both where it is launched (`Config.splits`). The first entry of which all conditions hold is taken. Then the tile
is made to fit: the rows that share a scale, the heads of a group, and the shared memory of the device, for which
stages go first, then half of the slots.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.device import Device, device_of
from kvcompile.kernels.triton.spec import Role
from kvcompile.kernels.triton.tile.channel_blocks import ONE_WARP, step_in_words
from kvcompile.kernels.triton.tile.stacking import stacks
from kvcompile.layouts import CacheLayout, Paged, Storage
from kvcompile.util.cache_dir import cache_dir

__all__ = [
    "Case",
    "Config",
    "Device",
    "bits_of",
    "case_of",
    "config",
    "device_of",
    "fitted",
    "found",
    "measured",
    "shipped",
    "table_of",
    "using",
]

_SMALLEST = 16  # what a product takes at least
_FEW_SLOTS = 32  # of a tile whose products would take too many descriptors
_ONE_PAGE = 64  # a page that is smaller makes tiles too small: then slots are gathered
_USED: ContextVar[Mapping[str, Config]] = ContextVar("configurations that are measured", default={})  # noqa: B039


@dataclass(frozen=True)
class Case:
    """What a configuration is looked up by.

    bits:  of an element of the keys, as they are stored
    dim:   the larger of the channels of keys and values
    rows:  queries of a group of heads: query heads per KV head
    page:  tokens of a page, 0 where slots are not in pages
    mixed: whether some tokens are in full beside the slots
    turned: whether keys turn when they are read (RoPE)
    stack: how often a query head is a row of its products (`tile/stacking.py`)
    lookups: what is read one behind the other before it is known where a tile is: pages, and of a step chosen ones
    affine: whether codes of keys take their scales in float16 (`TileLoader.affine`); of scales per channel, a tile may
        have several groups then
    codebook: whether codes of keys are chosen from a list of numbers
    reused: whether new tokens take the slots of others: a prompt's are read beside the slots, by a loop of their own
    decoded: whether slots hold numbers in the model's dtype, and some tokens are in full beside (`host/over_rows.py`)
    wide:  whether the model is in float32, as are products then
    """

    role: Role
    bits: int
    dim: int
    rows: int
    page: int = 0
    mixed: bool = False
    turned: bool = False
    stack: int = 1
    lookups: int = 0
    affine: bool = False
    codebook: bool = False
    reused: bool = False
    decoded: bool = False
    wide: bool = False

    def buffers(self, stages: int) -> int:
        """Tiles that stand in shared memory: each lookup takes as many stages as what it finds."""
        return max(1, (stages - 1) // (1 + self.lookups))


@dataclass(frozen=True)
class Config:
    """How one kernel is cut up.

    waves: of decode: programs that each multiprocessor shall have at the same time
    source: who says so: "heuristic: ...", or "measured on ..."
    """

    block_m: int = 16
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    waves: float = 2.0
    source: str = ""

    def splits(self, device: Device, programs: Any, tiles: Any) -> Any:
        """Into how many shares decode cuts the tiles of slots; integers, or symbols of them.

        programs: batch x KV heads, each of which is cut; tiles: of one sequence, at its limit
        """
        wanted = self._wanted(device)
        return torch.sym_max(1, torch.sym_min(tiles, (wanted + programs - 1) // programs))

    def shares(self, device: Device, tiles: Any) -> Any:
        """Over how many programs decode shares out a list of tiles; an integer, or a symbol of one.

        tiles: of all sequences and heads, at their limit
        """
        return torch.sym_max(1, torch.sym_min(tiles, self._wanted(device)))

    def _wanted(self, device: Device) -> int:
        return int(self.waves * device.multiprocessors)


def case_of(
    role: Role,
    site: SiteSpec,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype,
) -> Case:
    """The case of a site."""
    placement, heads = site.layout.placement, num_qo_heads // num_kv_heads
    stack = stacks(role, site, head_dim, v_head_dim, heads, dtype)
    return Case(
        role,
        bits_of(site.layout.keys, head_dim, dtype),
        max(head_dim, v_head_dim),
        heads,
        placement.page_size if isinstance(placement, Paged) else 0,
        site.layout.in_full,
        site.layout.rotates_on_read and site.rotary is not None,
        stack,
        _lookups(role, site),
        _affine(role, site, head_dim, dtype, heads * stack),
        site.layout.keys.of_slots.element.kind == "codebook",
        not site.layout.in_order,
        _decoded(site.layout),
        dtype == torch.float32,
    )


def config(case: Case, site: SiteSpec, device: Device) -> Config:
    """The configuration for a case on a device, made to fit the site."""
    own = _USED.get().get(case.role) or found(case, device)
    return fitted(own, case, site, device)


@contextmanager
def using(role: Role, own: Config) -> Iterator[None]:
    """Within it, kernels of `role` have this configuration instead of the tables': to measure it."""
    token = _USED.set({**_USED.get(), role: own})
    try:
        yield
    finally:
        _USED.reset(token)


@cache
def found(case: Case, device: Device) -> Config:
    """The first entry of the tables whose conditions hold."""
    for entry in (*measured(device), *shipped()):
        if _holds(entry["when"], case, device):
            return Config(**entry["use"], source=entry["source"])
    raise LookupError(f"the shipped table has no entry for {case}")


def fitted(config: Config, case: Case, site: SiteSpec, device: Device) -> Config:
    """`config` with a tile that the site's layout and the device's shared memory allow."""
    keys = site.layout.keys
    block_n = config.block_n
    if keys.channelwise and keys.group >= _SMALLEST and not case.affine:
        # One group a tile: its scales are folded into the queries. Of 2 bits, so small a tile is the work of two warps.
        block_n = min(block_n, _power_below(keys.group))
        few = step_rows(case) * case.stack <= _SMALLEST
        if case.role == "decode" and few and block_n <= 32 and case.dim <= 128 and case.bits <= 2:
            config = replace(config, num_warps=min(config.num_warps, 2))
    if case.role == "decode" and case.affine and block_n == ONE_WARP < keys.group:
        # A single warp's tile has one group of so few tokens; of a longer one, scales would multiply the queries.
        block_n, warps = 2 * block_n, 2 * config.num_warps
        config = replace(config, num_warps=warps, waves=config.waves / 2)
    if _ONE_PAGE <= case.page < block_n and case.page & (case.page - 1) == 0:
        block_n = case.page  # one address for all slots of a tile
    if case.role == "prefill" and device.arch == 90 and _many_pieces(case, site):
        block_n = min(block_n, _FEW_SLOTS)
    smallest = max(1, _SMALLEST // case.stack)
    if case.role == "prefill" and site.score.mod is not None:
        # A tile of what an expression goes through does not fit the registers of fewer warps, nor with more rows.
        config = replace(config, num_warps=max(config.num_warps, 8), block_m=min(config.block_m, 64))
    rows = step_rows(case) if case.role == "decode" else config.block_m
    config = replace(config, block_m=max(smallest, rows), block_n=max(_SMALLEST, block_n))
    sides = 1 if site.layout.in_keys else 2
    row = case.dim * sides * max(case.bits, 8) // 8
    while (
        config.num_stages > 1
        and config.block_n * row * case.buffers(config.num_stages) > device.shared * 3 // 4
    ):
        if config.num_stages > 2:
            config = replace(config, num_stages=config.num_stages - 1)
        elif config.block_n > _SMALLEST:
            config = replace(config, block_n=config.block_n // 2)
        else:
            config = replace(config, num_stages=1)
    return config


def _lookups(role: Role, site: SiteSpec) -> int:
    """Prompts read all pages, of a step those that were chosen are read."""
    paged, chosen = isinstance(site.layout.placement, Paged), site.layout.selection.selects
    return {"decode": paged + chosen, "prefill": int(paged)}.get(role, 0)


def _decoded(layout: CacheLayout) -> bool:
    sides = (layout.keys, layout.values)
    return layout.in_full and all(
        isinstance(side, Storage) and side.element.kind == "float" for side in sides
    )


def _many_pieces(case: Case, site: SiteSpec) -> bool:
    """Whether a tile's products have more descriptors than sm_90 has uniform registers, 64 slots of it.

    ptxas of Triton 3.6 to 3.7.1 then loses some (`tools/descriptors.py`): on an H200 an illegal access. So it is with
    values of four bits and fewer, in four pieces and more, beside keys of eight, and with those of three bits beside
    any codes.
    """
    values = site.layout.values
    if not isinstance(values, Storage):
        return False
    if case.bits == 8:
        return bits_of(values, case.dim, torch.float16) <= 4
    return case.bits <= 4 and values.of_slots.element.kind == "uint" and values.of_slots.element.bits == 3


def step_rows(case: Case) -> int:
    """Rows of a tile of queries of a decode step: those of a group of heads, and what fills up the least of a product.

    A group of more heads than the most is cut into several programs: the sums of all would not fit the registers.
    """
    most = max(1, (16 if case.dim > 256 else 32 if case.dim > 128 else 64) // case.stack)
    return max(1, _SMALLEST // case.stack, min(_power_above(case.rows), most))


def _affine(role: Role, site: SiteSpec, head_dim: int, dtype: torch.dtype, rows: int) -> bool:
    """Whether codes of keys take their scales in float16 (`TileLoader.affine`), for any tile that fits a page.

    rows: of a product, that the heads of a group take
    """
    own = site.layout.keys
    if role == "prefill" and not site.layout.in_keys and own.of_slots.scale.per == "group":
        whole = own.of_slots.element.kind == "uint" and own.of_slots.element.bits in (4, 8)
        return whole and dtype != torch.float32 and own.of_slots.groups(head_dim) > 1
    keys, placement = site.layout.keys, site.layout.placement
    group = keys.group
    in_page = not isinstance(placement, Paged) or placement.page_size % group == 0
    plain = keys.of_slots.element.kind == "uint" and keys.of_slots.element.bits in (2, 4, 8)
    if keys.of_slots.element.bits == 2:
        plain = plain and step_in_words(role, keys, head_dim, rows)
    packs = head_dim * keys.of_slots.element.bits % 16 == 0 and head_dim % 2 == 0
    whole = keys.channelwise and group & (group - 1) == 0 and not site.layout.selection.selects
    halves = dtype != torch.float32 and keys.of_slots.scale.dtype == "float16"
    turns = site.layout.rotates_on_read and site.rotary is not None
    return (
        role != "columns"
        and whole
        and in_page
        and plain
        and packs
        and halves
        and not turns
        and not site.layout.in_keys
    )


def bits_of(storage: Storage, dim: int, dtype: torch.dtype) -> int:
    """Bits of an element of vectors of `dim` channels in a slot, without scales."""
    data = storage.parts(dim, dtype)[0]
    return 8 * data.dtype.itemsize * math.prod(data.shape) // (data.every * dim)


def shipped() -> tuple[Mapping[str, Any], ...]:
    """Entries of `tuned.json`; the last ones have no conditions but the role."""
    return _entries(files(__package__).joinpath("tuned.json").read_text("utf-8"))


def measured(device: Device) -> tuple[Mapping[str, Any], ...]:
    """Entries that `kvcompile tune` has written for this device, or none.

    Raises:
        ValueError: the file is not a table.
    """
    path = table_of(device)
    try:
        return _entries(path.read_text("utf-8"))
    except FileNotFoundError:
        return ()
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: no table of configurations ({error}): delete it, or run kvcompile tune"
        ) from None


def table_of(device: Device) -> Path:
    """The file of the user's table for a device."""
    return cache_dir() / "tuned" / f"{device.slug}.json"


@cache
def _entries(text: str) -> tuple[Mapping[str, Any], ...]:
    entries = json.loads(text)["entries"]
    for entry in entries:
        Config(**entry["use"], source=entry["source"])
    return tuple(entries)


def _holds(when: Mapping[str, Any], case: Case, device: Device) -> bool:
    """Whether all conditions hold: name -> a value, a list of values, or {"min": ..., "max": ...}."""
    values: dict[str, Any] = {**vars(case), "arch": device.arch, "device": device.name}
    for name, wanted in when.items():
        value = values[name]
        if isinstance(wanted, Mapping):
            if not wanted.get("min", value) <= value <= wanted.get("max", value):
                return False
        elif value not in (
            wanted if isinstance(wanted, Sequence) and not isinstance(wanted, str) else [wanted]
        ):
            return False
    return True


def _power_above(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _power_below(number: int) -> int:
    return 1 << (number.bit_length() - 1)
