"""Tracing and compiling, one at a time: what PyTorch notes while it traces belongs to the process, not to a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:  # what imports this may do without it
    import torch

Params = ParamSpec("Params")
Result = TypeVar("Result")

TRACING = threading.RLock()
_AUTOCAST = ("cpu", "cuda")
_DEFAULTS: list[
    torch.device
] = []  # where the caller makes tensors, if not on the CPU; whoever has TRACING writes it


def traces(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """Let `function` run in one thread at a time, of all that are decorated so; it may call others of them.

    Whatever mode the caller is in (inference, autocast, another default device), it computes as plain PyTorch does.
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
            if (default := torch.get_default_device()).type != "cpu":
                _DEFAULTS.append(default)
                stack.callback(_DEFAULTS.pop)
                stack.enter_context(torch.device("cpu"))
            return function(*args, **kwargs)

    return alone


def as_the_caller() -> AbstractContextManager[Any]:
    """Within what `traces`: the caller's default device, for a forward of the model, which may rely on it."""
    default: AbstractContextManager[Any] = _DEFAULTS[-1] if _DEFAULTS else nullcontext()
    return default
