"""The cache tensors of one rewritten model, and what its sequences have seen so far."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from kvcompile.errors import InputError, LimitError
from kvcompile.kernels.ops.page_copy import page_copy
from kvcompile.layouts.pages import SPARE_PAGES
from kvcompile.runtime.cache_spec import CacheShape
from kvcompile.runtime.growing import Growing, make_growing
from kvcompile.runtime.pages import PagePool
from kvcompile.runtime.text import Text
from kvcompile.runtime.turns import Writers
from kvcompile.runtime.whole_calls import WholeCalls

# Contiguous slots are read in whole blocks, so that lengths next to each other read the same shapes.
SPAN_STEP = 64
_VERSIONS = itertools.count(1)  # no two caches ever have one in common


class KVCache:
    """Buffers of every layer, and of recurrent state, allocated when the first tokens of a batch come and then only
    overwritten. Those that keep every token take memory as tokens come (`runtime/growing.py`), and pools of pages may
    grow: see `runtime/pages.py` for which sequence has which.

    A batch is a rectangle of columns, padded on the left; each row (sequence) has its own length.

    Of a model over several devices, each layer's buffers stand on that layer's; text, lengths and page tables stand
    where token ids come to.
    """

    def __init__(self, shape: CacheShape, device: torch.device, grows: bool = True):
        """
        Args:
            grows: whether who runs on the cache calls `hold` first; else a GPU's buffers are allocated for the limit.
        """
        self.shape = shape
        self.device = device
        self.grows = grows or device.type == "cpu"
        self.batch = 0
        self.columns = 0
        self.seq_lens = torch.zeros(0, dtype=torch.int64, device=device)
        self.buffers: dict[str, Tensor] = {}
        self._growing: dict[str, Growing] = {}  # buffers of which only what was held takes memory
        self._written = 0  # columns that they have had, at most
        self._in_memory = 0  # slots that they may be read and written up to
        self.version = next(_VERSIONS)  # of the buffers: another whenever some stand elsewhere in memory
        self._seen: list[int] = []  # tokens of each row, known without asking the device
        self.stamp = 0  # of the weights that the text was begun with
        self.text = Text(device)
        self.writers = Writers()
        self.calls = WholeCalls()
        self.pools = tuple(PagePool(pool.group) for pool in shape.pools)
        self._in_pool = [pool.buffers for pool in shape.pools]
        self._paged = {name: of.spec for name, of in shape.buffers.items() if of.spec.paged}

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the buffers take now."""
        return sum(self._held(name, buffer) for name, buffer in self.buffers.items())

    @property
    def reserved(self) -> int:
        """Bytes that the buffers have addresses for: what they can come to without being allocated anew."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    @property
    def nbytes_by_device(self) -> dict[str, int]:
        """`nbytes` of each device that has some."""
        found: dict[str, int] = {}
        for name, buffer in self.buffers.items():
            device = str(buffer.device)
            found[device] = found.get(device, 0) + self._held(name, buffer)
        return found

    def _held(self, name: str, buffer: Tensor) -> int:
        if name not in self._growing:
            return buffer.nbytes
        return self._growing[name].held(self._rows_for(self._written, buffer))

    def _rows_for(self, slots: int, buffer: Tensor) -> int:
        """Rows of a head that so many slots take: fewer where one is shared by a group of tokens."""
        return self.shape.rows_for(slots, buffer.shape[2])

    def _used(self, name: str, buffer: Tensor) -> Tensor:
        """What holds something of the text: of a layer whose slots stand in the order of tokens, the first ones."""
        if not self.shape.buffers[name].in_order:
            return buffer
        return buffer[:, :, : self._rows_for(self.columns, buffer)]

    @property
    def span(self) -> int:
        """Slots of the contiguous layers; 0 where there are none."""
        return self.shape.span

    def report(self) -> dict[str, Any]:
        """JSON-ready: bytes of the buffers and what they can come to as they are, sequences, columns, and of each pool
        its layers and pages (without those that belong to nobody). Of a model over several devices, bytes by device."""
        spread = any(of.device is not None for of in self.shape.buffers.values())
        return ({"devices": self.nbytes_by_device} if spread else {}) | {
            "bytes": self.nbytes,
            "reserved": self.reserved,
            "sequences": self.batch if self.columns else 0,
            "columns": self.columns,
            "pools": [
                {
                    "layers": list(pool.group.layers),
                    "page_size": pool.group.page_size,
                    "pages": pool.capacity,
                    "used": pool.used,
                    "free": pool.free,
                }
                for pool in self.pools
            ],
        }

    def inputs(self) -> dict[str, Tensor]:
        """The buffers as the graph takes them."""
        return self.shape.as_kernels_take(self.buffers)

    def shapes(self) -> dict[str, tuple[tuple[int | str, ...], torch.dtype, torch.device]]:
        """Shape, dtype and device of each of `inputs`: the first size is "batch", or the name of a pool's number of
        pages."""
        shapes: dict[str, tuple[tuple[int | str, ...], torch.dtype]] = {
            name: (("batch", *shape), dtype) for name, (shape, dtype) in self._rows_of().items()
        }
        for number, names in enumerate(self._in_pool):
            for name in names:
                shapes[name] = ((f"pages_{number}", *self._paged[name].shape), self._paged[name].dtype)
        of = self.shape.buffers
        return {
            name: (shape, torch.uint8 if name in of and of[name].as_bytes else dtype, self._device_of(name))
            for name, (shape, dtype) in shapes.items()
        }

    def _rows_of(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape without batch, and dtype, of what every sequence has a row of."""
        specs = {name: of.spec for name, of in self.shape.buffers.items()}
        rows = {name: (spec.shape, spec.dtype) for name, spec in specs.items() if not spec.paged}
        return rows | {
            pool.group.name: ((pool.group.pages_per_sequence,), torch.int32) for pool in self.pools
        }

    def rows(self, pads: Tensor | None) -> list[list[int]]:
        """[2, B]: `pads` of the new tokens, and how many tokens each row has seen. Without pads no device is asked."""
        return [[0] * self.batch if pads is None else pads.tolist(), self._seen]

    def check_limits(self, batch: int, tokens: int) -> None:
        """Refuse `batch` sequences of `tokens` in all that could never fit.

        Raises:
            LimitError: more than the limits.
        """
        limits = self.shape.limits
        if batch > limits.max_batch:
            raise LimitError(
                f"{batch} sequences, but runtime.max_batch is {limits.max_batch}: raise it in the recipe, or "
                "pass fewer sequences"
            )
        if limits.max_tokens is not None and tokens > limits.max_tokens:
            raise LimitError(
                f"{tokens} tokens a sequence, but runtime.max_tokens is {limits.max_tokens}: raise it in the "
                "recipe, pass fewer, or choose a bounded retention"
            )

    def check_room(self, batch: int, tokens: int) -> None:
        """Refuse what does not fit, before anything is written.

        Raises:
            LimitError: more sequences or tokens than the limits.
            InputError: another number of sequences than the cache holds.
        """
        self.calls.check()
        limit = self.shape.limits.max_tokens
        if self.columns and batch != self.batch:
            raise InputError(
                f"the cache holds {self.batch} sequences of {self.columns} tokens, and this call has {batch}"
                ": a batch keeps its size until reset()"
            )
        if self.columns and limit is not None and self.columns + tokens > limit:
            raise LimitError(
                f"{self.columns} tokens in the cache and {tokens} new ones are more than runtime.max_tokens "
                f"{limit}: raise it in the recipe, call reset(), or choose a bounded retention"
            )
        self.check_limits(batch, tokens)

    def check_pages(self, lengths: Sequence[int], kept: bool = True) -> None:
        """Refuse sequences of `lengths` tokens that pools of a fixed size have no pages for.

        kept: whether they are those that the cache holds, with what they hold now.

        Raises:
            LimitError: some pool lacks pages; nothing has changed.
        """
        for pool in self.pools:
            pool.check(lengths, kept)

    def check_end(self, tokens: int, batch: int, mask: Any, kept: bool = False) -> None:
        """Refuse what pools of a fixed size could not hold at the end: `batch` sequences of `tokens`, padding included.

        mask: [sequences, any]: 0 is padding; `batch` is a multiple of its sequences. None, or no such mask: no padding.
        kept: whether they are the sequences that the cache holds.
        """
        pads = [0] * batch
        if (
            self.pools
            and isinstance(mask, Tensor)
            and mask.dim() == 2
            and len(mask)
            and batch % len(mask) == 0
        ):
            pads = (mask == 0).sum(1).repeat_interleave(batch // mask.shape[0]).tolist()
        self.check_pages([tokens - pad for pad in pads], kept)

    def allocate(self, batch: int, tokens: int, pads: Tensor | None) -> None:
        """Make room for `tokens` more columns of `batch` sequences, of which the first `pads` are padding.

        Everything is checked before anything is written; a sequence takes pages for its own tokens only.

        Raises:
            LimitError: a pool of a fixed size lacks pages; the cache is as it was.
        """
        if self.pools:
            kept = batch == self.batch and self.columns > 0
            seen = self._seen if kept else [0] * batch
            padded = [0] * batch if pads is None else pads.tolist()
            lengths = [max(0, s + tokens - pad) for s, pad in zip(seen, padded, strict=True)]
            self.check_pages(lengths, kept)
        self.reserve(batch)
        if self.pools:
            for pool, names in zip(self.pools, self._in_pool, strict=True):
                self._grow(pool, names, pool.lacking(lengths))
            for pool in self.pools:
                for row, before in pool.extend(lengths):
                    pages = pool.rows[row]
                    self._write_table(pool, row, before, pages[before:])

    def whole(self, tokens: int) -> AbstractContextManager[None]:
        """A call that appends `tokens` columns: where it does not end, it has not been, or the text is lost."""
        columns, lengths, seen = self.columns, self.seq_lens, self._seen

        def undo() -> None:
            self.columns, self.seq_lens, self._seen = columns, lengths, seen
            self.text.crop(columns)
            self.trim()

        return self.calls.whole(columns, tokens, self.shape.back, undo)

    def trim(self) -> None:
        """Take back pages that no token has been written to (a call that failed)."""
        for pool in self.pools:
            for row, kept in pool.trim(self._seen):
                table = self.buffers[pool.group.name]
                table[row, kept:] = 0

    def _grow(self, pool: PagePool, names: Sequence[str], lacking: int) -> None:
        """Let a pool grow, one tensor after the other: each stands in memory twice while it is copied."""
        if not lacking:
            return
        capacity = pool.capacity_for(lacking)
        size, before = capacity + SPARE_PAGES, pool.capacity + SPARE_PAGES
        self.version = next(_VERSIONS)
        try:
            for name in names:
                spec, old = self._paged[name], self.buffers.get(name)
                # Zeros: what nobody wrote is read, and then weighed with zero.
                new = torch.zeros((size, *spec.shape), dtype=spec.dtype, device=self._device_of(name))
                if old is not None:
                    new[: len(old)] = old
                self.buffers[name] = new
        except BaseException:
            # Out of memory, most likely: the pools of a group keep one size.
            for name in names:
                if not pool.capacity:
                    self.buffers.pop(name, None)
                elif name in self.buffers:
                    self.buffers[name] = self.buffers[name][:before]
            raise
        pool.grow(capacity)

    def _write_table(self, pool: PagePool, row: int, start: int, pages: Sequence[int]) -> None:
        table = self.buffers[pool.group.name]
        numbers = torch.tensor(pages, dtype=torch.int32)
        if self.device.type == "cuda":  # from pinned memory no copy waits for the device
            numbers = numbers.pin_memory()
        table[row, start : start + len(pages)].copy_(numbers, non_blocking=True)

    def reserve(self, batch: int) -> None:
        """Allocate for `batch` sequences, unless the buffers already are of that size.

        Raises:
            LimitError: there is no memory for so many; the cache is empty.
        """
        if batch == self.batch:
            return
        self.version = next(_VERSIONS)
        self.batch = 0  # until there is memory for so many
        # The old buffers go first: two caches never stand in memory together. Pools serve any sequences.
        self.buffers = {name: pool for name, pool in self.buffers.items() if name in self._paged}
        self._growing, self._written, self._in_memory = {}, 0, 0
        try:
            self.buffers |= {
                name: self._zeros(name, (batch, *shape), dtype)
                for name, (shape, dtype) in self._rows_of().items()
            }
        except RuntimeError as error:  # what torch raises where an allocator has no more
            self.release()
            raise LimitError(
                f"no memory for the cache of {batch} sequences with runtime.max_tokens "
                f"{self.shape.limits.max_tokens}: {str(error).splitlines()[0]}; set max_tokens, or choose a recipe "
                "that takes less (kvcompile.estimate says how much)"
            ) from error
        for pool in self.pools:
            pool.clear(batch)
        for name, of in self.shape.buffers.items():
            if not of.spec.paged:  # what a pool holds is there when tokens come
                of.spec.written(self.buffers[name])
        self.batch = batch
        self._seen = [0] * batch
        self.seq_lens = torch.zeros(batch, dtype=torch.int64, device=self.device)

    def _device_of(self, name: str) -> torch.device:
        return self.shape.device_of(name, self.device)

    def _zeros(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        device = self._device_of(name)
        of = self.shape.buffers.get(name)  # none: a table of pages
        if self.grows and of is not None and of.in_order and of.spec.fill is None:
            made = make_growing(shape, dtype, device)
            if made is not None:
                buffer, self._growing[name] = made
                return buffer
        return torch.zeros(shape, dtype=dtype, device=device)

    def hold(self, slots: int, pads: Tensor | None = None) -> None:
        """Let the first `slots` of the contiguous layers have memory: nothing may read or write beyond them, but
        padding, of which each sequence has `pads`, and which is written to the last slots.

        Raises:
            LimitError: the device has no more; the cache holds what it held.
        """
        if slots <= self._in_memory and pads is None:
            return
        last = int(pads.max()) if pads is not None and self._growing else 0
        for name, memory in self._growing.items():
            buffer = self.buffers[name]
            memory.hold(self._rows_for(slots, buffer), self._rows_for(last, buffer))
        self._in_memory = max(slots, self._in_memory)

    def swap(self, name: str, buffer: Tensor) -> Tensor:
        """Hold `buffer`, all of which was written, in the place of another one, which is given back."""
        old, self.buffers[name] = self.buffers[name], buffer
        self._growing.pop(name, None)
        return old

    def advance(self, ids: Tensor, new_lens: Tensor, rows: list[list[int]] | None = None) -> None:
        """Note that columns [B, S] of ids have been appended, and the rows' lengths now; rows: of this call."""
        columns = ids.shape[1]
        self.text.append(ids)
        self.seq_lens = new_lens
        self.columns += columns
        self._written = max(self._written, self.columns)
        if rows is not None:
            self._seen = [seen + columns - pad for pad, seen in zip(*rows, strict=True)]

    def reset(self) -> None:
        """Forget all sequences; the memory is kept for the next ones of the same number, that of pools for any."""
        self.writers.begin(self.columns)
        self.calls.forget()
        self.columns = 0
        self.text.crop(0)
        for pool in self.pools:
            pool.clear(self.batch)
            if pool.group.name in self.buffers:
                self.buffers[pool.group.name].zero_()
        self.seq_lens = torch.zeros_like(self.seq_lens)
        self._seen = [0] * self.batch  # what the states hold is not read where nothing was seen

    def release(self) -> None:
        """Forget all sequences and free the buffers."""
        self.writers.begin(self.columns)
        self.version = next(_VERSIONS)
        self.text = Text(self.device)
        self.buffers = {}
        self._growing, self._written, self._in_memory = {}, 0, 0
        for pool in self.pools:
            pool.release()
        self.batch = self.columns = 0
        self.seq_lens = torch.zeros(0, dtype=torch.int64, device=self.device)
        self._seen = []
        self.calls.forget()

    @property
    def hidden(self) -> Tensor:
        """Which columns are padding, bool [B, columns]."""
        return torch.arange(self.columns, device=self.device) < (self.columns - self.seq_lens)[:, None]

    def crop(self, columns: int) -> None:
        """Forget all but the first `columns` columns, as if the others had never come.

        Raises:
            InputError: the cache cannot step back, with the reason; it is as it was.
        """
        if not 0 <= columns <= self.columns:
            raise InputError(f"crop: expected 0 to {self.columns} columns to keep, got {columns}")
        gone = self.columns - columns
        if not gone:
            return
        if columns:
            self.calls.check()
        problem = self.shape.back.problem(self.columns) if columns else None
        if problem is not None:
            raise InputError(f"this cache cannot step back by {gone} of {self.columns} tokens: {problem}")
        if not columns:
            self.reset()
            return
        self.columns = columns
        self.text.crop(columns)
        self.seq_lens = (self.seq_lens - gone).clamp(min=0)
        self._seen = [max(0, seen - gone) for seen in self._seen]
        self.trim()

    @property
    def seen(self) -> list[int]:
        """Tokens of each row, where states or pools need to know; else zeros."""
        return list(self._seen)

    def state(self) -> dict[str, Tensor]:
        """What the buffers hold of the text, by name: slots behind it are left out, and pages stand in the order of
        their sequences, the tables left out."""
        self.calls.check()
        found = {}
        tables = {pool.group.name for pool in self.pools}
        for name, buffer in self.buffers.items():
            if name in self._paged or name in tables:
                continue
            found[name] = self._used(name, buffer)
        for pool, names in zip(self.pools, self._in_pool, strict=True):
            pages = torch.tensor([page for row in pool.rows for page in row], dtype=torch.int64)
            found |= {name: self.buffers[name][pages.to(self._device_of(name))] for name in names}
        return found

    def restore(self, ids: Tensor, lengths: Tensor, seen: list[int], state: dict[str, Tensor]) -> None:
        """Hold a text and what `state` gave of it, instead of what is held now.

        Raises:
            ValueError: tensors of other names, shapes or dtypes.
            LimitError: pools of a fixed size lack pages. In both cases the cache is as it was.
        """
        batch, columns = ids.shape
        made = KVCache(self.shape, self.device, self.grows)
        made._seen = [0] * batch
        made.allocate(
            batch, columns, torch.tensor([columns - count for count in seen]) if made.pools else None
        )
        made.columns = made._written = columns  # so that `state` says what there must be
        made.hold(columns)
        wanted = made.state()
        if wanted.keys() != state.keys():
            raise ValueError(f"it has {', '.join(sorted(wanted.keys() ^ state.keys()))} on one side only")
        for name, own in wanted.items():
            given = state[name]
            if own.shape != given.shape or own.dtype != given.dtype:
                raise ValueError(
                    f"{name}: expected {own.dtype} {tuple(own.shape)}, got {given.dtype} {tuple(given.shape)}"
                )
        paged = {name: pool for pool, names in zip(made.pools, made._in_pool, strict=True) for name in names}
        for name, given in state.items():
            if name in paged:
                buffer = made.buffers[name]
                pages = torch.tensor([page for row in paged[name].rows for page in row], dtype=torch.int64)
                buffer[pages.to(buffer.device)] = given.to(buffer.device)
            else:
                wanted[name].copy_(given)
        made.seq_lens, made._seen = lengths.to(self.device), list(seen)
        made.text.append(ids.to(self.device))
        self.take(made)

    def select(self, index: Tensor) -> None:
        """Hold rows index[0], index[1], .. of what is held, as many as there are.

        Raises:
            LimitError: more rows than the limits, or than pools have pages for; the cache is as it was.
        """
        rows = index.tolist()
        self.check_limits(len(rows), self.columns)
        state, index = self.state(), index.to(self.device)
        pages_of = dict(zip(itertools.chain(*self._in_pool), self._pools_by_buffer(), strict=True))
        for name, held in state.items():
            picked = index
            if name in pages_of:
                starts = [0, *itertools.accumulate(map(len, pages_of[name].rows))]
                picked = torch.tensor([page for row in rows for page in range(starts[row], starts[row + 1])])
            state[name] = held.index_select(0, picked.to(held.device))
        ids, lengths = self.text.ids.index_select(0, index), self.seq_lens.index_select(0, index)
        self.restore(ids, lengths, [self._seen[row] for row in rows], state)

    def _pools_by_buffer(self) -> list[PagePool]:
        return [pool for pool, names in zip(self.pools, self._in_pool, strict=True) for _ in names]

    def take(self, other: KVCache) -> None:
        """Hold what `other` holds, which is of the same shape and is not used any more."""
        self.writers.begin(self.columns)
        self.version = next(_VERSIONS)
        self.buffers, self.pools, self.text = other.buffers, other.pools, other.text
        self._growing, self._written = other._growing, other._written
        self._in_memory = other._in_memory
        self.batch, self.columns = other.batch, other.columns
        self.seq_lens, self._seen = other.seq_lens, other._seen
        self.calls.forget()

    def copy(self) -> KVCache:
        """Another cache that holds the same."""
        self.calls.check()
        made = KVCache(self.shape, self.device, self.grows)
        made.batch, made.columns = self.batch, self.columns
        for name, buffer in self.buffers.items():
            if name in self._growing:  # a copy of all of it would take memory for all of it
                made.buffers[name] = made._zeros(name, tuple(buffer.shape), buffer.dtype)
                made._growing[name].hold(made._rows_for(self.columns, buffer), 0)
                made._used(name, made.buffers[name]).copy_(self._used(name, buffer))
            else:
                made.buffers[name] = buffer.clone()
        made._written = self.columns
        made.seq_lens, made.text = self.seq_lens.clone(), self.text.copy()
        made._seen, made.stamp = list(self._seen), self.stamp
        made.pools = tuple(pool.copy() for pool in self.pools)
        return made

    def reorder(self, index: Tensor) -> None:
        """Row i becomes what row index[i] was (beam search); in place, so that addresses stay.

        Raises:
            LimitError: a row that is chosen twice needs pages of its own, and a pool of a fixed size has too few; the
                cache is as it was.
        """
        self.calls.check()
        index = index.to(self.device)
        if self.pools:
            self._reorder_pages(index.tolist())
        tables = {pool.group.name for pool in self.pools}
        for name, buffer in self.buffers.items():
            if name in self._paged or name in tables:
                continue
            used = self._used(name, buffer)
            used.copy_(used.index_select(0, index.to(used.device)))
        self.seq_lens = self.seq_lens.index_select(0, index)
        self.text.reorder(index)
        if self.shape.state or self.pools:
            self._seen = [self._seen[i] for i in index.tolist()]

    def _reorder_pages(self, index: list[int]) -> None:
        """Pages follow their sequences; only a sequence that is chosen again is copied."""
        lengths = [self._seen[i] for i in index]
        self.check_pages(lengths, kept=False)
        for pool, names in zip(self.pools, self._in_pool, strict=True):
            self._grow(pool, names, pool.moves(index).more)
        for pool, shape in zip(self.pools, self.shape.pools, strict=True):
            moves = pool.moves(index)
            changed = [row for row in range(self.batch) if moves.rows[row] != tuple(pool.rows[row])]
            if moves.copies:
                copies = torch.tensor(moves.copies)
                copy = page_copy("triton" if shape.triton else "reference")
                for name in shape.buffers:
                    copy(self.buffers[name], *copies.to(self._device_of(name)).unbind(1))
            pool.move(moves)
            for row in changed:
                self.buffers[pool.group.name][row] = 0
                self._write_table(pool, row, 0, pool.rows[row])
