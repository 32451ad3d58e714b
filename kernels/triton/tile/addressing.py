"""Where the rows of a tile stand in memory: what a source's placement makes of slots start .. start + BLOCK_N - 1.

A source is an array of slots: the cache, or the new tokens of a prompt that are not in it yet. Its tensors are dense,
so a row's address is a multiple of the row's size, which is a constant: the compiler sees how it is aligned.

    dense:   ((batch * KV heads + head) * slots + slot) * elements
    paged:   ((page * KV heads + head) * page_size + slot mod page_size) * elements      page = table[slot // page_size]

Where a tile lies in one page, the page is one number; else every row looks its own up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import sympy
import torch

from kvcompile.kernels.triton.params import Param, ScalarParam, TensorParam
from kvcompile.kernels.triton.tile.symbolic import printed
from kvcompile.layouts import symbols as sy
from kvcompile.layouts.pages import offset, page_index

_LONG = 32  # elements of a row: numbers of groups of channels are fewer
_SLOT = sympy.Symbol("slot", integer=True, nonnegative=True)


@dataclass(frozen=True)
class SlotArray:
    """An array of slots that a kernel reads.

    prefix: of the names of its tensors ("" for the cache, "new_" for new tokens)
    slots:  how many there are, a number, or the argument that says so; "slots_16" and "new_16" say how many times 16
    page_size: 0: dense
    packed: whether the tokens of all sequences stand in one row (`kernels/triton/packed.py`)
    by_bits: whether addresses of long rows are sums over the bits of their numbers (`times` of the helpers)
    chosen: tokens of a page, where only pages that were chosen are read (`attend/keys.py`); 0: all slots are
    """

    prefix: str
    slots: str
    num_kv_heads: int
    block_n: int
    page_size: int = 0
    chosen: int = 0
    packed: bool = False
    by_bits: bool = False

    @property
    def at(self) -> str:
        """The variable that holds the first slot of a tile, or the slot of each row where they are scattered."""
        return "slot" if self.chosen else "start"

    @property
    def scattered(self) -> bool:
        """Whether the slots of a tile do not follow each other."""
        return self.chosen % self.block_n != 0

    @property
    def each(self) -> str:
        """An expression: the slot of each row of a tile, [BLOCK_N]."""
        return self.at if self.scattered else f"{self.at} + n"

    @property
    def one_page(self) -> bool:
        """Whether all rows of a tile are in one page."""
        return self.page_size > 0 and self.page_size % self.block_n == 0 and not self.scattered

    @property
    def gathers(self) -> bool:
        """Whether every row of a tile has an address of its own."""
        return self.scattered or (self.page_size > 0 and not self.one_page)

    @property
    def params(self) -> tuple[Param, ...]:
        if self.page_size:
            return (TensorParam("page_table", torch.int32, 2),)
        if self.packed and self.slots == "tokens":
            return ()
        return (ScalarParam(self.slots),) if not self.slots.isdigit() else ()

    def base(self, multiple: int = 1) -> str:
        """The variable that holds the row of slot `start`, or where rows are gathered, that of each slot.

        multiple: the tokens that share a row: the array has whole groups of them
        """
        return "base" if multiple == 1 or self.page_size else f"base_{multiple}"

    def located(self, multiples: Iterable[int], masked: bool) -> list[str]:
        """Lines that define `base` for each of `multiples`. masked: slots beyond `inside` have no row."""
        heads = self.num_kv_heads
        if self.packed and not self.page_size:
            if self.slots == "tokens":
                return [f"base = head.to(tl.int64) * row_tokens + query_start + {self.at}"]
            return [f"base = head.to(tl.int64) * {self._rows(1)} + query_place + {self.at}"]
        if not self.page_size:
            return [
                f"{self.base(of)} = (batch * {heads} + head) * {self._rows(of)} + {self.at}"
                for of in sorted(set(multiples))
            ]
        at = self.at if self.one_page or self.scattered else f"({self.each})"
        entry = printed(page_index(self.page_size), {sy.slot: at})
        guard = ", mask=inside, other=0" if masked and self.gathers else ""
        within = offset(self.page_size).subs(sy.slot, _SLOT)
        if self.one_page:
            # The same, as a tile begins at a multiple of its size. The oldest Triton does not see that behind a
            # remainder: scales of two bytes would be loaded at once there, not copied ahead.
            tile = sympy.floor(_SLOT / self.block_n)
            within = sympy.Mod(tile, self.page_size // self.block_n) * self.block_n
        return [
            f"page = tl.load(page_table_ptr + batch * page_table_s0 + {entry}{guard}).to(tl.int64)",
            f"base = (page * {heads} + head) * {self.page_size}"
            + (f" + {printed(within, {_SLOT: at})}" if within else ""),
        ]

    def rows(self, name: str, elements: int, channels: str, multiple: int = 1, words: bool = False) -> str:
        """Pointers [BLOCK_N, channels] to `channels` (a row [1, W]) of part `name`, rows of `elements`.

        words: elements are words of two bytes, whatever the part has
        """
        pointer, base = f"{self.prefix}{name}_ptr", self.base(multiple)
        if words:
            pointer = f"{pointer}.to(tl.pointer_type(tl.uint16))"
        if self.gathers:
            return f"{pointer} + {base}[:, None] * {elements} + {channels}"
        if not self.by_bits or elements < _LONG:  # of short rows a thread copies few
            return f"{pointer} + {base} * {elements} + n[:, None] * {elements} + {channels}"
        row = f"times(n, {elements}, {self.block_n.bit_length() - 1})[:, None]"
        return f"{pointer} + {base} * {elements} + ({row} + {channels})"

    @property
    def row(self) -> str:
        """An expression: the number of each row of a tile, [BLOCK_N]."""
        return "base" if self.gathers else "(base + n)"

    def numbers(self, name: str, elements: int = 1, index: int = 0) -> str:
        """Pointers [BLOCK_N] to number `index` of each row of part `name`."""
        pointer = f"{self.prefix}{name}_ptr"
        if elements > 1:
            return f"{pointer} + {self.row} * {elements} + {index}"
        return f"{pointer} + base" + ("" if self.gathers else " + n")

    def shared(self, name: str, group: int, elements: int, channels: str, alike: bool) -> str:
        """Pointers into part `name`, of rows that `group` tokens share: [BLOCK_N, channels], or where all of the tile
        share one (`alike`), [1, channels]."""
        rows = f"({self.base(group)} + n)[:, None]" if not self.gathers else f"{self.base(group)}[:, None]"
        if alike:
            rows = self.base(group)
        return f"{self.prefix}{name}_ptr + {rows} // {group} * {elements} + {channels}"

    def groups(self, name: str, group: int, masked: bool) -> list[str]:
        """Lines that define `name` [groups of a tile, 1]: the rows that each `group` tokens of a tile share.

        masked: groups beyond `end` have no row
        """
        each = f"tl.arange(0, {self.block_n // group})"
        if not self.gathers:
            return [f"{name} = {self.base(group)} // {group} + {each}[:, None]"]
        # Of those in a page, all are: a group has one place in the table.
        slots, pages, shared = f"{name}_slots", f"{name}_pages", self.page_size // group
        guard = f", mask={slots} < end, other=0" if masked else ""
        entry = printed(page_index(self.page_size), {sy.slot: slots})
        within = printed(sympy.Mod(sympy.floor(_SLOT / group), shared), {_SLOT: slots})
        return [
            f"{slots} = start + {each} * {group}",
            f"{pages} = tl.load(page_table_ptr + batch * page_table_s0 + {entry}{guard}).to(tl.int64)",
            f"{name} = (({pages} * {self.num_kv_heads} + head) * {shared} + {within})[:, None]",
        ]

    def _rows(self, multiple: int) -> str:
        # That it is a multiple stands in the text, where every compiler of a launch sees it.
        slots = f"({self.slots} * 16)" if self.slots.endswith("_16") else self.slots
        if multiple == 1:
            return slots
        if slots.isdigit():
            return str(-(-int(slots) // multiple) * multiple)
        return f"(({slots} + {multiple - 1}) // {multiple} * {multiple})"
