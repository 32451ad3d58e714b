"""Whether something else gives what a module's Python gives for a step: the same tokens, side by side, over a text.

error  = RMS(x - python) / RMS(python)                          of each result and of the state, after every token
budget = MARGIN (RMS(disturbed - python) / RMS(python) + eps)   disturbed: inputs and state by units in the last place
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcompile.kernels.ops.opaque import Dim, OpaqueModule

PROMPT, STEPS = 2, 4  # tokens of the text: in one piece, then one by one
_ULPS = {torch.float32: 8.0, torch.float64: 8.0, torch.bfloat16: 1.0, torch.float16: 1.0}
_MARGIN = 8.0

# The module's inputs and its state, which is updated in place -> its results.
Run = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class Example:
    """The inputs of a module over the first tokens of two sequences, as the model gave them."""

    inputs: tuple[Tensor, ...]

    @classmethod
    def of(cls, record: OpaqueModule, inputs: Sequence[Tensor]) -> Example:
        """Cut from the inputs of a longer call."""
        return cls(tuple(_tokens(record, inputs, 2, 0, PROMPT + STEPS)))

    def rows(self, record: OpaqueModule, batch: int) -> list[Tensor]:
        """As many sequences as are asked for: the two in turn."""
        found = []
        for tensor, spec in zip(self.inputs, record.inputs, strict=True):
            axis = spec.axis("B")
            parts = [tensor if axis is None else tensor.narrow(axis, row % 2, 1) for row in range(batch)]
            found.append(tensor.clone() if axis is None else torch.cat(parts, dim=axis))
        return found

    def tokens(self, record: OpaqueModule, batch: int, start: int, count: int) -> list[Tensor]:
        """Inputs of `count` tokens of each sequence."""
        return _tokens(record, self.rows(record, batch), batch, start, count)

    def step(self, record: OpaqueModule, batch: int) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs of one token, and the state that it meets."""
        state = buffers(record, batch, self.inputs[0].device)
        if record.state is not None:
            record.step(self.tokens(record, batch, 0, PROMPT), state, _rows(batch, 0))
        return self.tokens(record, batch, PROMPT, 1), state


def buffers(record: OpaqueModule, batch: int, device: torch.device) -> list[Tensor]:
    """Room for the state, which a first step fills."""
    if record.state is None:
        return []
    return [
        torch.full((batch, *shape), 3, dtype=dtype, device=device)
        for _, shape, dtype in record.state.buffers()
    ]


def differs(record: OpaqueModule, example: Example, run: Run, batch: int) -> str:
    """How `run` differs from the module's Python; empty where rounding explains it."""
    _, state = example.step(record, batch)
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        inputs = example.tokens(record, batch, PROMPT + step, 1)
        before, own = ([tensor.clone() for tensor in state] for _ in range(2))
        wanted = [*record.next_token([x.clone() for x in inputs], state), *state]
        found = [*run([x.clone() for x in inputs], own), *own]
        if len(found) != len(wanted):
            return f"{len(found)} results and tensors of state in the place of {len(wanted)}"
        if all(map(_equal, found, wanted)):
            continue
        noisy = []
        for _ in range(2):
            part, kept = ([_disturbed(x, generator) for x in of] for of in (inputs, before))
            noisy.append([*record.next_token(part, kept), *kept])
        for number, (got, want) in enumerate(zip(found, wanted, strict=True)):
            if got.shape != want.shape or got.dtype != want.dtype or got.device != want.device:
                return f"{got.dtype}{tuple(got.shape)} in the place of {want.dtype}{tuple(want.shape)}"
            noise = max(_error(moved[number], want) for moved in noisy)
            eps = torch.finfo(want.dtype).eps if want.dtype.is_floating_point else 0.0
            error, budget = _error(got, want), _MARGIN * (noise + eps)
            if not error <= budget:
                results = len(wanted) - len(state)
                what = f"result {number}" if number < results else f"state {number - results}"
                return f"{what} is off by {error:.1e} of its size, where rounding explains {budget:.1e}"
    return ""


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _tokens(
    record: OpaqueModule, inputs: Sequence[Tensor], batch: int, start: int, count: int
) -> list[Tensor]:
    found = []
    for tensor, spec in zip(inputs, record.inputs, strict=True):
        for axis, dim in enumerate(spec.dims):
            tensor = _narrow(tensor, axis, dim, batch, start, count)
        found.append(tensor.contiguous())
    return found


def _narrow(tensor: Tensor, axis: int, dim: Dim, batch: int, start: int, count: int) -> Tensor:
    unit = {"S": dim.factor, "BS": dim.factor * batch}.get(dim.base)
    return tensor if unit is None else tensor.narrow(axis, unit * start, unit * count)


def _rows(batch: int, seen: int) -> Tensor:
    return torch.tensor([[0] * batch, [seen] * batch])


def _disturbed(x: Tensor, generator: torch.Generator) -> Tensor:
    if not x.is_floating_point():
        return x.clone()
    unit = torch.rand(x.shape, generator=generator).to(x.device) * 2 - 1
    return (x.double() * (1 + _ULPS.get(x.dtype, 1.0) * torch.finfo(x.dtype).eps * unit.double())).to(x.dtype)


def _error(a: Tensor, b: Tensor) -> float:
    if not b.is_floating_point():
        return 0.0 if torch.equal(a, b) else float("inf")
    size = b.double().square().mean().sqrt().clamp(min=1e-30)
    return float((a.double() - b.double()).square().mean().sqrt() / size)
