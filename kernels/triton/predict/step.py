"""A whole decode step of a model, as predicted: the tenth goal, of Llama-3.1-8B's shape and one sequence in bfloat16.

    norm.   32 layers of: q, k, v; append, decode (and combine); o; gate, up; down.   Then norm and head.

All other norms are parts of q, k, v and of gate, up, and what they read is added up by o and down.

Launches come behind each other in a CUDA graph, as everywhere in this model. Linear layers and attention are predicted
from their machine code. What Inductor makes has none here: of a norm, with the sum that it begins with, it makes one
program that loads twice, one after another, what was just written, and adds up across its threads. So it is assumed
to take a launch, the start of a program, two hits of the L2 cache and two barriers. No other launch is assumed: what
chooses the token, and what a graph takes to begin (8 us, measured on an H200: 0.2 % of a step), are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.predict import linears
from kvcompile.kernels.triton.predict.cases import CaseTime
from kvcompile.kernels.triton.predict.facts import Facts, Progress, facts
from kvcompile.kernels.triton.predict.launch import Predicted, predicted
from kvcompile.kernels.triton.predict.linears import Layers
from kvcompile.kernels.triton.predict.memory import case_bytes
from kvcompile.kernels.triton.predict.model import Model
from kvcompile.kernels.triton.predict.recorded import Made, Shape, recorded
from kvcompile.layouts import CacheLayout
from kvcompile.specs import RotaryForm
from kvcompile.util.machines import Machine

_LAYERS, _HIDDEN, _WIDE, _WORDS = 32, 4096, 14336, 128256
_NORMS, _ALL_NORMS = 2, 2 * 32 + 1  # that are launches, and that there are
_HEADS, _DIM = (32, 8), 128
_ROOM = 33024  # tokens that a cache may grow to, which splits follow from: `gpu_day_decode.py` has one for all contexts
_CONTEXTS = {"1k": 1024, "32k": 32768}
LINEARS = (
    Layers("q, k, v", _HIDDEN, (_HEADS[0] * _DIM, _HEADS[1] * _DIM, _HEADS[1] * _DIM), normed=True),
    Layers("o", _HEADS[0] * _DIM, (_HIDDEN,), added=True),
    Layers("gate, up", _HIDDEN, (_WIDE, _WIDE), "silu", normed=True),
    Layers("down", _WIDE, (_HIDDEN,), added=True),
    Layers("head", _HIDDEN, (_WORDS,)),
)
STEPS = {f"Llama-3.1-8B bf16 B1 {name}": context for name, context in _CONTEXTS.items()}
WEIGHT_BYTES = sum(of.weight_bytes * (1 if of.name == "head" else _LAYERS) for of in LINEARS)


def measured_as(of: Layers) -> str:
    """The case that benchmarks measure one of `LINEARS` by (`benchmarks/kernel_linear.py`)."""
    return f"linear Llama-8B {of.name}"


@dataclass(frozen=True)
class Part:
    """A launch of a step, and how often a step makes it."""

    times: int
    launch: Predicted


@dataclass(frozen=True)
class Prepared:
    """What steps launch on a machine, by name, and the facts of these kernels."""

    layers: Mapping[str, Made]
    attention: Mapping[str, tuple[Made, ...]]
    facts: Facts


def shape_of(context: int) -> Shape:
    """Attention of a layer's step, with the write of the new token."""
    site = SiteSpec(CacheLayout(), _DIM**-0.5, rotary=RotaryForm("half", 0, _DIM))
    return Shape(site, _HEADS, (_DIM, _DIM), torch.bfloat16, (context,), limit=_ROOM)


def prepared(machine: Machine, progress: Progress | None = None) -> Prepared:
    """The launches of all steps, and the facts of their kernels; those that no cache has are assembled."""
    layers = {of.name: linears.recorded(of, machine) for of in LINEARS}
    attention = {name: recorded(shape_of(context), machine) for name, context in STEPS.items()}
    every = [*layers.values(), *(one for launches in attention.values() for one in launches)]
    return Prepared(layers, attention, facts((one.request for one in every), progress))


def parts(name: str, model: Model, own: Prepared) -> tuple[Part, ...]:
    """The launches of a step, each once, in their order; raises as `launch.predicted`."""
    layers = {of: linears.predicted(made, own.facts, model) for of, made in own.layers.items()}
    attention = predicted(own.attention[name], shape_of(STEPS[name]), own.facts, model)
    linear = {of: replace(one, role=f"linear: {of}") for of, one in layers.items()}
    head = linear.pop("head")
    first, *others = linear.values()
    of_layer = (first, *attention, *others)
    return (
        Part(_NORMS, of_inductor("norm", 2, 2, model)),
        *(Part(_LAYERS, one) for one in of_layer),
        Part(1, head),
    )


def of_inductor(role: str, hits: int, barriers: int, model: Model) -> Predicted:
    """A launch of one program of Inductor's, which waits so often for what the launch before it has written."""
    assumed, moved = model.assumed, 3.0 * _HIDDEN * 2
    waits = hits * assumed.hit + barriers * assumed.barrier / model.machine.clock
    on = {"launch": assumed.launch, "start": assumed.program, "latency": waits}
    seconds = sum(on.values())
    share = moved / seconds / model.machine.copied
    places = model.machine.multiprocessors
    return Predicted(role, "", seconds, moved, share, 1, 1, "assumed", 1 / places, on)


def times(model: Model, own: Prepared) -> dict[str, CaseTime]:
    """Of each step, by its name, what is predicted. Its launches are there once each."""
    found = {}
    for name, context in STEPS.items():
        made = parts(name, model, own)
        seconds = sum(part.times * part.launch.seconds for part in made)
        moved = WEIGHT_BYTES + _LAYERS * case_bytes(shape_of(context))
        share = moved / seconds / model.machine.copied
        found[name] = CaseTime(name, seconds, moved, share, tuple(part.launch for part in made))
    return found


def layers_time(of: Layers, model: Model, own: Prepared) -> CaseTime:
    """One of `LINEARS` by itself, as benchmarks measure it."""
    one = linears.predicted(own.layers[of.name], own.facts, model)
    return CaseTime(measured_as(of), one.seconds, int(one.bytes), one.share, (one,))


def without_layers(name: str, model: Model, own: Prepared) -> float:
    """Seconds of a step without its linear layers, where every norm and activation of a gate is a launch by itself."""
    others = (part for part in parts(name, model, own) if not part.launch.role.startswith("linear"))
    apart = _LAYERS * of_inductor("gate", 1, 0, model).seconds
    apart += (_ALL_NORMS - _NORMS) * of_inductor("norm", 2, 2, model).seconds
    return apart + sum(part.times * part.launch.seconds for part in others)
