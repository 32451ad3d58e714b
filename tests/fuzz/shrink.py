"""A failing decoder made plainer, part by part, as long as it fails in the same way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from tests.fuzz.check import Outcome, check
from tests.fuzz.parts import Part
from tests.fuzz.spec import DecoderSpec, Layer


def plainer(spec: DecoderSpec) -> Iterator[DecoderSpec]:
    """Specs with one thing less."""
    plain = DecoderSpec()
    if len(spec.layers) > 1:
        for number in range(len(spec.layers)):
            yield replace(spec, layers=spec.layers[:number] + spec.layers[number + 1 :])
    for number, layer in enumerate(spec.layers):
        for field in fields(Layer):
            default = getattr(Layer(), field.name)
            if getattr(layer, field.name) != default:
                changed = replace(layer, **{field.name: default})
                yield replace(spec, layers=_with(spec, number, changed))
        simple = Part("eager", ("masked_fill", float("-inf"), "matmul", "mask last"))
        if layer.spelling.name.startswith("eager") and layer.spelling != simple:
            changed = replace(layer, spelling=simple)
            yield replace(spec, layers=_with(spec, number, changed))
    for field in fields(DecoderSpec):
        default = getattr(plain, field.name)
        if field.name != "layers" and getattr(spec, field.name) != default:
            yield replace(spec, **{field.name: default})


def _with(spec: DecoderSpec, number: int, layer: Layer) -> tuple[Layer, ...]:
    return (*spec.layers[:number], layer, *spec.layers[number + 1 :])


def works(layer: Layer) -> bool:
    """Whether the spelling writes all parts of the layer."""
    scores = layer.scale.args[1:] == ("scores",)
    eager = layer.spelling.name.startswith("eager")
    by_hand = layer.response.name != "none" or layer.softmax.name != "softmax" or layer.weights.name != "none"
    if layer.spelling.name == "sdpa is_causal":
        return (
            layer.mask.name == "causal"
            and layer.bias.name == "none"
            and layer.select.name == "none"
            and not by_hand
        )
    return eager or not (
        by_hand or scores or (layer.spelling.name == "sdpa bool" and layer.bias.name != "none")
    )


def shrink(spec: DecoderSpec, verify: str = "off") -> tuple[DecoderSpec, Outcome]:
    """The plainest decoder that fails as this one does, and its outcome."""
    outcome = check(spec, verify)
    again = not outcome.good
    while again:
        again = False
        for candidate in plainer(spec):
            if not all(works(layer) for layer in candidate.layers):
                continue
            found = check(candidate, verify)
            if found.kind == outcome.kind:
                spec, outcome, again = candidate, found, True
                break
    return spec, outcome
