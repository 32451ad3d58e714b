"""A decoder as data: printable, comparable, and enough to build its module and its text again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from tests.fuzz.parts import NONE, Part


@dataclass(frozen=True)
class Layer:
    """One block. Each part is of the room of its name; the defaults are the plainest decoder.

    mask:     what is shown, an expression over i, j, h, d = i - j, ids and c (`expressions.Context`)
    spelling: how mask, bias and product are written
    select:   keys chosen by scores of an indexer
    shape:    how the block is put together
    places:   what i and j are: an arange of their own, or the positions that the decoder was given
    """

    mask: Part = Part("causal", ("i >= j",))
    bias: Part = NONE
    scale: Part = NONE
    response: Part = NONE
    softmax: Part = Part("softmax")
    weights: Part = NONE
    select: Part = NONE
    mixer: Part = NONE
    keys: Part = NONE
    shape: Part = Part("sequential")
    spelling: Part = Part("sdpa bool")
    places: str = "arange"

    @property
    def chooses(self) -> bool:
        """Whether a comparison of activations decides what is seen: among near ties, rounding does."""
        return self.select != NONE or self.softmax.name == "best scores" or self.weights.name == "a threshold"


@dataclass(frozen=True)
class Special:
    """Token ids that some ingredient treats in its own way."""

    sep: int = 5
    image: int = 9
    pad: int = 3
    hidden: int = 11


@dataclass(frozen=True)
class DecoderSpec:
    """All of a decoder and its text.

    chunks:  sizes that the text is fed in; their sum is its length
    longest: rows of the tables of positions
    pads:    columns of padding, of tokens pad_id, that the second row has in the padded run
    """

    seed: int = 0
    vocab: int = 61
    heads: int = 4
    kv_heads: int = 4
    dim: int = 8
    dtype: str = "float32"
    embedding: Part = Part("plain")
    position: Part = Part("learned, arange", ("arange",))
    mixer: Part = NONE
    layers: tuple[Layer, ...] = (Layer(),)
    output: Part = Part("logits")
    habit: Part = NONE
    forward: str = "input_ids"
    special: Special = Special()
    qk_norm: bool = False
    fused: bool = False
    rms: bool = False
    longest: int = 1024
    chunks: tuple[int, ...] = (130, 1, 61, 1, 97, 64, 1)
    pads: int = 23
    pad_id: int = 0
    recipe: str = "baseline"

    @property
    def tokens(self) -> int:
        return sum(self.chunks)

    @property
    def chooses(self) -> bool:
        return any(layer.chooses for layer in self.layers)

    def parts(self) -> Iterator[tuple[str, Part]]:
        """Every part that is not the default, with its room."""
        for owner, plain in ((self, DecoderSpec()), *((layer, Layer()) for layer in self.layers)):
            for field in fields(owner):
                value = getattr(owner, field.name)
                if isinstance(value, Part) and value.name != getattr(plain, field.name).name:
                    yield field.name, value

    def labels(self) -> tuple[str, ...]:
        """The families that this decoder is of, each once."""
        found = [f"{room}: {part.name}" for room, part in self.parts()]
        if any(layer.places != "arange" for layer in self.layers):
            found.append("mask of positions")
        for name in ("dtype", "forward", "recipe"):
            if getattr(self, name) != getattr(DecoderSpec(), name):
                found.append(f"{name}: {getattr(self, name)}")
        return tuple(dict.fromkeys(found)) or ("plain",)
