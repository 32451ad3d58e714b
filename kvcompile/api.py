"""`kvcompile.optimize`: a model in, the same model with the cache of a recipe out."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import kvcompile
from kvcompile.compile import ahead
from kvcompile.compile.cudagraph import CudaRecorder, StepGraphs
from kvcompile.compile.executor import Executor, RegionCompiler
from kvcompile.compile.regions import cut
from kvcompile.decide.backend import load
from kvcompile.errors import RankError
from kvcompile.kernels.ops import cached_attention as ops
from kvcompile.kernels.ops import opaque
from kvcompile.original.adapters import base_of
from kvcompile.original.checks import hooks_of
from kvcompile.original.digest import of_config, of_model, of_tensors
from kvcompile.original.identity import read_ahead
from kvcompile.original.inference_tensors import as_normal
from kvcompile.passes.graph_digest import names_of
from kvcompile.passes.probe.evaluate import fetch_attr
from kvcompile.passes.rewrite.insert_cache import Rewritten
from kvcompile.passes.shard import collectives
from kvcompile.passes.table import PassRun, totals, watched
from kvcompile.pipeline import (
    Front,
    Part,
    absorbed,
    alone,
    analysis_of,
    divided,
    opaques_of,
    parts_of,
    plan_for,
    rewrite,
    rewrite_part,
    tabulated,
    understand,
)
from kvcompile.plan import INDUCTOR, Plan
from kvcompile.recipe import Recipe
from kvcompile.report.dump import Dump
from kvcompile.runtime.module import CachedModel, PlainCachedModel
from kvcompile.runtime.parallel.group import Brought, Group, check_world, join, rank_of_process
from kvcompile.runtime.parallel.options import Parallel
from kvcompile.runtime.parallel.skeleton import skeleton
from kvcompile.runtime.program import OfStage, Program
from kvcompile.runtime.report import Report
from kvcompile.util.listed import listed
from kvcompile.util.progress import Progress, told
from kvcompile.util.serial import traces
from kvcompile.util.tracing import uncollected
from kvcompile.verify import Check, check_program, verify
from kvcompile.verify.ids import bounds
from kvcompile.verify.proofs import Proof


def optimize(
    model: nn.Module,
    recipe: object = "baseline",
    *,
    progress: Progress | None = None,
    parallel: object = None,
    device_mesh: Any = None,
    **overrides: Any,
) -> CachedModel:
    """Rewrite `model` onto the KV cache that `recipe` chooses, prove it, and return it ready to compile.

    Args:
        model: a decoder: a `transformers` causal LM, or any module from token ids to logits. Left as it is; its
            weights are shared, not copied.
        recipe: a shipped name ("int8"), a path of a YAML file, a mapping, or a `Recipe`.
        progress: called as progress(stage, done, total) while long stages run; None: a bar where stderr is a
            terminal, once it takes more than two seconds, else the log.
        parallel: {"tensor": n}: this process is one of n that each keep a part of heads and weights; {"stages": n}:
            of n that each keep a part of the layers; or both. All are called alike (`docs/parallel.md`). None: the
            whole model is here.
        device_mesh: of `torch.distributed`, the group to do that in; None: the default one, or torchrun's.
        overrides: recipe sections or keys of `runtime`, e.g. max_tokens=4096, compile={"mode": "none"}.

    Returns:
        A module that is called and generates as the original, with its cache inside. Each class of shapes
        (prompt, decode step) compiles when it first comes, or in `warmup()`.

    Raises:
        RecipeError, ModelError, PlanError, VerificationError: the model has not been touched.
        RankError: with `parallel`, ranks do not come in time, or do not have the same.
    """
    checked = Recipe.load(recipe, **overrides)
    over = Parallel.of(parallel)
    if over.size > 1:
        check_world(over, device_mesh)
    started = time.perf_counter()
    with told(progress) as tell, watched(code=Dump.asked()):
        tell("capture and detect", 0, 1)
        model = base_of(model)
        kept = isinstance(model, nn.Module) and Proof.kept(checked.verify, over.size)
        with ahead.optimizing(), read_ahead(model) if kept else nullcontext(_unread) as read:

            def begin() -> None:
                read(ahead.begin(model, checked))

            front = understand(model, partial(_begin_kernels, checked) if over.size == 1 else None, begin)
            _warn_of_hooks(model)
            tell("capture and detect", 1, 1)
            return build(model, front, checked, tell, started, over, device_mesh)


@traces
def build(
    model: nn.Module,
    front: Front,
    checked: Recipe,
    tell: Progress | None = None,
    started: float | None = None,
    parallel: Parallel = Parallel(),  # noqa: B008 (frozen)
    device_mesh: Any = None,
) -> CachedModel:
    """`optimize` from where the model is understood: `front` serves any number of recipes.

    Raises:
        PlanError, VerificationError: as `optimize`.
    """
    with ahead.optimizing(), as_normal(model), watched(code=Dump.asked()) as runs, uncollected():
        tell = tell or (lambda stage, done, total: None)
        fast = _built(model, front, checked, tell, started, runs, parallel, device_mesh)
    if fast.group is None:  # a rank's weights are its own
        fast.watch_original(front.captured.changing)
    return fast


def _built(
    model: nn.Module,
    front: Front,
    checked: Recipe,
    tell: Progress,
    started: float | None,
    runs: Sequence[PassRun],
    parallel: Parallel,
    device_mesh: Any,
) -> CachedModel:
    started = time.perf_counter() if started is None else started
    plan = plan_for(front, checked)
    _warn_beyond(model, front, plan)
    front = absorbed(front, plan)
    front = divided(front, plan, parallel.tensor, parallel.stages)
    understood = time.perf_counter()
    whole = parallel.size == 1
    kept = Proof.kept(checked.verify, parallel.size)
    proof = Proof.of(model, front, plan, checked.digest()) if kept else None
    known = None if proof is None else proof.read()
    # A rank's kernels are for its own heads; and those of what was proved before are likely to be compiled.
    if whole and known is None:
        ahead.begin_kernels(plan)
        ahead.begin_header(front.device, checked)
    dump = Dump.from_environment(plan)
    dump.front(front)
    checks: tuple[Check, ...] = ()
    if whole:
        checks = _verified(model, front, plan, checked, tell) if known is None else known.checks
        if proof is not None and known is None:
            proof.keep(checks)
        verified, group, weights = time.perf_counter(), None, None
    else:  # what all ranks compute is proved on rank 0 before they meet
        rank = rank_of_process(device_mesh)
        mine = Brought()
        try:
            if rank == 0:
                checks = _verified(model, front, plan, checked, tell)
            mine = brought_by(rank, model, front, plan)
        except Exception as error:
            if rank == 0:  # the others wait for it
                with suppress(RankError):
                    told = f"{type(error).__name__}: {error}"
                    join(parallel, front.device, device_mesh).compare(Brought(problem=told))
            raise
        verified = time.perf_counter()
        tell("meet the other ranks", 0, 1)
        group = join(parallel, front.device, device_mesh)
        weights = group.compare(mine).weights
        tell("meet the other ranks", 1, 1)
    fast = _emit(model, front, plan, checked, dump, group)
    fast.whole_weights = weights
    emitted = time.perf_counter()
    dump.passes(runs)
    if checked.verify == "thorough" and group is None:
        checks = (*checks, _check_emitted(fast, front, plan))
    fast.report = Report(
        understand_seconds=understood - started,
        capture_seconds=front.captured.seconds,
        detect_seconds=front.detection.seconds,
        verify_seconds=verified - understood,
        emit_seconds=emitted - verified,
        checks=checks,
        proved=None if known is None else known.made,
        passes=totals(runs),
    )
    if front.sharding is not None:
        fast.report["sharding"] = front.sharding.told()
        fast.report["whole"] = front.sharding.whole
    if front.staging is not None:
        fast.report["stages"] = front.staging.told()
    return fast


def _unread(after: threading.Event) -> None:
    """Nobody asks for the weights' hash."""


def _begin_kernels(checked: Recipe, front: Front) -> None:
    """Have the kernels of the plan compiled beside what follows."""
    ahead.begin_kernels(plan_for(front, checked))


def _verified(
    model: nn.Module, front: Front, plan: Plan, checked: Recipe, tell: Progress
) -> tuple[Check, ...]:
    tell(f"verify ({checked.verify})", 0, 1)
    checks = verify(model, front, plan, checked.verify)
    tell(f"verify ({checked.verify})", 1, 1)
    return checks


def _warn_of_hooks(model: nn.Module) -> None:
    """Tell once which forward hooks nobody calls any more."""
    if hooks := hooks_of(model):
        warnings.warn(
            f"forward hooks of {type(model).__name__} are not called by the optimized module, which runs one graph: "
            f"{listed(hooks, 5)}; what they did to tensors while it was traced is in the graph",
            stacklevel=3,
        )


def _warn_beyond(model: nn.Module, front: Front, plan: Plan) -> None:
    """Tell that a limit lies beyond what the model was made for, where it is computed exactly and means little."""
    made_for, limit = front.max_tokens, plan.limits.max_tokens
    if made_for is not None and limit is not None and limit > made_for and not plan.bounded:
        warnings.warn(
            f"max_tokens is {limit}, and {type(model).__name__} was made for {made_for}: what it answers beyond is its "
            "own, and often nonsense",
            stacklevel=4,
        )


def brought_by(rank: int, model: nn.Module, front: Front, plan: Plan) -> Brought:
    """What a rank of a group brings to the start.

    Rank 0 reads all weights; any other one those of its own part.
    """
    named, sharding = names_of(model), front.sharding
    graphs = [] if sharding is None else [sharding.digest(named)]
    pieces = () if sharding is None else [sharding.pieces(number) for number in range(sharding.ranks)]
    if front.staging is not None:
        graphs.append(front.staging.digest(named, pieces))
    same = {
        "kvcompile": kvcompile.__version__,
        "torch": torch.__version__,
        "plan": plan.digest(),
        "config": of_config(model),
        "graphs": " ".join(graphs),
    }
    whole = rewrite(front, plan)
    parts = [
        (part, pieces[number] if pieces else {})
        for stage in parts_of(front, plan)
        for number, part in enumerate(stage)
    ]
    if rank:
        return Brought(same, _digest_of(front, *parts[rank], whole, named))
    found = tuple(_digest_of(front, part, own, whole, named) for part, own in parts)
    return Brought(same, found[0], found, of_model(model))


def _digest_of(
    front: Front,
    part: Part,
    pieces: Mapping[str, tuple[str, str]],
    whole: tuple[Rewritten, dict[str, Tensor]],
    named: Collection[str],
) -> str:
    """Of all that a rank computes with: weights, constants, tables, and modules that run as Python.

    A weight goes by its name and which part of it there is; what else a graph has, by its content.
    """
    own, tables = rewrite_part(part, *whole)
    found = dict.fromkeys(str(node.target) for node in own.graph_module.graph.nodes if node.op == "get_attr")
    held = []
    for name in found:
        path, which = pieces.get(name, (name, ""))
        value = fetch_attr(own.graph_module, name)
        held.append((f"{path} {which}" if path in named else which, value))
    for record in opaques_of(front, own):
        module = record.module
        held += [
            (f"{record.path}.{name}", value) for name, value in module.state_dict(keep_vars=True).items()
        ]
    return of_tensors([*held, *tables.items()])


def _emit(
    model: nn.Module, front: Front, plan: Plan, recipe: Recipe, dump: Dump, group: Group | None = None
) -> CachedModel:
    analysis = analysis_of(front, plan, recipe)
    rewritten, constants = rewrite(front, plan)
    stage, whole = None, plan
    if group is not None:
        part = parts_of(front, plan)[group.stage][group.tensor_rank]
        rewritten, constants = rewrite_part(part, rewritten, constants)
        rewritten, stage, plan = alone(rewritten), part.stage, part.plan
        collectives.name_group(rewritten.graph_module, group.name)
    regions = cut(
        rewritten.graph_module,
        lambda node: node.target is ops.cached_attention,
        lambda node: node.target in (opaque.opaque, opaque.mixer),
        alone=plan.backend != INDUCTOR,
    )
    dump.back(model, rewritten, regions, recipe)
    graphs = StepGraphs(CudaRecorder(front.device)) if plan.step == "cudagraph" else None
    executor = Executor(regions, recipe.compile.mode, graphs, _compiler(plan, recipe))
    program = Program(
        rewritten.caches,
        rewritten.states,
        constants,
        front.captured.rebuild,
        front.captured.logits_index,
        front.captured.inputs.position_ids,
        front.captured.inputs.logits_to_keep,
        front.takes_past_length,
        front.ragged,
        front.device,
        opaques_of(front, rewritten),
        bounds(front),
        front.captured.last is not None,
        None
        if stage is None or front.staging is None
        else OfStage(stage.takes, stage.gives, front.staging.outputs, whole),
        () if group is not None else tabulated(front, rewritten),
    )
    model = model if group is None else skeleton(model)
    kind: type[CachedModel] = PlainCachedModel
    if _is_hugging_face(model):
        from kvcompile.runtime.huggingface import HuggingFaceCachedModel

        kind = HuggingFaceCachedModel
    fast = kind(model, program, plan, executor)
    fast.group = group
    fast.analysis = analysis
    fast.recipe = recipe
    return fast


def _compiler(plan: Plan, recipe: Recipe) -> RegionCompiler | None:
    """The region compiler of the plan's backend; None: Inductor."""
    return None if plan.backend == INDUCTOR else load(plan.backend).compiler(plan, recipe)


def _check_emitted(fast: CachedModel, front: Front, plan: Plan) -> Check:
    def step(ids: Any, mask: Any) -> Any:
        return fast._call(ids, mask, keep=None)[front.captured.logits_index]

    fast.reset()
    try:
        return check_program(step, front, plan, buffers=lambda: fast.cache.buffers)
    finally:
        fast.release()


def _is_hugging_face(model: nn.Module) -> bool:
    """Whether the model brings a configuration to generate with."""
    return hasattr(model, "generation_config") and hasattr(model, "config")
