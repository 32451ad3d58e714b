"""Tracing and compiling, one at a time: what PyTorch notes while it traces belongs to the process, not to a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

Params = ParamSpec("Params")
Result = TypeVar("Result")

TRACING = threading.RLock()
_AUTOCAST = ("cpu", "cuda")


def traces(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """Let `function` run in one thread at a time, of all that are decorated so; it may call others of them.

    Whatever mode the caller is in (inference, autocast), it traces and computes as plain PyTorch does.
    """

    @wraps(function)
    def alone(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        import torch  # here, for what imports this may do without it

        with ExitStack() as stack:
            stack.enter_context(TRACING)
            stack.enter_context(torch.inference_mode(False))
            for kind in _AUTOCAST:
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            return function(*args, **kwargs)

    return alone
