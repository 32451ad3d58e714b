"""The way from a model to a rewritten graph: capture, detect, canonicalize, plan, insert the cache."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from kvcompile.decide import make_plan
from kvcompile.decide.known import KnownModel, known_sites
from kvcompile.errors import PlanError
from kvcompile.kernels.ops.opaque import OpaqueModule, mixer, opaque
from kvcompile.kernels.ops.running_sum import running_sum
from kvcompile.original.adapters import base_of
from kvcompile.original.checks import check_model
from kvcompile.original.inference_tensors import as_normal
from kvcompile.passes.capture.capture import capture, nothing
from kvcompile.passes.capture.captured import Captured
from kvcompile.passes.capture.inputs import device_of
from kvcompile.passes.capture.opaque import describe, states_of
from kvcompile.passes.capture.python_step import give_steps
from kvcompile.passes.detect.detect import Detection, detect
from kvcompile.passes.detect.rotary_form import NotRotary
from kvcompile.passes.detect.rotation import Rotations
from kvcompile.passes.graph import ancestors
from kvcompile.passes.graph_module import module_of
from kvcompile.passes.probe.evaluate import fetch_attr
from kvcompile.passes.records import AttentionSite, NoMatch, RopeSpec
from kvcompile.passes.rewrite.absorb import absorb
from kvcompile.passes.rewrite.canonicalize import canonicalize
from kvcompile.passes.rewrite.insert_cache import Rewritten, insert_cache
from kvcompile.passes.rewrite.places import places_of
from kvcompile.passes.rewrite.positions import offset_positions
from kvcompile.passes.shard.shard import Shard, Sharding, localized, shard
from kvcompile.passes.stages.stage import Stage, Staging, staged
from kvcompile.plan import INDUCTOR, Decision, Plan
from kvcompile.recipe import Recipe
from kvcompile.recipe.scales import ModelId
from kvcompile.specs import RecurrentState
from kvcompile.util.copied import copied
from kvcompile.util.serial import traces
from kvcompile.util.threads import renew_threads, threads_that_pay
from kvcompile.util.tracing import uncollected

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Front:
    """A model as the compiler sees it: one graph with one `kvcompile::attention` per site."""

    captured: Captured
    detection: Detection
    canonical: GraphModule
    sites: tuple[AttentionSite, ...]
    takes_past_length: bool
    sums: tuple[RecurrentState, ...]  # counts along the sequence
    max_tokens: int | None  # what the model was made for, where that is known
    device: torch.device
    model: ModelId
    sharding: Sharding | None = None  # over ranks; the canonical graph is the whole one all the same
    staging: Staging | None = None  # over stages, of the ranks' graphs where there are some

    @property
    def ragged(self) -> bool:
        """Whether the sequences of a batch may start at different places: all positions come from the caller."""
        return self.captured.inputs.position_ids and not self.takes_past_length

    @property
    def spread(self) -> bool:
        """Whether its layers are on other devices than that which token ids come to."""
        return bool(places_of(self.sites, self.device))


@dataclass(frozen=True)
class Analysis:
    """What `explain` tells of a model and a recipe."""

    plan: Plan
    misses: tuple[NoMatch, ...]
    route: str
    reasons: tuple[str, ...]
    capture_seconds: float
    detect_seconds: float


@traces
def understand(
    model: nn.Module,
    foresee: Callable[[Front], object] | None = None,
    tracing: Callable[[], object] = nothing,
) -> Front:
    """Capture the model, find its attention sites and make the graph canonical; the model is left as it was.

    foresee: called before the captured graph is compared with the model, which takes as long as a compiler does
    tracing: called before the model is traced, which takes one core for seconds

    Raises:
        ModelError: no decoder, no attention, or blocks that were not recognised (see its subclasses).
    """
    check_model(model)
    with as_normal(model), uncollected(), threads_that_pay(model):
        return _understood(model, foresee, tracing)


def _understood(
    model: nn.Module,
    foresee: Callable[[Front], object] | None,
    tracing: Callable[[], object] = nothing,
) -> Front:
    foreseen: dict[GraphModule, Front] = {}

    def look(captured: Captured) -> None:
        if foresee is None or captured.opaques:  # whose steps take longer than what is gained
            return
        try:
            renew_threads()  # what was begun when tracing was may have a core
            foreseen[captured.graph_module] = front = _front(model, captured)
            foresee(front)
            renew_threads()
        except Exception as error:  # told by whoever meets it in a graph that is right
            log.debug("foreseen: %s", error)

    captured = capture(model, look, tracing)
    front = foreseen.get(captured.graph_module)
    if front is not None:
        return replace(front, captured=captured)
    give_steps(captured.opaques)
    return _front(model, captured)


def _front(model: nn.Module, captured: Captured) -> Front:
    made_for = _max_tokens(model, captured)
    detection = detect(captured, made_for)
    canonical = canonicalize(captured, detection)
    moved = offset_positions(canonical)
    limit = detection.limit
    return Front(
        captured,
        detection,
        moved.graph_module,
        moved.sites,
        moved.past_length,
        moved.states,
        made_for if limit is None else min(made_for or limit.tokens, limit.tokens),
        device_of(model),
        identity(model),
    )


def identity(model: nn.Module) -> ModelId:
    """Which model this is: its class, and the names and shapes of its weights, whatever they hold."""
    weights = sorted(f"{name} {list(tensor.shape)}" for name, tensor in model.named_parameters())
    digest = hashlib.sha256("\n".join(weights).encode()).hexdigest()[:16]
    return ModelId(architecture=type(model).__name__, digest=digest)


@dataclass(frozen=True)
class Part:
    """What one process of several runs: its graph, sites and plan.

    shard: the part of heads and weights, where the graph is sharded; stage: of the layers, where it is over stages
    """

    graph_module: GraphModule
    sites: tuple[AttentionSite, ...]
    plan: Plan
    shard: Shard | None = None
    stage: Stage | None = None


def analyze(model: nn.Module, recipe: Recipe, ranks: int = 1, stages: int = 1) -> Analysis:
    """What `recipe` would do to `model`, without doing it; over ranks and stages: what each of them has.

    Raises:
        ModelError, PlanError: as `understand` and `make_plan`.
    """
    front = understand(base_of(model))
    plan = plan_for(front, recipe)
    return analysis_of(divided(front, plan, ranks, stages), plan, recipe)


def plan_for(front: Front, recipe: Recipe) -> Plan:
    """The plan of a recipe for an understood model."""
    return make_plan(known(front), recipe)


def known(front: Front) -> KnownModel:
    """What deciding is given of an understood model."""
    table, limit = front.captured.max_seq_len, front.detection.limit
    limits = [] if limit is None else [(limit.tokens, limit.reason)]
    if table is not None:
        limits.append((table, "its graph was traced for no more"))
    opaques = front.captured.opaques
    places = places_of(front.sites, front.device)
    states = (*states_of(opaques), *front.sums)
    return KnownModel(
        sites=known_sites(front.sites, places),
        dtype=front.sites[0].dtype,
        max_tokens=front.max_tokens,
        position_limit=min(limits, default=None),
        states=_placed(front, states) if places else states,
        identity=front.model,
        device=front.device,
        python=tuple(sorted({record.path for record in opaques})),
    )


def _placed(front: Front, states: Sequence[RecurrentState]) -> tuple[RecurrentState, ...]:
    """States of a model over several devices, each with the one that it stands on."""
    found = {record.path: device_of(record.module) for record in front.captured.opaques}
    for node in front.canonical.graph.nodes:
        if node.target is running_sum:
            found[str(node.args[1])] = node.meta["val"].device
    return tuple(replace(state, device=str(found[state.module_path])) for state in states)


def analysis_of(front: Front, plan: Plan, recipe: Recipe) -> Analysis:
    captured, detection = front.captured, front.detection
    compiled = recipe.compile.mode != "none" and plan.backend == INDUCTOR
    sharding = front.sharding
    return Analysis(
        plan if sharding is None else localized(plan, sharding, 0),
        detection.misses,
        captured.route,
        (
            *captured.reasons,
            *describe(captured.opaques, compiled),
            *(() if sharding is None else sharding.told()),
            *(() if front.staging is None else front.staging.told()),
        ),
        captured.seconds,
        detection.seconds,
    )


def absorbed(front: Front, plan: Plan) -> Front:
    """`front` with the latent form of the sites that the plan gives it to; as it is where that was done before."""
    if not any(site.latent for site in front.sites):
        return front
    layers = [decision.layer for decision in plan.decisions if decision.latent]
    canonical, sites = absorb(front.canonical, front.sites, layers)
    return replace(front, canonical=canonical, sites=sites)


def sharded(front: Front, plan: Plan, ranks: int) -> Front:
    """`front` over ranks, each with its heads and weights.

    Raises:
        PlanError: its heads do not divide over so many ranks, or the plan has a layout that needs all heads of a layer.
    """
    front = absorbed(front, plan)
    return replace(front, sharding=shard(front.canonical, front.sites, plan, ranks))


def divided(front: Front, plan: Plan, ranks: int, stages: int) -> Front:
    """`front` over ranks, and their graphs over stages; one of either: as it is.

    Raises:
        PlanError: heads do not divide, a layout needs all heads of a layer, no value alone crosses between layers, or
            the model is over several devices by itself.
    """
    if ranks * stages > 1 and plan.devices:
        raise PlanError(
            f"parallel: the model's layers are on {', '.join(plan.devices)} in this process already: leave parallel= "
            "out, and it runs there; or load it on one device in each process"
        )
    if ranks > 1:
        front = sharded(front, plan, ranks)
    if stages == 1:
        return front
    front = absorbed(front, plan)
    if front.sharding is None:
        graphs, local = [(front.canonical, front.sites)], plan
    else:
        graphs = [(own.graph_module, own.sites) for own in front.sharding.shards]
        local = localized(plan, front.sharding, 0)
    return replace(front, staging=staged(graphs, local, stages))


def parts_of(front: Front, plan: Plan) -> tuple[tuple[Part, ...], ...]:
    """What runs, by stage and rank: one part where the graph is whole."""
    sharding, staging = front.sharding, front.staging
    if sharding is None:
        ranks: tuple[Part, ...] = (Part(front.canonical, front.sites, plan),)
    else:
        ranks = tuple(
            Part(own.graph_module, own.sites, localized(plan, sharding, own.rank), own)
            for own in sharding.shards
        )
    if staging is None:
        return (ranks,)
    return tuple(
        tuple(
            Part(stage.graph_module, stage.sites, stage.of(rank.plan), rank.shard, stage)
            for rank, stage in zip(ranks, own, strict=True)
        )
        for own in zip(*staging.ranks, strict=True)
    )


def rewrite_part(
    part: Part, rewritten: Rewritten, constants: Mapping[str, Tensor]
) -> tuple[Rewritten, dict[str, Tensor]]:
    """The cached graph of a part, and the values of its constant placeholders.

    rewritten, constants: of the whole graph
    """
    own = insert_cache(part.graph_module, part.sites, part.plan)
    values: dict[str, Tensor] = {}
    names = {table.rope.table: (table.cos_name, table.sin_name) for table in rewritten.ropes}
    for table in own.ropes:
        cos, sin = names[table.rope.table]
        values |= {table.cos_name: constants[cos], table.sin_name: constants[sin]}
    return own, values


def opaques_of(front: Front, own: Rewritten) -> tuple[OpaqueModule, ...]:
    """The modules that a cached graph runs as Python."""
    used = {node.args[-1] for node in own.graph_module.graph.nodes if node.target in (opaque, mixer)}
    return tuple(record for record in front.captured.opaques if record.key in used)


def alone(own: Rewritten) -> Rewritten:
    """The cached graph with copies of its weights: what they are parts of, and the file that is mapped, can go."""
    graph = own.graph_module.graph
    names = dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "get_attr")
    held = {name: fetch_attr(own.graph_module, name).detach() for name in names}
    return replace(own, graph_module=module_of(copied(held), graph, "CachedRank"))


def rewrite(front: Front, plan: Plan) -> tuple[Rewritten, dict[str, Tensor]]:
    """The cached graph of a plan, and the values of its constant placeholders (rope tables)."""
    front = absorbed(front, plan)
    rewritten = insert_cache(front.canonical, front.sites, plan)
    constants: dict[str, Tensor] = {}
    count = max((_positions(decision, plan) for decision in plan.decisions), default=0)
    if plan.limits.max_tokens is not None:  # no position is beyond it
        count = min(count, plan.limits.max_tokens)
    for table in rewritten.ropes:
        # Tabulated with the model's own graph: whatever scaling its embedding has is in the table.
        for name, value in zip(
            (table.cos_name, table.sin_name), _tabulate(front, table.rope, count), strict=True
        ):
            constants[name] = value.float().contiguous().to(table.device)
    return rewritten, constants


def tabulated(front: Front, rewritten: Rewritten) -> tuple[Tensor, ...]:
    """The weights that the constants of a cached graph are computed from."""
    rotations = [rotation for table in rewritten.ropes for rotation in (table.rope.k, table.rope.q)]
    nodes = ancestors([node for rotation in rotations for node in rotation.tables])
    return tuple(fetch_attr(front.canonical, str(node.target)) for node in nodes if node.op == "get_attr")


def _positions(decision: Decision, plan: Plan) -> int:
    """How many positions the op of a site rotates to."""
    retention = decision.layout.retention
    if decision.rotary_in_op is None:
        return 0
    if retention.in_cache:
        return int(retention.budget()) + plan.limits.prefill_chunk + 1
    assert plan.limits.max_tokens is not None, "without a limit of tokens the plan refuses keys before RoPE"
    return plan.limits.max_tokens


def _tabulate(front: Front, rope: RopeSpec, count: int) -> tuple[Tensor, Tensor]:
    """cos and sin of positions 0 .. count - 1, [count, rotary_dim]; checked for keys and queries.

    Raises:
        PlanError: the model has no positions that far.
    """
    rotations = Rotations(front.canonical)
    inputs = example_inputs(front, 1, count)
    try:
        tables = {r.tables: rotations.table_values(r, inputs) for r in (rope.k, rope.q)}
        cos, sin = rotations.tabulate(rope.k, tables[rope.k.tables], rope.form, count)
        rotations.follows(rope.q, tables[rope.q.tables], rope.form, cos, sin)
    except (IndexError, RuntimeError, NotRotary) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise PlanError(
            "keys that are rotated when they are read need a table of positions (positions: in_cache: the budget + "
            "runtime.prefill_chunk; rope: before: runtime.max_tokens), and the model's rotary embedding cannot be told "
            f"for {count:,}: {reason}. Make them fewer, or use positions: original and rope: after (and "
            "KVCOMPILE_DISABLE=rope_on_append where generated kernels run them)"
        ) from error
    return cos, sin


def example_inputs(front: Front, batch: int, tokens: int) -> dict[str, Any]:
    """Placeholder values of the canonical graph for sequences that start at position 0."""
    device = front.device
    inputs: dict[str, Any] = {"input_ids": torch.zeros(batch, tokens, dtype=torch.int64, device=device)}
    if front.captured.inputs.position_ids:
        inputs["position_ids"] = torch.arange(tokens, device=device).expand(batch, tokens).contiguous()
    if front.captured.inputs.logits_to_keep:
        inputs["logits_to_keep"] = torch.arange(tokens, device=device)
    if front.takes_past_length:
        inputs["past_length"] = torch.zeros((), dtype=torch.int64, device=device)
    return inputs


def _max_tokens(model: nn.Module, captured: Captured) -> int | None:
    if captured.max_seq_len is not None:
        return captured.max_seq_len
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    limit = getattr(text, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None
