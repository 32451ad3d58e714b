"""One site: the layout that the recipe gives it, what is known of it, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvcompile.decide.checks import check
from kvcompile.decide.known import KnownSite, facts_of
from kvcompile.decide.scales import calibrated
from kvcompile.layouts import InKeys
from kvcompile.plan import Decision
from kvcompile.recipe import Recipe
from kvcompile.recipe.retention import LayerContext
from kvcompile.recipe.scales import Scales


def decide_site(
    site: KnownSite,
    sites: Sequence[KnownSite],
    recipe: Recipe,
    scales: Scales | None,
    model_max_tokens: int | None,
) -> Decision:
    """The layout of one site.

    Args:
        site: the one to decide.
        sites: all of the model, in call order.
        recipe: the checked recipe.
        scales: those that it names, of this model.
        model_max_tokens: the longest sequence the model was made for, where that is known.

    Raises:
        ValueError: the recipe asks something of the site that it cannot do.
    """
    config, rules = recipe.cache_for(site.layer, len(sites), site.mask.kind)
    tokens = recipe.runtime.max_tokens or model_max_tokens
    layout = config.build(LayerContext(site.mask.window, tokens, site.layer, len(sites)))
    because = [f"layers[{i}] of the recipe: {_where(recipe, i)}" for i in rules] or ["the recipe's cache"]
    readers = [other.layer for other in sites if other.kv_source == site.layer != other.layer]
    latent = site.latent is not None and config.latent == "auto" and not readers
    if site.latent is not None and latent:
        expanded, site = site, site.latent
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
    check(layout, site, readers)
    if layout.before_rope and site.positionless:
        because.append("no position enters this layer, so its keys have no RoPE to stand before")
    if layout.retention.in_cache and site.positionless and site.score.bias is None and site.score.mod is None:
        because.append("no position enters this layer, so counting in the cache changes nothing")
    own = calibrated(site, layout, latent, scales)
    if own and scales is not None:
        because.append(f"scales calibrated on {scales.text.tokens:,} tokens ({scales.digest()})")
    exact_retention, why = layout.retention.exact(site.mask)
    because.append(why)
    if layout.selection.selects:
        exact_retention = False
        because.append(f"a decode step reads the {layout.selection} tokens whose keys may matter most to it")
    exact_storage = layout.keys.exact(site.dtype) and layout.values.exact(site.dtype)
    lossless = exact_retention and exact_storage
    return Decision(
        **facts_of(site),  # type: ignore[arg-type]
        layout=layout,
        lossless=lossless,
        because=tuple(because),
        rope=site.rope,
        latent=latent,
        rerun=site.rerun,
        mask_rows=site.mask_rows,
        scales=own,
        device=None if site.device is None else str(site.device),
    )


def _where(recipe: Recipe, rule: int) -> str:
    where = recipe.layers[rule].where.model_dump(exclude_none=True)
    return ", ".join(f"{key} {value}" for key, value in where.items())
