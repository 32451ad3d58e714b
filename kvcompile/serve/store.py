"""Where what texts have in the cache is kept outside of it: three calls, whoever answers them.

    lookup(key)         whether it is there
    load(key)           what was stored under the key; None: nothing, or nothing whole
    store(key, item)    keep it, if there is room for it

An item is bytes, a function of its key: whoever has the key may have them, and what is stored under a key once is never
another thing. So nothing is lost where an item is forgotten, and two stores never disagree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvcompile.serve.pages import Key


@dataclass(frozen=True)
class Item:
    """Bytes in the host's memory.

    data:  uint8 [n]
    ready: of a device that still copies to them; None: they are there
    """

    data: Tensor
    ready: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def wait(self) -> Tensor:
        """The bytes, once they are there."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.data


class Store(Protocol):
    """What an engine keeps under keys outside of its cache."""

    def lookup(self, key: Key) -> bool:
        """Whether an item is there."""
        ...

    def load(self, key: Key) -> Item | None:
        """The item of a key, as it was stored; None: it is not there, or not whole."""
        ...

    def store(self, key: Key, item: Item) -> None:
        """Keep an item, if there is room for it; others may have to go."""
        ...


class Host:
    """The host's memory: what was asked for longest ago goes first.

    below: where it goes then; None: nowhere
    """

    def __init__(self, room: int, below: Store | None = None):
        self._room, self._below = room, below
        self._items: OrderedDict[Key, Item] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._items)

    def lookup(self, key: Key) -> bool:
        return key in self._items

    def load(self, key: Key) -> Item | None:
        item = self._items.get(key)
        if item is not None:
            self._items.move_to_end(key)
        return item

    def store(self, key: Key, item: Item) -> None:
        if key in self._items:
            return
        if item.nbytes > self._room:
            self._pass_down(key, item)
            return
        self._items[key] = item
        self.nbytes += item.nbytes
        self.limit(self._room)

    def limit(self, room: int) -> None:
        """There are so many bytes from now on."""
        self._room = room
        while self.nbytes > room:
            key, item = self._items.popitem(last=False)
            self.nbytes -= item.nbytes
            self._pass_down(key, item)

    def items(self) -> Iterator[tuple[Key, Item]]:
        """All that is there, those first that go first."""
        return iter(list(self._items.items()))

    def _pass_down(self, key: Key, item: Item) -> None:
        if self._below is not None and not self._below.lookup(key):
            self._below.store(key, item)


def pack(parts: Iterable[Tensor], device: torch.device) -> Item:
    """Tensors as bytes on the host. On a GPU nothing waits: what comes after on its stream comes after; of several
    devices, each copy waits.

    device: where bytes stand of which no part says it
    """
    given = list(parts)
    device = _one_of(given, device)
    flat = torch.zeros(sum(_padded(part) for part in given), dtype=torch.uint8, device=device)
    for place, part in zip(_places(flat, given), given, strict=True):
        place.copy_(part)
    if device.type != "cuda":
        return Item(flat.cpu())
    pinned = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=True).copy_(flat, non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))
    return Item(pinned, done)


def unpack(item: Item, parts: Iterable[Tensor], device: torch.device) -> None:
    """Write what `pack` made of such tensors into these.

    Raises:
        ValueError: the item is of others.
    """
    given = list(parts)
    size = sum(_padded(part) for part in given)
    if item.data.shape != (size,):
        raise ValueError(f"expected {size:,} bytes, got {tuple(item.data.shape)}")
    flat = item.data.to(_one_of(given, device), non_blocking=True)
    for place, part in zip(_places(flat, given), given, strict=True):
        part.copy_(place)


def _one_of(parts: Sequence[Tensor], device: torch.device) -> torch.device:
    """The device of all parts; the host where they stand on several; `device` where there are none."""
    found = {part.device for part in parts} or {device}
    return found.pop() if len(found) == 1 else torch.device("cpu")


def _padded(part: Tensor) -> int:
    """Bytes of a part, so that the next one's numbers stand at multiples of their size."""
    return -(-part.numel() * part.element_size() // 16) * 16


def _places(flat: Tensor, parts: Iterable[Tensor]) -> Iterator[Tensor]:
    """Where in the bytes each part stands, as it is."""
    begin = 0
    for part in parts:
        size = part.numel() * part.element_size()
        yield flat[begin : begin + size].view(part.dtype).view(part.shape)
        begin += _padded(part)
