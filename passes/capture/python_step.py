"""A decode step of a module that runs as Python, as a graph.

What keeps a module out of the model's graph, a loop over the sequence or a cache object, mostly is not there when one
token comes to sequences that have some: `step_graph` traces the module's own forward for that call alone, its state
handed in and out as tensors. It is a graph like any region's: compiled once for all modules that have the same, with
no guards, and without Python's share of a step.

The module stays in Python where

    tracing fails                its Python asks for values, or does what fake tensors cannot
    it leaves something behind   any attribute, class attribute or global that a step changes but for its state: a graph
                                 would not change it, or would compute with what it was
    somebody hooks into it       hooks of its parts are called by Python alone
    it draws random numbers      a compiled program draws others
    it depends on how many sequences come (only then, and only for more than one)
    the graph gives something else than the Python, over several tokens of a text (`passes/capture/step_proof.py`)

and for all calls but those steps: prompts, and rows that begin or are padded.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.nn.modules import module as hooked

from kvcompile.errors import ModelError
from kvcompile.kernels.ops.opaque import OpaqueModule, Slot
from kvcompile.passes.capture.as_eager import as_eager
from kvcompile.passes.capture.changes import Snapshot
from kvcompile.passes.capture.equal_steps import Known
from kvcompile.passes.capture.first_line import SPECIALISED, first_line
from kvcompile.passes.capture.harmless import check_random
from kvcompile.passes.capture.inline import inline
from kvcompile.passes.capture.step_graph import StepGraph
from kvcompile.passes.capture.step_proof import Example, differs
from kvcompile.passes.capture.subclasses import open_subclasses
from kvcompile.passes.capture.trace import unanswered
from kvcompile.passes.probe.evaluate import fetch_attr
from kvcompile.passes.recurrent.state import attributes_restored
from kvcompile.passes.rewrite.clean import is_assert
from kvcompile.passes.table import disabled, graph_pass
from kvcompile.util.tracing import quiet, uncollected

log = logging.getLogger(__name__)
aten = torch.ops.aten
ROWS = 3  # sequences of the example that stands for any number
NAME = "python_step"
_LOGGERS = ("torch._dynamo", "torch._guards", "torch.export", "torch.fx.experimental.symbolic_shapes")


class NoStep(Exception):
    """Why a module's step stays in Python."""


def give_steps(records: Sequence[OpaqueModule]) -> None:
    """Trace the steps of modules, those of equal ones once, or note why they stay in Python."""
    known = Known()
    for record in records if not disabled(NAME) else ():
        for one_sequence in (True, False):
            with attributes_restored(record.module), torch.random.fork_rng(devices=[]), torch.no_grad():
                record.steps[one_sequence] = _step_or_why(known, record, one_sequence)
        known.add(record)


def _step_or_why(known: Known, record: OpaqueModule, one_sequence: bool) -> StepGraph | str:
    try:
        return known.like(record, one_sequence) or step_graph(record, record.example, one_sequence)
    except NoStep as why:
        found = str(why)
    except Exception as error:  # a module raises anything where it is called in a way that its model does not
        log.debug("%s: no step", record.path, exc_info=True)
        found = f"a step of it raises {first_line(error)}"
    log.info("%s stays in Python: %s", record.path, found)
    return found


@graph_pass("python_step")
def step_graph(record: OpaqueModule, example: Example, one_sequence: bool) -> StepGraph:
    """The graph of one token of each of `one_sequence`, or of any number of sequences from two on.

    Raises:
        NoStep: it stays in Python; the text is the exact reason.
    """
    _check_module(record)
    batch = 1 if one_sequence else ROWS
    inputs, state = example.step(record, batch)
    _check_changes(record, inputs, state)
    found = _graph(record, inputs, state, one_sequence)
    for rows in (1,) if one_sequence else (2, ROWS):
        problem = differs(record, example, found.run, rows)
        if problem:
            raise NoStep(f"its graph does not give what it gives: {problem}")
    return found


def _check_module(record: OpaqueModule) -> None:
    state = record.state
    if state is not None and state.feed == "in pairs":
        raise NoStep("it must be given two tokens at least")
    parts = list(record.module.modules())
    everywhere = (hooked._global_forward_hooks, hooked._global_forward_pre_hooks)
    # Of the module itself nobody calls hooks: its forward is called, not the module.
    called = [
        h for part in parts[1:] for h in (*part._forward_pre_hooks.values(), *part._forward_hooks.values())
    ]
    called += [h for hooks in everywhere for h in hooks.values()]
    for hook in called:
        if not str(getattr(hook, "__module__", "")).startswith(("transformers.", "torch.")):
            raise NoStep(
                f"a part of it has a forward hook ({getattr(hook, '__qualname__', type(hook).__name__)})"
            )


class _Whole(nn.Module):
    """A module and the cache object of its state, to look at both."""

    def __init__(self, record: OpaqueModule):
        super().__init__()
        self.module = record.module
        self.cache = None if record.state is None else record.state.warm


def _check_changes(record: OpaqueModule, inputs: Sequence[Tensor], state: Sequence[Tensor]) -> None:
    """A step changes nothing but its state: `step` puts back what stands in its slots."""
    before = Snapshot(_Whole(record))
    given = [tensor.clone() for tensor in inputs]
    drawn = torch.get_rng_state()
    try:
        record.next_token(given, [tensor.clone() for tensor in state])
    except Exception as error:  # whatever a module raises that was never called like this
        raise NoStep(f"a step of it raises {first_line(error)}") from error
    if not torch.equal(drawn, torch.get_rng_state()):
        raise NoStep("it draws random numbers")
    if changed := before.changed():
        raise NoStep(f"a step changes {str(changed[0]).removeprefix('module.')}")
    if any(not torch.equal(a, b) for a, b in zip(given, inputs, strict=True)):
        raise NoStep("it writes into what it is given")


class _Step(nn.Module):
    """The call of a step, with its state as arguments and results."""

    def __init__(self, record: OpaqueModule):
        super().__init__()
        self.module = record.module
        self.record = [record]  # in a list: nothing to trace
        # A copy: tracing may leave fake tensors wherever the module writes.
        self.warm = [None if record.state is None else copy.deepcopy(record.state.warm)]

    def forward(self, inputs: list[Tensor], state: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        record = self.record[0]
        if record.state is None:
            return record.call_with(record.arguments.fill_leaves(inputs)), []
        warm, slots = self.warm[0], record.state.slots
        root = record.module if warm is None else warm
        # What it writes in place are copies, so that nothing else reads its buffers half written.
        with _holding(slots, root, [tensor.clone() for tensor in state]):
            results = record.call_with(record.state.arguments.fill_leaves(inputs, warm))
            after = [slot.get(root) for slot in slots]
        for slot, old, new in zip(slots, state, after, strict=True):
            if new.shape != old.shape or new.dtype != old.dtype:
                raise NoStep(f"the state {slot.name} becomes {new.dtype}{tuple(new.shape)}")
        return results, after


@contextmanager
def _holding(slots: Sequence[Slot], root: Any, values: Sequence[Tensor]) -> Iterator[None]:
    saved = [slot.get(root) for slot in slots]
    try:
        for slot, value in zip(slots, values, strict=True):
            slot.set(root, value)
        yield
    finally:
        for slot, value in zip(slots, saved, strict=True):
            slot.set(root, value)


def _graph(record: OpaqueModule, inputs: list[Tensor], state: list[Tensor], one_sequence: bool) -> StepGraph:
    shapes: Any = None
    if not one_sequence:
        rows = Dim("rows", min=2)
        of_inputs = []
        for number, spec in enumerate(record.inputs):
            if any(dim.base in ("B", "BS") and dim.factor > 1 for dim in spec.dims):
                raise NoStep(f"sequences cannot be told apart in its input {number}")
            of_inputs.append({axis: rows for axis, dim in enumerate(spec.dims) if dim.base in ("B", "BS")})
        shapes = (of_inputs, [{0: rows} for _ in state])
    with (
        uncollected(),
        redirect_stderr(StringIO()),
        quiet(*_LOGGERS),
        torch.no_grad(),
        as_eager(record.module),
        unanswered() as refused,
    ):
        try:
            program = torch.export.export(_Step(record), (inputs, state), dynamic_shapes=shapes, strict=False)
        except NoStep:
            raise
        except Exception as error:  # export raises many kinds
            line = first_line(error)
            of_rows = SPECIALISED in line  # of a size that is to be free: also where a branch only bounds it
            what = "it depends on the number of sequences" if of_rows else "its Python cannot be traced"
            raise NoStep(f"{what}: {line.rpartition(SPECIALISED)[2]}") from error
    if refused:
        raise NoStep(f"its Python asks for the value of a tensor ({refused[0]})")
    module = program.module(check_guards=False)
    assert isinstance(module, GraphModule)
    try:
        inline(module)
    except ModelError as error:
        raise NoStep(str(error)) from error
    return _flat(module, len(inputs), len(state))


def _flat(module: GraphModule, inputs: int, state: int) -> StepGraph:
    """Weights as placeholders, guards dropped, the state written back, results that share no memory with it."""
    attributes = {
        str(node.target): fetch_attr(module, str(node.target))
        for node in module.graph.nodes
        if node.op == "get_attr"
    }
    open_subclasses(module.graph, attributes)
    old = list(module.graph.nodes)
    given = [node for node in old if node.op == "placeholder"]
    assert len(given) == inputs + state
    graph = Graph()
    made: dict[Node, Node] = {
        node: graph.placeholder(f"{'input' if at < inputs else 'state'}_{at}")
        for at, node in enumerate(given)
    }
    weights: dict[str, Node] = {}
    for node in old:
        if node.op == "get_attr" and node.users:
            name = str(node.target)
            if type(attributes[name].data) is not Tensor:
                raise NoStep(f"its weight {name} is a {type(attributes[name]).__name__}")
            if name not in weights:
                weights[name] = graph.placeholder(f"weight_{len(weights)}")
            made[node] = weights[name]
    for node in old:
        if node.op == "call_function" and not (is_assert(node) and not node.users):
            made[node] = graph.node_copy(node, made.__getitem__)
        elif node.op == "call_module" and node.users:
            raise NoStep(f"it calls {node.target}")
    output = next(node for node in old if node.op == "output")
    leaves = map_arg(torch.utils._pytree.tree_leaves(output.args[0]), made.__getitem__)
    results, after = leaves[: len(leaves) - state], leaves[len(leaves) - state :]
    if not all(isinstance(leaf, Node) for leaf in leaves):
        raise NoStep("it returns something else than tensors")
    kept = [
        graph.call_function(aten.clone.default, (result,), {"memory_format": torch.contiguous_format})
        for result in results
    ]
    for place, value in zip(given[inputs:], after, strict=True):
        graph.call_function(aten.copy_.default, (made[place], value))
    graph.output(tuple(kept))
    graph.lint()
    graph_module = GraphModule(nn.Module(), graph, "PythonStep")
    try:
        check_random(graph_module)
    except ModelError as error:
        raise NoStep(str(error)) from error
    names = tuple(name.removeprefix("module.") for name in weights)
    return StepGraph(graph_module, tuple(attributes[name].detach() for name in weights), names)
