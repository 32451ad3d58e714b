"""Items of a store on their way into memory, read by threads: no step waits for a disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kvcompile.serve.pages import Key
from kvcompile.serve.store import Item, Store

log = logging.getLogger(__name__)

_THREADS = 4  # reading a file and checking its signature both let other threads run


class Reading:
    """What was asked for, and is read or being read. One thread asks and takes."""

    def __init__(self, store: Store):
        self._store = store
        self._asked: dict[Key, Future[Item | None]] = {}
        self._threads = ThreadPoolExecutor(_THREADS, "kvcompile reading")
        self.done: Callable[[], None] = lambda: None
        """Called by a reading thread whenever nothing is being read any more."""

    @property
    def busy(self) -> bool:
        """Whether something that was asked for is still being read."""
        return not all(future.done() for future in list(self._asked.values()))

    def ask(self, keys: Sequence[Key]) -> bool:
        """Whether all of these are read. What is not is read from now on; what is not among them is forgotten."""
        wanted = set(keys)
        for key in [key for key in self._asked if key not in wanted]:
            self._asked.pop(key).cancel()
        for key in keys:
            if key not in self._asked:
                try:
                    self._asked[key] = self._threads.submit(self._store.load, key)
                except RuntimeError as error:  # the process has no more threads: `take` reads it
                    log.warning("an item of the store is read while steps wait: %s", error)
                    continue
                self._asked[key].add_done_callback(self._one_done)
        return not self.busy

    def take(self, key: Key) -> Item | None:
        """What the store has under a key, as `Store.load`; it is read here if nobody asked for it."""
        future = self._asked.pop(key, None)
        try:
            return self._store.load(key) if future is None else future.result()
        except Exception:  # what cannot be read is not there
            log.exception("an item of the store could not be read")
            return None

    def close(self) -> None:
        """Read no more."""
        self.ask(())
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _one_done(self, _: Future[Item | None]) -> None:
        if not self.busy:
            self.done()
