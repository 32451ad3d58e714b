"""Probing: what a mask shows and what happens to the scores, found by evaluating the graph, never assumed.

The value that enters the softmax, as a function of the raw scores T = Q K^T, is evaluated for concrete T,
lengths and tokens, and compared with

    f(T) = sm_scale * T + (row constant)   where the mask shows a key,
    f(T) <= -1000 below the row's largest   where it hides one.

Masks are compared with causal (j <= i) and sliding(W) (i - W < j <= i) at several lengths: 29, 67, the
length of every table in the mask subgraph, and beyond every integer constant in it, so no window or chunk
escapes. Where that length is too large to evaluate, the large constants are *shrunk* (all by the same
amount, twice) and the window found must follow them exactly. Two batch rows and two token inputs: a mask
that differs is padding or data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvcompile.passes.base import ancestors, expr, shape, target_name
from kvcompile.passes.evaluate import evaluate, fetch_attr
from kvcompile.types import MaskSpec

_HIDDEN = (
    -1000.0
)  # a hidden key's score lies at least this far below; masks use -1e4, -1e9, finfo.min or -inf
_LENGTHS = (29, 67)
_BUDGET = 2**25  # elements of one probed mask; 4096 + margin squared fits, 32768 squared does not
_MARGIN = 33


class Refused(Exception):
    """A probe found something that no canonical attention expresses; the text is the exact reason."""


@dataclass(frozen=True)
class Probed:
    """What a probe found out about one attention block."""

    sm_scale: float
    mask: MaskSpec


class Prober:
    """Evaluates parts of one captured graph at concrete sizes, and remembers masks that layers share."""

    def __init__(self, graph_module: GraphModule, max_seq_len: int | None = None):
        self.graph_module = graph_module
        self.max_seq_len = max_seq_len or 2**31
        self.placeholders = {str(n.target): n for n in graph_module.graph.nodes if n.op == "placeholder"}
        ids = self.placeholders["input_ids"].meta["val"]
        self.device = ids.device
        self.batch, self.seq = (expr(dim) for dim in ids.shape)
        keep = self.placeholders.get("logits_to_keep")
        self.keep = None if keep is None else expr(shape(keep)[0])  # the symbol of K
        self._masks: dict[Any, MaskSpec | Refused] = {}
        self._leaves: dict[Any, list[Any]] = {}

    def inputs(self, batch: int, seq: int, seed: int = 0) -> dict[str, Tensor]:
        """Placeholder values: tokens in {0, 1} (every vocabulary has them), positions as arange rows."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 2, (batch, seq), generator=generator)
        values = {
            "input_ids": tokens,
            "position_ids": torch.arange(seq).repeat(batch, 1),
            "logits_to_keep": torch.arange(min(seq, 3)),
        }
        return {name: values[name].to(self.device) for name in self.placeholders if name in values}

    def size(self, dim: Any, batch: int, seq: int) -> int:
        """A symbolic dimension at concrete sizes."""
        return int(expr(dim).subs({self.batch: batch, self.seq: seq}))

    def concrete(self, node: Node, batch: int, seq: int) -> tuple[int, ...]:
        return tuple(self.size(dim, batch, seq) for dim in shape(node))

    def run(
        self,
        outputs: list[Node],
        batch: int,
        seq: int,
        overrides: dict[Node, Any] | None = None,
        seed: int = 0,
        constant: Callable[[int], int] | None = None,
    ) -> list[Any]:
        """Values of `outputs` at concrete sizes; raises Refused where an operator declines them."""
        try:
            return evaluate(self.graph_module, outputs, self.inputs(batch, seq, seed), overrides, constant)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise Refused(f"the graph cannot be evaluated at length {seq}: {reason[:200]}") from error

    def evaluate(
        self, outputs: list[Node], inputs: dict[str, Tensor], overrides: dict[Node, Any]
    ) -> list[Tensor]:
        return evaluate(self.graph_module, outputs, inputs, overrides)

    def scores(self, raw: Node, final: Node, head_dim: int) -> Probed:
        """Scale and mask between the raw scores [.., S, S] and the softmax input; raises Refused."""
        chain = _between(raw, final)
        leaves = [n for node in chain for n in node.all_input_nodes if n not in chain and n is not raw]
        leaves = list(dict.fromkeys(leaf for leaf in leaves if leaf.op != "get_attr" and shape(leaf)))

        def masked(
            batch: int, seq: int, seed: int, constant: Callable[[int], int] | None, factor: float
        ) -> Tensor:
            """f(factor * R) for a fixed random R; factor 0 shows the mask alone."""
            size = self.concrete(raw, batch, seq)
            ramp = torch.zeros(size, dtype=torch.float64, device=self.device)
            if factor:
                generator = torch.Generator().manual_seed(seq)
                ramp = factor * torch.randn(size, generator=generator, dtype=torch.float64).to(self.device)
            # float64 finds the scale exactly even where the model computes in bfloat16; some ops decline it
            for dtype in (torch.float64, raw.meta["val"].dtype):
                try:
                    known = (
                        {}
                        if constant
                        else dict(zip(leaves, self._shared(leaves, batch, seq, seed), strict=True))
                    )
                    found = self.run([final], batch, seq, {raw: ramp.to(dtype), **known}, seed, constant)[0]
                    return _rows(found.double(), batch)
                except Refused:
                    if dtype != torch.float64:
                        raise
            raise AssertionError

        batch, seq = 2, _LENGTHS[0]
        visible, base = _visible(masked(batch, seq, 0, None, 0.0))
        again, base_again = _visible(masked(batch, seq, 1, None, 0.0))
        if not torch.equal(visible, again):
            raise Refused("the mask depends on the tokens or on activations, not on positions alone")
        if not torch.equal(base, base_again):
            raise Refused(
                "the scores get a bias that depends on the tokens or on activations, not supported yet"
            )
        pattern = _one_pattern(visible)
        self._check_bias(base, visible)
        signature = (tuple(leaves), tuple(_signature(node, raw, leaves) for node in chain))
        if signature not in self._masks:

            def probe(batch: int, seq: int, constant: Callable[[int], int] | None) -> Tensor:
                return _one_pattern(_visible(masked(batch, seq, 0, constant, 0.0))[0])

            heads = math.prod(self.concrete(raw, 1, 1))
            self._masks[signature] = self._attempt(probe, pattern, final, raw, heads)
        mask = self._masks[signature]
        if isinstance(mask, Refused):
            raise mask
        return Probed(self._scale(masked, visible, chain, head_dim), mask)

    def mask(self, node: Node) -> MaskSpec:
        """The mask that an attn_mask argument (boolean, or added to the scores) is; raises Refused."""

        def raw(batch: int, seq: int, seed: int, constant: Callable[[int], int] | None) -> Tensor:
            found: Tensor = self.run([node], batch, seq, None, seed, constant)[0]
            return (
                found.expand(*([1] * (4 - found.dim())), *found.shape[:-2], seq, seq)
                if found.dim() < 4
                else found
            )

        def shown(batch: int, seq: int, seed: int, constant: Callable[[int], int] | None) -> Tensor:
            found = raw(batch, seq, seed, constant)
            return found if found.dtype == torch.bool else _visible(found.double())[0]

        if node not in self._masks:
            first, second = raw(2, _LENGTHS[0], 0, None), raw(2, _LENGTHS[0], 1, None)
            if not torch.equal(first, second):
                raise Refused("the mask depends on the tokens or on activations, not on positions alone")
            if first.dtype != torch.bool:
                visible, base = _visible(first.double())
                self._check_bias(base, visible)
            pattern = _one_pattern(shown(2, _LENGTHS[0], 0, None))
            heads = math.prod(self.concrete(node, 1, 1))
            self._masks[node] = self._attempt(
                lambda batch, seq, constant: _one_pattern(shown(batch, seq, 0, constant)),
                pattern,
                node,
                None,
                heads,
            )
        mask = self._masks[node]
        if isinstance(mask, Refused):
            raise mask
        return mask

    def _shared(self, leaves: list[Node], batch: int, seq: int, seed: int) -> list[Any]:
        """Values of the nodes that enter a score chain from outside; layers share them."""
        if seq > 256:  # large masks are not worth keeping
            return self.run(leaves, batch, seq, None, seed) if leaves else []
        key = (tuple(leaves), batch, seq, seed)
        if key not in self._leaves:
            self._leaves[key] = self.run(leaves, batch, seq, None, seed) if leaves else []
        return self._leaves[key]

    def _attempt(
        self, probe: _Probe, pattern: Tensor, final: Node, raw: Node | None, heads: int
    ) -> MaskSpec | Refused:
        try:
            return self._classify(probe, pattern, final, raw, heads)
        except Refused as refused:
            return refused

    def _classify(
        self, probe: _Probe, pattern: Tensor, final: Node, raw: Node | None, heads: int
    ) -> MaskSpec:
        """Compare the mask with causal and sliding at every length that could tell a difference."""
        region = ancestors([final], {raw} if raw is not None else set())
        constants, tables = self._constants(region)
        short = _window(pattern)
        windows: dict[int, int | None] = {pattern.shape[-1]: short}
        lengths = {_LENGTHS[1], *(n for n in tables if n > _LENGTHS[0])}
        lengths |= {constant + _MARGIN for constant in constants}
        lengths = {min(length, self.max_seq_len) for length in lengths}
        affordable = sorted(length for length in lengths if heads * length * length <= _BUDGET)
        for length in affordable:
            windows[length] = _window(probe(1, length, None))
        found = {window for window in windows.values() if window is not None}
        large = sorted(c for c in constants if heads * (c + _MARGIN) ** 2 > _BUDGET and c < self.max_seq_len)
        if large:
            found |= self._shrunk(probe, large)
        if any(n not in affordable and n <= self.max_seq_len for n in tables if n > _LENGTHS[0]):
            raise Refused(f"the mask is a table of {max(tables)} positions, too large to check")
        if len(found) > 1:
            raise Refused(f"the mask's window changes with the length: {sorted(found)}")
        if not found:
            return MaskSpec("causal")
        window = found.pop()
        for length, seen in windows.items():
            if seen is None and length > window:
                raise Refused(f"the mask is sliding({window}) at some lengths and causal at {length}")
        return MaskSpec("sliding", window)

    def _shrunk(self, probe: _Probe, large: list[int]) -> set[int]:
        """Classify with the large constants replaced by small ones: the window must follow them."""
        if large[-1] - large[0] > 16:
            raise Refused(f"the mask has several large constants {large}, more than a probe can tell apart")
        results = set()
        for small in (11, 19):
            shift = large[0] - small
            shrink = {**{n: n - shift for n in large}, **{-n: shift - n for n in large}}
            found = _window(probe(1, _LENGTHS[1], partial(_replace, shrink)), shift)
            results.add(None if found is None else found + shift)
        if len(results) > 1:
            raise Refused("the mask depends on a large constant in a way that is not a window")
        return {window for window in results if window is not None}

    def _constants(self, region: set[Node]) -> tuple[set[int], set[int]]:
        """Integer constants above the probe length, and lengths of tables, in a mask subgraph."""
        constants: set[int] = set()
        tables: set[int] = set()
        for node in region:
            if node.op == "get_attr":
                tensor = fetch_attr(self.graph_module, str(node.target))
                if isinstance(tensor, Tensor) and tensor.dim():
                    tables.update(tensor.shape)
                elif isinstance(tensor, Tensor) and not tensor.is_floating_point():
                    constants.add(abs(int(tensor)))
            for leaf in torch.utils._pytree.tree_leaves((node.args, dict(node.kwargs))):
                if isinstance(leaf, (int, float)) and not isinstance(leaf, bool) and float(leaf).is_integer():
                    constants.add(abs(int(leaf)))
        return {c for c in constants if _LENGTHS[0] <= c < 2**30}, tables

    @staticmethod
    def _check_bias(base: Tensor, visible: Tensor) -> None:
        """What the visible scores get besides the scaled product must be one constant per row."""
        rows = base.masked_fill(~visible, float("nan"))
        reference = rows.nan_to_num(nan=math.inf).amin(-1, keepdim=True)
        spread = (rows - reference).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        if float(spread.abs().max()) > 1e-6:
            raise Refused("the scores get a bias that depends on positions (ALiBi-like), not supported yet")

    @staticmethod
    def _scale(masked: Callable[..., Tensor], visible: Tensor, chain: list[Node], head_dim: int) -> float:
        """The slope of the softmax input over the raw scores; raises Refused where it is not one number."""
        batch, seq = visible.shape[0], visible.shape[-1]
        generator = torch.Generator().manual_seed(seq)
        count = visible[0].numel() * batch
        ramp = (
            torch.randn(count, generator=generator, dtype=torch.float64)
            .reshape(visible.shape)
            .to(visible.device)
        )
        slopes = []
        diagonal = torch.eye(seq, dtype=torch.bool, device=visible.device)
        lower = visible & ~diagonal
        steps = ramp - ramp.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        for factor in (1.0, 64.0):
            found = masked(batch, seq, 0, None, factor)
            rises = found - found.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
            x, y = steps[lower] * factor, rises[lower]
            slope = float((x * y).sum() / (x * x).sum())
            if float((y - slope * x).abs().max()) > 1e-2 * abs(slope) * float(x.abs().max()):
                raise Refused(_non_affine(masked, visible, chain))
            slopes.append(slope)
        if not math.isclose(slopes[0], slopes[1], rel_tol=1e-2):
            raise Refused(_non_affine(masked, visible, chain))
        slope = slopes[1]
        usual = head_dim**-0.5
        return usual if math.isclose(slope, usual, rel_tol=1e-6) else slope


_Probe = Callable[[int, int, "Callable[[int], int] | None"], Tensor]


def _replace(replacements: dict[int, int], number: int) -> int:
    return replacements.get(number, number)


def _between(raw: Node, final: Node) -> list[Node]:
    """The nodes computed from `raw` that `final` needs, in graph order."""
    behind = ancestors([final], {raw})
    inside = {raw}
    chain = []
    for node in raw.graph.nodes:
        if node in behind and node not in inside and any(used in inside for used in node.all_input_nodes):
            inside.add(node)
            chain.append(node)
    return chain


def _signature(node: Node, raw: Node, leaves: list[Node]) -> Any:
    """A node of a score chain without its identity: two layers with equal signatures mask alike."""
    plain = [
        leaf if not isinstance(leaf, Node) or leaf in leaves else "chain"
        for leaf in torch.utils._pytree.tree_leaves((node.args, dict(node.kwargs)))
    ]
    names = [n.target for n in node.all_input_nodes if n.op == "get_attr"]
    return (str(node.target), str(plain), str(names))


def _rows(found: Tensor, batch: int) -> Tensor:
    """[.., S, S] -> [B, H, S, S]."""
    return (
        found.expand(batch, *found.shape) if found.dim() == 2 else found.reshape(batch, -1, *found.shape[-2:])
    )


def _visible(found: Tensor) -> tuple[Tensor, Tensor]:
    """Which keys are shown, and the values, of a softmax input for zero scores."""
    top = found.amax(-1, keepdim=True)
    shift = torch.where(top > _HIDDEN, top, torch.zeros_like(top))  # a row that hides everything stays hidden
    return found > shift + _HIDDEN, found


def _one_pattern(visible: Tensor) -> Tensor:
    """[B, H, S, S] -> [S, S] when batch rows and heads agree; raises Refused otherwise."""
    pattern = visible.reshape(-1, *visible.shape[-2:])
    if visible.dim() == 4 and not torch.equal(visible, visible[:1].expand_as(visible)):
        raise Refused("the mask differs between the sequences of a batch")
    if not torch.equal(pattern, pattern[:1].expand_as(pattern)):
        raise Refused("the mask differs between heads")
    return pattern[0]


def _window(pattern: Tensor, shift: int = 0) -> int | None:
    """None for causal, W for sliding(W); raises Refused saying what is seen that should not be.

    shift: by how much the mask's constants were shrunk, for the message.
    """
    size = pattern.shape[-1]
    if pattern.shape[-2] != size:
        raise Refused(f"the mask has {pattern.shape[-2]} queries for {size} keys")
    position = torch.arange(size, device=pattern.device)
    past = position[:, None] >= position[None, :]
    future = pattern & ~past
    if future.any():
        if pattern.all():
            raise Refused("the mask is bidirectional: query 3 sees key 7")
        query, key = (int(i) for i in future.nonzero()[0])
        raise Refused(f"the mask shows the future: query {query} sees key {key}")
    own = pattern.diagonal()
    if not own.all():
        query = int((~own).nonzero()[0, 0])
        raise Refused(f"the mask hides the present: query {query} does not see its own key")
    width = int(pattern[-1].sum())
    band = past & (position[:, None] - position[None, :] < width)
    if torch.equal(pattern, band):
        return None if width == size else width
    chunk = int(pattern[:, 0].sum())
    if torch.equal(pattern, past & (position[:, None] // chunk == position[None, :] // chunk)):
        raise Refused(f"the mask is chunked({chunk + shift}), not supported yet")
    query, key = (int(i) for i in (pattern != past).nonzero()[0])
    raise Refused(f"the mask is neither causal nor a sliding window: query {query} does not see key {key}")


def _non_affine(masked: Callable[..., Tensor], visible: Tensor, chain: list[Node]) -> str:
    """Name what the scores pass through: a softcap saturates."""
    names = [target_name(node) for node in chain]
    if "tanh" in names:
        batch, seq = visible.shape[0], visible.shape[-1]
        cap = float(masked(batch, seq, 0, None, 1e6)[visible].abs().max())
        return f"softcap {cap:g} of the scores is not supported yet"
    return (
        f"the scores pass through a function that is not scale and mask ({', '.join(dict.fromkeys(names))})"
    )


__all__ = ["Probed", "Prober", "Refused"]
