"""The plan of an estimate: what a config tells of a model, given to the function that decides for `optimize`, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcompile.errors import ModelError

if TYPE_CHECKING:
    import torch

    from kvcompile.decide.known import KnownModel, KnownSite
    from kvcompile.original.model_config import LayerShape, ModelShape
    from kvcompile.plan import Plan
    from kvcompile.recipe import Recipe


def plan_for(
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
        made, shape = None, shape_of(source)
    loaded = _told(Recipe.load("baseline" if recipe is None else recipe, **overrides), asked)
    chosen: torch.dtype = getattr(torch, dtype_name(dtype or shape.dtype or "bfloat16"))
    places = _places(source, shape) if made is None else _places_of_plan(made)
    return make_plan(known_model(shape, chosen, made, _device(source), places), loaded), shape


def plan_of_shape(shape: ModelShape, dtype: str, recipe: Recipe, asked: Mapping[str, int | None]) -> Plan:
    """The plan of shapes that no model need have, such as one rank's; asked: as `plan_for` has it."""
    import torch

    from kvcompile.decide import make_plan

    return make_plan(known_model(shape, getattr(torch, dtype), None, None), _told(recipe, asked))


def _told(recipe: Recipe, asked: Mapping[str, int | None]) -> Recipe:
    """A recipe that chooses, with what it does not say itself; any other as it is."""
    if recipe.auto is None:
        return recipe
    given = recipe.auto.model_fields_set
    missing = {key: value for key, value in asked.items() if value is not None and key not in given}
    return recipe.load(recipe, auto=missing)


def known_model(
    shape: ModelShape,
    dtype: torch.dtype,
    made: Plan | None,
    device: torch.device | None,
    places: Mapping[int, torch.device] | None = None,
) -> KnownModel:
    """What a config tells of the model that deciding asks for.

    made:   a plan of it, whose states are known
    places: of a model over several devices, that of each layer
    """
    from kvcompile.decide.known import KnownModel

    numbers = {layer.layer: number for number, layer in enumerate(shape.layers)}
    placed = places or {}
    return KnownModel(
        sites=tuple(
            replace(
                _known_site(number, layer, numbers[layer.kv_source], dtype), device=placed.get(layer.layer)
            )
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


def _places(source: object, shape: ModelShape) -> dict[int, torch.device]:
    """The device of each layer of a model over several: where the weights stand whose path has the layer's number;
    empty where the model is on one, or where that is not told."""
    import torch

    if not isinstance(source, torch.nn.Module):
        return {}
    found: dict[int, set[torch.device]] = {}
    for name, weight in source.named_parameters():
        number = next((int(part) for part in name.split(".") if part.isdigit()), None)
        if number is not None:
            found.setdefault(number, set()).add(weight.device)
    own = [found.get(layer.layer, set()) for layer in shape.layers]
    if any(len(devices) != 1 for devices in own) or set().union(*own) == {_device(source)}:
        return {}
    return {layer.layer: next(iter(devices)) for layer, devices in zip(shape.layers, own, strict=True)}


def _places_of_plan(plan: Plan) -> dict[int, torch.device]:
    import torch

    return {d.layer: torch.device(d.device) for d in plan.decisions if d.device is not None}


def shape_of(source: object) -> ModelShape:
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
