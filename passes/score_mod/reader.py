"""Reader: the scores of each attention block of one graph, translated, proved and put into a site's words."""

from __future__ import annotations

import math
from dataclasses import replace

import sympy
import torch
from torch.fx import Node

from kvcompile.expression import SCORE, B, Expr, H, K, Q, R, const, integer
from kvcompile.passes.dependence import Dependence
from kvcompile.passes.detect.refused import Refused
from kvcompile.passes.graph import descendants, expr, shape, target_name
from kvcompile.passes.score_mod.leaves import Untranslatable
from kvcompile.passes.score_mod.make import cast, le, make, where
from kvcompile.passes.score_mod.normal_form import summed, terms
from kvcompile.passes.score_mod.prove import Prover
from kvcompile.passes.score_mod.ranges import LONGEST
from kvcompile.passes.score_mod.rules import RULES
from kvcompile.passes.score_mod.site import Scores, scores_of
from kvcompile.passes.score_mod.translate import Places, Translator
from kvcompile.passes.score_mod.weights import NoSoftmax, Weights, bare, weights_of


class Reader:
    """Reads scores; what layers share is translated and proved once."""

    def __init__(self, dependence: Dependence):
        self.dependence = dependence
        self._translators: dict[tuple[int, int], Translator] = {}
        self._reach = LONGEST

    def translator(self, num_heads: int, channels: int = 1) -> Translator:
        """The translator of blocks of so many heads (and of vectors of so many channels, where those are read)."""
        key = (num_heads, channels)
        if key not in self._translators:
            ctx = self.dependence.ctx
            made = Translator(self.dependence, Prover(num_heads, channels), RULES, (ctx.batch, ctx.seq))
            self._translators[key] = made
        return self._translators[key]

    def heads(self, product: Node) -> int | None:
        """How many heads the batch dimensions of a product [.., S, .] hold beside the batch; None: none can be told."""
        total = sympy.Integer(1)
        for size in shape(product)[:-2]:
            total *= expr(size)
        found = total / self.dependence.ctx.batch
        return int(found) if found.is_Integer else None

    def repeats(
        self, operand: Node, product: Node, source: Node, order: tuple[int, ...], transposed: bool
    ) -> bool:
        """Whether operand[b, h, s, d] is source[b, h // G, s, d], whose dimensions stand in this order."""
        num_heads = self.heads(product)
        assert num_heads is not None
        sizes = shape(operand)
        channels = int(sizes[-2] if transposed else sizes[-1])
        t, behind = self.translator(num_heads, channels), descendants([source])
        try:
            rows = self.rows(product, shape(product)[:-2], num_heads, t)
            whole = (*rows, R, Q) if transposed else (*rows, Q, R)
            heads = int(shape(source)[order[1]])
            group = integer(num_heads // heads)
            head = integer(0) if heads == 1 else make("floordiv", torch.int64, H, group)
            wanted = dict(zip(order, (B, head, Q, integer(0) if channels == 1 else R), strict=True))
            found = Expr("moved", source.meta["val"].dtype)

            def stop(places: Places) -> Expr:
                if any(places[dim] is not place for dim, place in wanted.items()):
                    raise Untranslatable("another element", source)
                return found

            t.stops, t.moving = {source: stop}, True
            t.forget(behind)
            return t.element(operand, t.broadcast(operand, whole)) is found
        except (Untranslatable, Refused):
            return False
        finally:
            t.stops, t.moving = {}, False
            t.forget(behind)

    def sdpa(self, mask: Node | None, is_causal: bool, scale: float, num_heads: int, head_dim: int) -> Scores:
        """softmax(scale * q k^T + mask); raises Refused."""
        t = self.translator(num_heads)
        body = make("mul", torch.float32, SCORE, const(scale, torch.float32))
        hidden = const(-math.inf, torch.float32)
        if is_causal:
            body = where(le(K, Q), body, hidden)
        if mask is not None:
            try:
                found = t.element(mask, self._of_mask(mask))
            except Untranslatable as end:
                raise Refused(f"the mask passes through what cannot be carried: {end}") from end
            if found.is_bool:
                body = where(found, body, hidden)
            else:
                body = make("add", torch.float32, body, cast(found, torch.float32))
        return self._scores(Weights(body), t, num_heads, head_dim)

    def weighed(
        self, raw: Node, product: Node, num_heads: int, head_dim: int, gate: Node | None = None
    ) -> Scores:
        """What weighs the values in `product`, made of the raw scores `raw` [.., S, S]; raises Refused.

        gate: a factor behind the product that is made of the scores, and must stand for a sink
        """
        probabilities = product.args[0]
        assert isinstance(probabilities, Node)
        t = self.translator(num_heads)
        wanted = self.canonical(raw, num_heads)

        def stop(places: Places) -> Expr:
            if places != wanted:
                raise Untranslatable(
                    "the scores are read at other places than the query's and the key's", raw
                )
            return SCORE

        t.stops, t.behind = {raw: stop}, descendants([raw])
        try:
            found = t.element(probabilities, self.canonical(probabilities, num_heads))
            weights = weights_of(found)
            if gate is not None:
                weights = self._gated(weights, gate, product, num_heads)
        except Untranslatable as end:
            raise Refused(f"the scores pass through what cannot be carried: {end}") from end
        except NoSoftmax:
            names = ", ".join(_names(raw, probabilities))
            raise Refused(f"what weighs the values is not the softmax of the scores ({names})") from None
        finally:
            t.stops, t.behind = {}, set()
            t.forget(descendants([raw]))
        return self._scores(weights, t, num_heads, head_dim)

    def _gated(self, weights: Weights, gate: Node, product: Node, num_heads: int) -> Weights:
        """softmax(x) v sigmoid(logsumexp(x) - s) is softmax([x, s]) v, s weighing nothing."""
        t = self.translator(num_heads)
        places = (*self.rows(product, shape(product)[:-2], num_heads), Q, integer(0))
        found = bare(t.element(gate, t.broadcast(gate, places)))
        parts = terms(bare(found.args[0])) if found.op == "sigmoid" else []
        whole = [part for part in parts if part[0] > 0 and bare(part[1]).op == "reduce_lse"]
        if len(whole) != 1 or weights.sink is not None or bare(whole[0][1]).args[0] is not weights.body:
            raise NoSoftmax
        sink = summed([(-factor, term) for factor, term in parts if (factor, term) not in whole])
        return replace(weights, sink=sink)

    def _scores(self, weights: Weights, t: Translator, num_heads: int, head_dim: int) -> Scores:
        found = scores_of(weights, num_heads, head_dim, t.prover, t.tables)
        self._reach = min(self._reach, found.reach)
        return found

    def limit(self) -> tuple[int, str] | None:
        """For how many tokens what was read holds, and what ends there: a table, or the power of a mask to hide."""
        ends = [end for t in self._translators.values() if (end := t.tables.limit()) is not None]
        found = [(tokens, f"the table {node.name} of a mask or bias ends there") for tokens, node in ends]
        if self._reach < LONGEST:
            found.append((self._reach, "in longer texts a bias outweighs what the mask adds"))
        return min(found, default=None)

    def _of_mask(self, mask: Node) -> Places:
        """The places of a mask that broadcasts to [B, H, S, S]."""
        own = (B, H, Q, K)[4 - len(shape(mask)) :]
        return tuple(
            integer(0) if _one(size) else place for size, place in zip(shape(mask), own, strict=True)
        )

    def canonical(self, node: Node, num_heads: int) -> Places:
        """The places in [.., S, S] of query q, key k, sequence b and head h, heads in row-major order."""
        return (*self.rows(node, shape(node)[:-2], num_heads), Q, K)

    def rows(
        self, node: Node, sizes: tuple[object, ...], num_heads: int, t: Translator | None = None
    ) -> Places:
        """The places along batch dimensions of a product: sequences lead, heads are what is left, row-major."""
        batch = self.dependence.ctx.batch
        parts: list[tuple[int, int]] = []  # which dimension, how many heads
        lead = -1
        for dim, size in enumerate(sizes):
            found = expr(size)
            if found.is_Integer:
                parts.append((dim, int(found)))
                continue
            heads = found / batch
            if lead >= 0 or not heads.is_Integer:
                raise Refused(
                    f"the product's dimensions {tuple(map(str, shape(node)))} are not those of batch and heads"
                )
            lead = dim
            parts.append((dim, int(heads)))
        if lead < 0 or math.prod(count for _, count in parts) != num_heads:
            raise Refused(f"the batch is not part of the product's dimensions {tuple(map(str, shape(node)))}")
        t = t or self.translator(num_heads)
        digits: dict[int, Expr] = {}
        rest: Expr = H
        for dim, count in reversed(parts):
            if count == 1:
                digits[dim] = integer(0)
                continue
            rest, digits[dim] = t.split(rest, integer(count), node)
        found_places = []
        for dim in range(len(sizes)):
            place = digits[dim]
            if dim == lead:
                count = dict(parts)[dim]
                place = B if count == 1 else t.joined(B, place, integer(count))
            found_places.append(place)
        return tuple(found_places)


def _one(size: object) -> bool:
    found = expr(size)
    return bool(found.is_Integer and int(found) == 1)


def _names(raw: Node, probabilities: Node) -> list[str]:
    inside = descendants([raw])
    nodes = [node for node in raw.graph.nodes if node in inside and node is not raw]
    end = nodes.index(probabilities) if probabilities in nodes else len(nodes) - 1
    return list(dict.fromkeys(target_name(node) for node in nodes[: end + 1]))
