"""The launches of a site with symbolic sizes: which kernel on which tensors, over which grid.

    the launching code (`kernels/triton/host/attention.py`), run on tensors without memory whose sizes are symbols

So grids, strides and shares of a decode step are read from the code that launches them anywhere else, and not written a
second time. Symbols: `batch` (sequences), `tokens` (new ones of each; one is a class of its own), `pages` (of a pool).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from kvcompile.compile.inductor import ShapeClass, Tracer
from kvcompile.errors import KernelError
from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.attend.cascade import alone
from kvcompile.kernels.triton.attend.work_list import joined_apart
from kvcompile.kernels.triton.device import Device, acting_as
from kvcompile.kernels.triton.host.decoded_once import read_in_slots
from kvcompile.kernels.triton.host.launch import recording
from kvcompile.kernels.triton.host.launches import call, for_hardware
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.kernels.triton.tile import expression

Shape = tuple[sympy.Expr, ...]


@dataclass(frozen=True)
class Launched:
    """One launch.

    grid:    programs in x, y, z
    tensors: shapes by `TensorParam.name`; all are dense
    sizes:   by `ScalarParam.name`
    """

    spec: KernelSpec
    grid: Shape
    tensors: dict[str, Shape]
    sizes: dict[str, sympy.Expr]
    num_warps: int
    num_stages: int


def launched(
    site: SiteSpec,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    device: Device,
    limit: int,
    one: bool,
    leaves: Sequence[Sequence[int]] = (),
) -> tuple[Launched, ...]:
    """The launches of one call, in their order.

    heads, dims: of queries and keys; of keys and values. limit: tokens that a sequence has room for
    one:         one new token of each sequence, else many
    leaves:      the shapes of the tables that the site's scores read (`ScoreSpec.mod`), which stand in the kernels

    Raises:
        KernelError: the site's scores have no kernels, or other tables than `leaves` says.
    """
    _check(site, leaves)
    tracer = Tracer(ShapeClass(False, one, True))
    # A plugin's inputs are not written, so that programs of one cannot count themselves in what append made. Nor does
    # one tell the next what sequences have in common: each reads its own pages. Nor does one make rows of the tokens
    # before a prompt: no plugin has that role.
    with (
        joined_apart(),
        alone(),
        read_in_slots(),
        recording() as found,
        acting_as(device),
        tracer.mode,
        torch.no_grad(),
    ):
        call(site, heads, dims, dtype, limit, tracer.batch, tracer.tokens, tracer.size("pages"), leaves)
    names = {size.node.expr: _symbol(name) for name, size in tracer.symbols().items()}

    def size(value: Any) -> sympy.Expr:
        return sympy.sympify(value.node.expr if isinstance(value, torch.SymInt) else value).xreplace(names)

    made = []
    for one_launch in found:
        grid = tuple(map(size, one_launch.grid))
        made.append(
            Launched(
                for_hardware(one_launch.kernel.spec),
                (*grid, *[sympy.Integer(1)] * (3 - len(grid))),
                {name: tuple(map(size, tensor.shape)) for name, tensor in one_launch.tensors.items()},
                {name: size(value) for name, value in one_launch.sizes.items()},
                one_launch.num_warps,
                one_launch.num_stages,
            )
        )
    return tuple(made)


def _check(site: SiteSpec, leaves: Sequence[Sequence[int]]) -> None:
    """Raises KernelError: see `launched`."""
    mod = site.score.mod
    if mod is not None and (problem := expression.refusal(mod)):
        raise KernelError(
            f"a site has no kernels, and so no plugins: {problem}; export the graph without plugins"
        )
    count = 0 if mod is None else len(mod.leaves)
    if len(leaves) != count:
        raise KernelError(
            f"its scores read {count} tables, and the shapes of {len(leaves)} are known: pass leaves, the shape of "
            "each in the order of ScoreMod.leaves"
        )
    for number, (rank, _) in sorted((expression.tensors(mod).found if mod is not None else {}).items()):
        if len(leaves[number]) != rank:
            raise KernelError(
                f"table {number} has the shape {list(leaves[number])}, and is read by {rank} places: pass in leaves "
                "the shape of the tensor that the site is called with"
            )


def _symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, positive=True)
