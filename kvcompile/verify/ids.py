"""Which token ids a model takes, which of them it treats apart, and texts that have them.

What becomes of an id before it is a vector (clamped, hashed, cast, looked up in another table, compared) is a part of
the captured graph that is small enough to run for every id there is:

    taken    ids whose every look-up lies within its table
    special  the numbers that anything computed from ids is compared with; the special ids of the model's
             configuration; ids of each kind, where a value computed from an id alone tells few kinds of ids apart

What is computed from an id alone is seen by ids that come in another order: it moves with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node, map_arg

from kvcompile.passes.graph import ancestors, descendants, target_name
from kvcompile.passes.probe.evaluate import fetch_attr
from kvcompile.pipeline import Front

_COMPARES = frozenset(
    [
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "isin",
        "where",
        "masked_fill",
        "sub",
        "rsub",
        "bitwise_and",
        "remainder",
    ]
)
_LOOK_UPS = {"embedding": (0, 1), "index_select": (0, 2), "gather": (0, 2), "take": (0, 1)}  # table, indices
_BEYOND = 4  # times the largest table: ids where all are made to fit into it first
_KINDS = 16  # values that tell kinds of ids apart, at most; and values that one node has for an id
_OF_A_KIND = 2  # ids of each
_SHAPES = (
    "reshape",
    "view",
    "_unsafe_view",
    "unsqueeze",
    "squeeze",
    "flatten",
    "unflatten",
    "clone",
    "contiguous",
    "to",
    "_to_copy",
)
_MOST_SPECIAL = 64
_MOST_IDS = 1 << 20  # a vocabulary is not larger
_TRIAL = 11  # ids by which it is seen what treats each by itself
_PLACES = 3  # of each special id in a row of a long text
_SHARE = 4  # of a text, one in so many tokens is special, at most
_CANNOT = (IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Vocabulary:
    """taken: all ids that the model takes [N]; special: those among them that it may treat apart."""

    taken: Tensor
    special: tuple[int, ...] = ()

    def below(self, size: int) -> Vocabulary:
        """The ids below `size`."""
        return Vocabulary(self.taken[self.taken < size], tuple(i for i in self.special if i < size))

    def text(self, rows: int, tokens: int, seed: int = 0) -> Tensor:
        """Random ids [rows, tokens], different from row to row, with special ids at several places of every row, one
        id that comes twice, and a stretch that comes again."""
        generator = torch.Generator().manual_seed(seed)
        ids = self.taken[torch.randint(0, len(self.taken), (rows, tokens), generator=generator)]
        for row in range(rows):
            length, quarter = tokens // 16, tokens // 4
            if length > 1:
                start, again = (int(torch.randint(0, quarter, (), generator=generator)) for _ in range(2))
                ids[row, tokens // 2 + again :][:length] = ids[row, start : start + length]
                ids[row, start + length] = ids[row, start + length - 1]
            # One of each before a second of any; every row begins with others, where there is no room for all.
            turned = row * len(self.special) // rows
            wanted = (*self.special[turned:], *self.special[:turned]) * _PLACES
            count = min(len(wanted), tokens // _SHARE)
            places = torch.randperm(tokens, generator=generator)[:count]
            ids[row, places] = torch.tensor(wanted[:count], dtype=torch.int64)
        return ids


def vocabulary(front: Front, model: nn.Module | None = None) -> Vocabulary:
    """The ids of a model, from its graph and, where it is at hand, its configuration."""
    module, config = front.captured.graph_module, getattr(model, "config", None)
    graph = IdGraph(module)
    output = next(n for n in module.graph.nodes if n.op == "output").args[0]
    assert isinstance(output, (list, tuple))
    logits = output[front.captured.logits_index].meta.get("val")
    sizes = [2, *graph.tables, *_sizes(config)]
    if isinstance(logits, Tensor) and logits.dim() and isinstance(logits.shape[-1], int):
        sizes.append(logits.shape[-1])
    taken, apart = graph.run(min(max(sizes) * (1 if graph.straight else _BEYOND), _MOST_IDS))
    known = set(taken.tolist())
    special = [i for i in dict.fromkeys((*graph.numbers, *_special(config), *apart)) if i in known]
    return Vocabulary(taken, tuple(special[:_MOST_SPECIAL]))


def bounds(front: Front) -> tuple[int, int] | None:
    """The least and the largest id that the tables have into which ids go as they are; None: there is no such table."""
    graph = IdGraph(front.captured.graph_module)
    found = [(lowest, rows - 1) for rows, node, lowest in graph.look_ups if _unmoved(node) is graph.start]
    return (max(low for low, _ in found), min(high for _, high in found)) if found else None


def _unmoved(node: Node) -> Node:
    """What a tensor has all of its numbers of, in another shape or width: GPT-2 looks up `input_ids.view(-1, S)`."""
    while target_name(node) in _SHAPES and isinstance(node.args[0], Node) and _is_number(node):
        node = node.args[0]
    return node


def _sizes(config: Any) -> list[int]:
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    size = getattr(text, "vocab_size", None)
    return [size] if isinstance(size, int) else []


def _special(config: Any) -> Iterator[int]:
    """Numbers of the configuration whose names say that they are ids of tokens, at any depth."""
    tree = config.to_dict() if hasattr(config, "to_dict") else getattr(config, "__dict__", {})
    stack: list[tuple[str, Any]] = list(tree.items())
    while stack:
        name, value = stack.pop()
        named = name.endswith(("token_id", "token_ids", "token_index"))
        if isinstance(value, dict):
            stack += [(str(key), inner) for key, inner in value.items()]
        elif named and isinstance(value, (list, tuple)):
            stack += [(name, inner) for inner in value]
        elif named and isinstance(value, int) and not isinstance(value, bool):
            yield value


class IdGraph:
    """The part of a graph that token ids enter as numbers.

    tables:  rows of the constant tables that ids, or numbers computed from them, select from
    numbers: what numbers computed from ids are compared with, and their neighbours
    """

    def __init__(self, module: GraphModule):
        self.module = module
        self.start = next(n for n in module.graph.nodes if n.op == "placeholder" and n.name == "input_ids")
        behind = descendants([user for user in self.start.users if target_name(user) != "sym_size"])
        self.numeric = [n for n in module.graph.nodes if n in behind and _is_number(n)]
        reached = {self.start, *self.numeric}
        self.look_ups = [
            found
            for node in module.graph.nodes
            if (found := self._look_up(node)) is not None and found[1] in reached
        ]
        self.tables = tuple(rows for rows, _, _ in self.look_ups)
        self.numbers = tuple(dict.fromkeys(self._numbers()))
        self.single = self._single()

    @property
    def straight(self) -> bool:
        """Whether a table bounds the ids themselves, or what bounds them cannot be seen from an id alone."""
        by = [node for _, node, _ in self.look_ups]
        return not by or any(node is self.start or node not in self.single for node in by)

    def run(self, count: int) -> tuple[Tensor, list[int]]:
        """Which of the ids 0 .. count - 1 are taken [N], and some of each kind that is told apart."""
        taken = torch.arange(count)
        while len(taken):
            values = self._values(taken, self.single)
            inside = torch.ones(len(taken), dtype=torch.bool)
            for rows, by, lowest in self.look_ups:
                if by in values:
                    index = values[by].reshape(len(taken), -1)
                    inside &= ((index >= lowest) & (index < rows)).all(-1)
            if bool(inside.all()):
                return taken, [int(taken[place]) for place in _apart(values)]
            taken = taken[inside]
        return torch.arange(min(count, 2)), []  # none: whatever it is, the graph does not say

    def _look_up(self, node: Node) -> tuple[int, Node, int] | None:
        """(rows of the table, what selects from them, the least that it may be), if that is what a node does."""
        name = target_name(node)
        if node.op != "call_function":
            return None
        if name == "index":
            indices = node.args[1]
            assert isinstance(indices, (list, tuple))
            places = [(dim, n) for dim, n in enumerate(indices) if isinstance(n, Node)]
            if len(places) != 1:
                return None
            (dim, by), table = places[0], node.args[0]
        elif name in _LOOK_UPS and len(node.args) > _LOOK_UPS[name][1]:
            dim, table, by = 0, *(node.args[place] for place in _LOOK_UPS[name])  # type: ignore[assignment]
        else:
            return None
        if not isinstance(table, Node) or not isinstance(by, Node) or by.meta.get("val") is None:
            return None
        val = table.meta.get("val")
        if by.meta["val"].dtype == torch.bool or not isinstance(val, Tensor) or val.dim() <= dim:
            return None
        rows = val.shape[dim]
        constant = table.op == "get_attr" or not any(n.op == "placeholder" for n in ancestors([table]))
        return (rows, by, -rows if name == "index" else 0) if constant and isinstance(rows, int) else None

    def _numbers(self) -> Iterator[int]:
        for node in self.numeric:
            if target_name(node) not in _COMPARES:
                continue
            for leaf in torch.utils._pytree.tree_leaves((node.args, dict(node.kwargs))):
                found: list[Any] = []
                if isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
                    found = [leaf]
                elif isinstance(leaf, Node) and leaf.op == "get_attr":
                    tensor = fetch_attr(self.module, str(leaf.target))
                    if isinstance(tensor, Tensor) and tensor.numel() <= _MOST_SPECIAL:
                        found = tensor.flatten().tolist()
                for number in found:
                    if abs(number) < _MOST_IDS:
                        yield from (int(number), int(number) - 1, int(number) + 1)

    def _single(self) -> list[Node]:
        """Nodes that treat every id by itself: what they give moves as the ids do."""
        order = torch.randperm(_TRIAL, generator=torch.Generator().manual_seed(0))
        ids = torch.arange(_TRIAL) % max(min(self.tables, default=_TRIAL), 1)
        ids[-1] = ids[0]  # two that are alike, so that what compares ids with each other shows
        plain, other = (self._values(x, self.numeric) for x in (ids, ids[order]))
        return [
            node
            for node in self.numeric
            if node in plain and node in other and torch.equal(plain[node][:, order], other[node])
        ]

    def _values(self, ids: Tensor, nodes: list[Node]) -> dict[Node, Tensor]:
        """Values for ids [N] of `nodes`, those that are a handful of numbers for every id; on the CPU."""
        values: dict[Node, Tensor] = {self.start: ids[None]}
        with torch.no_grad():
            for node in nodes:
                try:
                    value = self._call(node, values)
                except _CANNOT:  # it needs more than ids, or some of these are outside of a table
                    continue
                if isinstance(value, Tensor) and value.dim() >= 2 and tuple(value.shape[:2]) == (1, len(ids)):
                    values[node] = value
        return values

    def _call(self, node: Node, values: dict[Node, Tensor]) -> Any:
        def known(source: Node) -> Any:
            if source in values:
                return values[source]
            if source.op == "get_attr":
                found = fetch_attr(self.module, str(source.target))
                return found.detach().cpu() if isinstance(found, Tensor) else found
            if target_name(source) == "sym_size":
                of, dim = source.args
                size = values[self.start].shape if isinstance(of, Node) and of.op == "placeholder" else None
                return (values[of].shape if size is None else size)[dim]  # type: ignore[index]
            if source.op == "call_function" and not any(n.op == "placeholder" for n in ancestors([source])):
                return self._call(source, {})
            raise KeyError(source.name)

        args, kwargs = map_arg((node.args, dict(node.kwargs)), known)
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        assert callable(node.target)
        return node.target(*args, **kwargs)


def _is_number(node: Node) -> bool:
    """Whether a node has a handful of numbers for every id, and not a vector of the model's width."""
    val = node.meta.get("val")
    if node.op != "call_function" or not isinstance(val, Tensor):
        return False
    if val.is_floating_point() and (target_name(node) in _LOOK_UPS or val.dim() > 2):
        return False
    sizes: list[Any] = list(val.shape)
    return all(isinstance(size, torch.SymInt) or size <= _KINDS for size in sizes)


def _apart(values: dict[Node, Tensor]) -> list[int]:
    """Places of some ids of each kind that a node tells apart, where the kinds are few: the first of each, and those
    on both sides of where one ends."""
    found: list[int] = []
    for value in values.values():
        for of in value.reshape(value.shape[1], -1)[:, :_KINDS].unbind(1):
            kinds = of.unique()
            if not 1 < len(kinds) <= _KINDS or len(kinds) == len(of):
                continue
            for kind in kinds:
                found += (of == kind).nonzero()[:_OF_A_KIND, 0].tolist()
            ends = (of[1:] != of[:-1]).nonzero()[:_OF_A_KIND, 0].tolist()
            found += [place for end in ends for place in (end, end + 1)]
    return list(dict.fromkeys(found))
