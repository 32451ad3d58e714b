"""The oracle's runs: the canonical graph, every attention by its policy over the whole sequence.

The policies are `kernels/oracle/attention.py`. A run may be disturbed: every q, k, v and attention result times
1 + a u, u uniform in [-1, 1), a of a few units in the last place (`ULPS`). How far that moves the outputs is what two
correct orders of summation may differ by (`compare.py`).

Several runs of a short text are one run of as many times its rows: each weight is read once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from kvcompile.errors import VerificationError
from kvcompile.kernels.ops import opaque
from kvcompile.kernels.oracle.attention import attention
from kvcompile.kernels.oracle.choice import Choice
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import InKeys, Storage, model_dtype
from kvcompile.passes.capture.opaque import is_mixer
from kvcompile.passes.graph import descendants, shape
from kvcompile.passes.probe.steps import Steps
from kvcompile.passes.records import AttentionSite
from kvcompile.passes.rewrite.insert_cache import Rewritten
from kvcompile.pipeline import Front, example_inputs
from kvcompile.plan import Decision, Plan
from kvcompile.verify.compare import Check
from kvcompile.verify.runs import REPORT, Run, chosen, of_every_token

# Disturbance of the oracle, in units of the dtype's epsilon. Sums of float32 products round in float32, a little
# at every step; those of half precision are kept in float32 and rounded once.
ULPS = {torch.float32: 4.0, torch.bfloat16: 1.0, torch.float16: 1.0}
_HALF = {torch.bfloat16, torch.float16}
QUANTIZED = 2.0**-15  # disturbance of what is quantized, at least
# How many disturbed runs are made, one number after the other until they explain an error, where vectors are rounded to
# few steps: then a handful of values on the edge between two of them make most of what a disturbance moves, and most
# runs have none. (2 bits in float16: half of 40 runs below 1.5e-3, one at 4.4e-3.)
_ROUNDED_RUNS = (1, 3, 12)
_TOGETHER = 256  # tokens of all runs that are rows of one, at most: more are no quicker so


def oracles(
    front: Front,
    plan: Plan,
    tables: dict[int, list[Tensor]],
    ids: Tensor,
    pads: Tensor,
    chunks: Sequence[int] = (),
    kept: Mapping[int, Sequence[Tensor]] | None = None,
    keep: Tensor | None = None,
    sites: int | None = None,
    disturbed: int = 1,
) -> tuple[Run, list[Run]]:
    """The policy's full-sequence run, as it is and disturbed; chunks and kept: of a cached run, for scored layers.

    keep: positions whose logits are wanted; None: all
    sites: how many sites are run, the first ones; then there are no logits. None: all
    disturbed: how many disturbed runs
    """
    seeds = [None, *range(1, 1 + disturbed)]
    at_once = [seeds] if _side_by_side(front, plan, ids.numel() * len(seeds)) else [[seed] for seed in seeds]
    undisturbed, *noisy = (
        run
        for some in at_once
        for run in Oracle(front, plan, tables, pads, some, chunks, kept, sites).run_on(ids, keep)
    )
    return undisturbed, noisy


def _side_by_side(front: Front, plan: Plan, tokens: int) -> bool:
    """Whether runs of so many tokens in all are rows of one: where rows have nothing to do with each other, which is
    proved of graphs alone, and where no choice by scores belongs to a row."""
    alone = not front.captured.opaques and all(d.layout.followed is None for d in plan.decisions)
    return alone and tokens <= _TOGETHER and all(map(_has_rows, front.sites))


def _has_rows(site: AttentionSite) -> bool:
    """Whether all that a site is given has the batch's rows."""
    given = [site.q, site.k, site.v, *((site.rope.q_input, site.rope.k_input) if site.rope else ())]
    return all(isinstance(shape(node)[0], torch.SymInt) for node in given)


def explained(plan: Plan, check: Callable[[int], Check]) -> Check:
    """`check(disturbed)`, with as many disturbed runs as it takes: what a few allow, more of them allow as well.

    Raises:
        VerificationError: the error is not explained by the most of them.
    """
    storages = [storage for d in plan.decisions for storage in (d.layout.keys, d.layout.values)]
    *few, most = (1,) if all(storage.exact(plan.torch_dtype) for storage in storages) else _ROUNDED_RUNS
    for disturbed in few:
        with suppress(VerificationError):
            return check(disturbed)
    return check(most)


def rope_tables(
    front: Front, plan: Plan, rewritten: Rewritten, constants: dict[str, Tensor]
) -> dict[int, list[Tensor]]:
    """[cos, sin] of each layer that counts positions in the cache."""
    names = {table.rope.table: (table.cos_name, table.sin_name) for table in rewritten.ropes}
    tables = {}
    for site, decision in zip(front.sites, plan.decisions, strict=True):
        if decision.rotary is not None and site.rope is not None:
            tables[site.layer] = [constants[name] for name in names[site.rope.table]]
    return tables


def _rounded_after(front: Front) -> dict[Node, float]:
    """By the node of a site in a wider dtype than what follows it: a unit in the last place of the latter.

    The last bit of float32 decides now and then to which number of bfloat16 a result is rounded. Few of them are, in a
    disturbed run others than in a correct one; so what later sites are given is disturbed by as much as that moves it.
    """
    wide = [site for site in front.sites if site.dtype.itemsize > 2]
    if not wide or all(node.meta["val"].dtype not in _HALF for node in _tensors(front.canonical.graph.nodes)):
        return {}
    found = {}
    for site in wide:
        dtypes = {node.meta["val"].dtype for node in _tensors(descendants([site.out]))}
        if halves := dtypes & _HALF:
            found[site.out] = max(ULPS[dtype] * torch.finfo(dtype).eps for dtype in halves)
    return found


def _tensors(nodes: Iterable[Node]) -> Iterator[Node]:
    return (node for node in nodes if isinstance(node.meta.get("val"), Tensor))


class Enough(Exception):
    """The sites that were asked for have run."""


def _read(front: Front) -> dict[Node, list[Node]]:
    """By a site's node, what its oracle may read."""
    order = {node: place for place, node in enumerate(front.canonical.graph.nodes)}
    return {
        site.out: [n for n in _nodes(site) if order.get(n, len(order)) < order[site.out]]
        for site in front.sites
    }


def _nodes(record: Any) -> Iterator[Node]:
    """All nodes that a site's record names, in whatever field: its oracle may read any of them."""
    if isinstance(record, Node):
        yield record
    elif isinstance(record, Mapping):
        yield from (node for item in record.items() for node in _nodes(item))
    elif isinstance(record, (list, tuple, set, frozenset)):
        yield from (node for item in record for node in _nodes(item))
    elif is_dataclass(record) and not isinstance(record, type):
        yield from (node for field in fields(record) for node in _nodes(getattr(record, field.name)))


class Oracle(Steps):
    """Runs the canonical graph with every attention replaced by its policy's oracle.

    seeds: of the runs that are made at once, row behind row; None: one that is not disturbed
    """

    def __init__(
        self,
        front: Front,
        plan: Plan,
        tables: dict[int, list[Tensor]],
        pads: Tensor,
        seeds: Sequence[int | None] = (None,),
        chunks: Sequence[int] = (),
        kept: Mapping[int, Sequence[Tensor]] | None = None,
        sites: int | None = None,
    ):
        super().__init__(front.canonical, _read(front))
        self.chunks, self.kept = chunks, kept or {}
        self.count = len(front.sites) if sites is None else sites
        self.choices: dict[int, list[Choice]] = {}
        self.front, self.plan, self.tables = front, plan, tables
        self.pads = pads.repeat(len(seeds))
        self.sites = {
            site.out: (site, decision) for site, decision in zip(front.sites, plan.decisions, strict=True)
        }
        self.rounded = _rounded_after(front)
        self.outputs: list[Tensor] = []
        # On the host: results stand on the devices of their layers.
        self.generators = [None if seed is None else torch.Generator().manual_seed(seed) for seed in seeds]

    def run_on(self, ids: Tensor, keep: Tensor | None = None) -> list[Run]:
        """One run for each of the seeds, over the same ids."""
        whole = self._run_on(ids.repeat(len(self.generators), 1), keep)
        if len(self.generators) == 1:
            return [whole]
        logits, *sites = (x.chunk(len(self.generators)) for x in (whole.logits, *whole.sites))
        return [Run(of, tuple(own)) for of, *own in zip(logits, *sites, strict=True)]

    def _run_on(self, ids: Tensor, keep: Tensor | None) -> Run:
        inputs = example_inputs(self.front, *ids.shape) | {"input_ids": ids}
        fewer = keep is not None and "logits_to_keep" in inputs
        if fewer:
            inputs["logits_to_keep"] = keep
        if "position_ids" in inputs:
            inputs["position_ids"] = (inputs["position_ids"] - self.pads[:, None]).clamp(min=0)
        names = [n.name for n in self.front.canonical.graph.nodes if n.op == "placeholder"]
        try:
            with torch.no_grad():
                out = self.run(*[inputs[name] for name in names])
        except Enough:
            return Run(ids.new_zeros(*ids.shape, 0), tuple(self.outputs), choices=self.choices)
        logits = out[self.front.captured.logits_index].to(ids.device)
        logits = (
            of_every_token(logits, ids[:, : len(keep)])
            if fewer and keep is not None
            else chosen(logits, ids, keep)
        )
        return Run(logits, tuple(self.outputs), choices=self.choices)

    def run_node(self, node: Node) -> Any:
        if is_mixer(node):
            return self._mixer(node)
        if node not in self.sites:
            return super().run_node(node)
        site, decision = self.sites[node]
        q, k, v = site.q, site.k, site.v
        if decision.rotary is not None:
            assert site.rope is not None
            q, k = site.rope.q_input, site.rope.k_input
        storages = (model_dtype(), decision.layout.keys, decision.layout.values)
        q_in, k_in, v_in = (
            self._disturbed(self.env[of], storage) for of, storage in zip((q, k, v), storages, strict=True)
        )
        spec = SiteSpec(decision.layout, decision.sm_scale, decision.mask, site.score, rotary=decision.rotary)
        sinks, bias = (None if of is None else self.env[of] for of in (site.sinks, site.bias))
        read = node.kwargs.get("leaves") or ()
        assert isinstance(read, (list, tuple))
        leaves = [self.env[leaf] for leaf in read if isinstance(leaf, Node)]
        known = {name: torch.tensor(values, device=q_in.device) for name, values in decision.scales}
        scales = (known.get("keys.scale"), known.get("values.scale"))
        rope = [table.to(q_in.device) for table in self.tables.get(site.layer, [])]
        held = [note.to(q_in.device) for note in self.kept.get(site.layer, ())] or None
        pads = self.pads.to(q_in.device)
        with self._told(site, decision):
            out, choices = attention(
                q_in, k_in, v_in, spec, rope, pads, sinks, bias, leaves, scales, self.chunks, held
            )
        if decision.layout.followed is not None:
            self.choices[site.layer] = choices
        self.outputs.append(self._disturbed(out, model_dtype()))
        if len(self.outputs) == self.count < len(self.sites):
            raise Enough
        if node in self.rounded:
            return self._disturbed(self.outputs[-1], model_dtype(), self.rounded[node])
        return self.outputs[-1]

    @contextmanager
    def _told(self, site: AttentionSite, decision: Decision) -> Iterator[None]:
        """What the cached run kept or read and cannot be is a failure of this site."""
        try:
            yield
        except ValueError as error:
            raise VerificationError(
                f"verification failed: layer {site.layer} ({site.module_path}, {site.source}; {decision.layout}) "
                f"{error}. {REPORT}",
                site.layer,
                float("inf"),
            ) from error

    def _mixer(self, node: Node) -> list[Tensor]:
        """A module with recurrent state, over each whole sequence and without its state."""
        inputs, key = self.arguments(node)[0]
        record = opaque.find(key)
        assert record.state is not None
        # Its way over many tokens and its way over one differ by `spread`, however exact both are.
        found = record.ragged([self._disturbed(x, model_dtype()) for x in inputs], self.pads.tolist())
        return [self._disturbed(x, model_dtype(), record.state.spread) for x in found]

    def _disturbed(self, x: Tensor, storage: Storage | InKeys, spread: float = 0.0) -> Tensor:
        if not any(self.generators) or not x.is_floating_point():
            return x
        amount = max(ULPS[x.dtype] * torch.finfo(x.dtype).eps, spread)
        if not (isinstance(storage, InKeys) or storage.plain):
            # A value on the edge between two steps falls to either side. That is rare, and then far larger than a
            # rounding: without enough of it in the disturbed run, one such value would look like a defect.
            amount = max(amount, QUANTIZED)
        parts = [
            _moved(part, amount, of)
            for part, of in zip(x.chunk(len(self.generators)), self.generators, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _moved(x: Tensor, amount: float, generator: torch.Generator | None) -> Tensor:
    """x times 1 + amount u, u uniform in [-1, 1)."""
    if generator is None:
        return x
    unit = (torch.rand(x.shape, generator=generator, dtype=torch.float32) * 2 - 1).to(x.device)
    return (x.float() * (1 + amount * unit)).to(x.dtype)
