"""The plan: for every attention site one Decision, made once; the passes only carry it out.

A Plan is pure, frozen, printable and hashable; its digest names every compiled artifact that it led to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import sympy
import torch

from kvcompile.errors import PlanError
from kvcompile.layouts import CacheLayout, Full, ModelDtype, SinkWindow
from kvcompile.layouts import symbols as sy
from kvcompile.recipe import Recipe
from kvcompile.types import AttentionSite, MaskSpec

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

    @property
    def ops(self) -> tuple[str, ...]:
        """The roles that run at this site."""
        rope = "rope+" if self.layout.retention.in_cache else ""
        return (
            f"append[{self.layout.placement}]",
            f"{rope}attend[K {self.layout.keys}, V {self.layout.values}]",
        )

    def subs(self, expression: sympy.Expr, itemsize: int) -> sympy.Expr:
        """`expression` with this site's head counts and sizes filled in."""
        return expression.subs(
            {sy.H: self.num_kv_heads, sy.D: self.head_dim, sy.Dv: self.v_head_dim, sy.P: itemsize}
        )

    def bytes_per_token(self, itemsize: int) -> int:
        """Bytes of one slot, all KV heads."""
        return int(self.subs(self.layout.bytes_per_slot, itemsize))


@dataclass(frozen=True)
class Plan:
    """All decisions, the limits and the dtype they hold for."""

    recipe: str
    recipe_digest: str
    dtype: str
    limits: Limits
    decisions: tuple[Decision, ...]

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
    def bytes_per_token(self) -> int:
        """Bytes that one more token takes over all layers while no budget is full."""
        return sum(decision.bytes_per_token(self.torch_dtype.itemsize) for decision in self.decisions)

    def bytes(self, batch: int, max_tokens: int | None = None) -> int:
        """Bytes of the cache for `batch` sequences of at most `max_tokens` (default: the plan's limit)."""
        tokens = self.limits.max_tokens if max_tokens is None else max_tokens
        values = {sy.B: batch} | ({} if tokens is None else {sy.T: tokens})
        itemsize = self.torch_dtype.itemsize
        return sum(int(d.subs(d.layout.bytes, itemsize).subs(values)) for d in self.decisions)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def digest(self) -> str:
        """A short stable hash of everything that decides what is generated."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        head = f"plan {self.digest()} of recipe {self.recipe} ({self.dtype}, {self.limits})"
        rows = (
            f"  {d.layer:>3} {d.module_path}: {d.num_qo_heads}/{d.num_kv_heads} heads x {d.head_dim}, {d.mask} "
            f"-> {d.layout}; because {'; '.join(d.because)}"
            for d in self.decisions
        )
        return "\n".join((head, *rows))


def make_plan(
    sites: Sequence[AttentionSite],
    recipe: Recipe,
    dtype: torch.dtype,
    model_max_tokens: int | None,
    position_table: int | None = None,
) -> Plan:
    """Decide a layout for every site.

    Args:
        sites: what detection found, in call order.
        recipe: the checked recipe.
        dtype: the model's dtype, which `dtype: model` storage takes.
        model_max_tokens: the longest sequence the model was made for, where that is known.
        position_table: rows of the model's table of positions, if it has one: no sequence can be longer.

    Raises:
        PlanError: the recipe asks something of a site that it cannot do; all problems are listed.
    """
    refused: dict[str, list[AttentionSite]] = {}
    decisions: list[Decision] = []
    for site in sites:
        try:
            decisions.append(_decide(site, len(sites), recipe))
        except ValueError as error:
            refused.setdefault(str(error), []).append(site)
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
    if position_table is not None:
        if max_tokens is not None and max_tokens > position_table:
            raise PlanError(
                f"recipe {recipe.name!r} sets runtime.max_tokens to {max_tokens}, but the model has a table of "
                f"{position_table} positions: no retention lets it count further; set at most {position_table}"
            )
        max_tokens = max_tokens or position_table
    limits = Limits(recipe.runtime.max_batch, max_tokens, recipe.runtime.prefill_chunk)
    return Plan(recipe.name, recipe.digest(), _DTYPE_NAMES[dtype], limits, tuple(decisions))


def _decide(site: AttentionSite, num_layers: int, recipe: Recipe) -> Decision:
    config, rules = recipe.cache_for(site.layer, num_layers, site.mask.kind)
    layout = config.build(own_window=site.mask.window)
    because = [f"layers[{i}] of the recipe: {_where(recipe, i)}" for i in rules] or ["the recipe's cache"]
    for side, storage, dim in (
        ("keys", layout.keys, site.head_dim),
        ("values", layout.values, site.v_head_dim),
    ):
        problem = storage.check(dim)
        if problem:
            raise ValueError(f"cache.{side}: {problem}")
    if isinstance(layout.retention, SinkWindow) and layout.retention.in_cache and site.rope is None:
        raise ValueError(
            "cache.retention.positions: in_cache needs a rotary embedding between the projections and the "
            "scores, and none was recognised here; use positions: original"
        )
    if layout.retention.in_cache and site.mask.window is not None:
        raise ValueError(
            f"cache.retention.positions: in_cache counts from the first kept token, which a {site.mask} mask hides; "
            "give sliding layers a retention of their own: layers: [{where: {attention: sliding}, "
            "cache: {retention: {kind: window}}}]"
        )
    exact_retention, why = _exact(layout, site.mask)
    because.append(why)
    lossless = (
        exact_retention and isinstance(layout.keys, ModelDtype) and isinstance(layout.values, ModelDtype)
    )
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
    )


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
