"""A region with tensors in and tensors out: what TensorRT takes.

Regions hand sizes on as numbers (`sym_size` of one is an input of the next). Each of them is a dimension of a tensor
that the region has anyway: there it is read again. Numbers among the outputs are read from the inputs by the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node


class HasNumbers(Exception):
    """A number that is no dimension of any tensor of the region; says which."""


@dataclass(frozen=True)
class Size:
    """A dimension of one of the region's inputs."""

    place: int
    dim: int


Output = int | Size  # a tensor of the program, by its place, or a number that the inputs have


@dataclass(frozen=True)
class TensorRegion:
    """A region without numbers.

    module:  the program: tensors in, tensors out
    inputs:  which of the region's inputs it takes
    outputs: the region's outputs, in order; `constants` where a number is known beforehand
    """

    module: GraphModule
    inputs: tuple[int, ...]
    outputs: tuple[Output, ...]
    constants: dict[int, int]

    def bind(self, program: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        """The region's call around a compiled `module`."""

        def run(*args: Any) -> tuple[Any, ...]:
            found = program(*[args[place] for place in self.inputs])
            made = [found] if isinstance(found, Tensor) else list(found)
            return tuple(
                self.constants[number]
                if number in self.constants
                else args[output.place].shape[output.dim]
                if isinstance(output, Size)
                else made[output]
                for number, output in enumerate(self.outputs)
            )

        return run


def tensors_only(module: GraphModule, inputs: Sequence[Any], outputs: Sequence[Any]) -> TensorRegion:
    """`module` without numbers. inputs, outputs: its fake ones: tensors, and (symbolic) integers

    Raises:
        HasNumbers: a number is no dimension of an input, or something else than tensors and numbers comes.
    """
    sizes: dict[Any, Size] = {}
    for place, value in enumerate(inputs):
        if isinstance(value, Tensor):
            for dim, size in enumerate(_sizes(value)):
                if isinstance(size, torch.SymInt):
                    sizes.setdefault(size.node.expr, Size(place, dim))
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    graph = Graph()
    made: dict[Node, Any] = {}
    for node, value in zip(placeholders, inputs, strict=True):
        if isinstance(value, Tensor):
            made[node] = graph.placeholder(node.name)
    for node, value in zip(placeholders, inputs, strict=True):
        if not isinstance(value, Tensor) and node.users:
            made[node] = _number(graph, node.name, value, sizes, [made.get(p) for p in placeholders])
    for node in module.graph.nodes:
        if node.op not in ("placeholder", "output"):
            made[node] = graph.node_copy(node, lambda n: made[n])
    (results,) = next(node for node in module.graph.nodes if node.op == "output").args
    order: list[Output] = []
    constants: dict[int, int] = {}
    tensors: list[Any] = []
    assert isinstance(results, list | tuple)
    for number, (result, value) in enumerate(zip(results, outputs, strict=True)):
        if isinstance(value, Tensor):
            order.append(len(tensors))
            tensors.append(made[result])
            continue
        order.append(_size(f"output {number}", value, sizes))
        if not isinstance(value, torch.SymInt):
            constants[number] = int(value)
    graph.output(tuple(tensors))
    graph.eliminate_dead_code()
    graph.lint()
    taken = tuple(place for place, value in enumerate(inputs) if isinstance(value, Tensor))
    program = GraphModule(torch.nn.Module(), graph, type(module).__name__)
    return TensorRegion(program, taken, tuple(order), constants)


def _sizes(tensor: Tensor) -> tuple[Any, ...]:
    """Integers, and symbols of them."""
    return tuple(tensor.shape)


def _number(graph: Graph, name: str, value: Any, sizes: dict[Any, Size], made: list[Any]) -> Any:
    size = _size(name, value, sizes)
    if not isinstance(size, Size):
        return value
    return graph.call_function(torch.ops.aten.sym_size.int, (made[size.place], size.dim))


def _size(name: str, value: Any, sizes: dict[Any, Size]) -> Output:
    """Where a number is read; 0 for one that is known beforehand."""
    if isinstance(value, int) and not isinstance(value, bool):
        return 0
    if isinstance(value, torch.SymInt) and value.node.expr in sizes:
        return sizes[value.node.expr]
    raise HasNumbers(f"{name} is the number {value}, which is no dimension of a tensor")
