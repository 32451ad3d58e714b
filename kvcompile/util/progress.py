"""Progress of what may take long: the caller's own, or a bar on a terminal once two seconds have passed.

Where stderr is no terminal, stages are lines of the log (INFO).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, Timer
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # rich comes when something is shown
    from rich.console import Console

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
PATIENCE = 2.0  # seconds without a sign
_SHOWN = Lock()  # there is one bar at a time


@contextmanager
def told(progress: Progress | None = None) -> Iterator[Progress]:
    """`progress(stage, done, total)`: the caller's own; without one, a bar or the log. It is gone afterwards."""
    if progress is not None:
        yield progress
        return
    console = _terminal()
    if console is None or not _SHOWN.acquire(blocking=False):
        yield _Logged()
        return
    bar = _Bar(console)
    try:
        yield bar
    finally:
        bar.end()
        _SHOWN.release()


@contextmanager
def taken() -> Iterator[None]:
    """Meanwhile no bar is shown by itself: the caller has one."""
    own = _SHOWN.acquire(blocking=False)
    try:
        yield
    finally:
        if own:
            _SHOWN.release()


def _terminal() -> Console | None:
    if not (hasattr(sys.stderr, "isatty") and sys.stderr.isatty()):
        return None
    from rich.console import Console

    console = Console(stderr=True)
    return console if console.is_terminal and not console.is_dumb_terminal else None


class _Logged:
    """Stages as lines of the log."""

    def __init__(self) -> None:
        self._stage = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self._stage = stage
            log.info("%s", stage)


class _Bar(_Logged):
    """A bar that appears when it has been waited for long enough, and leaves no trace."""

    def __init__(self, console: Console):
        from rich import progress as rich

        super().__init__()
        columns = (
            rich.SpinnerColumn(),
            rich.TextColumn("{task.description}"),
            rich.BarColumn(),
            rich.TimeElapsedColumn(),
        )
        self._bar = rich.Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task("", total=None)
        self._over = False
        self._changes = Lock()
        self._timer = Timer(PATIENCE, self._show)
        self._timer.daemon = True
        self._timer.start()

    def __call__(self, stage: str, done: int, total: int) -> None:
        from rich.markup import escape

        super().__call__(stage, done, total)
        self._bar.update(
            self._task, description=escape(stage), completed=done, total=total if total > 1 else None
        )

    def _show(self) -> None:
        with self._changes:
            if not self._over:
                self._bar.start()

    def end(self) -> None:
        """Take the bar away, whether it has appeared or not."""
        self._timer.cancel()
        with self._changes:
            self._over = True
            self._bar.stop()
