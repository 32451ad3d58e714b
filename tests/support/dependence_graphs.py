"""Small random graphs over every operator that has a transfer function, and what their nodes really depend on.

A graph starts from token ids, positions, an embedding and some weights; each step applies one operator to what is
there. Sizes are symbols (3 rows, 11 tokens, 5 wanted logits while it is built), so it runs at any size. Weights are
float64 and small integers, so that what is equal is equal to the last bits.
"""

from __future__ import annotations

import logging
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from kvcompile.passes.dependence import Dependence, Fact, Level
from kvcompile.passes.graph import call, expr, shape
from kvcompile.passes.probe.evaluate import evaluate

aten = torch.ops.aten
BATCH, SEQ, KEEP, VOCABULARY = 3, 11, 5, 13
Args = tuple[Any, ...]


class NotHere(Exception):
    """The operator has no use for what the graph has."""


class Builder:
    """One random graph."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.graph = Graph()
        self.root = torch.nn.Module()
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        self.nodes: list[Node] = []
        generator = torch.Generator().manual_seed(seed)
        for name, value in (
            ("input_ids", torch.zeros(BATCH, SEQ, dtype=torch.int64)),
            ("position_ids", torch.zeros(BATCH, SEQ, dtype=torch.int64)),
            ("logits_to_keep", torch.zeros(KEEP, dtype=torch.int64)),
        ):
            node = self.graph.placeholder(name)
            node.meta["val"] = self.mode.from_tensor(value)
            self.nodes.append(node)
        self.ids, self.positions, self.keep = self.nodes
        self.table = self.constant("table", torch.randint(-4, 5, (40, 4), generator=generator).double())
        self.square = self.constant("square", torch.randint(-2, 3, (4, 4), generator=generator).double())
        self.vector = self.constant("vector", torch.randint(1, 5, (4,), generator=generator).double())
        self.experts = self.constant("experts", torch.randint(-2, 3, (4, 4, 4), generator=generator).double())
        self.rows = self.add(aten.sym_size.int, (self.ids, 0))
        self.tokens = self.add(aten.sym_size.int, (self.ids, 1))
        self.x = self.add(aten.embedding.default, (self.table, self.ids))
        self.add(aten.arange.default, (self.tokens,))
        self.add(aten.gt.Scalar, (self.ids, 5))
        self.add(aten.slice.Tensor, (self.table, 0, 2, self.add(operator.add, (self.tokens, 2))))

    def constant(self, name: str, value: Tensor) -> Node:
        self.root.register_buffer(name, value)
        node = self.graph.get_attr(name)
        node.meta["val"] = self.mode.from_tensor(value, static_shapes=True)
        self.nodes.append(node)
        return node

    def add(self, target: Callable[..., Any], args: Args, kwargs: dict[str, Any] | None = None) -> Node:
        """A call; raises whatever the operator does not like."""
        node = call(self.graph, target, args, self.ids, kwargs)
        value = node.meta["val"]
        if isinstance(value, Tensor):
            sizes = [expr(size) for size in value.shape]
            limit = all(size.is_Integer or len(size.free_symbols) < 3 for size in sizes)
            if value.dim() > 5 or not limit or value.numel() > 40_000:
                raise NotHere
            self.nodes.append(node)
        elif isinstance(value, (list, tuple)):
            for place in range(len(value)):
                self.add(operator.getitem, (node, place))
        return node

    def add_number(self, number: Node, more: int) -> Node:
        return self.add(operator.add, (number, more))

    # What templates draw

    def any(self, *kinds: str) -> Node:
        """A tensor: float, integer, bool; the latest are more likely."""
        found = [n for n in self.nodes if not kinds or _kind(n) in kinds]
        if not found:
            raise NotHere
        recent = found[-4:]
        return self.random.choice(recent if self.random.random() < 0.5 else found)

    def floating(self) -> Node:
        return self.any("float")

    def dim(self, node: Node) -> int:
        if not shape(node):
            raise NotHere
        return self.random.randrange(-len(shape(node)), len(shape(node)))

    def one_of(self, *values: Any) -> Any:
        return self.random.choice(values)

    @property
    def specialised(self) -> bool:
        """Whether some call has fixed one of the sizes."""
        sizes = [expr(size) for node in (self.ids, self.keep) for size in shape(node)]
        return len({size for size in sizes if size.is_Symbol}) < len(sizes)

    def finish(self) -> GraphModule:
        self.graph.output(tuple(node for node in self.nodes if node.op == "call_function"))
        return GraphModule(self.root, self.graph)


def _kind(node: Node) -> str:
    dtype = node.meta["val"].dtype
    return (
        "float"
        if dtype.is_floating_point
        else "complex"
        if dtype.is_complex
        else "bool"
        if dtype == torch.bool
        else "integer"
    )


def grown(seed: int, templates: list[Template], steps: int, last: Template | None = None) -> Builder:
    """A graph of some random calls, and of `last` at its end where that finds anything to work on."""
    builder = Builder(seed)
    # It tells of every failed call.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    for number in range(steps + (last is not None)):
        template = last if last is not None and number == steps else builder.random.choice(templates)
        for _ in range(8):
            before = len(builder.nodes)
            try:
                target, args, kwargs = template.make(builder)
                builder.add(target, args, kwargs)
            except (
                NotHere,
                RuntimeError,
                IndexError,
                ValueError,
                TypeError,
                NotImplementedError,
                AssertionError,
            ):
                del builder.nodes[before:]
                continue
            break
    if builder.specialised:
        return grown(seed + 1_000_003, templates, steps, last)
    _without_failures(builder)
    return builder


def _without_failures(builder: Builder) -> None:
    """Calls whose fake values could not be made are gone again."""
    for node in reversed(list(builder.graph.nodes)):
        if node.op == "call_function" and "val" not in node.meta and not node.users:
            builder.graph.erase_node(node)


@dataclass(frozen=True)
class Template:
    """How an operator is called: `key` is its name in the table of transfer functions."""

    key: str
    make: Callable[[Builder], tuple[Callable[..., Any], Args, dict[str, Any]]]

    def __str__(self) -> str:
        return self.key


# What nodes really depend on


def inputs(seed: int, rows: int = BATCH, tokens: int = SEQ) -> dict[str, Tensor]:
    """Random ids and positions; longer sequences begin with the shorter ones."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (40, BATCH), generator=generator).T
    steps = torch.randint(0, 2, (40, BATCH), generator=generator).T
    positions = (torch.arange(40) // 2 + steps).clamp(max=30)
    return {
        "input_ids": ids[:rows, :tokens].contiguous(),
        "position_ids": positions[:rows, :tokens].contiguous(),
        "logits_to_keep": torch.tensor([0, 3, 1, tokens - 1, 2]),
    }


class Runs:
    """Values of the nodes of a graph for some inputs."""

    def __init__(self, module: GraphModule, seed: int):
        self.module, self.seed = module, seed
        self.nodes = [
            n for n in module.graph.nodes if n.op == "call_function" and isinstance(n.meta.get("val"), Tensor)
        ]

    def values(self, given: dict[str, Tensor], held: dict[Node, Tensor] | None = None) -> dict[Node, Tensor]:
        """A node that cannot run at this size has no value. held: values of nodes that are not computed."""
        try:
            return dict(zip(self.nodes, evaluate(self.module, self.nodes, given, held), strict=True))
        except (RuntimeError, IndexError, ValueError):
            pass
        found = {}
        for node in self.nodes:
            try:
                found[node] = evaluate(self.module, [node], given, held)[0]
            except (RuntimeError, IndexError, ValueError):
                continue
        return found


def violations(module: GraphModule, seed: int) -> list[str]:
    """Every way in which a node depends on something that its fact denies."""
    analysis = Dependence(module)
    runs = Runs(module, seed)
    given = inputs(seed)
    base = runs.values(given)
    facts = {node: analysis.fact(node) for node in base}
    known = {n: f for n, f in facts.items() if f.level <= Level.LAST and not _is_sorted(f)}
    states = {state: base[state] for fact in facts.values() for state in fact.states if state in base}
    found = [text for node, fact in known.items() for text in _varies(node, fact, base[node])]
    chooser = random.Random(seed)
    columns = (0, SEQ - 1, chooser.randrange(1, SEQ - 1))
    alone = any(fact.level == Level.LAST for fact in known.values())
    for column in range(SEQ) if alone else columns:  # what is the last token's is of no other
        row = chooser.randrange(BATCH)
        for name in ("input_ids", "position_ids"):
            changed = {key: value.clone() for key, value in given.items()}
            changed[name][row, column] = (changed[name][row, column] + chooser.randrange(1, 6)) % VOCABULARY
            after = runs.values(changed, states)  # what is carried is no dependence
            for node, fact in known.items():
                if node in after:
                    found += _changed_elsewhere(node, fact, base[node], after[node], name, row, column)
    for rows, tokens in ((BATCH, SEQ + 6), (1, SEQ), (BATCH, 1)):
        other = runs.values(inputs(seed, rows, tokens))
        for node, fact in known.items():
            if node in other and fact.level != Level.LAST and not fact.count("keep"):
                found += _not_the_same(node, fact, base[node], other[node], rows, tokens)
    return found


def _is_sorted(fact: Fact) -> bool:
    return any(factor.role in ("sorted", "chosen") for dim in fact.dims for factor in dim)


def _by_factor(fact: Fact, value: Tensor, rows: int, tokens: int) -> tuple[Tensor, list[str]]:
    """A value with a dimension for each factor, and their roles."""
    sizes, roles = [], []
    for dim in fact.dims:
        for factor in dim:
            count = {"batch": rows, "token": tokens, "keep": KEEP}.get(factor.role, factor.size.number)
            sizes.append(count)
            roles.append(str(factor.role))
    return value.reshape(sizes), roles


def _different(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == torch.bool or not (a.is_floating_point() or a.is_complex()):
        return a != b
    return ~torch.isclose(a, b, rtol=1e-7, atol=1e-7, equal_nan=True)


def _varies(node: Node, fact: Fact, value: Tensor) -> list[str]:
    """Constants that are not the same for all rows and tokens."""
    if fact.level != Level.CONSTANT:
        return []
    parts, roles = _by_factor(fact, value, BATCH, SEQ)
    for place, role in enumerate(roles):
        if role != "free" and _different(parts, parts.narrow(place, 0, 1).expand_as(parts)).any():
            return [f"{node} ({node.target}) is CONSTANT and varies along {role}"]
    return []


def _changed_elsewhere(
    node: Node, fact: Fact, before: Tensor, after: Tensor, name: str, row: int, column: int
) -> list[str]:
    """Elements that change and belong to another token, or to none."""
    if before.shape != after.shape:
        return [f"{node} ({node.target}): its shape depends on {name}"]
    change, roles = _by_factor(fact, _different(before, after), BATCH, SEQ)
    change = change.clone()
    allowed = fact.level >= (Level.TOKEN if name == "input_ids" else Level.POSITION)
    if fact.level == Level.LAST:
        allowed = column == SEQ - 1
    if allowed:
        where: list[Any] = [slice(None)] * change.dim()
        for place, role in enumerate(roles):
            if role == "batch":
                where[place] = row
            elif role == "token":
                where[place] = column
            elif role == "keep":
                where[place] = (inputs(0)["logits_to_keep"] == column).nonzero().flatten()
        change[tuple(where)] = False
        if roles.count("token") > 1:  # a table over pairs: either of the two
            for place, role in enumerate(roles):
                if role == "token":
                    change.select(place, column).fill_(False)
    if not change.any():
        return []
    return [f"{node} ({node.target}) is {fact.level.name} and changes with {name} of another place"]


def _not_the_same(node: Node, fact: Fact, value: Tensor, other: Tensor, rows: int, tokens: int) -> list[str]:
    """Elements that both runs have and that are different."""
    most = max(tokens, SEQ)
    if fact.limit is not None and most > fact.limit:
        return []
    one, roles = _by_factor(fact, value, BATCH, SEQ)
    two, _ = _by_factor(fact, other, rows, tokens)
    for place in range(len(roles)):
        size = min(one.shape[place], two.shape[place])
        one, two = one.narrow(place, 0, size), two.narrow(place, 0, size)
    if not _different(one, two).any():
        return []
    return [f"{node} ({node.target}) is {fact.level.name} and differs in {rows} rows of {tokens} tokens"]
