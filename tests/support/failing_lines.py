"""Memory that runs out at a line of a function: before it has run, once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

Line = tuple[CodeType, int]


@contextmanager
def traced(functions: Sequence[Callable[..., Any]], at: Callable[[Line], None]) -> Iterator[None]:
    """`at` is called before each line of these functions that this thread runs."""
    codes = {function.__code__ for function in functions}  # type: ignore[attr-defined]

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            at((frame.f_code, frame.f_lineno))
        return local

    def entered(frame: FrameType, event: str, _: Any) -> Any:
        return local if frame.f_code in codes else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def failing(
    functions: Sequence[Callable[..., Any]], line: Line, error: type[Exception]
) -> Iterator[list[Line]]:
    """The first time that a line is come to, it fails; the list has it then."""
    failed: list[Line] = []

    def at(here: Line) -> None:
        if here == line and not failed:
            failed.append(here)
            raise error

    with traced(functions, at):
        yield failed
