"""What an engine is at and has done, in numbers."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

_WINDOW = 5.0  # seconds that the speed is of


@dataclass(frozen=True)
class Stats:
    """waiting, running, swapped: texts now. requests .. steps: counted since the start; cached_tokens: of prompts, out
    of the prefix cache; found_device_tokens, .. host .., .. store ..: of texts that came in, by the slowest of where
    what they found was. pages: over all pools. bytes: of pools and rows. host_pages, snapshots: that the host's memory
    has (a snapshot's slots in the order of tokens count as another), host_bytes: of both. store_bytes: of files.
    tokens_per_second: of texts, over the last seconds. prefix_cache, packed: "on", or "off: why";
    packed_steps: those in which all texts took one pass."""

    waiting: int = 0
    running: int = 0
    swapped: int = 0
    requests: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    found_device_tokens: int = 0
    found_host_tokens: int = 0
    found_store_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    swapped_bytes: int = 0
    steps: int = 0
    packed_steps: int = 0
    pages: int = 0
    pages_held: int = 0
    pages_cached: int = 0
    bytes: int = 0
    host_pages: int = 0
    host_bytes: int = 0
    snapshots: int = 0
    store_bytes: int = 0
    tokens_per_second: float = 0.0
    prefix_cache: str = "off"
    packed: str = "off"


class Speed:
    """Tokens a second, over the last seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def note(self, tokens: int) -> None:
        now = time.monotonic()
        self._seen.append((now, tokens))
        self._forget(now)

    def _forget(self, now: float) -> None:
        while self._seen and self._seen[0][0] < now - _WINDOW:
            self._seen.popleft()

    def now(self) -> float:
        moment = time.monotonic()
        self._forget(moment)
        return sum(tokens for _, tokens in self._seen) / _WINDOW
