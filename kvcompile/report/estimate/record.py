"""The records of an estimate, and how they are printed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from kvcompile.util.console import format_bytes, format_layers, render, table

# Light on purpose: torch and transformers are imported when estimate() is called.
if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from kvcompile.layouts import CacheLayout
    from kvcompile.specs import SiteShape


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
    devices: tuple[
        tuple[str, int], ...
    ] = ()  # `bytes` on each device of a model over several, without page tables

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
        for device, size in self.devices:
            facts.add_row(f"  of it on {device}", format_bytes(size))
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


def _layout(cost: LayerCost) -> str:
    layout = cost.layout
    return str(replace(layout, values=layout.keys) if cost.latent else layout)


def _dims(cost: LayerCost) -> str:
    keys, values = cost.shape.head_dim, cost.shape.v_head_dim
    if cost.latent:
        return f"{keys} (latent)"
    return str(keys) if values == keys else f"{keys}/{values}"
