"""Equal layers are traced once: the first of them, and for each of the others its nodes are copied.

While a model is traced, the first of equal layers runs between two marks, and a call of another one (see
`passes/capture/equal_layers.py`) becomes one node:

    given' = layer_begin(given, n)      ..the layer's own nodes..      layer_end(made, n)
    made   = layer_again(given, m)      the nodes of the layer that record m names, with its own weights

`expand` puts the copies in their places, so that what comes after sees the graph that tracing everything gives. It is
by far the longest part of capturing a deep model. Where a layer's nodes are more than a function of what it is given
and of its weights (it writes into something, makes sizes of values, reads a tensor of another place), nothing is
copied: `NotOnce`, and the model is traced layer by layer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from kvcompile.kernels.ops.opaque import Argument, Template, template
from kvcompile.passes.capture.equal_layers import Attribute, Called, Layer, reads, tensors
from kvcompile.passes.capture.functionalize import may_write_into
from kvcompile.passes.capture.inputs import WRAPPED, Wrapper
from kvcompile.passes.capture.opaque import instead
from kvcompile.passes.graph import value
from kvcompile.passes.table import graph_pass

_LIB = torch.library.Library("kvcompile", "FRAGMENT")
_LIB.define("layer_begin(Tensor[] given, int layer) -> Tensor[]")
_LIB.define("layer_end(Tensor[] made, int layer) -> Tensor[]")
_LIB.define("layer_again(Tensor[] given, int layer, int call) -> Tensor[]")
BEGIN, END, AGAIN = (
    getattr(torch.ops.kvcompile, name).default for name in ("layer_begin", "layer_end", "layer_again")
)


class NotOnce(Exception):
    """Why the nodes of a layer cannot be copied for another."""


@dataclass(frozen=True)
class _First:
    """A layer that was traced: how it was called, what it read of its modules, and what it gave.

    result: how its tensors nest; numbers below that of the distinct ones it was given are these, the others it made
    """

    number: int
    layer: Layer
    called: Called
    read: frozenset[Attribute]
    result: Template

    def serves(self, layer: Layer, called: Called) -> bool:
        """Whether another layer does the same in a call."""
        if not self.called.alike(called):
            return False
        apart = self.layer.differences(layer)
        return apart is not None and not any(
            (path, name) in self.read or (path, "__dict__") in self.read for path, name in apart
        )


@dataclass
class Once:
    """One trace of a model in which equal layers are traced once.

    layers: those that are looked at
    copies: for each `layer_again`, its layer and the one whose nodes it gets
    """

    model: nn.Module
    layers: Mapping[nn.Module, Layer]
    copies: list[tuple[Layer, _First]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.firsts: list[_First] = []  # by their numbers
        self._inside = False

    @staticmethod
    def of(model: nn.Module) -> Once | None:
        """None: no layers in which it would pay."""
        layers: dict[nn.Module, Layer] = {}
        for path, holder in model.named_modules():
            if isinstance(holder, nn.ModuleList) and len({type(part) for part in holder}) < len(holder):
                found = {part: Layer.of(f"{path}.{name}", part) for name, part in holder.named_children()}
                layers |= {part: layer for part, layer in found.items() if layer is not None}
        return Once(model, layers) if layers else None

    @contextmanager
    def patched(self, wrapper: Wrapper) -> Iterator[None]:
        """Meanwhile the layers are as told above; wrapper: what is traced, maybe more than once."""
        call = wrapper.call

        def begun(*args: Any, **kwargs: Any) -> Any:
            self.firsts.clear()
            self.copies.clear()
            self._inside = False
            return call(*args, **kwargs)

        vars(wrapper)["call"] = begun
        try:
            with instead(
                {module: self._forward(layer, module.forward) for module, layer in self.layers.items()}
            ):
                yield
        finally:
            del vars(wrapper)["call"]

    def _forward(self, layer: Layer, forward: Callable[..., Any]) -> Callable[..., Any]:
        def traced(*args: Any, **kwargs: Any) -> Any:
            arguments, every = template((args, kwargs))
            called = Called.of(arguments, every)
            if self._inside or called is None or not every or layer.hooked():
                return forward(*args, **kwargs)
            given = list({id(tensor): tensor for tensor in every}.values())
            for first in self.firsts:
                if first.serves(layer, called):
                    self.copies.append((layer, first))
                    made = again(given, first.number, len(self.copies) - 1)
                    return first.result.fill([*given, *made])
            self._inside = True
            try:
                return self._first(layer, called, arguments, every, given, forward)
            finally:
                self._inside = False

        return traced

    def _first(
        self,
        layer: Layer,
        called: Called,
        arguments: Template,
        every: Sequence[Tensor],
        given: Sequence[Tensor],
        forward: Callable[..., Any],
    ) -> Any:
        number = len(self.firsts)
        inside = begin(given, number)
        places = {id(tensor): index for index, tensor in enumerate(given)}
        args, kwargs = arguments.fill([inside[places[id(tensor)]] for tensor in every])
        with reads(layer.module) as read:
            result, outputs = template(forward(*args, **kwargs))
        after, held = template((args, kwargs))
        kept = [inside[places[id(tensor)]] for tensor in every]
        if after != arguments or any(one is not other for one, other in zip(held, kept, strict=True)):
            raise NotOnce(f"{layer.path} changes a list that it is given")
        places = {id(tensor): index for index, tensor in enumerate(inside)}
        own = list({id(tensor): tensor for tensor in outputs if id(tensor) not in places}.values())
        places |= {id(tensor): len(given) + index for index, tensor in enumerate(own)}
        leaves = tuple(
            Argument(places[id(outputs[leaf.index])]) if isinstance(leaf, Argument) else leaf
            for leaf in result.leaves
        )
        result = Template(result.spec, leaves)
        if not own or Called.of(result, []) is None or any(t.storage_offset() != 0 for t in own):
            raise NotOnce(f"{layer.path} gives what cannot be given again")
        self.firsts.append(_First(number, layer, called, frozenset(read), result))
        return result.fill([*given, *end(own, number)])


_FORMS: dict[int, tuple[tuple[Any, ...], ...]] = {}  # of what the layers of the present trace make


def begin(given: Sequence[Tensor], number: int) -> list[Tensor]:
    """What a layer is given, as it is known inside of it."""
    return BEGIN(list(given), number)  # type: ignore[no-any-return]


def end(made: Sequence[Tensor], number: int) -> list[Tensor]:
    """What a layer makes, as it is known outside of it."""
    _FORMS[number] = tuple((t.shape, t.stride(), t.dtype, t.device) for t in made)
    return END(list(made), number)  # type: ignore[no-any-return]


def again(given: Sequence[Tensor], number: int, call: int = 0) -> list[Tensor]:
    """What the layer that was traced under a number makes of something else."""
    return AGAIN(list(given), number, call)  # type: ignore[no-any-return]


def makes(number: int) -> int:
    """How many tensors the layer makes that was traced under a number."""
    return len(_FORMS[number])


def _as_they_are(given: list[Tensor], layer: int) -> list[Tensor]:
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in given]


def _as_before(given: list[Tensor], layer: int, call: int) -> list[Tensor]:
    return [
        torch.empty_strided(s, strides, dtype=dtype, device=device)
        for s, strides, dtype, device in _FORMS[layer]
    ]


for _name, _fake in (("layer_begin", _as_they_are), ("layer_end", _as_they_are), ("layer_again", _as_before)):
    torch.library.register_fake(f"kvcompile::{_name}", _fake, lib=_LIB)


@dataclass(frozen=True)
class _Body:
    """What stands between the marks of a layer. given, made: what goes in and comes out of it."""

    begin: Node
    end: Node
    nodes: tuple[Node, ...]

    @property
    def given(self) -> Sequence[Node]:
        return self.begin.args[0]  # type: ignore[return-value]

    @property
    def made(self) -> Sequence[Node]:
        return self.end.args[0]  # type: ignore[return-value]

    def check(self) -> None:
        """Raises NotOnce where it is more than a function of what it is given and of weights."""
        inside = set(self.nodes)
        for node in self.nodes:
            if node.meta.get("unbacked_bindings"):
                raise NotOnce(f"{node.name} has a size that depends on values")
            for source in node.all_input_nodes:
                if (
                    source not in inside
                    and source.op != "get_attr"
                    and source is not self.begin
                    and not _is_size(source)
                ):
                    raise NotOnce(f"{node.name} reads {source.name}, which its layer is not given")
            for written in may_write_into(node):
                if written not in inside or written.op == "get_attr" or _is_given(written, self.begin):
                    raise NotOnce(f"{node.name} writes into {written.name}, which its layer did not make")

    def copied(
        self, graph: Graph, given: Sequence[Node], weights: Callable[[str], str], paths: tuple[str, str]
    ) -> list[Any]:
        """The same for what another layer is given, at the graph's insertion point; returns what it makes."""
        known: dict[Node, Any] = {}

        def taken(node: Node) -> Any:
            if node not in known:
                if node.op != "get_attr":
                    return node  # a size, which is the same
                name = weights(str(node.target))
                known[node] = node if name == node.target else graph.get_attr(name)
                known[node].meta = dict(node.meta)
            return known[node]

        for node in self.nodes:
            if _is_given(node, self.begin):
                known[node] = given[node.args[1]]  # type: ignore[index]
            elif node.op == "get_attr":
                taken(node)
            else:
                known[node] = graph.node_copy(node, taken)
                known[node].meta["nn_module_stack"] = _moved(node.meta.get("nn_module_stack"), *paths)
        return [taken(node) for node in self.made]


@graph_pass("traced_once")
def expand(graph_module: GraphModule, once: Once) -> int:
    """Put copies of the layers that were traced for those that were not, in place; returns how many.

    Raises:
        NotOnce: a layer is more than a function of what it is given and its weights.
    """
    graph = graph_module.graph
    bodies = _bodies(graph)
    calls = [node for node in graph.nodes if node.target is AGAIN]
    if [node.args[2] for node in calls] != list(range(len(once.copies))):
        raise NotOnce("calls of layers were lost or moved while the model was traced")
    for number, body in bodies.items():
        body.check()
        path = f"{WRAPPED}.{once.firsts[number].layer.path}"
        for node in body.nodes:
            node.meta["nn_module_stack"] = _settled(node.meta.get("nn_module_stack"), path)
    weights = Weights(once.model, graph_module)
    for node, (layer, first) in zip(calls, once.copies, strict=True):
        paths = (f"{WRAPPED}.{first.layer.path}", f"{WRAPPED}.{layer.path}")
        counterpart = weights.between(first.layer.module, layer.module)
        with graph.inserting_before(node):
            made = bodies[first.number].copied(graph, node.args[0], counterpart, paths)
        _replace(graph, node, made)
    for body in bodies.values():
        _replace(graph, body.end, body.made)
        _replace(graph, body.begin, body.given)
    return len(calls)


def _bodies(graph: Graph) -> dict[int, _Body]:
    """What was traced, by the numbers of the layers."""
    found: dict[int, _Body] = {}
    begin: Node | None = None
    inside: list[Node] = []
    for node in graph.nodes:
        if node.target is BEGIN:
            if begin is not None:
                raise NotOnce("layers are not traced one after the other")
            begin, inside = node, []
        elif node.target is END:
            if begin is None or begin.args[1] != node.args[1] or node.args[1] in found:
                raise NotOnce("layers are not traced one after the other")
            found[node.args[1]] = _Body(begin, node, tuple(inside))
            begin = None
        elif begin is not None:
            inside.append(node)
        elif found and may_write_into(node):
            raise NotOnce(f"{node.name} writes into memory after a layer, which may have made it")
    if begin is not None:
        raise NotOnce("the end of a layer is not where its beginning is")
    return found


class Weights:
    """The names that the weights of layers have in a graph's module."""

    def __init__(self, model: nn.Module, graph_module: GraphModule):
        self.module = graph_module
        nodes = graph_module.graph.nodes
        self.used = {str(node.target) for node in nodes if node.op == "get_attr" and node.users}
        self.named = tensors(model)
        self.names: dict[int, list[str]] = {}
        for name, tensor in self.named.items():
            self.names.setdefault(id(tensor), []).append(f"{WRAPPED}.{name}")

    def between(self, one: nn.Module, other: nn.Module) -> Callable[[str], str]:
        """The name of what another layer has for a weight of one; for what is no weight of it, the same name."""
        theirs = tensors(other)
        pairs = {id(tensor): theirs[name] for name, tensor in tensors(one).items()}

        def name(target: str) -> str:
            tensor = self.named.get(target.removeprefix(f"{WRAPPED}."))
            if tensor is None or id(tensor) not in pairs:
                return target
            names = [found for found in self.names[id(pairs[id(tensor)])] if _has(self.module, found)]
            if not names:
                raise NotOnce(f"the graph has no weight that is to another layer what {target} is to its own")
            # One weight of several layers goes by one name: that which it has already, or by its last, as in export.
            found = next((name for name in names if name in self.used), names[-1])
            self.used.add(found)
            return found

        return name


def _has(root: Any, target: str) -> bool:
    for part in target.split("."):
        root = getattr(root, part, None)
    return isinstance(root, Tensor)


def _is_size(node: Node) -> bool:
    """Whether a node is a number, which is the same for all layers whose inputs have the same sizes."""
    return isinstance(value(node), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def _is_given(node: Node, begin: Node) -> bool:
    return node.target is operator.getitem and node.args[0] is begin


def _settled(stack: Any, layer: str) -> Any:
    """Where in the model a node of a layer stands: export may name parts from the layer on, which it did not call."""
    found: dict[str, Any] = {}
    inside = False
    for key, (path, kind) in (stack or {}).items():
        if inside and not f"{path}.".startswith(f"{layer}."):
            key, path = f"{key}@{layer}", f"{layer}.{path}"
        inside = inside or path == layer
        found[key] = (path, kind)
    return found or stack


def _moved(stack: Any, old: str, new: str) -> Any:
    """Where in the model a copy stands, from where the original does: one layer's path for another's."""
    if not stack:
        return stack
    found = {}
    for key, (path, kind) in stack.items():
        inside = f"{path}.".startswith(f"{old}.")
        found[f"{key}@{new}" if inside else key] = (
            f"{new}{path.removeprefix(old)}" if inside else path,
            kind,
        )
    return found


def _replace(graph: Graph, node: Node, values: Sequence[Any]) -> None:
    """The items of a list become `values`."""
    for user in list(node.users):
        if user.target is not operator.getitem:
            raise NotOnce(f"the tensors of a layer are used as a whole, by {user.name}")
        user.replace_all_uses_with(values[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(node)
