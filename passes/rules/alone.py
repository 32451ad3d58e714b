"""Rule `alone`: a module that runs as Python gives for a few tokens what it gives for them among others.

What its Python decides by values (an early end, a norm of all that is loud) cannot be derived, and mostly does not
happen with the values that a probe has. So the module itself is called, with what the graph gives it and with louder
and quieter tokens, once for all tokens and in pieces; then again, for it may have kept something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.fx import Node

from kvcompile.kernels.ops.opaque import OpaqueModule, TensorSpec, find
from kvcompile.passes.records import NoMatch
from kvcompile.passes.recurrent.state import attributes_restored
from kvcompile.passes.rules.block import no_match

NAME = "alone"
_FEW = 43
_PIECES = (1, 1, 2, 5)  # of the first tokens; then the rest together
_LOUDER = (1.0, 0.03, 4.0, 30.0, 1000.0)
_PLACES = (0, 7, 42)  # the tokens that are louder than the others
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
_HALF = 3e-2


def check(node: Node, inputs: Sequence[Tensor], positional: Sequence[bool]) -> NoMatch | None:
    """None where the module that `node` calls treats tokens alone, as far as calling it shows.

    inputs: what the graph gives it; positional: which of them are made of positions alone
    """
    record = find(str(node.args[1]))
    axes = [_axis(spec) for spec in (*record.inputs, *record.outputs)]
    tokens = record.sizes(inputs).get("S")
    given = [_one_row(tensor, spec, tokens) for tensor, spec in zip(inputs, record.inputs, strict=True)]
    if all(axis is None for axis in axes[: len(given)]) or None in axes[len(given) :]:
        return None  # what takes no tokens, and results that are no tokens' own, are refused elsewhere
    with torch.no_grad(), attributes_restored(record.module):
        first = record.run(given)
        # What is made of positions may change with the length: passes/detect/position_limits.py finds up to where it
        # does not.
        turned = [
            tensor if place or axis is None else tensor.roll(1, axis)
            for tensor, place, axis in zip(given, positional, axes, strict=False)
        ]
        if any(positional) and all(_same(a, b) for a, b in zip(first, record.run(turned), strict=True)):
            return None
        for told, values in _variants(given, record.inputs):
            count = next(t.shape[a] for t, a in zip(values, axes, strict=False) if a is not None)
            try:
                whole = record.run(values)
                pieces = [record.run(_cut(values, axes, start, stop)) for start, stop in _pieces(count)]
            except (RuntimeError, IndexError, ValueError):
                if told == "as it is":
                    return no_match(NAME, f"{record.path} cannot be called with some of the tokens", node)
                continue  # values that it never meets
            outputs = zip(whole, zip(*pieces, strict=True), axes[len(given) :], strict=True)
            if not all(axis is not None and _same(a, torch.cat(b, axis)) for a, b, axis in outputs):
                return no_match(NAME, _text(record, f"{count} tokens, {told}"), node)
        if not all(_same(a, b) for a, b in zip(first, record.run(given), strict=True)):
            return no_match(NAME, f"{record.path}, which runs as Python, keeps something between calls", node)
    return None


def _text(record: OpaqueModule, where: str) -> str:
    return (
        f"tokens mix outside attention, in {record.path}, which runs as Python: in pieces it gives something else than "
        f"at once ({where}); that needs state besides K and V"
    )


def _axis(spec: TensorSpec) -> int | None:
    """The dimension of the tokens of one row."""
    return next((i for i, dim in enumerate(spec.dims) if dim.base in ("S", "BS") and dim.factor == 1), None)


def _one_row(tensor: Tensor, spec: TensorSpec, tokens: int | None) -> Tensor:
    """The first row's; where rows and tokens are one list and nothing tells them apart, all of it."""
    rows, both = spec.axis("B"), spec.axis("BS")
    if both is not None and tokens is not None:
        tensor = tensor.narrow(both, 0, tokens)
    return tensor if rows is None else tensor.narrow(rows, 0, 1)


def _variants(given: Sequence[Tensor], specs: Sequence[TensorSpec]) -> Iterator[tuple[str, list[Tensor]]]:
    axes = [_axis(spec) for spec in specs]
    yield "as it is", list(given)
    few = _cut(given, axes, 0, _FEW)
    for factor in _LOUDER:
        yield f"all {factor:g} times as loud", _louder(few, axes, lambda _, f=factor: f)  # type: ignore[misc]
        alone = _louder(few, axes, lambda place, f=factor: f if place in _PLACES else 1.0)  # type: ignore[misc]
        yield f"some {factor:g} times as loud", alone


def _louder(
    values: Sequence[Tensor], axes: Sequence[int | None], factor: Callable[[int], float]
) -> list[Tensor]:
    found = []
    for tensor, axis in zip(values, axes, strict=False):
        if axis is not None and tensor.is_floating_point():
            factors = torch.tensor([factor(i) for i in range(tensor.shape[axis])], device=tensor.device)
            sizes = [-1 if dim == axis else 1 for dim in range(tensor.dim())]
            tensor = (tensor.float() * factors.view(sizes)).to(tensor.dtype)
        found.append(tensor)
    return found


def _cut(values: Sequence[Tensor], axes: Sequence[int | None], start: int, stop: int) -> list[Tensor]:
    return [
        tensor if axis is None else tensor.narrow(axis, start, min(stop, tensor.shape[axis]) - start)
        for tensor, axis in zip(values, axes, strict=False)
    ]


def _pieces(tokens: int) -> list[tuple[int, int]]:
    edges = [sum(_PIECES[:n]) for n in range(len(_PIECES) + 1)]
    return [(a, b) for a, b in zip(edges, [*edges[1:], tokens], strict=True) if a < b <= tokens]


def _same(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    a, b, allowed = a.double(), b.double(), _TOLERANCE.get(a.dtype, _HALF)
    finite = a[a.isfinite()].abs()
    size = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=allowed, atol=allowed * size, equal_nan=True)
