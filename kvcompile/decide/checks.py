"""What a layout asks of a site that the site cannot do; each reason says what to do instead."""

from __future__ import annotations

from collections.abc import Sequence

from kvcompile.decide.known import KnownSite
from kvcompile.layouts import CacheLayout, Contiguous, Retention


def check(layout: CacheLayout, site: KnownSite, readers: Sequence[int]) -> None:
    """Refuse a layout that the site cannot have; readers: other layers that read the site's cache.

    Raises:
        ValueError: with the reason and what to do.
    """
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
        if window is not None and not storage.channelwise and storage.residual >= window:
            raise ValueError(
                f"cache.{side}.residual: the last {storage.residual} tokens in full are all of the window's {window}, "
                "so none would be read rounded; use fewer, or dtype: model"
            )
    mod = site.score.mod
    if (
        mod is not None
        and mod.reads_tokens
        and not (layout.retention.keeps_all and isinstance(layout.placement, Contiguous))
    ):
        raise ValueError(
            "cache.retention: the scores of this layer depend on the activations of all tokens before; use "
            "retention: {kind: full} and placement: {kind: contiguous}"
        )
    if layout.retention.by_score:
        _check_scored(layout.retention, site, readers)
    if layout.selection.selects:
        _check_selection(layout.selection.kind, site, readers)
    bias = site.score.bias
    if mod is not None and layout.retention.by_score and set(mod.leaves) - {"table"}:
        raise ValueError(
            "cache.retention: the scores of this layer depend on activations of each token, and a retention by scores "
            "keeps none; use retention: {kind: full}"
        )
    if layout.retention.in_cache and mod is not None and not mod.by_distance:
        raise ValueError(
            "cache.retention.positions: in_cache counts positions in the cache, and this layer's scores depend on "
            "positions in the sequence; use positions: original"
        )
    if layout.retention.in_cache and bias is not None and bias.kind in ("columns", "table"):
        raise ValueError(
            f"cache.retention.positions: in_cache counts positions in the cache, and this layer's {bias} is by "
            "positions in the sequence; use positions: original"
        )
    if (
        layout.retention.in_cache
        and site.rope is None
        and bias is None
        and mod is None
        and not site.positionless
    ):
        raise ValueError(
            "cache.retention.positions: in_cache needs a rotary embedding between the projections and the "
            "scores, and none was recognised here; use positions: original"
        )
    if layout.before_rope and site.rope is None and not site.positionless:
        raise ValueError(
            "cache.keys.rope: before needs a rotary embedding between the projections and the scores, and none was "
            "recognised here; use rope: after"
        )
    if layout.retention.in_cache and site.mask.window is not None:
        raise ValueError(
            f"cache.retention.positions: in_cache counts from the first kept token, which a {site.mask} mask hides; "
            f"give {site.mask.kind} layers a retention of their own: "
            f"layers: [{{where: {{attention: {site.mask.kind}}}, cache: {{retention: {{kind: window}}}}}}]"
        )


def _check_selection(kind: str, site: KnownSite, readers: Sequence[int]) -> None:
    """Refuse a selection of pages where it makes no sense, or is not written.

    Raises:
        ValueError: with the reason and what to do.
    """
    full = "selection: {kind: full}"
    if site.mask.window is not None:
        raise ValueError(
            f"cache.selection: {kind} chooses among all tokens, of which a {site.mask} mask hides most; give "
            f"{site.mask.kind} layers {full}: layers: [{{where: {{attention: {site.mask.kind}}}, cache: {{{full}}}}}]"
        )
    others = [*readers] if site.kv_source == site.layer else [site.kv_source]
    if others:
        layers = ", ".join(map(str, sorted((site.layer, *others))))
        raise ValueError(
            f"cache.selection: a selection is one layer's, and this cache is shared with layer {others[0]}; give both "
            f"{full}: layers: [{{where: {{index: [{layers}]}}, cache: {{{full}}}}}]"
        )
    if site.score.mod is not None and set(site.score.mod.leaves) - {"table"}:
        raise ValueError(
            "cache.selection: the scores of this layer depend on activations of each token, which are read in the "
            f"order of tokens; use {full}"
        )


def _check_scored(retention: Retention, site: KnownSite, readers: Sequence[int]) -> None:
    """Refuse a retention by scores where it makes no sense.

    Raises:
        ValueError: with the reason and what to do.
    """
    if site.mask.window is not None:
        raise ValueError(
            f"cache.retention: {retention.name} keeps tokens however old, which a {site.mask} mask hides; give "
            f"{site.mask.kind} layers a retention of their own: "
            f"layers: [{{where: {{attention: {site.mask.kind}}}, cache: {{retention: {{kind: window}}}}}}]"
        )
    others = [*readers] if site.kv_source == site.layer else [site.kv_source]
    if others:
        raise ValueError(
            f"cache.retention: {retention.name} scores tokens by the attention of one layer, and this cache is "
            f"shared with layer {others[0]}; give both a retention by positions, e.g. "
            f"layers: [{{where: {{index: [{', '.join(map(str, sorted((site.layer, *others))))}]}}, "
            "cache: {retention: {kind: full}}]"
        )
