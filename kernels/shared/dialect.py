"""How the reference says what its target has no words for: a graph for another runtime is traced under a dialect.

| primitive | PyTorch | portable |
|---|---|---|
| small integers in bytes | shifts and masks | quotients, exact in fp32 (`kernels/reference/packing.py`) |
| fp8 | a dtype | its code in a byte (`fp8_codes.py`) |
| carried scores in halves and small integers | their dtypes | float32 and int64, rounded by casts (`narrow.py`) |
| one query's scores | product and sum, which Inductor fuses | a matrix product |
| many queries and their columns | blocks of queries | all queries at once |
| a stable sort | a sort | the same, or places by counting (`stable_sort.py`) |
| rows in full among the keys | a scatter | the same, or each row looks for its key (`kernels/reference/residual.py`) |
| consecutive rows of a buffer | an index | the same, or one op for them (`kernels/reference/linear_write.py`) |

The numbers are the same but for the order of sums. Which form is meant is decided while tracing and never at run time:
a graph has one of them in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Dialect:
    """One target's words.

    portable: whether primitives are said in the portable way of the table above
    byte:     the dtype that holds packed integers and codes of fp8: uint8, or int8 with the same bits
    alone:    whether the graph runs where kvcompile is not and none of its ops can be called: many queries come at once
    counts:   whether the order of numbers is told by counting, and not by a sort, and places by looking for them
    linear:   whether new rows of a contiguous buffer of floating dtype are written by one op
    """

    portable: bool = False
    byte: torch.dtype = torch.uint8
    alone: bool = False
    counts: bool = False
    linear: bool = False

    @property
    def in_blocks(self) -> bool:
        """Whether many queries come in blocks, in an op of kvcompile."""
        return not (self.portable or self.alone)


PYTORCH = Dialect()
AOTI = Dialect(alone=True)
ONNX = Dialect(portable=True)
TENSORRT = Dialect(portable=True, byte=torch.int8, counts=True, linear=True)

_CURRENT: ContextVar[Dialect] = ContextVar("dialect", default=PYTORCH)


def current() -> Dialect:
    return _CURRENT.get()


@contextmanager
def speaking(dialect: Dialect) -> Iterator[None]:
    """What is traced within is said in `dialect`."""
    token = _CURRENT.set(dialect)
    try:
        yield
    finally:
        _CURRENT.reset(token)
