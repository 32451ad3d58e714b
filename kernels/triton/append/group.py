"""Role group: groups of tokens that share a scale and a minimum per channel (a scale per channel; KIVI's keys).

    q = round((x - m) / s),   m = min, s = (max - min) / (2^bits - 1)   over the group's tokens, per channel

A launch does one side of a layer: every group that the new tokens make whole. Its tokens come from the rows in full,
and of many tokens, the new ones from the call itself. So the order of launches is that of the reference: one token is
in the rows in full before (role append with `full`); of many, those before them must still be there (append with
`only_full` comes after attention).

| option | means |
|---|---|
| keys, values | which side |
| one | one new token a sequence: all its group is in the rows in full |
| interpreted | for Triton's interpreter |

Launch: grid(spec, batch, tokens). x [B, Hkv, S, D]: the new vectors as they are kept (append's k_out), where not `one`.
"""

from __future__ import annotations

import torch

from kvcompile.kernels.triton.append import residual as append_residual
from kvcompile.kernels.triton.append.encode.integers import affine_codes
from kvcompile.kernels.triton.append.encode.packing import packed
from kvcompile.kernels.triton.append.encode.tile import power_of_two
from kvcompile.kernels.triton.append.operands import Side, sides
from kvcompile.kernels.triton.helpers import module
from kvcompile.kernels.triton.params import KernelSource, Param, ScalarParam, TensorParam
from kvcompile.kernels.triton.render import rendered
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.layouts import Paged, Storage

OPTIONS = {"keys", "values", "one", "interpreted"}


def side_of(spec: KernelSpec) -> Side:
    """The side that a spec is for.

    Raises:
        ValueError: it names none, or one whose tokens have scales of their own.
    """
    if unknown := set(spec.options) - OPTIONS:
        raise ValueError(f"group knows no options {sorted(unknown)}")
    found = [side for side in sides(spec) if side.name in spec.options and side.grouped]
    if len(found) != 1:
        raise ValueError(f"group is for one side, in groups of tokens, not {spec.options} of {spec.layout}")
    return found[0]


def generate(spec: KernelSpec) -> KernelSource:
    """The kernel of a spec of role group; raises as `side_of`."""
    side = side_of(spec)
    storage = _storage(side)
    tile = side.tile(spec, rows(side))
    real = f"n < {storage.group}" if tile.rows != storage.group else None
    lines, codes = affine_codes("x", 0, "[None, :]", storage.element.bits, storage.scale.dtype, real)
    lines.append(f"codes = {codes}")
    more, data = packed("codes", storage.element.bits, tile)
    params = _params(spec, side)
    placement = spec.layout.placement
    text = rendered(
        "group.py.jinja",
        params=params,
        layout=str(spec.layout),
        side=side.name,
        letter=side.letter,
        group=storage.group,
        rows=tile.rows,
        tile=tile,
        row=append_residual.row_of(side, "t"),
        one="one" in spec.options,
        groups_per_page=placement.page_size // storage.group if isinstance(placement, Paged) else 0,
        encode=[*lines, *more],
        data=data,
    )
    return KernelSource("group", params, module(text))


def grid(spec: KernelSpec, batch: int, tokens: int) -> tuple[int, int, int]:
    """A program for every group that so many tokens can touch."""
    storage = _storage(side_of(spec))
    return (tokens + storage.group - 2) // storage.group + 1, spec.num_kv_heads, batch


def rows(side: Side) -> int:
    """Rows of a tile: a group, and what is missing to a power of two."""
    return power_of_two(_storage(side).group)


def _storage(side: Side) -> Storage:
    return side.settled


def _params(spec: KernelSpec, side: Side) -> tuple[Param, ...]:
    found: list[Param] = [] if "one" in spec.options else [TensorParam("x", spec.torch_dtype, 4)]
    found += side.params(spec)
    found.append(TensorParam("positions", torch.int64, 2))
    if isinstance(spec.layout.placement, Paged):
        found.append(TensorParam("page_table", torch.int32, 2))
    return (*found, ScalarParam("tokens"))
