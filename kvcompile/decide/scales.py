"""Calibrated scales: whether a file of them is of this model, and which of them a site's cache has."""

from __future__ import annotations

from collections.abc import Sequence

from kvcompile.decide.known import KnownSite
from kvcompile.layouts import CacheLayout
from kvcompile.recipe.scales import ModelId, Scales, scales_of


def foreign(scales: Scales, model: ModelId | None, sites: Sequence[KnownSite]) -> str | None:
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


def calibrated(
    site: KnownSite, layout: CacheLayout, latent: bool, scales: Scales | None
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
