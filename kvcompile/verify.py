"""Translation validation: the rewritten graph against the original, before anybody trusts it.

Two comparisons prove the two halves of the way:

    detection  the canonical graph, one full-sequence attention per site, against the original model
    cache      the cached graph in several passes (a prompt, single tokens, chunks; ragged where the model can),
               with the plan's budgets made small so that every ring wraps and every budget is met within a few
               tokens, against the oracle of the same policy (kernels/policy.py)

`thorough` adds longer passes, the budgets as they are, a plan that forgets and rounds nothing directly against
the original, and (in `optimize`) the compiled program.

An error is the RMS over a site's outputs (or the logits), relative to their RMS. Its budget is measured, not
chosen: how far the same outputs move in the oracle when every q, k, v and attention result is disturbed by a few
units in the last place, which is what two correct orders of summation do.

Which of two nearly equal scores is the lowest, rounding may decide, and a token that stays or goes is no rounding. So
the oracles keep what the cached run kept, and it is checked that each of its choices was right but for rounding: by
how much the scores move in the disturbed oracles.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from kvcompile.errors import VerificationError
from kvcompile.kernels import opaque, ops
from kvcompile.kernels.policy import policy_attention
from kvcompile.kernels.policy_scored import Choice, scored_attention
from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.supports import refusal
from kvcompile.layouts import (
    CacheLayout,
    InKeys,
    ModelDtype,
    Paged,
    PageGroup,
    PerChannel,
    Recent,
    Rotated,
    Scored,
    SinkWindow,
    Storage,
    Window,
)
from kvcompile.passes.capture import eval_mode
from kvcompile.passes.insert_cache import Rewritten
from kvcompile.passes.opaque import is_mixer
from kvcompile.passes.state import attributes_restored
from kvcompile.pipeline import Front, absorbed, example_inputs, rewrite
from kvcompile.plan import Decision, Plan
from kvcompile.recipe.schema import VerifyMode

log = logging.getLogger(__name__)

# Disturbance of the oracle, in units of the dtype's epsilon. Sums of float32 products round in float32, a little
# at every step; those of half precision are kept in float32 and rounded once.
ULPS = {torch.float32: 4.0, torch.bfloat16: 1.0, torch.float16: 1.0}
QUANTIZED = 2.0**-15  # disturbance of what is quantized, at least
# How many times the disturbed oracle's error a correct rewrite may have. Correct ones were seen to have a tenth
# of the budget in float32 and a fifth in half precision; a token too many or too few in a mask has 10 times it.
MARGIN = {torch.float32: 8.0, torch.bfloat16: 2.0, torch.float16: 2.0}
_SMALL_WINDOW, _SMALL_SINKS, _SMALL_HEAVY, _SMALL_TOKENS = 5, 2, 3, 48
_SMALL_RESIDUAL = 4  # in two groups
_SMALL_PAGE = 4
_ROUNDED_RUNS = 3
_QUICK_CHUNKS = (9, 1, 1, 6, 1)  # over the edge of a small ring in a prompt, in single tokens, in a chunk
_CHUNKS = (13, 1, 1, 7, 1, 1, 1, 9, 1)


_REPORT = "The rewritten model was not returned. Please report this model; verify: off skips the check"


@dataclass(frozen=True)
class Check:
    """One comparison: relative RMS errors, and the budget measured for them."""

    name: str
    tokens: int
    error: float
    budget: float
    worst_layer: int | None
    seconds: float

    def __str__(self) -> str:
        errors = f"error {self.error:.1e} of {self.budget:.1e} allowed"
        return f"{self.name}: {errors}, {self.tokens} tokens, {self.seconds:.1f} s"


@dataclass(frozen=True)
class _Run:
    """Outputs of a run over [B, T] tokens: logits [B, T, V], and each site's [B, Hq, T, Dv].

    kept:    by layer whose retention goes by scores: after each chunk, its tokens [B, Hs, N], -1 for none
    choices: by such a layer, what an oracle would have chosen by
    """

    logits: Tensor
    sites: tuple[Tensor, ...]
    kept: Mapping[int, Sequence[Tensor]] = field(default_factory=dict)
    choices: Mapping[int, Sequence[Choice]] = field(default_factory=dict)


def verify(model: nn.Module, front: Front, plan: Plan, mode: VerifyMode) -> tuple[Check, ...]:
    """Compare; returns what was measured.

    Raises:
        VerificationError: some comparison exceeds its budget; names the first layer that does, and the error.
    """
    if mode == "off":
        return ()
    front = absorbed(front, plan)
    chunks: tuple[int, ...] = _QUICK_CHUNKS if mode == "quick" else _CHUNKS
    checks = [_check_detection(model, front, plan, sum(chunks))]
    checks.append(_check_cache("cache, small budgets", front, _shrink(plan), chunks))
    if mode == "thorough":
        if plan.lossless:
            checks.append(_check_lossless(model, front, plan, chunks))
        slots = [d.layout.slots(_SMALL_TOKENS) for d in plan.decisions if d.layout.bounded]
        residuals = [d.layout.residual for d in plan.decisions]
        # One pass up to the edge of the largest ring, then over it in chunks and single tokens.
        edge = max([*slots, *residuals, _SMALL_TOKENS])
        limit = plan.limits.max_tokens
        edge = edge if limit is None else min(edge, limit - sum(_CHUNKS))
        chunks = (*_pieces(max(edge - 6, 2), plan.limits.prefill_chunk), *_CHUNKS)
        checks.append(_check_cache("cache, the plan's budgets", front, plan, chunks))
    for check in checks:
        log.info("verify %s", check)
    return tuple(checks)


def check_program(
    step: Callable[[Tensor, Tensor | None], Tensor],
    front: Front,
    plan: Plan,
    chunks: Sequence[int] = _CHUNKS,
    buffers: Callable[[], Mapping[str, Tensor]] | None = None,
) -> Check:
    """The emitted program against the oracle: `step(input_ids, attention_mask) -> logits`, called chunk by chunk.

    buffers: the program's caches by the names of its placeholders; needed where a retention goes by scores.
    """
    front = absorbed(front, plan)
    started = time.perf_counter()
    chunks = _fit(chunks, plan.limits.max_tokens)
    if not plan.whole_prompts:  # the program would cut them itself, which scores depend on
        chunks = [size for chunk in chunks for size in _pieces(chunk, plan.limits.prefill_chunk)]
    ids, pads = _probe(front, sum(chunks))
    rewritten, constants = rewrite(front, plan)
    mask = torch.arange(ids.shape[1], device=ids.device) >= pads[:, None]
    outs, start = [], 0
    kept = _Kept(plan, rewritten)
    for size in chunks:
        part = slice(start, start + size)
        outs.append(step(ids[:, part], mask[:, part].long() if bool(pads.any()) else None))
        start += size
        if buffers is not None:
            kept.note(buffers(), start - pads)
    got = _Run(torch.cat(outs, dim=1), (), kept.by_layer)
    oracle, noisy = _oracles(
        front, plan, _tables(front, plan, rewritten, constants), ids, pads, chunks, got.kept
    )
    bare = _Run(oracle.logits, (), choices=oracle.choices)
    noise = [_Run(n.logits, (), choices=n.choices) for n in noisy]
    return _compare("compiled program", got, bare, noise, pads, plan, started)


def _check_detection(model: nn.Module, front: Front, plan: Plan, tokens: int) -> Check:
    started = time.perf_counter()
    ids, _ = _probe(front, tokens if front.max_tokens is None else min(tokens, front.max_tokens))
    pads = torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
    lossless = _as_lossless(plan)
    oracle, noisy = _oracles(front, lossless, {}, ids, pads)
    original = _Run(_original(model, front, ids), ())
    return _compare(
        "detection",
        _Run(oracle.logits, ()),
        original,
        [_Run(_shift(original, oracle, n), ()) for n in noisy],
        pads,
        plan,
        started,
    )


def _check_lossless(model: nn.Module, front: Front, plan: Plan, chunks: Sequence[int]) -> Check:
    started = time.perf_counter()
    limit = plan.limits.max_tokens
    chunks = _fit(chunks, limit)
    ids, _ = _probe(front, sum(chunks))
    pads = torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
    rewritten, constants = rewrite(front, plan)
    oracle, noisy = _oracles(front, plan, {}, ids, pads)
    original = _Run(_original(model, front, ids), ())
    got = _cached(front, plan, rewritten, constants, ids, pads, chunks)
    return _compare(
        "lossless",
        _Run(got.logits, ()),
        original,
        [_Run(_shift(original, oracle, n), ()) for n in noisy],
        pads,
        plan,
        started,
    )


def _check_cache(name: str, front: Front, plan: Plan, chunks: Sequence[int]) -> Check:
    started = time.perf_counter()
    chunks = _fit(chunks, plan.limits.max_tokens)
    ids, pads = _probe(front, sum(chunks))
    rewritten, constants = rewrite(front, plan)
    got = _cached(front, plan, rewritten, constants, ids, pads, chunks)
    tables = _tables(front, plan, rewritten, constants)
    oracle, noisy = _oracles(front, plan, tables, ids, pads, chunks, got.kept)
    return _compare(name, got, oracle, noisy, pads, plan, started)


def _fit(chunks: Sequence[int], limit: int | None) -> tuple[int, ...]:
    """As many of the chunks as a small limit of tokens has room for."""
    kept: list[int] = []
    for size in chunks:
        if limit is not None and sum(kept) + size > limit:
            size = limit - sum(kept)
        if size > 0:
            kept.append(size)
    return tuple(kept)


def _pieces(tokens: int, chunk: int) -> list[int]:
    return [min(chunk, tokens - start) for start in range(0, tokens, chunk)]


def _shift(original: _Run, oracle: _Run, noisy: _Run) -> Tensor:
    """The disturbed oracle, moved to where the original stands."""
    return original.logits + (noisy.logits - oracle.logits)


def _probe(front: Front, tokens: int) -> tuple[Tensor, Tensor]:
    """Token ids [2, T] (two different rows), and padding [2]: ragged where the model takes positions."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, _vocabulary(front), (2, tokens), generator=generator).to(front.device)
    pads = [0, min(5, tokens - 1)] if front.ragged else [0, 0]
    return ids, torch.tensor(pads, device=front.device)


def _vocabulary(front: Front) -> int:
    """Rows of the table that input_ids select from."""
    start = next(n for n in front.canonical.graph.nodes if n.name == "input_ids")
    for user in start.users:
        if user.target is torch.ops.aten.embedding.default and user.args[1] is start:
            table = user.args[0]
            assert isinstance(table, Node)
            return int(table.meta["val"].shape[0])
    return 2


def _original(model: nn.Module, front: Front, ids: Tensor) -> Tensor:
    """The original model's logits, by the door that its users take."""
    with eval_mode(model), attributes_restored(model), torch.no_grad():
        out = model(ids, use_cache=False) if hasattr(model, "config") else model(ids)
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
    return leaves[front.captured.logits_index]


def _oracles(
    front: Front,
    plan: Plan,
    tables: dict[int, list[Tensor]],
    ids: Tensor,
    pads: Tensor,
    chunks: Sequence[int] = (),
    kept: Mapping[int, Sequence[Tensor]] | None = None,
) -> tuple[_Run, list[_Run]]:
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


def _tables(
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

    def run_on(self, ids: Tensor) -> _Run:
        inputs = example_inputs(self.front, *ids.shape) | {"input_ids": ids}
        if "position_ids" in inputs:
            inputs["position_ids"] = (inputs["position_ids"] - self.pads[:, None]).clamp(min=0)
        names = [n.name for n in self.front.canonical.graph.nodes if n.op == "placeholder"]
        with torch.no_grad():
            out = self.run(*[inputs[name] for name in names])
        return _Run(out[self.front.captured.logits_index], tuple(self.outputs), choices=self.choices)

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
                    f"{error}. {_REPORT}",
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


class _Kept:
    """Notes what layers whose retention goes by scores hold after each chunk."""

    def __init__(self, plan: Plan, rewritten: Rewritten):
        self.names = {
            decision.layer: f"cache_{decision.layer}_slots_token"
            for decision in plan.decisions
            if isinstance(decision.layout.retention, Scored)
        }
        known = {name for names in rewritten.caches for name in names}
        assert known >= set(self.names.values())
        self.by_layer: dict[int, list[Tensor]] = {layer: [] for layer in self.names}

    def note(self, buffers: Mapping[str, Tensor], lengths: Tensor) -> None:
        """lengths: tokens that each sequence has seen by now [B]; not positive where it has seen none."""
        for layer, name in self.names.items():
            token = buffers[name].long()
            slot = torch.arange(token.shape[2], device=token.device)
            self.by_layer[layer].append(torch.where(slot < lengths[:, None, None], token, -1))


class _Tap(Interpreter):
    """Runs the cached graph and notes what every site gives."""

    def __init__(self, module: GraphModule):
        super().__init__(module)
        self.outputs: list[Tensor] = []

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.target is ops.cached_attention:
            self.outputs.append(result)
        return result


def _cached(
    front: Front,
    plan: Plan,
    rewritten: Rewritten,
    constants: dict[str, Tensor],
    ids: Tensor,
    pads: Tensor,
    chunks: Sequence[int],
) -> _Run:
    """The cached graph over `chunks`, from an empty cache."""
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
    logits, sites, start = [], [], 0
    kept = _Kept(plan, rewritten)
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
            taken = [group.pages_for(max(0, length)) for length in (positions[:, -1] + 1).tolist()]
            has = torch.arange(own.shape[1], device=device) < torch.tensor(taken, device=device)[:, None]
            inputs[group.name] = torch.where(has, own, 0)
        tap = _Tap(rewritten.graph_module)
        with torch.no_grad():
            out = tap.run(*[inputs[name] for name in names])
        logits.append(out[front.captured.logits_index])
        sites.append(tap.outputs)
        seq_lens = positions[:, -1] + 1
        kept.note(caches, seq_lens)
        start += size
    outputs = tuple(torch.cat(parts, dim=2) for parts in zip(*sites, strict=True))
    return _Run(torch.cat(logits, dim=1), outputs, kept.by_layer)


def _pages(group: PageGroup, batch: int, device: torch.device, seed: int) -> Tensor:
    """A page table as a pool that was used for long may have it, int32 [batch, pages]: in no order."""
    count = batch * group.pages_per_sequence
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)) + 1
    return order.view(batch, -1).to(torch.int32).to(device)


def _compare(
    name: str, got: _Run, oracle: _Run, noisy: Sequence[_Run], pads: Tensor, plan: Plan, started: float
) -> Check:
    """Errors against their budgets, site by site and then the logits; the first that exceeds raises."""
    tokens = oracle.logits.shape[1]
    real = torch.arange(tokens, device=pads.device) >= pads[:, None]
    worst: tuple[float, float, float, int | None] = (-1.0, 0.0, 0.0, None)
    rows: list[tuple[int | None, Tensor, Tensor, list[Tensor]]] = [
        (plan.decisions[i].layer, g, o, [n.sites[i] for n in noisy])
        for i, (g, o) in enumerate(zip(got.sites, oracle.sites, strict=True))
    ]
    rows.append((None, got.logits, oracle.logits, [n.logits for n in noisy]))
    for layer, g, o, n in rows:
        where = real[:, None, :] if layer is not None else real
        error, noise = _relative(g, o, where), max(_relative(x, o, where) for x in n)
        budget = MARGIN[o.dtype] * (noise + torch.finfo(o.dtype).eps)
        if not error <= budget:
            raise VerificationError(_failure(name, layer, error, budget, plan), layer, error)
        if error / budget > worst[0]:
            worst = (error / budget, error, budget, layer)
    for layer, choices in oracle.choices.items():
        _check_choices(name, layer, choices, [n.choices[layer] for n in noisy], plan)
    return Check(name, tokens, worst[1], worst[2], worst[3], time.perf_counter() - started)


def _check_choices(
    name: str, layer: int, choices: Sequence[Choice], noisy: Sequence[Sequence[Choice]], plan: Plan
) -> None:
    """Each token that went had the lowest score, as far as rounding lets one tell.

    Raises:
        VerificationError: a choice that rounding does not explain.
    """
    for number, choice in enumerate(choices):
        moved = max(float((choice.values - other[number].values).abs().max()) for other in noisy)
        size = float(choice.values.abs().max())
        budget = MARGIN[torch.float32] * (moved + torch.finfo(torch.float32).eps * size)
        if choice.excess > budget:
            decision = next(d for d in plan.decisions if d.layer == layer)
            raise VerificationError(
                f"verification {name!r} failed: layer {layer} ({decision.module_path}, {decision.source}; "
                f"{decision.layout}) gave up a token whose score is above that of one it kept, by "
                f"{choice.excess:.2e}, where rounding explains {budget:.2e}. {_REPORT}",
                layer,
                choice.excess,
            )


def _relative(x: Tensor, reference: Tensor, where: Tensor) -> float:
    """RMS of x - reference over RMS of reference, at real tokens."""
    mask = where[..., None].expand(reference.shape)
    difference = (x.double() - reference.double())[mask]
    return float(
        difference.square().mean().sqrt() / reference.double()[mask].square().mean().sqrt().clamp(min=1e-30)
    )


def _failure(name: str, layer: int | None, error: float, budget: float, plan: Plan) -> str:
    if layer is None:
        where = "the logits differ"
    else:
        decision = next(d for d in plan.decisions if d.layer == layer)
        where = f"layer {layer} ({decision.module_path}, {decision.source}; {decision.layout}) differs"
    found = f"by {error:.2e} of its size, where rounding explains {budget:.2e}"
    return f"verification '{name}' failed: {where} {found}. {_REPORT}"


def _as_lossless(plan: Plan) -> Plan:
    """The plan with layouts that forget and round nothing."""
    limits = replace(plan.limits, max_tokens=_SMALL_TOKENS)
    return replace(
        plan, limits=limits, decisions=tuple(replace(d, layout=CacheLayout()) for d in plan.decisions)
    )


def _shrink(plan: Plan) -> Plan:
    """The plan with budgets that a few dozen tokens exceed; the arithmetic is the same."""

    def small(decision: Decision) -> Decision:
        retention = decision.layout.retention
        match retention:
            case Window(size=size):
                retention = Window(min(size, _SMALL_WINDOW))
            case SinkWindow():
                retention = replace(
                    retention,
                    sinks=min(retention.sinks, _SMALL_SINKS),
                    window=min(retention.window, _SMALL_WINDOW),
                )
            case Scored():
                retention = replace(
                    retention,
                    sinks=min(retention.sinks, _SMALL_SINKS),
                    heavy=min(retention.heavy, _SMALL_HEAVY),
                    recent=min(retention.recent, _SMALL_WINDOW),
                    rows=min(retention.rows, _SMALL_WINDOW),
                )
        keys, values = _settling(decision.layout.keys), _settling(decision.layout.values)
        placement = decision.layout.placement
        if isinstance(placement, Paged):
            placement = Paged(_SMALL_PAGE)  # several for a sequence
        layout = replace(decision.layout, keys=keys, values=values, placement=placement, retention=retention)
        return _with_kernels(decision, layout, replace(layout, placement=decision.layout.placement))

    limit = plan.limits.max_tokens
    limits = replace(plan.limits, max_tokens=None if limit is None else min(limit, _SMALL_TOKENS))
    return replace(plan, limits=limits, decisions=tuple(small(d) for d in plan.decisions))


def _with_kernels(decision: Decision, *smaller: CacheLayout) -> Decision:
    """The decision with the first of smaller layouts that its kernels have, or as it is: they are what is verified."""
    for layout in smaller:
        made = replace(decision, layout=layout)
        heads, dims = (made.num_qo_heads, made.num_kv_heads), (made.head_dim, made.v_head_dim)
        if made.kernels == "reference" or not refusal(made.site_spec(), heads, dims, torch.float32):
            return made
    return decision


def _settling(storage: Storage) -> Storage:
    """The storage with so few tokens in full, and in a group, that some settle within a prompt, a step and a chunk."""
    match storage:
        case Rotated(inner=inner):
            small = _settling(inner)
            assert not isinstance(small, (Rotated, InKeys))
            return Rotated(small)
        case Recent():
            residual, sinks = min(storage.residual, _SMALL_RESIDUAL), min(storage.sinks, _SMALL_SINKS)
            return replace(storage, residual=residual, sinks=sinks)
        case PerChannel():
            sinks = min(storage.sinks, _SMALL_SINKS)
            return replace(storage, group=_SMALL_RESIDUAL // 2, residual=_SMALL_RESIDUAL, sinks=sinks)
        case _:
            return storage


__all__ = ["Check", "check_program", "verify"]
