"""What a cache costs, from a config alone: bytes per token, bytes in all, and what fits in a memory budget.

    total(B, T) = sum over layers of CacheLayout.bytes    one sympy expression, which grows with B and with T
    tokens    = the largest T with total(B = batch, T) <= memory
    sequences = the largest B with total(B, T = tokens) <= memory

Nothing is decided here: `make_plan` (kvcompile/decide) is given what the config tells of the model, and decides as for
`optimize`. What no config tells is taken to be the usual: a rotary embedding in every layer, scores that are only
scaled and masked, and MLA that has its latent form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcompile.errors import ModelError
from kvcompile.util.console import MOST_BYTES, format_bytes, format_layers, parse_bytes, render, shown, table

# Light on purpose: torch and transformers are imported when estimate() is called.
if TYPE_CHECKING:
    import sympy
    import torch
    from rich.console import Console, ConsoleOptions, RenderResult

    from kvcompile.decide.known import KnownModel, KnownSite
    from kvcompile.layouts import CacheLayout
    from kvcompile.original.model_config import LayerShape, ModelShape
    from kvcompile.plan import Decision, Plan
    from kvcompile.specs import SiteShape

_TOKENS_UNKNOWN = 4096
_ENDLESS = MOST_BYTES
_WHOLE_GROUPS = 128  # tokens: a multiple of every group that shares its scales


@dataclass(frozen=True)
class LayerCost:
    """Layers of one kind and what each of them costs. Bytes are those of one layer."""

    layers: tuple[int, ...]
    shape: SiteShape
    layout: CacheLayout
    latent: bool  # one row for all heads, the values in the keys
    shared: bool  # reads another layer's K/V: costs nothing
    bytes_per_token: int  # of one slot
    bytes_per_sequence: int  # at `tokens` of the estimate

    @property
    def attention(self) -> str:
        """What the model shows to the layer: "causal", "sliding(4096)"."""
        return str(self.shape.mask)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready and flat."""
        data = asdict(self)
        shape = data.pop("shape")
        del shape["mask"]
        return {"layers": self.layers, "attention": self.attention, **shape, **data}


@dataclass(frozen=True)
class Fit:
    """What `memory` bytes of cache hold.

    tokens:    per sequence, at the estimate's batch; None: no limit, the cache does not grow
    sequences: of the estimate's `tokens` each
    """

    memory: int
    tokens: int | None
    sequences: int


@dataclass(frozen=True)
class Estimate:
    """The cost of a recipe's cache for a model. All sizes in bytes."""

    model: str
    recipe: str
    dtype: str
    batch: int
    tokens: int
    layers: tuple[LayerCost, ...]
    bytes_per_token: int  # over all layers, while no budget is full
    bytes_per_token_later: int  # once every bounded layer is full
    bytes: int  # of batch x tokens: what a CPU's cache takes once it holds them
    limit: int | None  # tokens that a sequence may have, by recipe and model; None: any number
    limit_bytes: int  # of batch x limit: what a GPU's contiguous cache takes from the first token on
    full_bytes_per_token: int  # model dtype, every token kept, all layers
    full_bytes: int
    state_bytes: int  # recurrent state per sequence, of any length; in `bytes` and `full_bytes`
    fit: Fit | None
    notes: tuple[str, ...]

    @property
    def ratio(self) -> float:
        """How many times smaller than the full cache in the model's dtype, at batch x tokens."""
        return self.full_bytes / self.bytes

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        layers = [cost.to_dict() for cost in self.layers]
        return asdict(self) | {"layers": layers, "ratio": self.ratio}

    def __str__(self) -> str:
        return render(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.markup import escape

        names = [f"[bold]{escape(name)}[/bold]" for name in (self.model, self.recipe)]
        yield f"{names[0]} with recipe {names[1]}, {self.dtype}"
        yield ""
        numbers = ("bytes/token", "per sequence")
        rows = table("layers", "attention", "KV heads", "layout", *numbers, right=numbers, grow=("layout",))
        for cost in self.layers:
            count = len(cost.layers)
            rows.add_row(
                f"{format_layers(cost.layers)}",
                cost.attention,
                f"{cost.shape.num_kv_heads} x {_dims(cost)}",
                "shared with an earlier layer" if cost.shared else _layout(cost),
                format_bytes(count * cost.bytes_per_token),
                format_bytes(count * cost.bytes_per_sequence),
            )
        yield rows
        yield ""
        later = self.bytes_per_token_later
        if later == self.bytes_per_token:
            growth = ""
        elif later:
            growth = f", {format_bytes(later)} once the bounded layers are full"
        else:
            growth = " until full, then none"
        what = f"{self.batch} sequence{'s' if self.batch > 1 else ''} x {self.tokens:,} tokens"
        facts = table("", "", grow=("",))
        facts.show_header = False
        facts.add_row("a token takes", f"[bold]{format_bytes(self.bytes_per_token)}[/bold]{growth}")
        if self.state_bytes:
            facts.add_row("recurrent state", f"{format_bytes(self.state_bytes)} a sequence of any length")
        facts.add_row(what, f"[bold]{format_bytes(self.bytes)}[/bold]")
        if self.limit is not None and self.limit > self.tokens:
            paged = any(cost.layout.placement.kind == "paged" for cost in self.layers)
            when = "in the end" if paged else "in the end; on a GPU from the first token on"
            facts.add_row(f"its limit, {self.limit:,} tokens", f"{format_bytes(self.limit_bytes)} {when}")
        compared = f"{self.ratio:.2f}x smaller" if self.bytes < self.full_bytes else "the same"
        if self.bytes > self.full_bytes and any(
            cost.layout.placement.kind == "paged" for cost in self.layers
        ):
            more = self.bytes / self.full_bytes - 1
            compared = f"{more:.1%} larger: pages are taken whole, and each pool has a spare one"
        elif self.bytes > self.full_bytes:
            compared = f"{1 / self.ratio:.2f}x larger: the budget is more than {self.tokens:,} tokens"
        full = f"{format_bytes(self.full_bytes)} ({format_bytes(self.full_bytes_per_token)} a token)"
        facts.add_row(f"full {self.dtype} cache", f"{full}: {compared}")
        if self.fit is not None:
            length = "no limit of tokens" if self.fit.tokens is None else f"{self.fit.tokens:,} tokens"
            each = f" for each of {self.batch} sequences" if self.batch > 1 else " for one sequence"
            facts.add_row(f"{format_bytes(self.fit.memory)} of cache holds", f"[bold]{length}[/bold]{each}")
            facts.add_row("", f"or [bold]{self.fit.sequences:,}[/bold] sequences of {self.tokens:,} tokens")
        yield facts
        for note in self.notes:
            yield escape(f"note: {note}")


def estimate(
    config_or_model: object,
    recipe: object = None,
    *,
    batch: int | None = None,
    tokens: int | None = None,
    memory: str | int | None = None,
    dtype: object = None,
    **overrides: Any,
) -> Estimate:
    """What a recipe's cache costs for a model, without its weights.

    Args:
        config_or_model: a transformers config, a dict of one, a folder with config.json (or the file), the
            name "smollm2", a model with `.config`, or an optimized module (its `.plan` is used).
        recipe: anything `Recipe.load` takes; default: baseline, or the plan of an optimized module as it is.
        batch: sequences; default 1.
        tokens: per sequence; default: the recipe's max_tokens, else the length the model was made for.
        memory: bytes for the cache alone ("24GiB", "24GB", 512): adds what fits in it.
        dtype: what `dtype: model` storage takes; default: the model's, else bfloat16.
        overrides: over the recipe, e.g. `max_tokens=4096`.

    Raises:
        ModelError: the shapes cannot be told; names the missing fields.
        PlanError, RecipeError: as `optimize` would, as far as a config tells: every layer is taken to have a rotary
            embedding.
        KVCompileError: a memory size that is none.
    """
    limit = None if memory is None else parse_bytes(memory)
    for name, value in (("batch", batch), ("tokens", tokens)):
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < _ENDLESS
        ):
            raise ModelError(f"{name}: expected a whole number of at least 1, got {shown(value)}")
    asked = {"memory": limit, "batch": batch, "tokens": tokens}
    plan, shape = _plan(config_or_model, recipe, dtype, overrides, asked)
    notes = [*plan.notes, *shape.notes]
    batch = batch or 1
    if tokens is None:
        tokens = plan.limits.max_tokens or shape.max_tokens
    if tokens is None:
        tokens = _TOKENS_UNKNOWN
        notes.append(f"neither recipe nor model says how many tokens; {tokens:,} assumed")
    if dtype is None and shape.dtype is None:
        notes.append(f"the config names no dtype; {plan.dtype} assumed")
    costs = _costs(plan, shape, tokens)
    itemsize = plan.torch_dtype.itemsize
    latents = [d for d in plan.decisions if d.latent]
    expanded = sum(
        layer.num_kv_heads * (layer.head_dim + layer.v_head_dim) for layer in shape.layers if layer.latent
    )
    if latents and expanded > sum(d.head_dim for d in latents):
        notes.append(
            "MLA is counted in its latent form: one row for all heads, the values in the keys, which optimize takes "
            f"where it proves them equal. Expanded, K and V take {format_bytes(expanded * itemsize)} a token"
        )
    readers = [cost for cost in costs if cost.shared]
    if readers:
        count = sum(len(cost.layers) for cost in readers)
        notes.append(f"{count} layers read the K/V of others and are counted with them")
    if shape.max_tokens and tokens > shape.max_tokens:
        notes.append(f"the model was made for {shape.max_tokens:,} tokens")
    for room in _pools(plan, batch, tokens):
        if room.sequences < batch:
            notes.append(
                f"a pool of {room.pages} pages ({room.placement}) holds {room.sequences:,} sequences of {tokens:,} "
                f"tokens, not {batch:,}"
            )
    total, full = _total(plan, shape), _total(plan, shape, full=True)
    return Estimate(
        model=shape.name,
        recipe=plan.recipe,
        dtype=plan.dtype,
        batch=batch,
        tokens=tokens,
        layers=costs,
        bytes_per_token=sum(len(cost.layers) * cost.bytes_per_token for cost in costs),
        bytes_per_token_later=_slope(plan, _total(plan, shape, tables=False)),
        bytes=_at(total, batch, tokens),
        limit=plan.limits.max_tokens,
        limit_bytes=_at(total, batch, max(tokens, plan.limits.max_tokens or 0)),
        full_bytes_per_token=_slope(plan, full),
        full_bytes=_at(full, batch, tokens),
        state_bytes=plan.state_bytes,
        fit=None if limit is None else _fit(plan, total, limit, batch, tokens),
        notes=tuple(notes),
    )


def _plan(
    source: object,
    recipe: object,
    dtype: object,
    overrides: Mapping[str, Any],
    asked: Mapping[str, int | None],
) -> tuple[Plan, ModelShape]:
    """The plan that `optimize` would make, from shapes alone; asked: what a recipe that chooses may not say itself."""
    import torch

    from kvcompile.decide import make_plan
    from kvcompile.original.model_config import dtype_name
    from kvcompile.plan import Plan
    from kvcompile.recipe import Recipe

    made = source if isinstance(source, Plan) else getattr(source, "plan", None)
    if isinstance(made, Plan):
        shape = _shape_of_plan(made)
        if recipe is None and dtype is None and not overrides:
            return made, shape
    else:
        made, shape = None, _shape(source)
    loaded = Recipe.load("baseline" if recipe is None else recipe, **overrides)
    if loaded.auto is not None:
        given = loaded.auto.model_fields_set
        missing = {key: value for key, value in asked.items() if value is not None and key not in given}
        loaded = Recipe.load(loaded, auto=missing)
    chosen: torch.dtype = getattr(torch, dtype_name(dtype or shape.dtype or "bfloat16"))
    return make_plan(_known(shape, chosen, made, _device(source)), loaded), shape


def _known(
    shape: ModelShape, dtype: torch.dtype, made: Plan | None, device: torch.device | None
) -> KnownModel:
    """What a config tells of the model that deciding asks for; made: a plan of it, whose states are known."""
    from kvcompile.decide.known import KnownModel

    numbers = {layer.layer: number for number, layer in enumerate(shape.layers)}
    return KnownModel(
        sites=tuple(
            _known_site(number, layer, numbers[layer.kv_source], dtype)
            for number, layer in enumerate(shape.layers)
        ),
        dtype=dtype,
        max_tokens=shape.max_tokens,
        states=() if made is None else made.states,
        device=device,
    )


def _known_site(number: int, layer: LayerShape, kv_source: int, dtype: torch.dtype) -> KnownSite:
    """A site as detection would report it."""
    from kvcompile.decide.known import KnownSite
    from kvcompile.specs import RotaryForm

    expanded = KnownSite(
        num_qo_heads=layer.num_qo_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        v_head_dim=layer.v_head_dim,
        mask=layer.mask,
        layer=number,
        module_path=f"layer {layer.layer}",
        source="config",
        idiom="config",
        sm_scale=1.0,  # nothing is decided by it
        kv_source=kv_source,
        dtype=dtype,
        rope=RotaryForm("half", 0, layer.head_dim),
    )
    if layer.latent is None:
        return expanded
    width, rank = layer.latent
    return replace(expanded, latent=replace(expanded, num_kv_heads=1, head_dim=width, v_head_dim=rank))


def _device(source: object) -> torch.device | None:
    """The device of a model; None where there is a config alone."""
    import torch

    if not isinstance(source, torch.nn.Module):
        return None
    return next((tensor.device for tensor in (*source.parameters(), *source.buffers())), None)


def _shape(source: object) -> ModelShape:
    import torch

    from kvcompile.models import load_config
    from kvcompile.original.model_config import dtype_name, model_shape

    if isinstance(source, (str, Path)):
        return model_shape(load_config(source))
    if not isinstance(source, torch.nn.Module):
        if isinstance(source, Mapping) or hasattr(source, "to_dict"):
            return model_shape(source)
        raise ModelError(
            f"estimate: expected a config, a dict, a path or a model, got {type(source).__name__}"
        )
    config = getattr(source, "config", None)
    if config is None:
        raise ModelError(
            f"{type(source).__name__} has no .config to read KV shapes from: give its config as a dict "
            "(num_hidden_layers, num_key_value_heads, head_dim), or use explain, which traces the model"
        )
    parameter = next((p for p in source.parameters() if p.is_floating_point()), None)
    shape = model_shape(config)
    return shape if parameter is None else replace(shape, dtype=dtype_name(parameter.dtype))


def _shape_of_plan(plan: Plan) -> ModelShape:
    from kvcompile.original.model_config import LayerShape, ModelShape

    layers = tuple(
        LayerShape(
            num_qo_heads=d.num_qo_heads,
            num_kv_heads=d.num_kv_heads,
            head_dim=d.head_dim,
            v_head_dim=d.v_head_dim,
            mask=d.mask,
            layer=d.layer,
            kv_source=d.kv_source,
            latent=(d.head_dim, d.v_head_dim) if d.latent else None,
        )
        for d in plan.decisions
    )
    return ModelShape("optimized model", layers, len(layers), plan.dtype, plan.limits.max_tokens, ())


def _costs(plan: Plan, shape: ModelShape, tokens: int) -> tuple[LayerCost, ...]:
    """Layers of the same kind together, in the order of their first."""
    from kvcompile.layouts import symbols as sy
    from kvcompile.specs import SiteShape

    itemsize = plan.torch_dtype.itemsize
    groups: dict[LayerCost, list[int]] = {}
    for decision, layer in zip(plan.decisions, shape.layers, strict=True):
        shared = layer.kv_source != layer.layer
        size = decision.subs(decision.bytes, itemsize).subs({sy.B: 1, sy.T: tokens})
        cost = LayerCost(
            layers=(),
            shape=SiteShape(**{of.name: getattr(decision, of.name) for of in fields(SiteShape)}),
            layout=decision.layout,
            latent=decision.latent,
            shared=shared,
            bytes_per_token=0 if shared else decision.bytes_per_token(itemsize),
            bytes_per_sequence=0 if shared else int(size),
        )
        groups.setdefault(cost, []).append(layer.layer)
    return tuple(replace(cost, layers=tuple(numbers)) for cost, numbers in groups.items())


def _total(plan: Plan, shape: ModelShape, full: bool = False, tables: bool = True) -> sympy.Expr:
    """Bytes of all layers, states and page tables (unless not `tables`) in B and T; `full`: K and V in the model's
    dtype, every token kept."""
    import sympy

    from kvcompile.layouts import symbols as sy

    itemsize = plan.torch_dtype.itemsize
    terms = [
        decision.subs((_full(decision) if full else decision.layout).bytes, itemsize)
        for decision, layer in zip(plan.decisions, shape.layers, strict=True)
        if layer.kv_source == layer.layer
    ]
    return sympy.Add(*terms, sy.B * plan.state_bytes, plan.table_bytes if tables and not full else 0)


def _full(decision: Decision) -> CacheLayout:
    """The layout that keeps everything as the model computes it."""
    from kvcompile.layouts import CacheLayout

    layout = decision.layout
    return CacheLayout(values=layout.values) if layout.in_keys else CacheLayout()


def _at(total: sympy.Expr, batch: int, tokens: int) -> int:
    from kvcompile.layouts import symbols as sy

    return int(total.subs({sy.B: batch, sy.T: tokens}))


def _slope(plan: Plan, total: sympy.Expr) -> int:
    """Bytes that one more token of one sequence takes, rounded up: on average, where tokens come in groups or pages."""
    whole = math.lcm(_WHOLE_GROUPS, *(group.page_size for group in plan.page_groups))
    budgets = [decision.layout.slots(None) for decision in plan.decisions if decision.layout.bounded]
    full = 1 + -(-max(budgets, default=0) // whole) * whole
    return -(-(_at(total, 1, full + whole) - _at(total, 1, full)) // whole)


@dataclass(frozen=True)
class _Room:
    """What a pool with a given number of pages holds.

    sequences: of the estimate's tokens
    tokens:    of each of the estimate's sequences; None: any number
    """

    placement: str
    pages: int
    sequences: int
    tokens: int | None


def _pools(plan: Plan, batch: int, tokens: int) -> list[_Room]:
    """Of each kind of pool whose pages are given."""
    from kvcompile.layouts import Paged

    found = {}
    for decision in plan.decisions:
        placement = decision.layout.placement
        if not decision.owns or not isinstance(placement, Paged) or placement.pages is None:
            continue
        each = -(-min(tokens, decision.layout.slots(tokens)) // placement.page_size)
        own = placement.pages // batch  # pages of each sequence
        endless = decision.layout.bounded and own * placement.page_size >= decision.layout.slots(None)
        most = None if endless else own * placement.page_size
        found[decision.layout] = _Room(str(placement), placement.pages, placement.pages // each, most)
    return list(dict.fromkeys(found.values()))


def _fit(plan: Plan, total: sympy.Expr, memory: int, batch: int, tokens: int) -> Fit:
    from kvcompile.layouts import symbols as sy

    most = _largest(total.subs(sy.B, batch), sy.T, memory)
    sequences = _largest(total.subs(sy.T, tokens), sy.B, memory)
    assert sequences is not None, "every sequence takes bytes"
    for room in _pools(plan, batch, tokens):
        sequences = min(sequences, room.sequences)
        if room.tokens is not None:
            most = room.tokens if most is None else min(most, room.tokens)
    return Fit(memory, most, sequences)


def _largest(total: sympy.Expr, symbol: sympy.Symbol, limit: int) -> int | None:
    """The largest whole `symbol` with total <= limit; None where the total does not depend on it and fits."""

    def fits(count: int) -> bool:
        return bool(total.subs(symbol, count) <= limit)

    if symbol not in total.free_symbols:
        return None if fits(0) else 0
    if fits(_ENDLESS):  # every layer's budget is full long before
        return None
    most = 1
    while fits(most):
        most *= 2
    least = 0  # where one does not fit, none does
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


def _layout(cost: LayerCost) -> str:
    layout = cost.layout
    return str(replace(layout, values=layout.keys) if cost.latent else layout)


def _dims(cost: LayerCost) -> str:
    keys, values = cost.shape.head_dim, cost.shape.v_head_dim
    if cost.latent:
        return f"{keys} (latent)"
    return str(keys) if values == keys else f"{keys}/{values}"
