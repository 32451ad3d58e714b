"""The cached graph, run chunk by chunk from an empty cache, as the runtime would feed it.

Of a graph that is sharded, those of all ranks run in step (`ranks.py`), and what comes out is put together again; of
one over stages, each takes what the one before gives. So everything that is compared with an oracle is what the ranks
compute.

What the runtime would not write must not matter: slots hold something that is not zero, and pages stand in no order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvcompile.errors import LimitError, VerificationError
from kvcompile.kernels.ops import cached_attention as ops
from kvcompile.layouts import PageGroup
from kvcompile.passes.probe.steps import Steps
from kvcompile.passes.rewrite.insert_cache import Rewritten
from kvcompile.passes.stages.stage import STAGE_IN
from kvcompile.pipeline import Front, example_inputs, parts_of, rewrite_part
from kvcompile.plan import Plan
from kvcompile.util.threads import renew_threads
from kvcompile.verify.oracle import Enough
from kvcompile.verify.ranks import InStep, whole_of
from kvcompile.verify.runs import REPORT, Run, chosen, of_every_token


class Kept:
    """Notes what layers whose retention goes by scores hold after each chunk, and which pages a selection read."""

    def __init__(self, plan: Plan, rewritten: Rewritten):
        self.names = {
            decision.layer: f"cache_{decision.layer}_{note.replace('.', '_')}"
            for decision in plan.decisions
            if (note := decision.layout.followed) is not None
        }
        known = {name for names in rewritten.caches for name in names}
        assert known >= set(self.names.values())
        self.by_layer: dict[int, list[Tensor]] = {layer: [] for layer in self.names}

    def note(self, buffers: Mapping[str, Tensor], lengths: Tensor) -> None:
        """lengths: tokens that each sequence has seen by now [B]; not positive where it has seen none."""
        for layer, name in self.names.items():
            token = buffers[name].to(lengths.device).long().clone()
            if name.endswith("pages_read"):
                self.by_layer[layer].append(token)
                continue
            slot = torch.arange(token.shape[2], device=token.device)
            self.by_layer[layer].append(torch.where(slot < lengths[:, None, None], token, -1))


class _Tap(Steps):
    """Runs the cached graph and notes what every site gives."""

    def __init__(self, module: GraphModule):
        super().__init__(module)
        self.outputs: list[Tensor] = []

    def run_node(self, node: Node) -> Any:
        result = super().run_node(node)
        if node.target is ops.cached_attention:
            self.outputs.append(result)
        return result


class _Taps(InStep):
    """The taps of all ranks, until so many sites have run."""

    def __init__(self, each: Sequence[_Tap], sites: int):
        super().__init__(each)
        self.first, self.count = each[0], sites

    def after(self, node: Node) -> None:
        if node.target is ops.cached_attention and len(self.first.outputs) == self.count:
            raise Enough


@dataclass(frozen=True)
class _Part:
    """What one process runs: its plan and graph, its inputs besides those of a call, what is noted."""

    plan: Plan
    rewritten: Rewritten
    inputs: dict[str, Tensor]
    tap: _Tap
    kept: Kept


class _Stage:
    """The parts of a stage, one for each rank, in step.

    tables: by a page table's name in their graphs its name in the whole plan
    """

    def __init__(self, parts: Sequence[_Part], tables: Mapping[str, str], sites: int):
        self.parts, self.tables = parts, tables
        self.taps = _Taps([part.tap for part in parts], sites)
        graph = parts[0].rewritten.graph_module.graph
        self.names = [node.name for node in graph.nodes if node.op == "placeholder"]

    def run(self, inputs: Mapping[str, Any], before: Sequence[Any]) -> list[Any]:
        """Each rank's outputs; before: what the stage before gave to each."""
        given = []
        shared = {**inputs, **{own: inputs[name] for own, name in self.tables.items()}}
        for rank, part in enumerate(self.parts):
            known = shared | part.inputs
            if before:
                known[STAGE_IN] = before[rank][0]
            given.append([known[name] for name in self.names])
        return self.taps.run(given)


def _stages(
    front: Front,
    plan: Plan,
    rewritten: Rewritten,
    constants: dict[str, Tensor],
    pages: Mapping[int, Tensor],
    batch: int,
    sites: int | None,
) -> list[_Stage]:
    """What runs, stage after stage, of the first `sites` sites."""
    tables = {layer: group.name for group in plan.page_groups for layer in group.layers}
    found, left = [], -1 if sites is None or sites >= len(plan.decisions) else sites
    for ranks in parts_of(front, plan):
        made = []
        for part in ranks:
            whole = part.shard is None and part.stage is None
            mine, own = (rewritten, constants) if whole else rewrite_part(part, rewritten, constants)
            caches = _caches(part.plan, mine, pages, batch, front.device)
            tap = _Tap(mine.graph_module)
            made.append(_Part(part.plan, mine, own | caches, tap, Kept(part.plan, mine)))
        own_plan = made[0].plan
        names = {group.name: tables[group.layers[0]] for group in own_plan.page_groups}
        own_sites = len(own_plan.decisions)
        last = 0 < left <= own_sites
        found.append(_Stage(made, names, left if last else -1))
        if last:
            break
        left -= own_sites if left > 0 else 0
    return found


def cached_run(
    front: Front,
    plan: Plan,
    rewritten: Rewritten,
    constants: dict[str, Tensor],
    ids: Tensor,
    pads: Tensor,
    chunks: Sequence[int],
    keep: Tensor | None = None,
    sites: int | None = None,
) -> Run:
    """The cached graph over `chunks`, from an empty cache.

    keep: positions whose logits are wanted, at least one of every chunk; None: all
    sites: how many sites are run, the first ones; then there are no logits. None: all
    """
    batch, device = ids.shape[0], front.device
    groups = plan.page_groups
    pages = {
        layer: _pages(group, batch, device, seed)
        for seed, group in enumerate(groups)
        for layer in group.layers
    }
    stages = _stages(front, plan, rewritten, constants, pages, batch, sites)
    seq_lens = torch.zeros(batch, dtype=torch.int64, device=device)
    logits, outputs, start = [], [], 0
    for size in chunks:
        renew_threads()  # compilers of kernels that this runs may have ended
        inputs = example_inputs(front, batch, size)
        positions = (seq_lens - (pads - start).clamp(0, size))[:, None] + torch.arange(size, device=device)
        inputs |= {
            "input_ids": ids[:, start : start + size],
            "position_ids": positions.clamp(min=0),
            "past_length": torch.tensor(start, device=device),
            "positions": positions,
            "seq_lens": seq_lens,
            "rows": torch.stack([(pads - start).clamp(0, size), seq_lens]).cpu(),
            "span": start + size,
        }
        for group in groups:
            own = pages[group.layers[0]]
            has = torch.zeros(own.shape, dtype=torch.bool)
            ends = (positions[:, -1] + 1).tolist()
            for row, seen, end in zip(has, seq_lens.tolist(), ends, strict=True):
                row[: group.pages_for(max(0, end))] = True
                if group.released is not None:  # pages behind the window may be another sequence's by now
                    gone = group.released.behind(max(0, seen), group.page_size)
                    row[gone.start : gone.stop] = False
            inputs[group.name] = torch.where(has.to(device), own, 0)
        wanted = None if keep is None else keep[(keep >= start) & (keep < start + size)] - start
        fewer = wanted is not None and "logits_to_keep" in inputs
        if fewer:
            inputs["logits_to_keep"] = wanted
        for part_of in (each for stage in stages for each in stage.parts):
            part_of.tap.outputs = []
        part = ids[:, start : start + size]
        try:
            with torch.no_grad():
                given: list[Any] = []
                for stage in stages:
                    given = stage.run(inputs, given)
                out = _same([each[front.captured.logits_index] for each in given]).to(ids.device)
            if fewer and wanted is not None:
                logits.append(of_every_token(out, part[:, : len(wanted)]))
            else:
                logits.append(chosen(out, part, wanted))
        except Enough:
            logits.append(part.new_zeros(*part.shape, 0))
        by_rank = zip(*([each.tap.outputs for each in stage.parts] for stage in stages), strict=True)
        outputs.append(_whole_outputs(front, [list(chain(*rank)) for rank in by_rank]))
        seq_lens = positions[:, -1] + 1
        for each in (each for stage in stages for each in stage.parts):
            each.kept.note(each.inputs, seq_lens)
        start += size
    whole = tuple(torch.cat(chunk, dim=2) for chunk in zip(*outputs, strict=True))
    kept = [
        {layer: notes for each in rank for layer, notes in each.kept.by_layer.items()}
        for rank in zip(*(stage.parts for stage in stages), strict=True)
    ]
    return Run(torch.cat(logits, dim=1), whole, _whole_kept(front, plan, kept))


def _caches(
    plan: Plan, rewritten: Rewritten, pages: Mapping[int, Tensor], batch: int, device: torch.device
) -> dict[str, Tensor]:
    """Empty caches and states by name; a slot that was never written must not matter: it is not zero.

    Raises:
        LimitError: there is no memory for them.
    """
    try:
        return _filled(plan, rewritten, pages, batch, device)
    except RuntimeError as error:  # what torch raises where an allocator has no more
        budgets = ", ".join(dict.fromkeys(str(d.layout.retention) for d in plan.decisions))
        raise LimitError(
            f"no memory for the caches that verification compares with, of {batch} sequences ({budgets}): "
            f"{str(error).splitlines()[0]}; a cache of this recipe would take as much: choose a smaller budget "
            "(kvcompile.estimate says what it takes), or free memory"
        ) from error


def _filled(
    plan: Plan, rewritten: Rewritten, pages: Mapping[int, Tensor], batch: int, device: torch.device
) -> dict[str, Tensor]:
    limit = plan.limits.max_tokens
    caches = {
        name: spec.written(
            torch.full(
                (int(pages[d.kv_source].max()) + 2 if spec.paged else batch, *spec.shape),
                3,
                dtype=spec.dtype,
                device=d.device or device,
            )
        )
        for names, d in zip(rewritten.caches, plan.decisions, strict=True)
        for name, spec in zip(
            names,
            d.buffers(plan.torch_dtype, limit),
            strict=True,
        )
    }
    return caches | {
        name: torch.full((batch, *slot.shape), 3, dtype=slot.torch_dtype, device=state.device or device)
        for names, state in zip(rewritten.states, plan.states, strict=True)
        for name, slot in zip(names, state.slots, strict=True)
    }


def _same(logits: Sequence[Tensor]) -> Tensor:
    """The logits of all ranks, which must be the same to the last bit: each rank goes on with what they say.

    Raises:
        VerificationError: they are not.
    """
    for rank, other in enumerate(logits[1:], 1):
        if not torch.equal(logits[0], other):
            raise VerificationError(
                f"verification failed: rank {rank} has other logits than rank 0, from the same tokens. {REPORT}"
            )
    return logits[0]


def _whole_outputs(front: Front, outputs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """What each site gives, all heads, from what it gives on each rank."""
    if front.sharding is None:
        return list(outputs[0])
    divisions = front.sharding.divisions
    return [
        whole_of(division.queries, parts, 1)
        for division, parts in zip(divisions, zip(*outputs, strict=True), strict=False)
    ]


def _whole_kept(
    front: Front, plan: Plan, kept: Sequence[Mapping[int, Sequence[Tensor]]]
) -> Mapping[int, Sequence[Tensor]]:
    """What each layer kept, all heads, from what the ranks kept."""
    if front.sharding is None:
        return kept[0]
    cuts = {
        decision.layer: division.keys
        for decision, division in zip(plan.decisions, front.sharding.divisions, strict=True)
    }
    return {
        layer: [whole_of(cuts[layer], parts, 1) for parts in zip(*(own[layer] for own in kept), strict=True)]
        for layer in kept[0]
    }


def _pages(group: PageGroup, batch: int, device: torch.device, seed: int) -> Tensor:
    """A page table as a pool that was used for long may have it, int32 [batch, pages]: in no order."""
    count = batch * group.pages_per_sequence
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)) + 1
    return order.view(batch, -1).to(torch.int32).to(device)
