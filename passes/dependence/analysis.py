"""The analysis: facts of nodes, found when they are asked for, by one transfer function for each operator."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from kvcompile.passes.dependence import (
    attention,
    contractions,
    convolutions,
    creation,
    cumulative,
    experts,
    indexing,
    joins,
    normalisation,
    pointwise,
    reductions,
    scalars,
    slices,
    sorting,
    views,
)
from kvcompile.passes.dependence.context import Context, Result, Rule
from kvcompile.passes.dependence.facts import (
    Choice,
    Fact,
    Factor,
    Kept,
    Level,
    Reason,
    anything,
    free,
    joined,
    mixing,
    settled,
)
from kvcompile.passes.dependence.reductions import POSITION
from kvcompile.passes.dependence.sizes import Size
from kvcompile.passes.graph import expr, shape, source_line, target_name
from kvcompile.passes.records import NoMatch

log = logging.getLogger(__name__)

NAME = "token_local"
FAMILIES = (
    attention,
    contractions,
    convolutions,
    creation,
    cumulative,
    experts,
    indexing,
    joins,
    normalisation,
    pointwise,
    reductions,
    slices,
    sorting,
    views,
)
# One transfer function for each operator. What is not here and is not tagged pointwise by torch is not known.
RULES: dict[str, Rule] = {name: rule for family in FAMILIES for name, rule in family.RULES.items()}
# Whose operators are functions of their operands and nothing else, so that those of weights alone are constants:
# torch's, and those that dequantize weights.
_FUNCTIONS = ("aten", "quantized_decomposed", "torchao", "quanto", "bitsandbytes")


class Dependence:
    """What each node of one graph may depend on. Facts are made when they are asked for, and remembered."""

    strict = False  # whether a transfer function that fails is an error (in tests), or knows nothing

    def __init__(self, graph_module: GraphModule):
        self.graph_module = graph_module
        self.placeholders = {str(n.target): n for n in graph_module.graph.nodes if n.op == "placeholder"}
        batch, seq = (expr(size) for size in shape(self.placeholders["input_ids"]))
        keep = self.placeholders.get("logits_to_keep")
        self.ctx = Context(batch, seq, None if keep is None else expr(shape(keep)[0]))
        for name in ("position_ids",):
            if name in self.placeholders:
                sizes = [expr(size) for size in shape(self.placeholders[name])]
                pairs = zip(sizes, (batch, seq), strict=True)
                self.ctx.same |= {a: b for a, b in pairs if a != b and isinstance(a, sympy.Symbol)}
        self._cuts: set[Node] = set()

    def cut(self, node: Node) -> None:
        """Say that `node` is the result of an attention block: a value of each token."""
        for operand in node.all_input_nodes:  # for the order of rows and heads, where they share a dimension
            self._find(operand)
        self._forget(node)
        self._cuts.add(node)
        self.ctx.facts[node] = attention.cut(self.ctx, node)

    @property
    def cuts(self) -> frozenset[Node]:
        """The results of attention blocks that are known."""
        return frozenset(self._cuts)

    def fact(self, node: Node) -> Fact:
        """What is known of a node; of one with several results: the worst of them, without dimensions."""
        found = self._find(node)
        if isinstance(found, Fact):
            return found
        worst = max(found, key=lambda fact: fact.level)
        return replace(worst, dims=())

    def is_local(self, node: Node) -> bool:
        """Each element belongs to one token of one row, and is a function of what that token has."""
        fact = self.fact(node)
        return fact.level <= Level.TOKEN and fact.count("token") == 1 and not fact.count("keep")

    def is_positional(self, node: Node) -> bool:
        """A function of positions (or a constant), of one or of pairs of them."""
        return self.fact(node).level <= Level.POSITION

    def is_constant(self, node: Node) -> bool:
        """The same whatever the tokens, positions and lengths."""
        return self.fact(node).level == Level.CONSTANT

    def is_last(self, node: Node) -> bool:
        """Of the last token of each row alone."""
        return self.fact(node).level == Level.LAST

    def token_dim(self, node: Node) -> int | None:
        """The dimension that is the tokens and nothing else."""
        return self._own_dim(node, "token")

    def batch_dim(self, node: Node) -> int | None:
        """The dimension that is the rows of the batch and nothing else."""
        return self._own_dim(node, "batch")

    def problem(
        self, nodes: Iterable[Node], outputs: Iterable[Node] = (), rule: str = NAME
    ) -> NoMatch | None:
        """The first operator at which what `nodes` need stops being local; None where all is.

        outputs: results of the whole graph, which may also be of the wanted tokens (`logits_to_keep`) or the last
        """
        results = set(outputs)
        reasons: list[Reason] = []
        for node in dict.fromkeys((*nodes, *results)):
            fact = self.fact(node)
            if fact.level in (Level.LENGTH, Level.ANYTHING):
                reasons.append(fact.why or Reason(mixing(node, "what it does is not known"), node))
            elif fact.level == Level.LAST and node not in results:
                reasons.append(Reason(mixing(node, "only the last token is used"), node))
            elif fact.count("keep") and node not in results:
                reasons.append(Reason(mixing(node, "only the tokens of the wanted logits are used"), node))
            elif fact.count("token") > 1:
                reasons.append(Reason(mixing(node, "it has a value for each pair of tokens"), node))
        return min(reasons, key=lambda reason: reason.node).no_match(rule) if reasons else None

    def limit(self, nodes: Iterable[Node]) -> tuple[int, str] | None:
        """Up to how many tokens what `nodes` need is the same function, and where that ends."""
        limits = [(fact.limit, node) for node in nodes if (fact := self.fact(node)).limit is not None]
        if not limits:
            return None
        most = min(limit for limit, _ in limits if limit is not None)
        return most, self._turn(most)

    def states(self, nodes: Iterable[Node]) -> tuple[Node, ...]:
        """The running sums and mixers whose state `nodes` use, in graph order."""
        return tuple(sorted({state for node in nodes for state in self.fact(node).states}))

    def opaque(self, nodes: Iterable[Node]) -> tuple[str, ...]:
        """Keys of the modules that run as Python on the way to `nodes`: not proved, to be checked by running."""
        return tuple(sorted({key for node in nodes for key in self.fact(node).opaque}))

    def _turn(self, most: int) -> str:
        """Where values begin to depend on the length."""
        for node in self.graph_module.graph.nodes:
            found = self.ctx.facts.get(node)
            if isinstance(found, Fact) and found.limit == most:
                return f"{target_name(node)} ({source_line(node)})"
        return ""

    def _own_dim(self, node: Node, role: str) -> int | None:
        found = [
            place for place, dim in enumerate(self.fact(node).dims) if len(dim) == 1 and dim[0].role == role
        ]
        return found[0] if len(found) == 1 else None

    def _forget(self, node: Node) -> None:
        stack = [node]
        while stack:
            gone = stack.pop()
            for user in gone.users:
                if user in self.ctx.facts and user not in self._cuts:
                    del self.ctx.facts[user]
                    stack.append(user)
        self.ctx.facts.pop(node, None)

    def _find(self, wanted: Node) -> Result:
        """The fact of a node, after those of what it is computed from."""
        facts, stack = self.ctx.facts, [wanted]
        while stack:
            node = stack[-1]
            if node in facts:
                stack.pop()
                continue
            missing = [used for used in node.all_input_nodes if used not in facts]
            if missing:
                stack.extend(missing)
                continue
            facts[node] = _named(node, self._transfer(node))
            stack.pop()
        return facts[wanted]

    def _transfer(self, node: Node) -> Result:
        if node.op == "placeholder":
            return self._placeholder(node)
        if node.op == "get_attr":
            value = node.meta.get("val")
            sizes = value.shape if isinstance(value, torch.Tensor) else ()
            return Fact(free(*(int(size) for size in sizes)), Level.CONSTANT)
        if node.op != "call_function":
            return anything(node, "it is no operator")
        if node.target is operator.getitem and not _is_number(node):
            return self._item(node)
        if _is_number(node):
            return scalars.number(self.ctx, node)
        name = node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""
        rule = RULES.get(name)
        if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
            rule = pointwise.pointwise
        # What a block takes of tokens is asked for by itself; parts of masks over pairs are built again for a cache.
        known = name in creation.SHAPE_ONLY or name == "kvcompile::attention"
        before = [] if known else self._unusable(node)
        if before:
            return anything(node, "", before)
        if rule is None:
            return self._of_constants(node) or anything(node, "what it does to tokens is not known")
        try:
            return self._checked(node, rule(self.ctx, node))
        except (
            TypeError,
            ValueError,
            IndexError,
            KeyError,
            AssertionError,
        ):
            # A form that it does not foresee.
            if self.strict:
                raise
            log.debug("transfer function of %s", node.target, exc_info=True)
            return anything(node, "this form of it is not known")

    def _of_constants(self, node: Node) -> Result | None:
        """What any known library's operator gives that takes weights and constants alone (a norm of weights)."""
        target, value = node.target, node.meta.get("val")
        if not isinstance(target, torch._ops.OpOverload) or target.namespace not in _FUNCTIONS:
            return None
        if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
            return None
        found = [self.ctx.facts[used] for used in node.all_input_nodes]
        facts = [each for fact in found for each in (fact if isinstance(fact, tuple) else (fact,))]
        results = list(value) if isinstance(value, (tuple, list)) else [value]
        if not facts or any(f.level != Level.CONSTANT or f.count("batch", "token", "keep") for f in facts):
            return None  # ones [S] tell their number
        made = []
        for each in results:
            if not isinstance(each, torch.Tensor) or any(not isinstance(size, int) for size in each.shape):
                return None
            made.append(replace(joined(facts), dims=free(*each.shape)))
        return tuple(made) if isinstance(value, (tuple, list)) else made[0]

    def _unusable(self, node: Node) -> list[Fact]:
        """Operands of which nothing is known."""
        found = []
        for used in node.all_input_nodes:
            fact = self.ctx.facts[used]
            for each in fact if isinstance(fact, tuple) else (fact,):
                if each.level == Level.ANYTHING and each.knows is None and each.why is not None:
                    found.append(each)
        return found

    def _item(self, node: Node) -> Result:
        source = node.args[0]
        assert isinstance(source, Node)
        found, index = self.ctx.facts[source], node.args[1]
        if isinstance(found, Fact):  # of all its results together: ANYTHING
            return found
        assert isinstance(index, int)
        return found[index]

    def _checked(self, node: Node, found: Result) -> Result:
        """The result, where its dimensions have the sizes that the trace has, and keep the invariant."""
        value = node.meta.get("val")
        if isinstance(found, tuple):
            return tuple(settled(each, node) for each in found)
        if found.level == Level.ANYTHING and found.knows is None:
            return found
        if not isinstance(value, torch.Tensor):
            return anything(node, "it has several results")
        if not self.ctx.agrees(node, found):
            return anything(
                node, f"its result has other dimensions ({', '.join(map(str, value.shape))}) than expected"
            )
        return settled(found, node)

    def _placeholder(self, node: Node) -> Fact:
        rows, tokens = (
            Factor("batch", Size(1, (self.ctx.batch,))),
            Factor("token", Size(1, (self.ctx.seq,))),
        )
        if node.target == "input_ids":
            return Fact(((rows,), (tokens,)), Level.TOKEN)
        if node.target == "position_ids":
            return Fact(((rows,), (tokens,)), Level.POSITION, length=POSITION)
        if node.target == "logits_to_keep" and self.ctx.keep is not None:
            kept = Factor("keep", Size(1, (self.ctx.keep,)))
            text = mixing(node, "it computes with the indices of the wanted logits")
            return Fact(((kept,),), Level.ANYTHING, Reason(text, node), knows=Kept())
        return anything(node, "an input of which nothing is known")


def _named(node: Node, found: Result) -> Result:
    """Choices that are known by no other node are all those of this one."""
    if isinstance(found, Fact) and isinstance(found.knows, Choice) and found.knows.origin is None:
        return replace(found, knows=Choice(found.knows.count, node))
    return found


def _is_number(node: Node) -> bool:
    value: Any = node.meta.get("val")
    return isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


__all__ = ["RULES", "Dependence"]
