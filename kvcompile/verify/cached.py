"""The cached graph, run chunk by chunk from an empty cache, as the runtime would feed it.

What the runtime would not write must not matter: slots hold something that is not zero, and pages stand in no order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvcompile.kernels.ops import cached_attention as ops
from kvcompile.layouts import PageGroup
from kvcompile.passes.rewrite.insert_cache import Rewritten
from kvcompile.pipeline import Front, example_inputs
from kvcompile.plan import Plan
from kvcompile.verify.oracle import Enough
from kvcompile.verify.runs import Run, chosen, of_every_token
from kvcompile.verify.steps import Steps


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

    def __init__(self, module: GraphModule, sites: int):
        super().__init__(module)
        self.outputs: list[Tensor] = []
        self.count = sites

    def run_node(self, node: Node) -> Any:
        result = super().run_node(node)
        if node.target is ops.cached_attention:
            self.outputs.append(result)
            if len(self.outputs) == self.count:
                raise Enough
        return result


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
    limit = plan.limits.max_tokens
    groups = plan.page_groups
    pages = {
        layer: _pages(group, batch, device, seed)
        for seed, group in enumerate(groups)
        for layer in group.layers
    }
    caches = {
        # A slot that was never written must not matter: it is not zero.
        name: spec.written(
            torch.full(
                (int(pages[d.kv_source].max()) + 2 if spec.paged else batch, *spec.shape),
                3,
                dtype=spec.dtype,
                device=device,
            )
        )
        for names, d in zip(rewritten.caches, plan.decisions, strict=True)
        for name, spec in zip(
            names,
            d.buffers(plan.torch_dtype, limit),
            strict=True,
        )
    }
    caches |= {
        name: torch.full((batch, *slot.shape), 3, dtype=slot.torch_dtype, device=device)
        for names, state in zip(rewritten.states, plan.states, strict=True)
        for name, slot in zip(names, state.slots, strict=True)
    }
    seq_lens = torch.zeros(batch, dtype=torch.int64, device=device)
    names = [n.name for n in rewritten.graph_module.graph.nodes if n.op == "placeholder"]
    logits, outputs, start = [], [], 0
    kept = Kept(plan, rewritten)
    tap = _Tap(rewritten.graph_module, -1 if sites is None or sites >= len(plan.decisions) else sites)
    for size in chunks:
        inputs = example_inputs(front, batch, size) | constants | caches
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
        tap.outputs = []
        part = ids[:, start : start + size]
        try:
            with torch.no_grad():
                out = tap.run(*[inputs[name] for name in names])[front.captured.logits_index]
            if fewer and wanted is not None:
                logits.append(of_every_token(out, part[:, : len(wanted)]))
            else:
                logits.append(chosen(out, part, wanted))
        except Enough:
            logits.append(part.new_zeros(*part.shape, 0))
        outputs.append(tap.outputs)
        seq_lens = positions[:, -1] + 1
        kept.note(caches, seq_lens)
        start += size
    whole = tuple(torch.cat(parts, dim=2) for parts in zip(*outputs, strict=True))
    return Run(torch.cat(logits, dim=1), whole, kept.by_layer)


def _pages(group: PageGroup, batch: int, device: torch.device, seed: int) -> Tensor:
    """A page table as a pool that was used for long may have it, int32 [batch, pages]: in no order."""
    count = batch * group.pages_per_sequence
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)) + 1
    return order.view(batch, -1).to(torch.int32).to(device)
