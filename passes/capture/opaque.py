"""Opaque modules: parts of a model that tracing does not look into; each call becomes one `kvcompile::opaque` node.

Two kinds of module end here: those whose Python depends on values (a router's loop over experts), found from the
traceback of a failed export, and those with recurrent state (passes/recurrent/state.py). The shapes of a call's inputs
and results are learnt from real calls at three sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.fx import Node

from kvcompile.kernels.ops.opaque import (
    Argument,
    Dim,
    OpaqueModule,
    State,
    Template,
    TensorSpec,
    find,
    opaque,
    template,
)
from kvcompile.passes.graph import expr
from kvcompile.specs import RecurrentState, StateSlot

# (sequences, tokens) of the calls to learn from: no two multiples of 1, B, S and B * S agree on all three.
SIZES = ((2, 5), (3, 7), (2, 13))

Run = Callable[[int, int], object]  # one eager pass of the model over that many sequences and tokens


Steps = tuple[tuple[str, Any], ...]  # attributes and items that lead from an object to a tensor in it


class CannotBeOpaque(Exception):
    """Why a module's forward cannot become one operator."""


@dataclass
class Call:
    """One call of a module at one size: what it was given, what came out."""

    arguments: Template
    inputs: list[Tensor]
    outputs: list[Tensor]
    result: Template  # how the outputs nest


@dataclass
class Observed:
    """The calls of one module in one pass of the model, in order; for each of `SIZES` one list."""

    calls: list[list[Call]] = field(default_factory=list)


NONE = (str, bytes, int, float, type, type(None), nn.Module)  # these hold no tensors that are looked for
_WITHOUT = (dict, list, tuple)  # these have no attributes


def tensors_of(root: object) -> Iterator[tuple[Steps, Tensor]]:
    """Every tensor that an object holds in its attributes, lists and dicts, with the way to it. No modules."""
    seen: set[int] = set()
    stack: list[tuple[Steps, Any]] = [] if isinstance(root, NONE) else [((), root)]
    while stack:
        steps, value = stack.pop()
        if isinstance(value, Tensor):
            yield steps, value
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        inside: list[tuple[tuple[str, Any], Any]] = []
        if isinstance(value, dict):
            inside = [(("item", key), item) for key, item in value.items()]
        elif isinstance(value, (list, tuple)):
            inside = [(("item", key), item) for key, item in enumerate(value)]
        if type(value) not in _WITHOUT and hasattr(value, "__dict__") and not callable(value):
            inside += [(("attr", name), item) for name, item in vars(value).items()]
        stack.extend(((*steps, step), item) for step, item in reversed(inside) if not isinstance(item, NONE))


@contextmanager
def instead(modules: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Each module's forward replaced; what its instance had of its own comes back."""
    own = {module: module.__dict__["forward"] for module in modules if "forward" in module.__dict__}
    try:
        for module, forward in modules.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module in modules:
            module.__dict__.pop("forward", None)
            if module in own:
                module.__dict__["forward"] = own[module]


def observe(modules: Sequence[nn.Module], run: Run) -> dict[nn.Module, Observed]:
    """Run the model eagerly at each of `SIZES` and note the calls of `modules`."""
    found = {module: Observed() for module in modules}

    def noting(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            arguments, inputs = template((args, kwargs))
            inputs = [tensor.detach().clone() for tensor in inputs]  # some modules write into what they get
            result = forward(*args, **kwargs)
            nested, outputs = template(result)
            outputs = [tensor.detach().clone() for tensor in outputs]
            found[module].calls[-1].append(Call(arguments, inputs, outputs, nested))
            return result

        return noted

    with instead({module: noting(module, module.forward) for module in modules}), torch.no_grad():
        for batch, tokens in SIZES:
            for observed in found.values():
                observed.calls.append([])
            run(batch, tokens)
    return found


def output_specs(observed: Observed, index: int) -> tuple[TensorSpec, ...]:
    """The shapes of the results of the module's call number `index`.

    Raises:
        CannotBeOpaque: they are no functions of the numbers of sequences and tokens.
    """
    calls = [calls[index] if index < len(calls) else None for calls in observed.calls]
    if None in calls:
        raise CannotBeOpaque("how often it is called depends on the sequence")
    known = [call for call in calls if call is not None]
    for leaf in known[0].result.leaves:
        if next(tensors_of(leaf), None) is not None:
            raise CannotBeOpaque(f"it returns tensors inside a {type(leaf).__name__}")
    if len({len(call.outputs) for call in known}) != 1:
        raise CannotBeOpaque("the number of its results depends on the sequence")
    if not known[0].outputs:
        raise CannotBeOpaque("it returns no tensor")
    found = []
    for number, each in enumerate(zip(*(call.outputs for call in known), strict=True)):
        first = each[0]
        if any(tensor.dim() != first.dim() or tensor.dtype != first.dtype for tensor in each):
            raise CannotBeOpaque(f"the rank or dtype of result {number} depends on the sequence")
        dims = []
        for axis, sizes in enumerate(zip(*(tensor.shape for tensor in each), strict=True)):
            dim = _dim(sizes)
            if dim is None:
                shapes = ", ".join(
                    f"{size} for {b} x {s} tokens" for size, (b, s) in zip(sizes, SIZES, strict=True)
                )
                raise CannotBeOpaque(f"dimension {axis} of result {number} is {shapes}")
            dims.append(dim)
        found.append(TensorSpec(tuple(dims), first.dtype))
    return tuple(found)


def _dim(sizes: Sequence[int]) -> Dim | None:
    """The multiple of 1, B, S or B * S that a dimension is."""
    for base in ("", "B", "S", "BS"):
        units = [{"": 1, "B": b, "S": s, "BS": b * s}[base] for b, s in SIZES]
        factor, rest = divmod(sizes[0], units[0])
        if not rest and all(size == factor * unit for size, unit in zip(sizes, units, strict=True)):
            return Dim(factor, base)
    return None


def _traced_dim(size: Any, known: Mapping[sympy.Expr, sympy.Expr]) -> Dim | None:
    """The same from a size that was traced; known: what the symbols of the model's inputs are in `_UNITS`."""
    traced = expr(size).subs(known)
    for base, unit in _UNITS.items():
        factor = sympy.simplify(traced / unit)
        if factor.is_Integer and factor > 0:
            return Dim(int(factor), base)
    return None


_B, _S = sympy.symbols("B S", positive=True, integer=True)
_UNITS = {"": sympy.Integer(1), "B": _B, "S": _S, "BS": _B * _S}


class Tracing:
    """Opaque forwards for the time of one export; `made` has the records of the calls that it met, with their number
    among the calls of the same module."""

    def __init__(
        self,
        modules: Mapping[nn.Module, tuple[str, str]],
        observed: Mapping[nn.Module, Observed],
        states: Mapping[nn.Module, State],
        sizes: Callable[[], Sequence[tuple[Any, Any]]],
    ):
        """
        modules: path and reason of each module that shall be opaque
        sizes:   shapes [B, S] of the model's inputs as they are being traced; each may have symbols of its own
        """
        self.modules, self.observed, self.states, self.sizes = modules, observed, states, sizes
        self.made: list[tuple[OpaqueModule, int]] = []
        self._count = dict.fromkeys(modules, 0)

    @contextmanager
    def patched(self) -> Iterator[None]:
        with instead({module: self._forward(module, module.forward) for module in self.modules}):
            yield

    def _forward(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        path, reason = self.modules[module]

        def traced(*args: Any, **kwargs: Any) -> Any:
            arguments, tensors = template((args, kwargs))
            number = self._count[module]
            self._count[module] += 1
            try:
                inputs = self._inputs(arguments, tensors)
                outputs = output_specs(self.observed[module], number)
            except CannotBeOpaque as problem:
                raise CannotBeOpaque(f"{path} would have to run as Python, but {problem}") from None
            record = OpaqueModule(
                path, module, forward, reason, arguments, inputs, outputs, self.states.get(module)
            )
            self.made.append((record, number))
            return self.observed[module].calls[0][number].result.fill(opaque(tensors, record.key))

        return traced

    def _inputs(self, arguments: Template, tensors: list[Tensor]) -> tuple[TensorSpec, ...]:
        for leaf in arguments.leaves:
            if isinstance(leaf, torch.SymInt):
                raise CannotBeOpaque("it takes a size that depends on the sequence as a number")
            if next(tensors_of(leaf), None) is not None:
                raise CannotBeOpaque(f"it takes tensors inside a {type(leaf).__name__}")
        if not tensors:
            raise CannotBeOpaque("it takes no tensor")
        known = {
            expr(size): unit for sizes in self.sizes() for size, unit in zip(sizes, (_B, _S), strict=True)
        }
        found = []
        for number, tensor in enumerate(tensors):
            dims = [_traced_dim(size, known) for size in tensor.shape]
            if None in dims:
                raise CannotBeOpaque(f"its input {number} has the shape {tuple(map(str, tensor.shape))}")
            found.append(TensorSpec(tuple(dim for dim in dims if dim is not None), tensor.dtype))
        return tuple(found)


def settle(record: OpaqueModule, observed: Observed, number: int) -> tuple[list[Tensor], list[Tensor]]:
    """Drop the inputs that the module ignores (masks, positions), as found by trying; sets `record.kept`.

    Returns the inputs that are left and the results, of the largest call that was observed.

    Raises:
        CannotBeOpaque: tracing gave it a tensor that it does not get otherwise, and it makes a difference.
    """
    call = observed.calls[-1][number]
    if call.arguments.spec != record.arguments.spec:
        raise CannotBeOpaque(f"{record.path} is called with other arguments while it is traced")
    leaves = list(call.arguments.fill_leaves(call.inputs))
    positions = [i for i, leaf in enumerate(record.arguments.leaves) if isinstance(leaf, Argument)]
    sizes = dict(zip(("B", "S", "BS"), (*SIZES[-1], SIZES[-1][0] * SIZES[-1][1]), strict=True))
    generator = torch.Generator().manual_seed(0)
    kept = []
    for index, position in enumerate(positions):
        spec = record.inputs[index]
        shape = [dim.factor * sizes[dim.base] if dim.base else dim.factor for dim in spec.dims]
        other = torch.randint(0, 2, shape, generator=generator).to(call.outputs[0].device, spec.dtype)
        trials = [[*leaves[:position], value, *leaves[position + 1 :]] for value in (None, other)]
        if all(_same(record, trial, call.outputs) for trial in trials):
            leaves[position] = None
        elif isinstance(leaves[position], Tensor):
            kept.append(index)
        else:
            raise CannotBeOpaque(
                f"{record.path} gets a tensor {tuple(shape)} while it is traced that it does not get otherwise"
            )
    record.keep(kept)
    return [leaves[positions[index]] for index in kept], call.outputs


def states_of(opaques: Sequence[OpaqueModule]) -> tuple[RecurrentState, ...]:
    """What the recurrent ones among the opaque modules carry."""
    return tuple(
        RecurrentState(
            record.path,
            tuple(
                StateSlot(name, shape, str(dtype).removeprefix("torch."))
                for name, shape, dtype in record.state.buffers()
            ),
            record.state.feed,
        )
        for record in opaques
        if record.state is not None
    )


def describe(opaques: Sequence[OpaqueModule], compiled: bool) -> tuple[str, ...]:
    """One line for all opaque modules of a kind; compiled: whether anything is."""
    kinds: dict[tuple[str, str, str], int] = {}
    for record in opaques:
        path = ".".join("*" if part.isdigit() else part for part in record.path.split("."))
        steps = f"; {_steps(record)}" if compiled and record.steps else ""
        kind = (path, type(record.module).__name__, f"{record.reason}{steps}")
        kinds[kind] = kinds.get(kind, 0) + 1
    return tuple(
        f"{path} ({name}) runs as Python{f', {count} of them' if count > 1 else ''}: {reason}"
        for (path, name, reason), count in kinds.items()
    )


def _steps(record: OpaqueModule) -> str:
    """Which calls of one token are compiled, and why others are not."""
    one, many = (record.steps[one_sequence] for one_sequence in (True, False))
    if isinstance(one, str) and isinstance(many, str):
        return f"its steps of one token stay in Python, too: {one}"
    if isinstance(one, str):
        return f"its steps of one token are compiled for several sequences, and stay in Python for one: {one}"
    if isinstance(many, str):
        return f"its steps of one token are compiled for one sequence, and stay in Python for several: {many}"
    return "its steps of one token are compiled"


def is_mixer(node: Node) -> bool:
    """Whether a node calls an opaque module with recurrent state."""
    return node.target is opaque and find(str(node.args[1])).state is not None


def _same(record: OpaqueModule, leaves: list[Any], outputs: list[Tensor]) -> bool:
    """Whether the module gives exactly `outputs` for these arguments."""
    try:
        found = record.call_with(leaves)
    except Exception:  # a missing argument raises whatever it raises
        return False
    return len(found) == len(outputs) and all(torch.equal(a, b) for a, b in zip(found, outputs, strict=True))


def innermost(error: BaseException, model: nn.Module) -> tuple[str, nn.Module] | None:
    """The innermost part of `model` in whose forward the error arose; None where that is the model itself."""
    names = {module: name for name, module in model.named_modules() if name}
    found: nn.Module | None = None
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and owner in names:
            found = owner
        trace = trace.tb_next
    return None if found is None else (names[found], found)
