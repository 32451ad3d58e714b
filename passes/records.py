"""Records of the passes: what detection finds in a graph, by its nodes. What needs no node is in kvcompile/specs.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.fx import Node

from kvcompile.expression import LeafKind
from kvcompile.specs import RopeStyle, RotaryForm, SiteFacts, StateSlot


@dataclass(frozen=True)
class Rotation:
    """The part of the graph in which positions enter queries or keys.

    output: [B, H, S, D], computed from
    roots:  nodes that know nothing of the positions (the projections), and
    tables: nodes that are functions of the positions alone, with the sequence as one of their dimensions
    """

    output: Node
    roots: tuple[Node, ...]
    tables: tuple[Node, ...]

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.output, *self.roots, *self.tables)


@dataclass(frozen=True)
class RopeSpec:
    """A rotary embedding found in the graph: out = x * cos + rotate(x) * sin on both q and k.

    form:             rotate((a, b)) = (-b, a) on these pairs of channels; the others pass
    q_input, k_input: [B, H, S, D] what the rotation starts from: queries and keys as at position 0
    q, k:             the rotations, from which cos and sin are tabulated (`passes/detect/rotation.py`)
    table:            a name of what turns positions into cos and sin; sites with equal names rotate alike
    """

    form: RotaryForm
    q_input: Node
    k_input: Node
    q: Rotation
    k: Rotation
    table: str

    @property
    def style(self) -> RopeStyle:
        return self.form.style

    @property
    def rotary_dim(self) -> int:
        return self.form.rotary_dim

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes of the graph that the spec needs."""
        return (self.q_input, self.k_input, *self.q.nodes, *self.k.nodes)

    def moved(self, mapping: Mapping[Node, Node]) -> RopeSpec:
        """The spec in a copy of the graph; nodes that are not in `mapping` stay."""

        def move(node: Node) -> Node:
            return mapping.get(node, node)

        def turn(rotation: Rotation) -> Rotation:
            roots, tables = (tuple(map(move, nodes)) for nodes in (rotation.roots, rotation.tables))
            return Rotation(move(rotation.output), roots, tables)

        inputs = (move(self.q_input), move(self.k_input))
        return replace(self, q_input=inputs[0], k_input=inputs[1], q=turn(self.q), k=turn(self.k))


@dataclass(frozen=True, kw_only=True)
class AttentionSite(SiteFacts):
    """One attention block of the captured graph; the call site, not the module, is the unit.

    q:   [B, num_qo_heads, S, head_dim]   as the scores use it (after RoPE)
    k:   [B, num_kv_heads, S, head_dim]   after RoPE, before repeat_kv
    v:   [B, num_kv_heads, S, v_head_dim] before repeat_kv
    out: [B, num_qo_heads, S, v_head_dim] the node whose value is the attention's result
    """

    q: Node
    k: Node
    v: Node
    out: Node
    rope: RopeSpec | None
    dtype: torch.dtype
    sinks: Node | None = None  # [num_qo_heads], a weight or a constant; where score.sinks
    bias: Node | None = None  # fp32, a constant in the form that score.bias says
    positionless: bool = False  # no position enters its queries and keys, but through other sites' results
    latent: LatentForm | None = None
    leaves: tuple[Leaf, ...] = ()  # what `score.mod` reads, in its order

    @property
    def kept(self) -> tuple[Node, ...]:
        """Nodes that detection added or found and that nothing in the graph may use yet."""
        rope = self.rope.nodes if self.rope else ()
        return (*rope, *(self.latent.kept if self.latent else ()))

    def moved(self, mapping: Mapping[Node, Node]) -> AttentionSite:
        """The site in a copy of the graph; nodes that are not in `mapping` stay."""

        def move(node: Node | None) -> Any:
            return node if node is None else mapping.get(node, node)

        return replace(
            self,
            q=move(self.q),
            k=move(self.k),
            v=move(self.v),
            out=move(self.out),
            sinks=move(self.sinks),
            bias=move(self.bias),
            rope=self.rope and self.rope.moved(mapping),
            latent=self.latent and self.latent.moved(mapping),
            leaves=tuple(leaf.moved(mapping) for leaf in self.leaves),
        )

    def without_roots(self) -> AttentionSite:
        """The site without what only tells how a rotation was found; tables are made from the whole graph."""
        if self.rope is None:
            return self
        q, k = (Rotation(node, (), ()) for node in (self.rope.q_input, self.rope.k_input))
        return replace(self, rope=replace(self.rope, q=q, k=k))

    @property
    def rerun(self) -> tuple[DynamicMask, ...]:
        """The parts of the mask that are run again over the cache."""
        return tuple(leaf.rerun for leaf in self.leaves if leaf.rerun is not None)

    @property
    def key_rows(self) -> tuple[tuple[Node, StateSlot], ...]:
        """What a cache keeps of each token for the scores, besides K and V; a node once."""
        rows = {leaf.node: leaf.slot for leaf in self.leaves if leaf.kind == "key"}
        for mask in self.rerun:
            for key in mask.keys:
                rows.setdefault(key.node, key.slot)
        return tuple(rows.items())

    @property
    def sources(self) -> tuple[Node, ...]:
        """What the scores take from tokens besides queries and keys: it must be there token by token."""
        own = [leaf.node for leaf in self.leaves if leaf.kind in ("query", "key")]
        return (*own, *(node for mask in self.rerun for node in mask.sources))


@dataclass(frozen=True)
class LatentForm:
    """A site's attention over one latent row per token that all heads share (MLA's absorbed form).

    site: the same attention with q [B, num_qo_heads, S, R], k [B, 1, S, R] and v = k[..., :r]
    up:   [num_kv_heads of the expanded site, v_head_dim, r]: out = up @ (the result over the latents)
    bias: [num_kv_heads, v_head_dim], added after; or None
    """

    site: AttentionSite
    up: Node
    bias: Node | None

    @property
    def kept(self) -> tuple[Node, ...]:
        own = (self.site.q, self.site.k, self.site.v, self.up, *self.site.kept)
        return own if self.bias is None else (*own, self.bias)

    def moved(self, mapping: Mapping[Node, Node]) -> LatentForm:
        bias = None if self.bias is None else mapping.get(self.bias, self.bias)
        return LatentForm(self.site.moved(mapping), mapping.get(self.up, self.up), bias)


Side = Literal["query", "key", ""]


@dataclass(frozen=True)
class Leaf:
    """A tensor that a carried expression reads (`kvcompile/expression.py`).

    dims:  the node's dimensions of the batch, the query and the key; -1: none
    rerun: of a pair, how it is computed for new queries over all slots
    """

    kind: LeafKind
    node: Node
    dims: tuple[int, int, int] = (-1, -1, -1)
    rerun: DynamicMask | None = None

    @property
    def order(self) -> list[int]:
        """The node's dimensions as an expression reads it: batch, query, key, the rest; without those it lacks."""
        own = [dim for dim in self.dims if dim >= 0]
        return [*own, *(dim for dim in range(self.node.meta["val"].dim()) if dim not in own)]

    @property
    def slot(self) -> StateSlot:
        """What a cache keeps of each token, of a key's leaf."""
        val = self.node.meta["val"]
        rest = tuple(int(val.shape[dim]) for dim in self.order[2:])
        return StateSlot(self.node.name, rest, str(val.dtype).removeprefix("torch."))

    def moved(self, mapping: Mapping[Node, Node]) -> Leaf:
        """The leaf in a copy of the graph."""
        again = self.rerun and self.rerun.moved(mapping)
        return replace(self, node=mapping.get(self.node, self.node), rerun=again)


@dataclass(frozen=True)
class KeySide:
    """A token-local tensor that every later query's mask reads: cached as [B, 1, slots, *rest].

    batch, seq: its dimensions of these kinds; rest: sizes of one token's entry
    """

    node: Node
    batch: int
    seq: int
    rest: tuple[int, ...]

    @property
    def slot(self) -> StateSlot:
        return StateSlot(self.node.name, self.rest, str(self.node.meta["val"].dtype).removeprefix("torch."))


@dataclass(frozen=True)
class PositionalPart:
    """A part of a mask that positions alone decide, as an expression that is evaluated where queries and slots stand.

    dims:    the node's dimensions of the batch, of heads (-1: none), of queries and of keys; others are ones
    heads:   how many heads it tells apart
    program: its expression, as JSON of a `ScoreMod` whose score it is; tables: the weights that it reads
    """

    node: Node
    dims: tuple[int, int, int, int]
    heads: int
    program: str
    tables: tuple[Node, ...]


@dataclass(frozen=True)
class DynamicMask:
    """A mask that depends on activations, and how to build it for new queries over all slots
    (`passes/detect/dynamic_mask.py`).

    node:      over queries and keys, and perhaps the batch and heads; of any meaning
    region:    its subgraph over both axes, in graph order; `queries`, `keys` and `static` are what enters it
    sides:     which side each dimension of a node runs over
    positions: which side a use (user, used) of positions alone is on
    """

    node: Node
    region: tuple[Node, ...]
    queries: tuple[Node, ...]
    keys: tuple[KeySide, ...]
    static: tuple[PositionalPart, ...]
    sides: Mapping[Node, tuple[Side, ...]]
    positions: Mapping[tuple[Node, Node], Side]

    @property
    def sources(self) -> tuple[Node, ...]:
        """What enters the mask token by token."""
        return (*self.queries, *(key.node for key in self.keys))

    def moved(self, mapping: Mapping[Node, Node]) -> DynamicMask:
        """The mask in a copy of the graph; nodes that are not in `mapping` stay."""

        def move(node: Node) -> Node:
            return mapping.get(node, node)

        return DynamicMask(
            move(self.node),
            tuple(map(move, self.region)),
            tuple(map(move, self.queries)),
            tuple(replace(key, node=move(key.node)) for key in self.keys),
            tuple(
                replace(part, node=move(part.node), tables=tuple(map(move, part.tables)))
                for part in self.static
            ),
            {move(node): sides for node, sides in self.sides.items()},
            {(move(user), move(used)): side for (user, used), side in self.positions.items()},
        )


@dataclass(frozen=True)
class NoMatch:
    """Why a rule did not match: failure is data."""

    rule: str
    reason: str
    node: str = ""
    source: str = ""  # "file.py:123" in the model's own code, where known
    module_path: str = ""

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.module_path, self.source, self.node) if part)
        return f"[{self.rule}] {self.reason}" + (f" ({where})" if where else "")
