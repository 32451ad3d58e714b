"""What predictions are made for: a device, and what is assumed of it."""

from __future__ import annotations

from dataclasses import dataclass

from kvcompile.kernels.triton.predict.assumptions import EXPECTED, Assumed
from kvcompile.util.machines import Machine


@dataclass(frozen=True)
class Model:
    """A device of the table, and what is assumed of it."""

    machine: Machine
    assumed: Assumed = EXPECTED
