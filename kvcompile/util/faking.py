"""Runs operators on fake tensors, so that what has a symbol for a size keeps it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode


@contextmanager
def faking(mode: FakeTensorMode) -> Iterator[None]:
    """Within it operators are run in `mode`, without gradients, composite ones in their forms for symbols.

    Without these forms, which are PyTorch's own in Python, torch 2.11 asks a matmul's operands for sizes in C++: it
    fixes symbols to the sizes that stand for them, or refuses them. Attention in float32 on a GPU is such a matmul.
    """
    with mode, torch.no_grad(), enable_python_dispatcher():
        yield
