"""A module with a cache inside is called, not traced: a trace would have one call's text and cache in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Proxy

from kvcompile.errors import InputError

Call = TypeVar("Call", bound=Callable[..., Any])


def check_untraced(input_ids: Any) -> None:
    """Refuse a call that somebody traces.

    Raises:
        InputError: by torch.jit.trace, torch.export, torch.fx, make_fx or torch.vmap.
    """
    if (
        torch._C._get_tracing_state() is not None  # torch.jit.trace
        or isinstance(input_ids, (FakeTensor, Proxy))
        or (isinstance(input_ids, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(input_ids))
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None  # of this thread
    ):
        raise InputError(
            "this call is traced (torch.jit.trace, torch.export, torch.fx or torch.vmap), and a trace would have this "
            "text and its cache in it: kvcompile.export(fast, ..) writes the model with its cache, fast.save(folder) "
            "the module as it is"
        )


def not_compiled_again(call: Call) -> Call:
    """Let torch.compile around a call leave it as it is: Dynamo would compile what looks after the cache."""
    why = "an optimized module of kvcompile is compiled already: call it as it is"
    made: Call = torch.compiler.disable(call, reason=why)
    return made
