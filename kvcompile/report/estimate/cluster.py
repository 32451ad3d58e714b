"""What a model and a cache cost on several devices, and a bound on how fast they decode: arithmetic, no measurement.

A replica is `tensor` x `stages` devices; the devices hold as many replicas as they are enough for. Of a step of B
sequences of T tokens each, on one device:

    read       (weights that the step reads + the cache of B x T) / memory bandwidth
    collect    2 sums a layer of B x hidden elements (ring: 2 (n - 1) / n of the bytes on every link), one gather of
               B x vocabulary, each at least the machine's least time
    step       stages x (read + collect), and tokens a second = B x replicas / the slowest stage's (read + collect)

Products are left out: a step of decoding is bound by what it reads until B is in the hundreds. Stages are taken to be
equal, and to be all at work (as many steps on their way as stages). So the speed is an upper bound.

Sources: Megatron-LM (Shoeybi et al. 2019, section 3) for the two sums; Pope et al. 2022, "Efficiently scaling
transformer inference", section 3, for the costs of collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from kvcompile.errors import KVCompileError, PlanError
from kvcompile.report.estimate.weights import Weights, weights_of
from kvcompile.util.console import format_bytes, render, table
from kvcompile.util.machines import Machine

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from kvcompile.original.model_config import LayerShape, ModelShape
    from kvcompile.recipe import Recipe

_USABLE = 0.92  # of a device's memory: the rest are activations, code and the allocator's
_LOGITS = 4  # bytes: logits are gathered in float32


@dataclass(frozen=True)
class Option:
    """One recipe on these devices. Bytes are those of one device; seconds of one step.

    refused:   why the recipe cannot be; "" where it can, and all else is 0 where it cannot
    sequences: of the estimate's tokens, that fit beside the weights
    selects:   whether a step reads but a part of the cache: then its time is less than this
    """

    recipe: str
    refused: str = ""
    cache: int = 0
    cache_per_token: int = 0
    sequences: int = 0
    read: float = 0.0
    collect: float = 0.0
    tokens_per_second: float = 0.0
    selects: bool = False

    @property
    def fits(self) -> bool:
        """Whether one sequence does."""
        return not self.refused and self.sequences > 0


@dataclass(frozen=True)
class ClusterEstimate:
    """What `estimate_cluster` finds.

    weights:           bytes on one device
    room:              bytes for its cache
    collected:         bytes that a token sends over each device's link
    repeats:           on how many devices every KV head is: more than 1, and more devices keep no smaller cache each
    """

    model: str
    machine: Machine
    dtype: str
    devices: int
    tensor: int
    stages: int
    replicas: int
    batch: int
    tokens: int
    weights: int
    all_weights: int
    room: int
    collected: int
    repeats: int
    options: tuple[Option, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    def __str__(self) -> str:
        return render(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.markup import escape

        parts = [f"tensor {self.tensor}"] if self.tensor > 1 else []
        parts += [f"{self.stages} stages"] if self.stages > 1 else []
        of = " x ".join(parts) or "one device"
        count = f"{self.replicas} replica{'s' if self.replicas > 1 else ''}"
        yield f"[bold]{escape(self.model)}[/bold] on {self.devices} {self.machine.name}: {count} of {of}"
        yield (
            f"a device has {format_bytes(self.weights)} of {format_bytes(self.all_weights)} of weights, and "
            f"{format_bytes(max(self.room, 0))} for its cache; a token sends {format_bytes(self.collected)} over each "
            "link"
        )
        yield ""
        numbers = ("a token", f"{self.batch} x {self.tokens:,}", "most", "step", "tokens/s")
        rows = table("recipe", *numbers, "", right=numbers, grow=("",))
        for option in self.options:
            if option.refused:
                rows.add_row(escape(option.recipe), "", "", "", "", "", escape(option.refused))
                continue
            step = self.stages * (option.read + option.collect)
            fits = option.sequences >= self.batch
            rows.add_row(
                escape(option.recipe),
                format_bytes(option.cache_per_token),
                format_bytes(option.cache),
                f"{option.sequences:,}",
                f"{step * 1000:.1f} ms" if fits else "",
                f"{option.tokens_per_second:,.0f}" if fits else "",
                self._remark(option),
            )
        yield rows
        yield ""
        for note in self.notes:
            yield escape(f"note: {note}")

    def _remark(self, option: Option) -> str:
        if option.sequences < self.batch:
            return "does not fit"
        share = option.collect / (option.read + option.collect)
        remarks = [f"{share:.0%} collectives"] if self.tensor > 1 else []
        return ", ".join([*remarks, *(["reads less"] if option.selects else [])])


def estimate_cluster(
    config: object,
    recipes: Sequence[object],
    machine: Machine,
    *,
    devices: int = 1,
    parallel: Mapping[str, int] | None = None,
    batch: int = 1,
    tokens: int | None = None,
    dtype: object = None,
    **overrides: Any,
) -> ClusterEstimate:
    """What each of these recipes costs on several devices, beside the weights.

    Args:
        config: a transformers config, a dict of one, or a folder or file that has one.
        recipes: anything that `Recipe.load` takes.
        machine: one of the devices (`machines.py`).
        devices: how many there are.
        parallel: {"tensor": ranks, "stages": count} of one replica; what is left out is 1.
        batch: sequences of one replica in a step.
        tokens: that each of them has; by default the length the model was made for, else 4096.
        dtype: of weights and of `dtype: model` storage; by default the model's, else bfloat16.
        overrides: over each recipe.

    Raises:
        KVCompileError: sizes that do not go together.
        ModelError: shapes or weights cannot be told from the config.
        PlanError: heads that do not divide over the ranks.
    """
    import torch

    from kvcompile.original.model_config import dtype_name
    from kvcompile.recipe import Recipe
    from kvcompile.report.estimate.planned import shape_of

    tensor, stages = _sizes(parallel, devices, batch)
    shape = shape_of(config)
    weights = weights_of(config)
    name = dtype_name(dtype or shape.dtype or "bfloat16")
    itemsize = getattr(torch, name).itemsize
    own, repeats = divided(shape, tensor)
    on_device = -(-weights.on_rank(tensor) * itemsize // stages)
    found = ClusterEstimate(
        model=shape.name,
        machine=machine,
        dtype=name,
        devices=devices,
        tensor=tensor,
        stages=stages,
        replicas=devices // (tensor * stages),
        batch=batch,
        tokens=tokens or shape.max_tokens or 4096,
        weights=on_device,
        all_weights=weights.total * itemsize,
        room=int(machine.memory * _USABLE) - on_device,
        collected=_collected(weights, len(shape.layers), tensor, itemsize),
        repeats=repeats,
        options=(),
        notes=(),
    )
    read = weights.read(tensor, batch) * itemsize / stages
    options = tuple(_option(found, own, read, Recipe.load(recipe, **overrides)) for recipe in recipes)
    return replace(found, options=options, notes=_notes(found, shape, weights))


def divided(shape: ModelShape, ranks: int) -> tuple[ModelShape, int]:
    """What one rank has of each layer's heads, and on how many ranks each KV head is at most.

    Raises:
        PlanError: they do not divide, by the rule of `passes/shard/sites.py`.
    """
    from kvcompile.passes.shard.sites import check_heads

    check_heads(((layer.num_qo_heads, _kept_heads(layer)) for layer in shape.layers), ranks)
    layers = tuple(
        replace(
            layer,
            num_qo_heads=layer.num_qo_heads // ranks,
            num_kv_heads=max(1, layer.num_kv_heads // ranks),
        )
        for layer in shape.layers
    )
    repeats = max((max(1, ranks // _kept_heads(layer)) for layer in shape.layers), default=1)
    return replace(shape, layers=layers), repeats


def _kept_heads(layer: LayerShape) -> int:
    """What a cache has rows for: KV heads, or one latent row for all heads."""
    return 1 if layer.latent is not None else layer.num_kv_heads


def _sizes(parallel: Mapping[str, int] | None, devices: int, batch: int) -> tuple[int, int]:
    given = dict(parallel or {})
    unknown = sorted(given.keys() - {"tensor", "stages"})
    if unknown:
        raise KVCompileError(f"parallel: expected tensor and stages, got {', '.join(unknown)}")
    tensor, stages = given.get("tensor", 1), given.get("stages", 1)
    for what, value in (
        ("parallel.tensor", tensor),
        ("parallel.stages", stages),
        ("devices", devices),
        ("batch", batch),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise KVCompileError(f"{what}: expected a whole number of at least 1, got {value!r}")
    if devices < tensor * stages:
        raise KVCompileError(
            f"parallel: a replica of tensor {tensor} x {stages} stages needs {tensor * stages} devices, and there are "
            f"{devices}"
        )
    return tensor, stages


def _collected(weights: Weights, layers: int, tensor: int, itemsize: int) -> int:
    """Bytes that one token sends over each device's link."""
    if tensor == 1:
        return 0
    sums = 2 * layers * weights.hidden * itemsize * 2 * (tensor - 1) / tensor
    gathered = weights.vocabulary * _LOGITS * (tensor - 1) / tensor
    return round(sums + gathered)


def _option(found: ClusterEstimate, own: ModelShape, weights: float, recipe: Recipe) -> Option:
    """One recipe.

    Args:
        found: all but its options.
        own: the heads that one rank has of each layer.
        weights: bytes of them that a device reads in a step.
    """
    from kvcompile.report.estimate import sizes
    from kvcompile.report.estimate.planned import plan_of_shape

    batch, tokens, stages, room = found.batch, found.tokens, found.stages, max(found.room, 0)
    asked = {"memory": max(room, 1), "batch": batch, "tokens": tokens}
    try:
        plan = plan_of_shape(own, found.dtype, recipe, asked)
    except PlanError as error:
        return Option(recipe.name, refused=" ".join(str(error).split())[:200])
    total = sizes.total(plan, own)
    cache = -(-sizes.at(total, batch, tokens) // stages)
    most = sizes.fit(plan, total, room * stages, batch, tokens).sequences if room else 0
    read = (weights + cache) / found.machine.bandwidth
    collect = 0.0
    if found.tensor > 1:
        least = (2 * len(own.layers) + 1) * found.machine.seconds
        collect = (found.collected * batch / found.machine.link + least) / stages
    return Option(
        recipe.name,
        cache=cache,
        cache_per_token=-(-sizes.slope(plan, sizes.total(plan, own, tables=False)) // stages),
        sequences=most,
        read=read,
        collect=collect,
        tokens_per_second=batch * found.replicas / (read + collect) if most >= batch else 0.0,
        selects=any(decision.layout.selection.selects for decision in plan.decisions),
    )


def _notes(found: ClusterEstimate, shape: ModelShape, weights: Weights) -> tuple[str, ...]:
    notes, machine = list(shape.notes), found.machine
    left = found.devices % (found.tensor * found.stages)
    if found.room <= 0:
        notes.append("the weights alone do not fit: use more devices for a replica (tensor or stages)")
    if found.repeats > 1:
        notes.append(
            f"each KV head (or latent row) is on {found.repeats} ranks: more ranks divide the weights further, and no "
            "cache"
        )
    if left:
        notes.append(f"{left} of the devices are in no replica")
    if weights.expert_share < 1:
        notes.append(f"a token goes through {weights.expert_share:.1%} of the experts; all of them are kept")
    notes.append(
        f"a bound: what is read at {machine.bandwidth / 1e12:.2f} TB/s and sent at {machine.link / 1e9:.0f} GB/s, at "
        f"least {machine.seconds * 1e6:.0f} us a collective; products and launches are not in it"
    )
    return tuple(notes)
