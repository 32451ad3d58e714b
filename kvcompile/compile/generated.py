"""The Python that Inductor wrote for a region: the module that calls its kernels."""

from __future__ import annotations

import types
from typing import Any

_DEEPEST = 12  # of how far the compiled graph is looked for within what Inductor returns


def function_of(program: Any) -> Any:
    """The function of the generated module, wherever it is wrapped; None: not found, as in another torch."""
    return _within(program, _DEEPEST, set())


def _within(value: Any, deep: int, seen: set[int]) -> Any:
    if deep == 0 or id(value) in seen:
        return None
    seen.add(id(value))
    found = getattr(value, "current_callable", None)
    if found is not None:
        call = getattr(getattr(found, "__self__", None), "call", found)
        return getattr(call, "__func__", call)
    inside: list[Any] = []
    if isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            try:
                inside.append(cell.cell_contents)
            except ValueError:
                continue
    elif isinstance(value, types.MethodType):
        inside = [value.__self__, value.__func__]
    elif type(value).__module__.startswith(("torch._inductor", "torch._functorch", "torch._dynamo")):
        inside = list(getattr(value, "__dict__", {}).values())
    return next((f for item in inside if (f := _within(item, deep - 1, seen)) is not None), None)
