"""Rule `token_local`: outside its attention blocks, a decoder with a KV cache treats each token alone.

A convolution over the sequence, a token shift or a recurrence would need state of its own beside the KV cache. What
mixes tokens is derived (`passes/dependence`): every query, key, value and logit must be a function of its own token,
its position, results of attention there and of states that are carried (running sums, mixers), the same whatever the
length.

Evaluating is the second line: attention results are replaced by fixed random values, one token of each row changes
(in the middle, the first, the last), and all at the other positions must stay. Of modules that run as Python nothing
can be derived, so for them it decides, over 300 tokens of the whole vocabulary (fewer, where positions end), and rule
`alone`; `unproved` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from kvcompile.kernels.ops.opaque import find, opaque
from kvcompile.passes.capture.opaque import is_mixer
from kvcompile.passes.dependence import Dependence
from kvcompile.passes.graph import ancestors, expr, shape
from kvcompile.passes.probe.evaluate import fetch_attr
from kvcompile.passes.probe.probe import Prober
from kvcompile.passes.records import AttentionSite, NoMatch
from kvcompile.passes.rewrite.running_sum import is_running_sum
from kvcompile.passes.rules import alone
from kvcompile.passes.rules.block import no_match

NAME = "token_local"
_BATCH, _SEQ, _LONG = 3, 13, 307


def check(
    sites: Sequence[AttentionSite],
    logits: Node,
    prober: Prober,
    dependence: Dependence | None = None,
    most: Callable[[], int | None] = lambda: None,
) -> NoMatch | None:
    """None when tokens only meet in the attention blocks, else where they meet first.

    dependence: of the prober's graph, with the results of all sites cut; None: made here
    most: how many tokens the model has positions for, asked where many are run; None: no end is known
    """
    analysis = dependence or analysed(sites, prober)
    wanted = operands(sites)
    found = analysis.problem(wanted, [logits])
    if found is not None:
        return found
    keys = analysis.opaque([*wanted, logits])
    trial = _Trial(sites, logits, prober, tried(most()) if keys else _SEQ)
    return trial.mixed() or trial.not_alone([n for n in logits.graph.nodes if _key(n) in keys], analysis)


def tried(most: int | None) -> int:
    """How many tokens modules that run as Python are run with, of a model that has positions for `most`."""
    return _LONG if most is None else min(_LONG, most)


def analysed(sites: Sequence[AttentionSite], prober: Prober) -> Dependence:
    """The analysis of a graph whose attention blocks are known."""
    analysis = Dependence(prober.graph_module)
    for site in sites:
        analysis.cut(site.out)
    return analysis


def operands(sites: Sequence[AttentionSite]) -> list[Node]:
    """What enters the attention blocks token by token."""
    found = [node for site in sites for node in (site.q, site.k, site.v)]
    return found + [node for site in sites for node in site.sources]


def unproved(
    sites: Sequence[AttentionSite], logits: Node, dependence: Dependence, most: int | None = None
) -> tuple[NoMatch, ...]:
    """Modules that run as Python on the way to queries, keys, values and logits: checked by running, not proved.

    most: how many tokens the model has positions for
    """
    keys = set(dependence.opaque([*operands(sites), logits]))
    calls = [node for node in logits.graph.nodes if _key(node) in keys]
    text = "treats each token alone as far as running it shows ({} tokens); it runs as Python and cannot be proved"
    return tuple(
        no_match(NAME, f"{find(str(node.args[1])).path} {text.format(tried(most))}", node) for node in calls
    )


def _key(node: Node) -> object:
    """Of the module that runs as Python which a node calls."""
    return node.args[1] if node.target is opaque else None


@dataclass(frozen=True)
class _Trial:
    """Two evaluations of one graph, with one token of each row changed between them."""

    sites: Sequence[AttentionSite]
    logits: Node
    prober: Prober
    tokens: int

    @property
    def changed(self) -> tuple[int, ...]:
        """The token of each row that is changed."""
        return (self.tokens // 2, 0, self.tokens - 1)

    def mixed(self) -> NoMatch | None:
        """The first node at which another position changes than that of the changed token."""
        held, nodes, states = self._held()
        given = [source for node in states for source in node.all_input_nodes]
        wanted = list(dict.fromkeys([*operands(self.sites), *given, self.logits]))
        counted = self._different(wanted, held, exact=True)
        if not counted:
            return None
        # Only now, with a message to write: the first node of all at which another position changes.
        every = [node for node in nodes if node.op == "call_function" and shape(node) and node not in held]
        first = (self._different(every, held) or counted)[0]
        return no_match(
            NAME, f"tokens mix outside attention, in {first.target}: that needs state besides K and V", first
        )

    def not_alone(self, calls: Sequence[Node], analysis: Dependence) -> NoMatch | None:
        """The first of the modules that run as Python which does not treat tokens alone."""
        held = self._held()[0] if calls else {}
        for node in calls:
            given = node.args[0]
            assert isinstance(given, (list, tuple))
            sources = [each for each in given if isinstance(each, Node)]
            places = [analysis.is_positional(source) for source in sources]
            found = alone.check(node, self._evaluate(sources, held, False), places)
            if found is not None:
                return found
        return None

    def _held(self) -> tuple[dict[Node, Any], list[Node], list[Node]]:
        """Values for what tokens may get from others; the nodes that are needed; those among them with a state."""
        generator = torch.Generator().manual_seed(0)
        held: dict[Node, Any] = {}
        for site in self.sites:
            values = torch.randn(self.prober.concrete(site.out, _BATCH, self.tokens), generator=generator)
            held[site.out] = values.to(self.prober.device, site.out.meta["val"].dtype)
        needed = ancestors([*operands(self.sites), self.logits], set(held))
        nodes = [node for node in self.logits.graph.nodes if node in needed]
        states = [node for node in nodes if is_mixer(node) or is_running_sum(node)]
        held |= dict(zip(states, self._evaluate(states, held, False), strict=True))
        return held, nodes, states

    def _different(self, nodes: list[Node], held: dict[Node, Any], exact: bool = False) -> list[Node]:
        before, after = (self._evaluate(nodes, held, changed) for changed in (False, True))
        pairs = zip(nodes, before, after, strict=True)
        return [node for node, a, b in pairs if self._differs(node, a, b, exact)]

    def _evaluate(self, wanted: list[Node], held: dict[Node, Any], changed: bool) -> list[Tensor]:
        inputs = self.prober.inputs(_BATCH, self.tokens)
        ids = self._ids()
        for row, column in enumerate(self.changed if changed else ()):
            ids[row, column] = (ids[row, column] + 1) % self._vocabulary()
        inputs["input_ids"] = ids.to(self.prober.device)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = torch.arange(self.tokens, device=self.prober.device)
        return self.prober.evaluate(wanted, inputs, held)

    def _ids(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, self._vocabulary(), (_BATCH, self.tokens), generator=generator)

    def _vocabulary(self) -> int:
        """How many ids there are: rows of the smallest table that the ids index as they are; two where none is."""
        ids = self.prober.placeholders["input_ids"]
        tables = [user.args[0] for user in ids.users if user.target is torch.ops.aten.embedding.default]
        sizes = [
            fetch_attr(self.prober.graph_module, str(table.target)).shape[0]
            for table in tables
            if isinstance(table, Node) and table.op == "get_attr"
        ]
        return int(min(sizes)) if sizes else 2

    def _differs(self, node: Node, before: Tensor, after: Tensor, exact: bool) -> bool:
        """Whether anything but the changed position of each row changed; nodes without both axes say nothing.

        exact: of integers, too (elsewhere they are indices, of which an order says nothing).
        """
        prober, sizes = self.prober, [expr(size) for size in shape(node)]
        rows = [i for i, size in enumerate(sizes) if size == prober.batch]
        columns = [i for i, size in enumerate(sizes) if size in (prober.seq, prober.keep)]
        if len(rows) != 1 or len(columns) != 1 or not (exact or before.is_floating_point()):
            return False
        change = (after.float() - before.float()).abs().nan_to_num()
        change = change.movedim((rows[0], columns[0]), (0, 1)).reshape(_BATCH, self.tokens, -1).amax(-1)
        for row, column in enumerate(self.changed):
            change[row, column] = 0
        tolerance = 1e-4 if before.dtype in (torch.float32, torch.float64) else 3e-2
        return bool(change.max() > tolerance * before.float().abs().max().clamp(max=1e6))
