"""What is known of a node: which role each of its dimensions has, and what its values may depend on.

The invariant behind every fact that is not ANYTHING. Take the element at row b and token i of the batch (and at any
index of the other dimensions). It is the same function, whatever the number of tokens, of rows and however the tokens
are cut into chunks, of

    CONSTANT   weights, constants, and its index along FREE dimensions
    POSITION   and i, or the position that the caller gives token i of row b
    TOKEN      and the id of that token, and results of attention and of carried states at (b, i)
    LAST       the same at (b, last token); such a node has no dimension of tokens

LENGTH is a value that depends on how many tokens there are, ANYTHING is all else; both say why. A node of POSITION with
two dimensions of tokens is a function of both positions: a table over pairs, which no token can own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Literal

import sympy
from torch.fx import Node

from kvcompile.passes.dependence.sizes import ONE, Size
from kvcompile.passes.graph import module_path, source_line
from kvcompile.passes.records import NoMatch


class Level(IntEnum):
    """What values may depend on; a pointwise result has the highest level of its operands."""

    CONSTANT = 0
    POSITION = 1
    TOKEN = 2
    LAST = 3
    LENGTH = 4
    ANYTHING = 5


Role = Literal["batch", "token", "keep", "free", "sorted", "chosen"]


@dataclass(frozen=True)
class Factor:
    """A part of a dimension: rows of the batch, tokens, tokens whose logits are kept, or something else (free).

    sorted: the list `of`, flattened, in the order that the sort `by` gave it; part: only those of this expert
    chosen: those of the list `of` that the mask `by` shows, in their own order
    """

    role: Role
    size: Size
    by: Node | None = None
    of: tuple[Factor, ...] = ()
    part: int | None = None

    def __str__(self) -> str:
        return f"{self.size}" if self.role == "free" else self.role


Dim = tuple[Factor, ...]  # row-major; () has size 1


@dataclass(frozen=True)
class Located:
    """The value is the place of its own element: the row-major index along `of`."""

    of: tuple[Factor, ...]


@dataclass(frozen=True)
class Choice:
    """Integers from 0 to `count` - 1, of any dtype; all elements of `origin`, in some order, where that is known."""

    count: int
    origin: Node | None = None


@dataclass(frozen=True)
class Counts:
    """How often each of 0 .. count - 1 occurs among all elements of `origin`.

    summed: how often up to it; place: how often this one; marks: not yet added up, a row for each token
    """

    count: int
    origin: Node
    summed: bool = False
    marks: bool = False
    place: int | None = None


@dataclass(frozen=True)
class Kept:
    """The indices of tokens whose logits the caller wants."""


Knowledge = Located | Choice | Counts | Kept


@dataclass(frozen=True)
class Reason:
    """Why a node is LENGTH or ANYTHING: the operator at which it began."""

    text: str
    node: Node

    def no_match(self, rule: str) -> NoMatch:
        return NoMatch(rule, self.text, self.node.name, source_line(self.node), module_path(self.node))


@dataclass(frozen=True)
class Fact:
    """What is known of a tensor or of a number.

    limit:  up to how many tokens it holds; None: any number
    length: the value itself, where it is one number and an expression in the number of tokens (`N`)
    states: the nodes whose running state it uses
    knows:  what the values are, where that is known
    opaque: keys of the modules that run as Python on the way: what is said of these is checked, not proved
    """

    dims: tuple[Dim, ...]
    level: Level
    why: Reason | None = None
    limit: int | None = None
    length: sympy.Expr | None = field(default=None, compare=False)
    states: frozenset[Node] = frozenset()
    knows: Knowledge | None = None
    opaque: frozenset[str] = frozenset()

    def count(self, *roles: Role) -> int:
        """How many factors have one of these roles."""
        return sum(factor.role in roles for factor in self.factors())

    def factors(self) -> tuple[Factor, ...]:
        """All factors, those of sorted lists in place of these."""
        return tuple(inner for dim in self.dims for factor in dim for inner in (factor.of or (factor,)))

    def only_free(self, dim: int) -> bool:
        """Whether a dimension runs over neither rows nor tokens."""
        return all(factor.role == "free" for factor in self.dims[dim])

    def plain(self) -> Fact:
        """The same without knowledge of the values."""
        return replace(self, knows=None, length=None)


N = sympy.Symbol("n", positive=True, integer=True)  # the number of tokens


def joined(level: Iterable[Fact]) -> Fact:
    """What a function of all of these depends on, without dimensions."""
    facts = tuple(level)
    worst = max((fact.level for fact in facts), default=Level.CONSTANT)
    reasons = [fact.why for fact in facts if fact.level == worst and fact.why is not None]
    limits = [fact.limit for fact in facts if fact.limit is not None]
    return Fact(
        (),
        worst,
        min(reasons, key=lambda reason: reason.node) if reasons else None,
        min(limits, default=None),
        states=frozenset().union(*(fact.states for fact in facts)),
        opaque=frozenset().union(*(fact.opaque for fact in facts)),
    )


def settled(fact: Fact, node: Node) -> Fact:
    """The fact, or ANYTHING where its dimensions break the invariant of its level."""
    rows, tokens, kept = fact.count("batch"), fact.count("token"), fact.count("keep")
    problem = ""
    if fact.level in (Level.LENGTH, Level.ANYTHING) or fact.level == Level.CONSTANT:
        return fact
    if rows > 1:
        problem = "every row of the batch meets every other"
    elif fact.level == Level.LAST and tokens + kept:
        problem = "every token meets the last one"
    elif fact.level == Level.TOKEN and tokens + kept > 1:
        problem = "every token meets every other"
    elif fact.level in (Level.TOKEN, Level.LAST) and rows == 0:
        problem = "it has lost the dimension of the batch's rows"
    elif fact.level in (Level.POSITION, Level.TOKEN) and not tokens + kept:
        problem = "it has lost the dimension of the tokens"
    return anything(node, problem, (fact,)) if problem else fact


def mixing(node: Node, what: str) -> str:
    """The text of a refusal."""
    return f"tokens mix outside attention, in {node.target}: {what}; that needs state besides K and V"


def anything(node: Node, what: str, inputs: Iterable[Fact] = (), knows: Knowledge | None = None) -> Fact:
    """ANYTHING at `node`, unless one of its inputs is already."""
    before = [fact for fact in inputs if fact.level == Level.ANYTHING and fact.why is not None]
    if before:
        first = min(before, key=lambda fact: fact.why.node)  # type: ignore[union-attr]
        return Fact((), Level.ANYTHING, first.why)
    return Fact((), Level.ANYTHING, Reason(mixing(node, what), node), knows=knows)


def free(*sizes: int) -> tuple[Dim, ...]:
    """Dimensions of fixed sizes."""
    return tuple(() if size == 1 else (Factor("free", Size(size)),) for size in sizes)


def compact(factors: Iterable[Factor]) -> Dim:
    """One dimension of these factors: neighbours that are free become one."""
    found: list[Factor] = []
    for factor in factors:
        if factor.size == ONE and factor.role == "free":
            continue
        if found and found[-1].role == factor.role == "free":
            found[-1] = Factor("free", found[-1].size * factor.size)
        else:
            found.append(factor)
    return tuple(found)


__all__ = [
    "Choice",
    "Counts",
    "Dim",
    "Fact",
    "Factor",
    "Kept",
    "Knowledge",
    "Level",
    "Located",
    "N",
    "Reason",
    "anything",
    "compact",
    "free",
    "joined",
    "mixing",
    "settled",
]
