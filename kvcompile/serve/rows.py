"""The tensors of an engine's cache: pools of pages, and a row for every text that runs.

What is not in pages (tables, rings of tokens in full, notes, recurrent state, contiguous slots) has a row per text.
Texts that take a step together stand in rows next to each other, so a pass sees a slice of the buffers from the first
of them to the last: no row is idle, and nothing is gathered or scattered. A text is moved where that needs it, which is
once or twice in its life.

Where kernels read pages that neighbours have in common once (`kernels/triton/attend/cascade.py`), texts that take a
step together stand in the order of their pages, so that those which begin alike are neighbours. They are brought into
it when others come or go.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvcompile.errors import LimitError
from kvcompile.kernels.ops.page_copy import indexable, page_copy
from kvcompile.layouts.pages import SPARE_PAGES
from kvcompile.runtime.cache_spec import CacheShape
from kvcompile.runtime.growing import Growing, make_growing
from kvcompile.serve.moves import Copy, Tables
from kvcompile.serve.store import Item, pack, unpack

_VERSIONS = itertools.count(1)


class Rows:
    """Buffers for `rows` texts and pools of the given sizes, allocated once."""

    def __init__(
        self, shape: CacheShape, device: torch.device, rows: int, pages: Sequence[int], unsettled: int = 0
    ):
        """
        Args:
            pages: of each pool of `shape`, without page 0.
            unsettled: newest tokens whose slots may be written when later tokens come.

        Raises:
            LimitError: the device has no memory for them.
        """
        self.shape, self.device, self._unsettled = shape, device, unsettled
        self.version = -next(_VERSIONS)  # no `KVCache` has a negative one
        self.buffers: dict[str, Tensor] = {}
        self._growing: dict[str, Growing] = {}
        self._tables = [pool.group.name for pool in shape.pools]
        self._pooled = [pool.buffers for pool in shape.pools]
        self._in_pools = {name for names in self._pooled for name in names}
        sizes = {name: count for pool, count in zip(shape.pools, pages, strict=True) for name in pool.buffers}
        try:
            for name, of in shape.buffers.items():
                if of.spec.paged:
                    whole = (sizes[name] + SPARE_PAGES, *of.spec.shape)
                    self.buffers[name] = self._zeros(
                        name, whole, of.spec.dtype, grows=self._device_of(name).type == "cpu"
                    )
                else:
                    whole = (rows, *of.spec.shape)
                    self.buffers[name] = of.spec.written(self._zeros(name, whole, of.spec.dtype, of.in_order))
            for pool in shape.pools:
                self.buffers[pool.group.name] = torch.zeros(
                    rows, pool.group.pages_per_sequence, dtype=torch.int32, device=device
                )
        except RuntimeError as error:  # what torch raises where an allocator has no more
            self.buffers = {}
            raise LimitError(
                f"no memory for the engine's cache: {str(error).splitlines()[0]}; give it less (memory=..), or fewer "
                "sequences"
            ) from error
        # What has a row per text.
        self._own = [name for name, of in shape.buffers.items() if not of.spec.paged]
        # Of it, what holds something of a text's tokens: slots in their order, and all else.
        told = [name for name in self._own if shape.buffers[name].spec.fill is None]
        self._in_order = [name for name in told if shape.buffers[name].in_order]
        self._fixed = [name for name in told if not shape.buffers[name].in_order]
        self._at: list[int | None] = [None] * rows  # which text is in a row
        self._row: dict[int, int] = {}
        self._tokens = [0] * rows
        # Rows that were changing places when something failed: what is in them is nobody's, and their tables too.
        self._torn: set[int] = set()
        self.in_bundles = any(pool.triton for pool in shape.pools)
        self._ordered: frozenset[int] = frozenset()  # the texts that stand in the order of their pages
        # Pools whose pages say which texts begin alike: of all tokens, and those of windows that are released last.
        groups = [pool.group for pool in shape.pools]
        self._telling = sorted(
            range(len(groups)), key=lambda pool: (groups[pool].released is not None, -groups[pool].slots)
        )
        self._written: list[list[list[int]]] = [[[] for _ in shape.pools] for _ in range(rows)]
        self._inputs = shape.as_kernels_take(self.buffers)

    def _device_of(self, name: str) -> torch.device:
        return self.shape.device_of(name, self.device)

    def _zeros(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, grows: bool) -> Tensor:
        if grows and self.shape.buffers[name].spec.fill is None:
            made = make_growing(shape, dtype, self._device_of(name))
            if made is not None:
                if not self.shape.buffers[name].spec.paged:  # a CPU's pool takes memory as it is written
                    self._growing[name] = made[1]
                return made[0]
        return torch.zeros(shape, dtype=dtype, device=self._device_of(name))

    # ---- texts and their rows

    def arrange(self, texts: Mapping[int, Tables]) -> list[int]:
        """Let these texts, by their tables, stand in the first rows; returns which stands where."""
        for text in texts:
            if text not in self._row:
                self._enter(text)
        wanted = set(texts)
        for row in range(len(texts)):
            here = self._at[row]
            if here in wanted:
                continue
            other = next(self._row[t] for t in texts if self._row[t] >= len(texts))
            self._exchange(row, other)
        standing = [text for text in self._at[: len(texts)] if text is not None]
        # To move what is in no page is more than to read common pages again.
        if self.in_bundles and not self._own and self._ordered != wanted:
            standing = self.by_pages(texts)
            self._reorder(standing)
            self._ordered = frozenset(wanted)
        return standing

    def by_pages(self, texts: Mapping[int, Tables]) -> list[int]:
        """These texts, those that begin with the same pages behind each other."""
        return sorted(texts, key=lambda text: [texts[text][pool] for pool in self._telling])

    def _reorder(self, texts: Sequence[int]) -> None:
        """Texts that have the first rows, and nothing in them but tables, stand there in this order."""
        came = [self._row[text] for text in texts]
        if came == sorted(came):
            return
        index = torch.tensor(came)
        if self.device.type == "cuda":
            index = index.pin_memory().to(self.device, non_blocking=True)
        for name in self._tables:
            rows = self.buffers[name][: len(came)]
            rows.copy_(rows[index])
        lists: tuple[list[Any], ...] = (self._at, self._written, self._tokens)
        for held in lists:
            held[: len(came)] = [held[row] for row in came]
        self._row.update(zip(texts, range(len(came)), strict=True))

    def place(self, text: int) -> int:
        """The row of a text, which gets one if it has none."""
        if text not in self._row:
            self._enter(text)
        return self._row[text]

    def _enter(self, text: int) -> None:
        row = self._at.index(None)
        if row in self._torn:
            self._clear_tables(row)
            self._torn.discard(row)
        self._at[row], self._row[text] = text, row
        self._tokens[row] = 0
        self._ordered = frozenset()

    @property
    def lost(self) -> list[int]:
        """Texts whose rows were changing places when something failed, as memory may run out in their midst.

        Such a text need not be one of the pass that failed: it may only have stood where one of those had to.
        """
        return [text for row in sorted(self._torn) if (text := self._at[row]) is not None]

    def note(self, text: int, tokens: int) -> None:
        """So many tokens of a text are in its row."""
        self._tokens[self._row[text]] = tokens

    def _used(self, name: str, part: Tensor, tokens: int) -> Tensor:
        """Of a row [H, slots, ..], or of several, what holds something of a text: the rest takes no memory."""
        if not self.shape.buffers[name].in_order:
            return part
        return part[:, : self.shape.rows_for(tokens, part.shape[1])]

    def drop(self, text: int) -> None:
        """A text has no row any more; nothing happens where it has none."""
        if text not in self._row:
            return
        row = self._at.index(text)  # an exchange that failed may not have come to `_row`
        self._torn.add(row)
        self._at[row] = None
        del self._row[text]
        self._tidy()

    def clear(self) -> None:
        """No text has a row."""
        self._torn = set(range(len(self._at)))
        self._at = [None] * len(self._at)
        self._row.clear()
        self._tidy()

    def _tidy(self) -> None:
        """Clear torn rows that are nobody's: what cannot be cleared now is when a text enters it."""
        for row in [row for row in self._torn if self._at[row] is None]:
            self._clear_tables(row)
            self._torn.discard(row)

    def __contains__(self, text: int) -> bool:
        return text in self._row

    def _clear_tables(self, row: int) -> None:
        """All of them: what a write that failed has left is not in `_written`."""
        for name, written in zip(self._tables, self._written[row], strict=True):
            self.buffers[name][row] = 0
            written.clear()

    def _exchange(self, one: int, other: int) -> None:
        """Texts of two rows, of which one may be nobody's, change places."""
        self._ordered = frozenset()
        torn = self._torn & {one, other}
        self._torn |= {one, other}  # until the lists below say what the buffers hold
        tokens = max(self._tokens[one], self._tokens[other])
        for name in self._own:
            parts = [self._used(name, self.buffers[name][row], tokens) for row in (one, other)]
            _exchange(*parts)
        for name in self._tables:
            _exchange(self.buffers[name][one], self.buffers[name][other])
        lists: tuple[list[Any], ...] = (self._at, self._written, self._tokens)
        for held in lists:
            held[one], held[other] = held[other], held[one]
        for row in (one, other):
            text = self._at[row]
            if text is not None:
                self._row[text] = row
        # A row that nobody entered since it was torn has its tables still, now in the other place.
        self._torn = self._torn - {one, other} | {one + other - row for row in torn}

    # ---- pages

    def write_tables(self, text: int, tables: Sequence[Sequence[int]]) -> None:
        """Let a text's tables say which pages it has."""
        row = self._row[text]
        for name, written, table in zip(self._tables, self._written[row], tables, strict=True):
            if written == table:
                continue
            same = 0
            while same < min(len(written), len(table)) and written[same] == table[same]:
                same += 1
            own = self.buffers[name]
            if same < len(table):
                numbers = torch.tensor(table[same:], dtype=torch.int32)
                if self.device.type == "cuda":  # from pinned memory no copy waits for the device
                    numbers = numbers.pin_memory()
                own[row, same : len(table)].copy_(numbers, non_blocking=True)
            if len(table) < len(written):
                own[row, len(table) : len(written)] = 0
            written[:] = table

    def copy_pages(self, copies: Sequence[Copy]) -> None:
        """Copy pages, one after the other."""
        for copy in copies:
            pool = self.shape.pools[copy.group]
            run = page_copy("triton" if pool.triton else "reference")
            for name in pool.buffers:
                device = self._device_of(name)
                pages = (torch.tensor([page], device=device) for page in (copy.source, copy.target))
                run(self.buffers[name], *pages)

    def fork(self, source: int, target: int) -> None:
        """A text gets a row that holds what another's holds; its tables are written before it runs."""
        a, b = self._row[source], self.place(target)
        self._tokens[b] = self._tokens[a]
        for name in self._own:
            parts = [self._used(name, self.buffers[name][row], self._tokens[a]) for row in (a, b)]
            parts[1].copy_(parts[0])

    # ---- a pass

    def hold(self, slots: int) -> None:
        """Let the first `slots` of contiguous layers have memory.

        Raises:
            LimitError: the device has no more.
        """
        for name, memory in self._growing.items():
            memory.hold(self.shape.rows_for(slots, self.buffers[name].shape[2]), 0)

    def inputs(self, first: int, end: int) -> dict[str, Tensor]:
        """The buffers as a pass over rows [first, end) takes them."""
        whole, inputs = self._in_pools, self._inputs
        return {name: buffer if name in whole else buffer[first:end] for name, buffer in inputs.items()}

    def inputs_of(self, texts: Sequence[int]) -> dict[str, Tensor]:
        """The buffers as a packed pass over these texts takes them: of what is in no page, a copy of their rows.

        Only for layouts that write nothing but pages (`layouts/packing.py`).
        """
        rows = torch.tensor([self.place(text) for text in texts])
        whole = self._in_pools
        return {
            name: buffer if name in whole else buffer[rows.to(buffer.device)]
            for name, buffer in self._inputs.items()
        }

    # ---- what goes to the host and comes back

    def state(self, text: int, tables: Tables) -> dict[str, Tensor]:
        """What a text has in its row and on its pages, on the CPU."""
        row = self._row[text]
        tokens = self._tokens[row]
        found = {name: _on_host(self._used(name, self.buffers[name][row], tokens)) for name in self._own}
        for names, table in zip(self._pooled, tables, strict=True):
            pages = torch.tensor(table, dtype=torch.int64)
            for name in names:
                found[name] = indexable(self.buffers[name])[pages.to(self._device_of(name))].cpu()
        return found

    def restore(self, text: int, tokens: int, tables: Tables, state: dict[str, Tensor]) -> None:
        """Hold again what `state` gave of a text of so many tokens, on these pages."""
        row = self.place(text)
        self._tokens[row] = tokens
        for name in self._own:
            self._used(name, self.buffers[name][row], tokens).copy_(state[name])
        for names, table in zip(self._pooled, tables, strict=True):
            pages = torch.tensor(table, dtype=torch.int64)
            for name in names:
                device = self._device_of(name)
                indexable(self.buffers[name])[pages.to(device)] = state[name].to(device)

    # ---- pages and snapshots that are kept

    @property
    def in_order(self) -> bool:
        """Whether a text has slots in the order of its tokens in its row."""
        return bool(self._in_order)

    def page(self, group: int, page: int) -> Item:
        """What a page holds."""
        return pack(self._page(group, page), self.device)

    def fill_page(self, group: int, page: int, item: Item) -> None:
        """Let a page hold what another one held."""
        unpack(item, self._page(group, page), self.device)

    def snapshot(self, text: int, pages: Tables) -> Item:
        """What a text has in its row besides slots in the order of tokens, and on these pages, by group."""
        return pack(self._fixed_parts(self._row[text], pages), self.device)

    def slots(self, text: int, start: int, end: int) -> Item:
        """The slots, in the order of tokens, of tokens [start, end) of a text that has `end`, and of those before that
        may have been written since it had `start`."""
        return pack(self._slots(self._row[text], start, end), self.device)

    def resume(self, text: int, tokens: int, pages: Tables, row: Item, slots: Sequence[Item]) -> None:
        """Let a text have what a snapshot of so many tokens has; slots: in pieces of equally many tokens."""
        place = self.place(text)
        self._tokens[place] = tokens
        self.hold(tokens)
        unpack(row, self._fixed_parts(place, pages), self.device)
        size = tokens // max(len(slots), 1)
        for number, item in enumerate(slots):
            unpack(item, self._slots(place, number * size, (number + 1) * size), self.device)

    def _page(self, group: int, page: int) -> list[Tensor]:
        return [self.buffers[name][page] for name in self._pooled[group]]

    def _fixed_parts(self, row: int, pages: Tables) -> list[Tensor]:
        parts = [self.buffers[name][row] for name in self._fixed]
        for group, own in enumerate(pages):
            for page in own:
                parts += self._page(group, page)
        return parts

    def _slots(self, row: int, start: int, end: int) -> list[Tensor]:
        parts = []
        for name in self._in_order:
            part = self.buffers[name][row]
            own = part.shape[1]
            # Tokens of a group share a row: no row that a token from `begin` on is in comes before this one.
            begin = max(start - self._unsettled, 0) * (own - 1) // self.shape.span
            parts.append(part[:, begin : self.shape.rows_for(end, own)])
        return parts


def _on_host(part: Tensor) -> Tensor:
    return part.cpu() if part.device.type != "cpu" else part.clone()


def _exchange(one: Tensor, other: Tensor) -> None:
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)
