"""K's and V's side in a kernel: the names of its vectors and parts, and where a row of a part stands."""

from __future__ import annotations

from dataclasses import dataclass

from kvcompile.kernels.triton.append.encode.tile import Store, Tile, power_of_two
from kvcompile.kernels.triton.params import TensorParam, taken_as
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.layouts import InKeys, Storage


@dataclass(frozen=True)
class Side:
    """name: "keys" or "values"; letter: of its new vectors, "k" or "v"; dim: channels of a vector."""

    name: str
    storage: Storage
    dim: int

    @property
    def letter(self) -> str:
        return self.name[0]

    @property
    def turned(self) -> bool:
        """Whether a Hadamard rotation comes before the storage."""
        return self.storage.hadamard

    @property
    def settled(self) -> Storage:
        """What its slots hold: the storage without the rotation before it and the rows in full beside."""
        return self.storage.of_slots

    @property
    def grouped(self) -> bool:
        """Whether its rows are those of groups of tokens (role group)."""
        return self.storage.channelwise

    @property
    def in_full(self) -> int:
        """Rows in full."""
        return self.storage.sinks + self.storage.residual

    def params(self, spec: KernelSpec) -> tuple[TensorParam, ...]:
        """Its parts: [batch or pages, KV heads, rows, ...]."""
        found = []
        for part in self.storage.parts(self.dim, spec.torch_dtype):
            dtype = taken_as(part.dtype, spec.fp8)
            found.append(TensorParam(f"{self.name}_{part.name}", dtype, 3 + len(part.shape)))
        return tuple(found)

    def tile(self, spec: KernelSpec, rows: int, heads: int = 0) -> Tile:
        """heads: as of `Tile`"""
        interpreted = "interpreted" in spec.options
        width = power_of_two(self.dim)
        return Tile(self.name, rows, width, self.dim, spec.dtype, spec.fp8, interpreted, heads)


def sides(spec: KernelSpec) -> tuple[Side, ...]:
    """K's, and V's where values are not kept in the keys."""
    keys = Side("keys", spec.layout.keys, spec.head_dim)
    if isinstance(spec.layout.values, InKeys):
        return (keys,)
    return keys, Side("values", spec.layout.values, spec.v_head_dim)


def store(part: TensorParam, value: Store, first: str, row: str, rows: str, tile: Tile) -> list[str]:
    """Statements that write `value` to `row` of the part, [rows], in entry `first` of its first dimension.

    row, page: [1] where rows are heads
    first: "batch", one for all rows, or "page", one for each;  rows: which of them are written;
    tile:  that `value` was made of; the variable `c` [1, width] holds its channels
    """
    name = part.name
    if part.rank == 3:  # a number per row
        at = f"{name}_ptr + {first} * {name}_s0 + head * {name}_s1 + {row}"
        return [f"tl.store({at}, {value.value}, mask={rows})"]
    if first == "page":
        at = f"{name}_ptr + {tile.head(name)} + (page * {name}_s0 + {row} * {name}_s2)[:, None]"
    else:
        at = f"{name}_ptr + batch * {name}_s0 + {tile.head(name)} + {row}[:, None] * {name}_s2"
    lines, channel = [f"at = {at}"], "c"
    if value.width != tile.width:
        lines, channel = [*lines, f"n = tl.arange(0, {value.width})[None, :]"], "n"
    begin = f"at + {value.first} + {channel}" if value.first else f"at + {channel}"
    inside = f" & ({channel} < {value.count})" if value.count != value.width else ""
    return [*lines, f"tl.store({begin}, {value.value}, mask={rows}[:, None]{inside})"]
