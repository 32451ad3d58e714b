"""The plan: for every attention site one Decision, made once; the passes only carry it out.

A Plan is pure, frozen, printable and hashable; its digest names every compiled artifact that it led to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import sympy
import torch

from kvcompile.errors import PlanError
from kvcompile.kernels.choice import choose
from kvcompile.kernels.spec import Kernels, Share, SiteSpec
from kvcompile.layouts import (
    BufferSpec,
    CacheLayout,
    Contiguous,
    Full,
    InKeys,
    Paged,
    PageGroup,
    Recent,
    Scored,
)
from kvcompile.layouts import symbols as sy
from kvcompile.layouts.pages import TABLE_BYTES
from kvcompile.layouts.storage import as_kept
from kvcompile.recipe import Recipe
from kvcompile.recipe.retention import Place
from kvcompile.recipe.scales import ModelId, Scales, scales_of
from kvcompile.types import AttentionSite, MaskSpec, RecurrentState, RotaryForm, ScoreSpec, StateSlot

_DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class Limits:
    """What one cache may hold. `max_tokens` None: no limit, every layer is bounded by itself."""

    max_batch: int
    max_tokens: int | None
    prefill_chunk: int


@dataclass(frozen=True)
class Decision:
    """One site and the layout chosen for it."""

    layer: int
    module_path: str
    source: str
    idiom: str
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    sm_scale: float
    mask: MaskSpec
    layout: CacheLayout
    lossless: bool
    because: tuple[str, ...]
    kv_source: int  # the layer whose cache this one reads (its own unless shared)
    rope: RotaryForm | None = None  # the site's rotary embedding, where one was recognised
    score: ScoreSpec = ScoreSpec()  # what happens to the scores besides scale and mask
    latent: bool = (
        False  # attends over latent rows, one for all heads, which the site's sizes here are those of
    )
    dynamic: bool = False  # its mask is computed from activations
    mask_rows: tuple[StateSlot, ...] = ()  # what that mask reads of every token, kept beside K and V
    scales: tuple[tuple[str, tuple[float, ...]], ...] = ()  # calibrated, per KV head: ("keys.scale", (...))
    kernels: Kernels = "reference"  # what runs it
    kernels_because: str = ""
    rope_on_append: bool = False  # the op turns new queries and keys, not the graph before it

    @property
    def owns(self) -> bool:
        """Whether the cache that this site reads is its own, and so counted here."""
        return self.kv_source == self.layer

    @property
    def rotary(self) -> RotaryForm | None:
        """How keys are turned when they are read; None where they are kept as they are read."""
        return self.rope if self.layout.rotates_on_read else None

    @property
    def rotary_in_op(self) -> RotaryForm | None:
        """How the op turns vectors that it is given before RoPE; None where it is given them after."""
        return self.rope if self.rope_on_append else self.rotary

    def site_spec(self, share: Share = "none") -> SiteSpec:
        """The site's constants as its op has them; share: its place among the sites that read one cache."""
        return SiteSpec(
            self.layout, self.sm_scale, self.mask, self.score, self.rotary_in_op, share, self.kernels
        )

    @property
    def attention(self) -> str:
        """Mask and what happens to the scores: "sliding(128), sink logits"."""
        mask = "computed from activations" if self.dynamic else str(self.mask)
        return mask if self.score.plain else f"{mask}, {self.score}"

    @property
    def mask_bytes(self) -> int:
        """Bytes that the mask keeps of one token."""
        return sum(row.nbytes for row in self.mask_rows)

    @property
    def bytes(self) -> sympy.Expr:
        """Bytes of what this site keeps, in B, T, H, D, Dv, P."""
        return self.layout.bytes + sy.B * self.layout.num_slots * self.mask_bytes

    def buffers(self, dtype: torch.dtype, max_tokens: int | None) -> tuple[BufferSpec, ...]:
        """The site's tensors for one sequence, [heads, slots, ...] each: K's parts, V's, and what the mask keeps."""
        own = self.layout.buffers(self.num_kv_heads, self.head_dim, self.v_head_dim, dtype, max_tokens)
        known = dict(self.scales)
        own = tuple(replace(spec, fill=known[spec.name]) if spec.name in known else spec for spec in own)
        slots = self.layout.slots(max_tokens)
        rows = (
            BufferSpec(f"mask.{i}", (1, slots, *row.shape), row.torch_dtype)
            for i, row in enumerate(self.mask_rows)
        )
        return (*own, *rows)

    @property
    def ops(self) -> tuple[str, ...]:
        """The roles that run at this site."""
        rope = "rope+" if self.rotary is not None else ""
        attend = f"{rope}attend[K {self.layout.keys}, V {self.layout.values}]"
        rope = "rope+" if self.rope_on_append else ""
        return (f"{rope}append[{self.layout.placement}]", attend) if self.owns else (attend,)

    def subs(self, expression: sympy.Expr, itemsize: int) -> sympy.Expr:
        """`expression` with this site's head counts and sizes filled in."""
        return expression.subs(
            {sy.H: self.num_kv_heads, sy.D: self.head_dim, sy.Dv: self.v_head_dim, sy.P: itemsize}
        )

    def bytes_per_token(self, itemsize: int) -> int:
        """Bytes of one more token, all KV heads, rounded up; none where the cache is another layer's."""
        if not self.owns:
            return 0
        return int(sympy.ceiling(self.subs(self.layout.bytes_per_slot, itemsize))) + self.mask_bytes


@dataclass(frozen=True)
class Plan:
    """All decisions, the limits and the dtype they hold for; `states` is what recurrent modules carry, as it is."""

    recipe: str
    recipe_digest: str
    dtype: str
    limits: Limits
    decisions: tuple[Decision, ...]
    states: tuple[RecurrentState, ...] = ()
    scales: str | None = None  # digest of the calibrated scales that it uses
    notes: tuple[str, ...] = ()  # why it was chosen, where `auto` chose it
    step: Literal["regions", "cudagraph"] = "regions"  # how a decode step runs
    step_because: str = ""  # where the recipe's mode asks for the latter

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def lossless(self) -> bool:
        """Whether every layer keeps all that the original model would read, unrounded."""
        return all(decision.lossless for decision in self.decisions)

    @property
    def bounded(self) -> bool:
        """Whether no layer's memory grows with the tokens."""
        return all(decision.layout.bounded for decision in self.decisions)

    @property
    def chunk_invariant(self) -> bool:
        """Whether results do not depend on the pieces in which a text comes, beyond rounding."""
        return all(decision.layout.chunk_invariant for decision in self.decisions)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token takes over all layers while no budget is full."""
        return sum(decision.bytes_per_token(self.torch_dtype.itemsize) for decision in self.decisions)

    def bytes(self, batch: int, max_tokens: int | None = None) -> int:
        """Bytes of the cache for `batch` sequences of at most `max_tokens` (default: the plan's limit)."""
        tokens = self.limits.max_tokens if max_tokens is None else max_tokens
        values = {
            sy.B: batch,
            sy.T: sympy.oo if tokens is None else tokens,
        }  # without a limit, every budget is full
        itemsize = self.torch_dtype.itemsize
        kept = sum(int(d.subs(d.bytes, itemsize).subs(values)) for d in self.decisions if d.owns)
        return kept + int(self.table_bytes.subs(values)) + batch * self.state_bytes

    @property
    def page_groups(self) -> tuple[PageGroup, ...]:
        """Layers that share a page table, at the plan's limit; none without paged layers."""
        tokens = self.limits.max_tokens
        found: dict[tuple[Paged, sympy.Expr], list[Decision]] = {}
        for key, decision in self._paged():
            found.setdefault(key, []).append(decision)
        return tuple(
            PageGroup(
                f"page_table_{number}",
                tuple(decision.layer for decision in members),
                placement.page_size,
                members[0].layout.slots(tokens),
                placement.pages,
            )
            for number, ((placement, _), members) in enumerate(found.items())
        )

    @property
    def table_bytes(self) -> sympy.Expr:
        """Bytes of all page tables, in B and T."""
        tables = {key: decision.layout for key, decision in self._paged()}
        entries = [
            placement.pages_per_sequence(layout.retention) for (placement, _), layout in tables.items()
        ]
        return sympy.Add(*(sy.B * TABLE_BYTES * count for count in entries))

    def _paged(self) -> Iterator[tuple[tuple[Paged, sympy.Expr], Decision]]:
        """The paged layers that own their cache, each with what those of one table have in common."""
        for decision in self.decisions:
            placement = decision.layout.placement
            if decision.owns and isinstance(placement, Paged):
                yield (placement, decision.layout.num_slots), decision

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent state per sequence, of any length."""
        return sum(state.nbytes for state in self.states)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def whole_prompts(self) -> bool:
        """Whether some layer needs a prompt in one pass."""
        retentions = [decision.layout.retention for decision in self.decisions]
        return any(isinstance(r, Scored) and r.prefill == "full" for r in retentions)

    def digest(self) -> str:
        """A short stable hash of everything that decides what is generated."""
        decisive = {key: value for key, value in self.to_dict().items() if key != "notes"}
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        head = f"plan {self.digest()} of recipe {self.recipe} ({self.dtype}, {self.limits})"
        rows = (
            f"  {d.layer:>3} {d.module_path}: {d.num_qo_heads}/{d.num_kv_heads} heads x {d.head_dim}, {d.attention} "
            f"-> {d.layout}; because {'; '.join(d.because)}; {d.kernels} kernels"
            for d in self.decisions
        )
        states = (
            f"  state {s.module_path}: {s.nbytes} bytes a sequence ({', '.join(slot.name for slot in s.slots)})"
            for s in self.states
        )
        return "\n".join((head, *(f"  {note}" for note in self.notes), *rows, *states))


def make_plan(
    sites: Sequence[AttentionSite],
    recipe: Recipe,
    dtype: torch.dtype,
    model_max_tokens: int | None,
    position_limit: tuple[int, str] | None = None,
    states: Sequence[RecurrentState] = (),
    model: ModelId | None = None,
    device: torch.device | None = None,
) -> Plan:
    """Decide a layout for every site.

    Args:
        sites: what detection found, in call order.
        recipe: the checked recipe.
        dtype: the model's dtype, which `dtype: model` storage takes.
        model_max_tokens: the longest sequence the model was made for, where that is known.
        position_limit: how many positions the model has, where they end, and what happens beyond.
        states: what recurrent modules carry; kept as it is under every recipe.
        model: whose sites they are, which calibrated scales must be of; None: unknown, only their sizes are compared.

        device: the model's, which decides on kernels; None: not known.

    Raises:
        RecipeError: the file of the recipe's scales cannot be read.
        PlanError: the recipe asks something of a site that it cannot do; all problems are listed.
    """
    scales = None if recipe.scales is None else Scales.load(recipe.scales)
    if scales is not None and (foreign := _foreign(scales, model, sites)):
        raise PlanError(
            f"recipe {recipe.name!r} does not fit this model:\n  - scales: {recipe.scales}: {foreign}"
        )
    refused: dict[str, list[AttentionSite]] = {}
    decisions: list[Decision] = []
    for site in sites:
        try:
            decided = _decide(site, sites, recipe, scales, model_max_tokens)
            decisions.append(_with_kernels(decided, recipe, dtype, device))
        except ValueError as error:
            refused.setdefault(str(error), []).append(site)
    decisions = _same_kernels(decisions)
    for site, reader in zip(sites, decisions if not refused else (), strict=False):
        if not reader.owns and (problem := _differs(reader, decisions[reader.kv_source])):
            refused.setdefault(problem, []).append(site)
    problems = [f"{_name(where)}: {error}" for error, where in refused.items()]
    unmatched = [
        f"layers[{i}]: no layer of this model matches `where: {rule.where.model_dump(exclude_none=True)}`"
        for i, rule in enumerate(recipe.layers)
        # An attention condition may well find nothing in a model; an index that does not exist is a slip.
        if rule.where.attention is None
        and not any(rule.where.matches(s.layer, len(sites), s.mask.kind) for s in sites)
    ]
    if dtype not in _DTYPE_NAMES:
        problems.append(f"the model's dtype is {dtype}; supported: {', '.join(_DTYPE_NAMES.values())}")
    if problems or unmatched:
        lines = "\n".join(f"  - {line}" for line in (*problems, *unmatched))
        raise PlanError(f"recipe {recipe.name!r} does not fit this model:\n{lines}")
    bounded = all(decision.layout.bounded for decision in decisions)
    max_tokens = recipe.runtime.max_tokens
    if max_tokens is None and not bounded:
        if model_max_tokens is None:
            raise PlanError(
                f"recipe {recipe.name!r} keeps every token, and the model does not say how many it was made for: "
                "set runtime.max_tokens"
            )
        max_tokens = model_max_tokens
    max_tokens = _within_reach(decisions, recipe, max_tokens)
    max_tokens = _within_pools(decisions, recipe, max_tokens)
    if position_limit is not None:
        most, reason = position_limit
        if recipe.runtime.max_tokens is not None and recipe.runtime.max_tokens > most:
            raise PlanError(
                f"recipe {recipe.name!r} sets runtime.max_tokens to {recipe.runtime.max_tokens}, but the model has "
                f"{most} positions: {reason}, and no retention lets it count further; set at most {most}"
            )
        max_tokens = most if max_tokens is None else min(max_tokens, most)
    late = [d.layer for d in decisions if d.rotary is not None and not d.layout.retention.in_cache]
    if late and max_tokens is None:
        raise PlanError(
            f"recipe {recipe.name!r} keeps keys before RoPE (cache.keys.rope: before) in layer {late[0]}, which needs "
            "a table of all positions, and no layer limits them: set runtime.max_tokens"
        )
    limits = Limits(recipe.runtime.max_batch, max_tokens, recipe.runtime.prefill_chunk)
    return Plan(
        recipe.name,
        recipe.digest(),
        _DTYPE_NAMES[dtype],
        limits,
        tuple(decisions),
        tuple(states),
        None if scales is None else scales.digest(),
    )


def _with_kernels(
    decision: Decision, recipe: Recipe, dtype: torch.dtype, device: torch.device | None
) -> Decision:
    """The decision with the kernels that run it.

    Raises:
        ValueError: the recipe asks for Triton, and the site has no kernels.
    """
    made = choose(
        recipe.compile.kernels,
        decision.site_spec(),
        (decision.num_qo_heads, decision.num_kv_heads),
        (decision.head_dim, decision.v_head_dim),
        dtype,
        device,
        dynamic=decision.dynamic,
    )
    return replace(decision, kernels=made.kernels, kernels_because=made.because)


def _same_kernels(decisions: list[Decision]) -> list[Decision]:
    """Sites that read one cache are run by the same kernels: it is theirs in all."""
    without = {d.kv_source: d for d in decisions if d.kernels == "reference"}
    return [
        replace(
            d,
            kernels="reference",
            kernels_because=f"layer {other.layer} reads the same cache: {other.kernels_because}",
        )
        if d.kernels == "triton" and (other := without.get(d.kv_source)) is not None
        else d
        for d in decisions
    ]


def _differs(reader: Decision, owner: Decision) -> str | None:
    """Why a site cannot read the cache of another one, or None."""
    if reader.layout == owner.layout:
        return None
    return (
        f"cache: reads the keys and values of layer {owner.layer} ({owner.module_path}), which are kept once, as "
        f"{owner.layout}, where the recipe says {reader.layout} here; give both layers the same"
    )


def _foreign(scales: Scales, model: ModelId | None, sites: Sequence[AttentionSite]) -> str | None:
    """Why calibrated scales are not of this model, or None."""
    again = "; run kvcompile calibrate on this one"
    if model is not None and scales.model.architecture != model.architecture:
        return f"made for a {scales.model.architecture}, and this model is a {model.architecture}{again}"
    if len(scales.layers) != len(sites):
        return (
            f"made for a model of {len(scales.layers)} attention layers, and this one has {len(sites)}{again}"
        )
    if model is not None and scales.model.digest != model.digest:
        return f"made for a {model.architecture} with weights of other names or shapes{again}"
    return None


def _calibrated(
    site: AttentionSite, layout: CacheLayout, latent: bool, scales: Scales | None
) -> tuple[tuple[str, tuple[float, ...]], ...]:
    """The calibrated scales of a site's cache, by buffer.

    Raises:
        ValueError: the file has none for what this site keeps.
    """
    found = []
    for side, storage in (("keys", layout.keys), ("values", layout.values)):
        if storage.calibration is None:
            continue
        assert scales is not None, "a recipe with calibrated scales names their file"
        own = scales.layers[site.kv_source]
        own = own.rows or own if latent else own
        sizes, wanted = ((x.num_kv_heads, x.head_dim, x.v_head_dim) for x in (own, site))
        if sizes != wanted:
            kept = "{0} KV heads of {1} and {2} channels".format
            raise ValueError(
                f"scales: layer {site.kv_source} of the file has {kept(*sizes)}, and this layer keeps {kept(*wanted)}; "
                "run kvcompile calibrate on this model"
            )
        extent = own.values
        if side == "keys":
            before = layout.rotates_on_read and site.rope is not None
            extent = own.keys_before_rope if before else own.keys
        if extent is None:
            what = "keys before RoPE" if side == "keys" else "values"
            raise ValueError(
                f"scales: layer {site.kv_source} of the file has no figures of {what}; run kvcompile calibrate again"
            )
        found.append((f"{side}.scale", scales_of(storage, extent)))
    return tuple(found)


def _decide(
    site: AttentionSite,
    sites: Sequence[AttentionSite],
    recipe: Recipe,
    scales: Scales | None,
    model_max_tokens: int | None,
) -> Decision:
    config, rules = recipe.cache_for(site.layer, len(sites), site.mask.kind)
    tokens = recipe.runtime.max_tokens or model_max_tokens
    layout = config.build(Place(site.mask.window, tokens, site.layer, len(sites)))
    because = [f"layers[{i}] of the recipe: {_where(recipe, i)}" for i in rules] or ["the recipe's cache"]
    readers = [other.layer for other in sites if other.kv_source == site.layer != other.layer]
    latent = site.latent is not None and config.latent == "auto" and not readers
    if site.latent is not None and latent:
        expanded, site = site, site.latent.site
        layout = replace(layout, values=InKeys(site.v_head_dim))
        whole = expanded.num_kv_heads * (expanded.head_dim + expanded.v_head_dim)
        because.append(
            f"one latent row of {site.head_dim} channels stands for {whole} of K and V: kept as the keys are"
        )
    elif site.latent is not None:
        why = f"layer {readers[0]} reads its K and V" if readers else "the recipe says so"
        because.append(f"K and V expanded from their latent: {why}")
    if site.kv_source != site.layer:
        because = [f"reads the cache of layer {site.kv_source}"]
    elif readers:
        because.append(f"kept once for layers {', '.join(map(str, (site.layer, *readers)))}")
    if problem := layout.check():  # with the layer's own window, which the recipe did not know
        raise ValueError(f"cache: {problem}")
    for side, storage, dim in (
        ("keys", layout.keys, site.head_dim),
        ("values", layout.values, site.v_head_dim),
    ):
        problem = storage.check(dim)
        if problem:
            raise ValueError(f"cache.{side}: {problem}")
    window = layout.retention.window
    for side, storage in (("keys", layout.keys), ("values", layout.values)):
        if window is not None and isinstance(as_kept(storage), Recent) and storage.residual >= window:
            raise ValueError(
                f"cache.{side}.residual: the last {storage.residual} tokens in full are all of the window's {window}, "
                "so none would be read rounded; use fewer, or dtype: model"
            )
    if site.dynamic is not None and not (
        isinstance(layout.retention, Full) and isinstance(layout.placement, Contiguous)
    ):
        raise ValueError(
            "cache.retention: the mask of this layer is computed from the activations of all tokens before; use "
            "retention: {kind: full} and placement: {kind: contiguous}"
        )
    if isinstance(layout.retention, Scored):
        _check_scored(layout.retention, site, readers)
    bias = site.score.bias
    if layout.retention.in_cache and bias is not None and bias.kind in ("columns", "table"):
        raise ValueError(
            f"cache.retention.positions: in_cache counts positions in the cache, and this layer's {bias} is by "
            "positions in the sequence; use positions: original"
        )
    if layout.retention.in_cache and site.rope is None and bias is None and not site.positionless:
        raise ValueError(
            "cache.retention.positions: in_cache needs a rotary embedding between the projections and the "
            "scores, and none was recognised here; use positions: original"
        )
    if layout.before_rope and site.rope is None and not site.positionless:
        raise ValueError(
            "cache.keys.rope: before needs a rotary embedding between the projections and the scores, and none was "
            "recognised here; use rope: after"
        )
    if layout.before_rope and site.positionless:
        because.append("no position enters this layer, so its keys have no RoPE to stand before")
    if layout.retention.in_cache and site.positionless and bias is None:
        because.append("no position enters this layer, so counting in the cache changes nothing")
    if layout.retention.in_cache and site.mask.window is not None:
        raise ValueError(
            f"cache.retention.positions: in_cache counts from the first kept token, which a {site.mask} mask hides; "
            f"give {site.mask.kind} layers a retention of their own: "
            f"layers: [{{where: {{attention: {site.mask.kind}}}, cache: {{retention: {{kind: window}}}}}}]"
        )
    calibrated = _calibrated(site, layout, latent, scales)
    if calibrated and scales is not None:
        because.append(f"scales calibrated on {scales.text.tokens:,} tokens ({scales.digest()})")
    exact_retention, why = _exact(layout, site.mask)
    because.append(why)
    exact_storage = layout.keys.exact(site.dtype) and layout.values.exact(site.dtype)
    lossless = exact_retention and exact_storage
    return Decision(
        layer=site.layer,
        module_path=site.module_path,
        source=site.source,
        idiom=site.idiom,
        num_qo_heads=site.num_qo_heads,
        num_kv_heads=site.num_kv_heads,
        head_dim=site.head_dim,
        v_head_dim=site.v_head_dim,
        sm_scale=site.sm_scale,
        mask=site.mask,
        layout=layout,
        lossless=lossless,
        because=tuple(because),
        kv_source=site.kv_source,
        rope=site.rope.form if site.rope else None,
        score=site.score,
        latent=latent,
        dynamic=site.dynamic is not None,
        mask_rows=_mask_rows(site, sites),
        scales=calibrated,
    )


def _check_scored(retention: Scored, site: AttentionSite, readers: Sequence[int]) -> None:
    """Refuse a retention by scores where it makes no sense.

    Raises:
        ValueError: with the reason and what to do.
    """
    if site.mask.window is not None:
        raise ValueError(
            f"cache.retention: {retention.method} keeps tokens however old, which a {site.mask} mask hides; give "
            f"{site.mask.kind} layers a retention of their own: "
            f"layers: [{{where: {{attention: {site.mask.kind}}}, cache: {{retention: {{kind: window}}}}}}]"
        )
    others = [*readers] if site.kv_source == site.layer else [site.kv_source]
    if others:
        raise ValueError(
            f"cache.retention: {retention.method} scores tokens by the attention of one layer, and this cache is "
            f"shared with layer {others[0]}; give both a retention by positions, e.g. "
            f"layers: [{{where: {{index: [{', '.join(map(str, sorted((site.layer, *others))))}]}}, "
            "cache: {retention: {kind: full}}]"
        )


def _mask_rows(site: AttentionSite, sites: Sequence[AttentionSite]) -> tuple[StateSlot, ...]:
    """What the site's mask keeps of every token; layers that read the same keep it once, at the first."""
    if site.dynamic is None:
        return ()
    before = {
        key.node
        for other in sites
        if other.layer < site.layer and other.dynamic
        for key in other.dynamic.keys
    }
    return tuple(key.slot for key in site.dynamic.keys if key.node not in before)


def _within_reach(decisions: list[Decision], recipe: Recipe, max_tokens: int | None) -> int | None:
    """The limit of tokens, at most what the layers' biases have values for."""
    limited = [(reach, d) for d in decisions if (reach := _reach(d)) is not None]
    if not limited:
        return max_tokens
    reach, first = min(limited, key=lambda pair: pair[0])
    if recipe.runtime.max_tokens is not None and recipe.runtime.max_tokens > reach:
        raise PlanError(
            f"recipe {recipe.name!r} sets runtime.max_tokens to {recipe.runtime.max_tokens}, but layer {first.layer} "
            f"({first.module_path}, {first.source}) has a {first.score.bias}, the most positions that were "
            f"evaluated: set at most {reach}, or a retention with a window"
        )
    return reach if max_tokens is None else min(max_tokens, reach)


def _within_pools(decisions: list[Decision], recipe: Recipe, max_tokens: int | None) -> int | None:
    """The limit of tokens, at most what pools of a given size hold of one sequence."""
    pools = [
        (placement.pages * placement.page_size, placement, d)
        for d in decisions
        if isinstance(placement := d.layout.placement, Paged) and placement.pages and not d.layout.bounded
    ]
    if not pools:
        return max_tokens
    least, placement, first = min(pools, key=lambda pool: pool[0])
    if recipe.runtime.max_tokens is not None and recipe.runtime.max_tokens > least:
        wanted = -(-recipe.runtime.max_tokens // placement.page_size)
        raise PlanError(
            f"recipe {recipe.name!r} sets runtime.max_tokens to {recipe.runtime.max_tokens}, but the pool of layer "
            f"{first.layer} ({first.module_path}) holds {least} tokens in all ({placement}): set at most {least}, or "
            f"pages to at least {wanted}, or leave pages out and the pool grows"
        )
    return least if max_tokens is None else min(max_tokens, least)


def _reach(decision: Decision) -> int | None:
    """The longest sequence that the site's bias has values for; None: any."""
    bias, retention = decision.score.bias, decision.layout.retention
    if bias is None or bias.reach is None:
        return None
    if bias.kind == "relative":
        # The largest distance that is ever read, where that does not grow with the sequence.
        windows = [] if retention.window is None or retention.sinks else [retention.window]
        windows += [] if decision.mask.window is None else [decision.mask.window]
        if retention.in_cache:
            windows.append(int(retention.budget()))
        if windows and min(windows) <= bias.reach:
            return None
    return bias.reach


def _name(sites: list[AttentionSite]) -> str:
    """The layers that one reason is for, with the first one's place in the model's code."""
    first = sites[0]
    layers = ", ".join(str(site.layer) for site in sites[:8]) + (", ..." if len(sites) > 8 else "")
    return f"layer{'s' if len(sites) > 1 else ''} {layers} ({first.module_path}, {first.source})"


def _where(recipe: Recipe, rule: int) -> str:
    where = recipe.layers[rule].where.model_dump(exclude_none=True)
    return ", ".join(f"{key} {value}" for key, value in where.items())


def _exact(layout: CacheLayout, mask: MaskSpec) -> tuple[bool, str]:
    """Whether the retention keeps all that the site's own mask shows."""
    retention = layout.retention
    if isinstance(retention, Full):
        return True, f"keeps all that a {mask} mask shows"
    if mask.window is not None and retention.window is not None and retention.window >= mask.window:
        return True, f"the layer sees {mask.window} tokens, the window keeps {retention.window}"
    return False, f"forgets tokens that a {mask} mask would still show"
