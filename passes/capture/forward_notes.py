"""What tracing notes of each node: where the model's own code made it, and its value; no more, and so sooner.

PyTorch writes down the whole stack for each node, and then keeps what is called `forward` and what stands in
`torch/__init__.py`. Here only those frames are written down. And it notes the form of each value a second time, as
`tensor_meta`, which nothing reads where `val` is; here it does not. That is a seventh of what tracing takes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import FrameSummary, StackSummary
from typing import Any

from torch.fx import proxy
from torch.fx.experimental import proxy_tensor

PLAIN: Any = getattr(proxy, "CapturedTraceback", None)
PLAIN_FORM: Any = getattr(proxy_tensor, "_extract_tensor_metadata", None)

# Whether frames of a code are kept; with the code, whose id stays its own.
_kept: dict[int, tuple[bool, Any]] = {}


class Forwards:
    """Those frames of a stack that a tracer keeps, outermost first."""

    def __init__(self, frames: list[FrameSummary]) -> None:
        self.frames = frames

    @staticmethod
    def extract() -> Any:
        asks: Any = sys._getframe(1)  # a tracer's `create_node`
        tracer = asks.f_locals.get("self")
        if not getattr(tracer, "_record_forward_stack_traces_only", False):
            return PLAIN.extract(skip=1)
        frames, frame = [], asks
        anchors = getattr(proxy, "_STACK_TRACE_ANCHORS", ())
        while frame is not None:
            code = frame.f_code
            if id(code) not in _kept:
                own = code.co_name == "forward" or code.co_filename.endswith("torch/__init__.py")
                _kept[id(code)] = (own, code)
            if _kept[id(code)][0] or (anchors and (code.co_filename, code.co_name) in anchors):
                frames.append(FrameSummary(code.co_filename, frame.f_lineno, code.co_name, lookup_line=False))
            frame = frame.f_back
        return Forwards(frames[::-1])

    def summary(self) -> StackSummary:
        return StackSummary.from_list(self.frames)


def no_form(value: Any) -> None:
    """In place of what `tensor_meta` is made by."""


_INSTEAD: tuple[tuple[Any, str, Any], ...] = (
    (proxy, "CapturedTraceback", Forwards),
    (proxy_tensor, "_extract_tensor_metadata", no_form),
)


@contextmanager
def forward_notes() -> Iterator[None]:
    """Notes are these while something is traced; they are PyTorch's where it has other names for what makes them."""
    found = [(module, name, getattr(module, name, None), own) for module, name, own in _INSTEAD]
    try:
        for module, name, before, own in found:
            if before is not None:
                setattr(module, name, own)
        yield
    finally:
        for module, name, before, _ in found:
            if before is not None:
                setattr(module, name, before)
