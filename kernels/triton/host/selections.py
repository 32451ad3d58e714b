"""Finds which pages a step of generated kernels reads, by the kind of the selection."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvcompile.kernels.triton.host import page_selection
from kvcompile.kernels.triton.host.call import Call
from kvcompile.layouts import TopPages

# What notes a call's new tokens and chooses: pages int32 [B, Hkv, K], ascending, those without tokens last; None: the
# call reads all, as one of many tokens does. The second argument is the span, as `AttendInputs` has it.
Select = Callable[[Call, int], Tensor | None]
SELECT: dict[str, Select] = {TopPages.kind: page_selection.select}
