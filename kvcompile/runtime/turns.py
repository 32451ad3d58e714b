"""Whose turn it is: one cache serves one caller at a time, and one text at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import Concatenate, ParamSpec, Protocol, TypeVar
from weakref import WeakSet, ref

import torch

from kvcompile.errors import InputError


class HasTurns(Protocol):
    """What a caller takes turns with."""

    turns: Turns


Params = ParamSpec("Params")
Result = TypeVar("Result")
Owner = TypeVar("Owner", bound=HasTurns)


class Turns:
    """Callers of a module with a cache inside, from any threads: a call, and a whole `generate`, has it to itself."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other thread calls meanwhile, and what is written can be written again outside of inference mode."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            yield


class Writers:
    """The threads that have fed a cache its text.

    A text that is fed call by call belongs to whoever goes on with it, so a worker may take over another's; but once
    another thread has begun a new text, a thread whose text is gone must begin anew as well, for what it goes on with
    would be the other's.
    """

    def __init__(self) -> None:
        self._owner: ref[threading.Thread] | None = None
        self._displaced: WeakSet[threading.Thread] = WeakSet()

    def go_on(self) -> None:
        """This thread goes on with the text, or begins one in an empty cache.

        Raises:
            InputError: another thread has begun a text since this thread's last call.
        """
        own = threading.current_thread()
        if own in self._displaced:
            raise InputError(
                "the text that this thread was at is gone: another thread has called reset() or generate() since. "
                "One module has one cache: call reset() and begin again, use generate(), which keeps other threads "
                "waiting, or optimize once per thread (weights are shared)"
            )
        self._owner = ref(own)

    def take_over(self) -> None:
        """This thread knows what the text is, and goes on with it."""
        self._displaced.discard(threading.current_thread())

    def begin(self, columns: int) -> None:
        """This thread begins anew; `columns`: of the text that it ends."""
        own = threading.current_thread()
        before = None if self._owner is None else self._owner()
        if columns and before is not None and before is not own:
            self._displaced.add(before)
        self._displaced.discard(own)
        self._owner = None


def alone(
    method: Callable[Concatenate[Owner, Params], Result],
) -> Callable[Concatenate[Owner, Params], Result]:
    """Let a method of what has `turns` keep other threads waiting until it returns."""

    def waiting(self: Owner, /, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        with self.turns.alone():
            return method(self, *args, **kwargs)

    update_wrapper(waiting, method)
    return waiting
