"""What an engine keeps outside of its cache: evicted pages and snapshots in the host's memory, and a store below.

Pages and snapshots have room of their own, so that neither drives out the other. Of the room of pages, texts that gave
up theirs are first. What goes from the host's memory goes to the store, if there is one, and what is found there comes
back. What a step needs is fetched before it is planned, and stays until its moves are done: what is planned is there.
What is in files is read by threads meanwhile (`reading.py`), and steps go on without it until it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol

from kvcompile.serve.pages import Key
from kvcompile.serve.reading import Reading
from kvcompile.serve.store import Host, Item, Store

Tier = Literal["device", "host", "store"]


class Below(Protocol):
    """What the scheduler asks of it.

    takes_pages, takes_snapshots: whether there is any room for them
    """

    takes_pages: bool
    takes_snapshots: bool

    def lookup(self, key: Key) -> bool:
        """Whether something is there, which may turn out not to be whole when it is fetched."""
        ...

    @property
    def reading(self) -> bool:
        """Whether something that `begin` began is not there yet."""
        ...

    def begin(self, pages: Iterable[Key], snapshots: Iterable[Key]) -> bool:
        """Whether `fetch` of these would not wait for a disk; if it would, they are read from now on."""
        ...

    def forget(self) -> None:
        """What `begin` began is not wanted any more."""
        ...

    def fetch(self, pages: Iterable[Key], snapshots: Iterable[Key]) -> Tier | None:
        """Have these at hand for the next moves: the slowest of where they were; None: one of them is not whole, and
        is not looked up any more."""
        ...

    def limit(self, room: int) -> None:
        """Evicted pages have so many bytes from now on."""
        ...

    def release(self) -> None:
        """What was fetched is not needed any more."""
        ...


class Tiers:
    """Evicted pages and snapshots, by their keys."""

    def __init__(self, pages: int = 0, snapshots: int = 0, below: Store | None = None):
        """
        pages, snapshots: bytes of the host's memory
        below: where things go from there
        """
        self.pages, self.snapshots, self._below = Host(pages, below), Host(snapshots, below), below
        self.takes_pages = bool(pages) or below is not None
        self.takes_snapshots = bool(snapshots) or below is not None
        self._reader = None if below is None else Reading(below)
        self._fetched: dict[Key, tuple[Item, Tier]] = {}

    def lookup(self, key: Key) -> bool:
        stores = (self.pages, self.snapshots, self._below)
        return any(store is not None and store.lookup(key) for store in stores)

    @property
    def reading(self) -> bool:
        return self._reader is not None and self._reader.busy

    def begin(self, pages: Iterable[Key], snapshots: Iterable[Key]) -> bool:
        if self._reader is None:
            return True
        wanted = [(self.pages, key) for key in pages] + [(self.snapshots, key) for key in snapshots]
        return self._reader.ask([k for host, k in wanted if k not in self._fetched and not host.lookup(k)])

    def forget(self) -> None:
        if self._reader is not None:
            self._reader.ask(())

    def on_read(self, done: Callable[[], None]) -> None:
        """`done` is called, by another thread, whenever nothing is being read any more."""
        if self._reader is not None:
            self._reader.done = done

    def fetch(self, pages: Iterable[Key], snapshots: Iterable[Key]) -> Tier | None:
        wanted = [(self.pages, key) for key in pages] + [(self.snapshots, key) for key in snapshots]
        # All are looked at, whatever the others are: what is not whole is removed at once.
        found = [self._at_hand(host, key) for host, key in wanted]
        if None in found:
            return None
        return "store" if "store" in found else "host"

    def _at_hand(self, host: Host, key: Key) -> Tier | None:
        found = self._fetched.get(key) or self._find(host, key)
        if found is None:
            return None
        self._fetched[key] = found
        return found[1]

    def _find(self, host: Host, key: Key) -> tuple[Item, Tier] | None:
        item = host.load(key)
        if item is not None:
            return item, "host"
        item = self._reader.take(key) if self._reader is not None else None
        if item is None:
            return None
        host.store(key, item)
        return item, "store"

    def fetched(self, key: Key) -> Item:
        """What `fetch` has at hand."""
        return self._fetched[key][0]

    def limit(self, room: int) -> None:
        self.pages.limit(room)

    def release(self) -> None:
        self._fetched.clear()

    def keep_snapshot(self, items: Sequence[tuple[Key, Item]], before: Sequence[Key]) -> None:
        """Keep the items of a snapshot; before: those of its beginning, the first ones first, which go after it."""
        for key, item in items:
            self.snapshots.store(key, item)
        for key in reversed(before):
            self.snapshots.load(key)

    def close(self) -> None:
        """Nothing is read any more."""
        if self._reader is not None:
            self._reader.close()

    def flush(self) -> None:
        """All that is in the host's memory goes to the store below."""
        if self._below is None:
            return
        for host in (self.snapshots, self.pages):
            for key, item in host.items():
                if not self._below.lookup(key):
                    self._below.store(key, item)
