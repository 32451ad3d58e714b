"""The oracle's runs: the canonical graph, every attention by its policy over the whole sequence.

The policies are `kernels/policy.py` and, where scores choose, `kernels/policy_scored.py`. A run may be disturbed: every
q, k, v and attention result times 1 + a u, u uniform in [-1, 1), a of a few units in the last place (`ULPS`). How far
that moves the outputs is what two correct orders of summation may differ by (`compare.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Interpreter, Node

from kvcompile.errors import VerificationError
from kvcompile.kernels import opaque
from kvcompile.kernels.policy import policy_attention
from kvcompile.kernels.policy_scored import Choice, scored_attention
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import ModelDtype, Scored, Storage
from kvcompile.passes.insert_cache import Rewritten
from kvcompile.passes.opaque import is_mixer
from kvcompile.pipeline import Front, example_inputs
from kvcompile.plan import Plan
from kvcompile.verify.runs import REPORT, Run

# Disturbance of the oracle, in units of the dtype's epsilon. Sums of float32 products round in float32, a little
# at every step; those of half precision are kept in float32 and rounded once.
ULPS = {torch.float32: 4.0, torch.bfloat16: 1.0, torch.float16: 1.0}
QUANTIZED = 2.0**-15  # disturbance of what is quantized, at least
_ROUNDED_RUNS = 3  # disturbed runs, where vectors are rounded to few steps


def oracles(
    front: Front,
    plan: Plan,
    tables: dict[int, list[Tensor]],
    ids: Tensor,
    pads: Tensor,
    chunks: Sequence[int] = (),
    kept: Mapping[int, Sequence[Tensor]] | None = None,
) -> tuple[Run, list[Run]]:
    """The policy's full-sequence run, as it is and disturbed; chunks and kept: of a cached run, for scored layers.

    Where vectors are rounded to few steps, a handful of values on the edge between two of them make most of what a
    disturbance moves: one run could miss them, so there are several.
    """
    storages = [storage for d in plan.decisions for storage in (d.layout.keys, d.layout.values)]
    exact = all(storage.exact(plan.torch_dtype) for storage in storages)
    seeds = [None, *range(1, 2 if exact else 1 + _ROUNDED_RUNS)]
    undisturbed, *noisy = (
        _Oracle(front, plan, tables, pads, seed, chunks, kept or {}).run_on(ids) for seed in seeds
    )
    return undisturbed, noisy


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


class _Oracle(Interpreter):
    """Runs the canonical graph with every attention replaced by its policy's oracle."""

    def __init__(
        self,
        front: Front,
        plan: Plan,
        tables: dict[int, list[Tensor]],
        pads: Tensor,
        seed: int | None,
        chunks: Sequence[int],
        kept: Mapping[int, Sequence[Tensor]],
    ):
        super().__init__(front.canonical, garbage_collect_values=False)
        self.chunks, self.kept = chunks, kept
        self.choices: dict[int, list[Choice]] = {}
        self.front, self.plan, self.tables, self.pads, self.noise = (
            front,
            plan,
            tables,
            pads,
            seed is not None,
        )
        self.sites = {
            site.out: (site, decision) for site, decision in zip(front.sites, plan.decisions, strict=True)
        }
        self.outputs: list[Tensor] = []
        self.generator = torch.Generator(device=front.device).manual_seed(seed or 0)

    def run_on(self, ids: Tensor) -> Run:
        inputs = example_inputs(self.front, *ids.shape) | {"input_ids": ids}
        if "position_ids" in inputs:
            inputs["position_ids"] = (inputs["position_ids"] - self.pads[:, None]).clamp(min=0)
        names = [n.name for n in self.front.canonical.graph.nodes if n.op == "placeholder"]
        with torch.no_grad():
            out = self.run(*[inputs[name] for name in names])
        return Run(out[self.front.captured.logits_index], tuple(self.outputs), choices=self.choices)

    def run_node(self, n: Node) -> Any:
        if is_mixer(n):
            return self._mixer(n)
        if n not in self.sites:
            return super().run_node(n)
        site, decision = self.sites[n]
        q, k, v = site.q, site.k, site.v
        if decision.rotary is not None:
            assert site.rope is not None
            q, k = site.rope.q_input, site.rope.k_input
        storages = (ModelDtype(), decision.layout.keys, decision.layout.values)
        q_in, k_in, v_in = (
            self._disturbed(self.env[node], storage)
            for node, storage in zip((q, k, v), storages, strict=True)
        )
        spec = SiteSpec(decision.layout, decision.sm_scale, decision.mask, site.score, rotary=decision.rotary)
        extra = (site.sinks, site.bias, None if site.dynamic is None else site.dynamic.node)
        sinks, bias, dynamic = (None if node is None else self.env[node] for node in extra)
        known = {name: torch.tensor(values, device=q_in.device) for name, values in decision.scales}
        scales = (known.get("keys.scale"), known.get("values.scale"))
        rope = self.tables.get(site.layer, [])
        if isinstance(decision.layout.retention, Scored):
            kept = self.kept[site.layer]
            try:
                out, self.choices[site.layer] = scored_attention(
                    q_in, k_in, v_in, spec, rope, self.chunks, self.pads, sinks, bias, kept, scales
                )
            except ValueError as error:
                raise VerificationError(
                    f"verification failed: layer {site.layer} ({site.module_path}, {site.source}; {decision.layout}) "
                    f"{error}. {REPORT}",
                    site.layer,
                    float("inf"),
                ) from error
        else:
            out = policy_attention(q_in, k_in, v_in, spec, rope, self.pads, sinks, bias, dynamic, scales)
        self.outputs.append(self._disturbed(out, ModelDtype()))
        return self.outputs[-1]

    def _mixer(self, n: Node) -> list[Tensor]:
        """A module with recurrent state, over each whole sequence and without its state."""
        inputs, key = self.fetch_args_kwargs_from_env(n)[0]
        record = opaque.find(key)
        assert record.state is not None
        # Its way over many tokens and its way over one differ by `spread`, however exact both are.
        found = record.ragged([self._disturbed(x, ModelDtype()) for x in inputs], self.pads.tolist())
        return [self._disturbed(x, ModelDtype(), record.state.spread) for x in found]

    def _disturbed(self, x: Tensor, storage: Storage, spread: float = 0.0) -> Tensor:
        if not self.noise or not x.is_floating_point():
            return x
        amount = max(ULPS[x.dtype] * torch.finfo(x.dtype).eps, spread)
        if not isinstance(storage, ModelDtype):
            # A value on the edge between two steps falls to either side. That is rare, and then far larger than a
            # rounding: without enough of it in the disturbed run, one such value would look like a defect.
            amount = max(amount, QUANTIZED)
        unit = torch.rand(x.shape, generator=self.generator, device=x.device, dtype=torch.float32) * 2 - 1
        return (x.float() * (1 + amount * unit)).to(x.dtype)
