"""What deciding is given: a model and its sites, without its graph. A traced model has it, and so has a config alone.

A config does not tell all: `estimate` says what it assumes (`kvcompile/report/estimate/`). Everything else that it
tells is decided by the function that `optimize` calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch

from kvcompile.passes.records import AttentionSite
from kvcompile.recipe.scales import ModelId
from kvcompile.specs import RecurrentState, RotaryForm, SiteFacts, StateSlot


@dataclass(frozen=True, kw_only=True)
class KnownSite(SiteFacts):
    """One attention site, as far as a plan depends on it.

    rope:         how its queries and keys rotate; None: no rotary embedding was recognised
    positionless: no position enters its queries and keys
    rerun:        a part of its mask is run again over the cache
    mask_rows:    what its mask keeps of every token, besides what an earlier site keeps
    latent:       the same attention over one latent row per token, where it has that form
    device:       where it runs, of a model over several devices; None: the model's only one
    """

    dtype: torch.dtype
    rope: RotaryForm | None
    positionless: bool = False
    rerun: bool = False
    mask_rows: tuple[StateSlot, ...] = ()
    latent: KnownSite | None = None
    device: torch.device | None = None


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A model, as far as a plan depends on it.

    sites:          in call order
    dtype:          the model's, which `dtype: model` storage takes
    max_tokens:     the longest sequence it was made for, where that is known
    position_limit: how many positions it has, where they end, and what happens beyond
    states:         what recurrent modules carry; kept as it is under every recipe
    identity:       which model calibrated scales must be of; None: unknown, only their sizes are compared
    device:         the model's, where token ids come to; None: not known, and what a device decides is left open
    python:         paths of the modules that run as Python
    """

    sites: tuple[KnownSite, ...]
    dtype: torch.dtype
    max_tokens: int | None
    position_limit: tuple[int, str] | None = None
    states: tuple[RecurrentState, ...] = ()
    identity: ModelId | None = None
    device: torch.device | None = None
    python: tuple[str, ...] = ()


def facts_of(site: SiteFacts) -> dict[str, object]:
    """What a site, a decision and what is known of a site have in common, by field."""
    return {of.name: getattr(site, of.name) for of in fields(SiteFacts)}


def known_sites(
    sites: Sequence[AttentionSite], places: Mapping[int, torch.device] | None = None
) -> tuple[KnownSite, ...]:
    """What is known of the sites of a graph; places: of a model over several devices, each layer's."""
    return tuple(_known(site, sites, places or {}) for site in sites)


def _known(
    site: AttentionSite, sites: Sequence[AttentionSite], places: Mapping[int, torch.device]
) -> KnownSite:
    return KnownSite(
        **facts_of(site),  # type: ignore[arg-type]
        dtype=site.dtype,
        rope=None if site.rope is None else site.rope.form,
        positionless=site.positionless,
        rerun=bool(site.rerun),
        mask_rows=_mask_rows(site, sites),
        latent=None if site.latent is None else _known(site.latent.site, sites, places),
        device=places.get(site.layer),
    )


def _mask_rows(site: AttentionSite, sites: Sequence[AttentionSite]) -> tuple[StateSlot, ...]:
    """What the site's mask keeps of every token; layers that read the same keep it once, at the first."""
    before = {node for other in sites if other.layer < site.layer for node, _ in other.key_rows}
    return tuple(slot for node, slot in site.key_rows if node not in before)
