"""One decoder from a source of chance: a seed, or hypothesis, which shrinks what it draws.

Most of a decoder is everyday; between none and three of its ingredients are drawn from the whole rooms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from hypothesis import strategies as st

from tests.fuzz.biases import BIASES
from tests.fuzz.embeddings import EMBEDDINGS
from tests.fuzz.masks import MASKS
from tests.fuzz.mixers import MIXERS
from tests.fuzz.outputs import HABITS, OUTPUTS
from tests.fuzz.parts import NONE, Part, Room, pick
from tests.fuzz.positions import POSITIONS
from tests.fuzz.scales import RESPONSES, SCALES
from tests.fuzz.selects import KEYS, SELECTS
from tests.fuzz.softmaxes import SOFTMAXES, WEIGHTS
from tests.fuzz.spec import DecoderSpec, Layer, Special
from tests.fuzz.spellings import SPELLINGS

PLAIN = ("causal", "plain", "softmax", "logits", "learned, arange")
SHAPES = ("sequential", "sequential", "sequential", "parallel", "gated", "normed after", "no mlp")
FORWARDS = (
    "idx",
    "position_ids",
    "position_ids",
    "position_ids, made",
    "position_ids, made",
    "logits_to_keep",
    "attention_mask",
)
LAYER_ROOMS: tuple[tuple[str, Room, float], ...] = (
    ("mask", MASKS, 9),
    ("bias", BIASES, 4),
    ("scale", SCALES, 3),
    ("response", RESPONSES, 1.5),
    ("softmax", SOFTMAXES, 2),
    ("weights", WEIGHTS, 3),
    ("select", SELECTS, 1.5),
    ("mixer", MIXERS, 2),
    ("keys", KEYS, 2),
)
DECODER_ROOMS: tuple[tuple[str, Room, float], ...] = (
    ("embedding", EMBEDDINGS, 2),
    ("position", POSITIONS, 4),
    ("mixer", MIXERS, 3),
    ("output", OUTPUTS, 2),
    ("habit", HABITS, 2),
)
EVERYDAY_POSITIONS = (
    "learned, arange",
    "rope half, arange",
    "rope half, arange [1, S]",
    "rope interleaved, arange",
    "rope, a table",
    "sinusoid, arange",
    "learned, a slice",
    "none",
)


def draw_spec(rng: Random, seed: int = 0) -> DecoderSpec:
    """A decoder: everyday, then unusual in some places."""
    heads, dim = rng.choice(((4, 8), (4, 8), (2, 16), (4, 4), (2, 8)))
    spec = DecoderSpec(
        seed=seed,
        vocab=rng.choice((61, 97, 128, 300)),
        heads=heads,
        dim=dim,
        kv_heads=rng.choice((heads, heads, heads // 2, 1)),
        forward=rng.choice(("input_ids",) * 7 + FORWARDS),
        qk_norm=rng.random() < 0.15,
        fused=rng.random() < 0.25,
        rms=rng.random() < 0.5,
        special=special(rng),
        chunks=chunks(rng),
        pads=rng.choice((1, 5, 23, 70)),
        pad_id=rng.choice((0, 3, 60)),
        recipe=rng.choice(("baseline",) * 5 + ("paged",)),
    )
    position = rng.choice(EVERYDAY_POSITIONS)
    spec = replace(spec, position=Part(position, POSITIONS[position].draw(rng)))
    layers = [everyday(rng) for _ in range(rng.choice((1, 1, 1, 2)))]
    for _ in range(rng.choices((0, 1, 2, 3), (1, 9, 5, 2))[0]):
        number = rng.randrange(len(layers))
        spec, layers[number] = unusual(rng, spec, layers[number])
    spec = replace(spec, layers=tuple(spelled(rng, layer) for layer in layers))
    if spec.chooses:  # where rounding may choose, an error must stay with its token
        spec = replace(spec, layers=next((layer,) for layer in spec.layers if layer.chooses))
        if not spec.position.name.startswith(("learned, a", "sinusoid, a")):
            # The same id twice would be a tie.
            spec = replace(spec, position=DecoderSpec().position)
    elif rng.random() < 0.08:
        spec = replace(spec, dtype=rng.choice(("bfloat16", "bfloat16", "float16", "float16", "float64")))
    if rng.random() < 0.5:
        spec = replace(spec, longest=spec.tokens + rng.choice((0, 1, 40)))
    return spec


def everyday(rng: Random) -> Layer:
    places = "positions" if rng.random() < 0.1 else "arange"
    layer = Layer(shape=Part(rng.choice(SHAPES)), places=places)
    mask = rng.choice(("causal",) * 6 + ("window",))
    return replace(layer, mask=Part(mask, MASKS[mask].draw(rng)))


def unusual(rng: Random, spec: DecoderSpec, layer: Layer) -> tuple[DecoderSpec, Layer]:
    """One part drawn from its whole room; one time in three of what a cache can hold."""
    rooms = [(name, room, True) for name, room, _ in LAYER_ROOMS]
    rooms += [(name, room, False) for name, room, _ in DECODER_ROOMS]
    weights = [weight for *_, weight in (*LAYER_ROOMS, *DECODER_ROOMS)]
    name, room, of_layer = rng.choices(rooms, weights)[0]
    held = True if rng.random() < 0.35 else None
    room = {key: rule for key, rule in room.items() if key not in (NONE.name, *PLAIN)}
    part = pick(rng, room, held)
    if of_layer:
        return spec, replace(layer, **{name: part})
    return replace(spec, **{name: part}), layer


def spelled(rng: Random, layer: Layer) -> Layer:
    """A spelling that can write this layer."""
    by_hand = any(
        (
            layer.response != NONE,
            layer.softmax.name != "softmax",
            layer.weights != NONE,
            layer.scale != NONE and layer.scale.args[1] == "scores",
        )
    )
    names = ["eager"] * 6 + ["eager, mask first"]
    if rng.random() < 0.03:
        names = ["eager, mask by product", "eager, hidden a little", "eager, hidden a little"]
    elif not by_hand and rng.random() < 0.03:
        names = ["two softmaxes", "memory"]
    elif not by_hand:
        names += ["sdpa float"] * 4
        if layer.bias == NONE:
            names += ["sdpa bool"] * 5
            if layer.mask.name == "causal" and layer.select == NONE:
                names += ["sdpa is_causal"] * 8
    name = rng.choice(names)
    return replace(layer, spelling=Part(name, SPELLINGS[name].draw(rng)))


def special(rng: Random) -> Special:
    """Four ids, any, not among the first two."""
    return Special(*rng.sample(range(2, 61), 4))


def chunks(rng: Random) -> tuple[int, ...]:
    """From 320 to 700 tokens: a prompt, odd chunks, single tokens between."""
    total = rng.randint(320, 700)
    sizes = [min(rng.choice((1, 7, 40, 130, 257, 300)), total)]
    while sum(sizes) < total:
        left = total - sum(sizes)
        size = 1 if rng.random() < 0.4 and len(sizes) < 12 else rng.choice((3, 17, 33, 64, 65, 100, 129))
        sizes.append(min(size, left) if len(sizes) < 16 else left)
    return tuple(sizes)


def spec_from_seed(seed: int) -> DecoderSpec:
    return draw_spec(Random(seed), seed)


@st.composite
def decoders(draw: Callable[..., Random]) -> DecoderSpec:
    """Decoders as hypothesis draws and shrinks them."""
    return draw_spec(draw(st.randoms(use_true_random=False)))
