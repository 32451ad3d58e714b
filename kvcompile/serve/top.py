"""A live view of an engine in a terminal: requests, pages, hits, tokens a second."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvcompile.serve.stats import Stats
from kvcompile.util.console import format_bytes, table

if TYPE_CHECKING:
    from rich.console import RenderableType

_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 40
_A_SECOND = 2  # views
_BAR = 30


class Top:
    """Renders what an engine is at, and remembers its last speeds."""

    def __init__(self, stats: Callable[[], Stats], title: str):
        self._stats, self._title = stats, title
        self._speeds: deque[float] = deque(maxlen=_HISTORY)

    def __call__(self) -> RenderableType:
        """A view of now; each call is one bar of the speeds."""
        from rich.console import Group
        from rich.text import Text

        stats = self._stats()
        self._speeds.append(stats.tokens_per_second)
        rows = table("", "", grow=("",))
        rows.show_header = False
        for name, value in _rows(stats, self._speeds):
            rows.add_row(name, value)
        return Group(Text(self._title, style="bold"), rows)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Keep it on stderr, at the bottom of whatever else is written there."""
        from rich.console import Console
        from rich.live import Live

        with Live(get_renderable=self, console=Console(file=sys.stderr), refresh_per_second=_A_SECOND):
            yield


def _rows(stats: Stats, speeds: deque[float]) -> Iterator[tuple[str, str]]:
    yield "requests", f"{stats.running} running, {stats.waiting} waiting, {stats.swapped} swapped"
    yield "", f"{stats.finished:,} finished, {stats.failed:,} failed, {stats.cancelled:,} cancelled"
    yield (
        "pages",
        f"{_bar(stats)}  {stats.pages_held:,} held, {stats.pages_cached:,} cached, of {stats.pages:,}",
    )
    yield "", format_bytes(stats.bytes)
    share = stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
    yield "hits", f"{share:.0%} of {stats.prompt_tokens:,} prompt tokens; prefix cache {stats.prefix_cache}"
    yield "tokens/s", f"{stats.tokens_per_second:,.1f}  {_sparks(speeds)}"
    packed = "" if stats.packed.startswith("off") else f", {stats.packed_steps:,} of them packed"
    yield "tokens", f"{stats.completion_tokens:,} in {stats.steps:,} steps{packed}"
    lost = f"{stats.recomputed_tokens:,} tokens again, {format_bytes(stats.swapped_bytes)} moved"
    yield "preempted", f"{stats.preemptions:,} times: {lost}"


def _bar(stats: Stats) -> str:
    """Held pages full, cached ones half."""
    whole = max(stats.pages, 1)
    held = round(_BAR * stats.pages_held / whole)
    both = round(_BAR * (stats.pages_held + stats.pages_cached) / whole)
    return "█" * held + "▒" * (both - held) + "·" * (_BAR - both)


def _sparks(speeds: deque[float]) -> str:
    most = max(speeds, default=0.0)
    return "".join(_BARS[round(speed / most * (len(_BARS) - 1))] if most else _BARS[0] for speed in speeds)
