"""The module of a spec: one skeleton, whose weights are made in a first pass and are the same for the same seed."""

from __future__ import annotations

import zlib
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.fuzz.biases import BIASES
from tests.fuzz.embeddings import EMBEDDINGS
from tests.fuzz.expressions import Context
from tests.fuzz.masks import MASKS
from tests.fuzz.mixers import MIXERS
from tests.fuzz.outputs import HABITS, OUTPUTS
from tests.fuzz.parts import Part, Room
from tests.fuzz.positions import POSITIONS, Places
from tests.fuzz.scales import SCALES
from tests.fuzz.selects import KEYS, SELECTS
from tests.fuzz.spec import DecoderSpec, Layer
from tests.fuzz.spellings import SPELLINGS

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def make(room: Room, part: Part, *given: Any) -> Any:
    return room[part.name].make(*given, *part.args)


class Fuzzed(nn.Module):
    """A decoder drawn from the grammar."""

    calls: Tensor
    mean: Tensor

    def __init__(self, spec: DecoderSpec):
        super().__init__()
        self.spec, self.dtype, self.longest = spec, DTYPES[spec.dtype], spec.longest
        self.numbers: dict[str, int] = {}
        self.words = (
            {f"word {value}": value for value in range(3000)} if spec.habit.name == "a vocabulary" else {}
        )
        self.building = True
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(()))

    def weight(self, name: str, *shape: int, gain: float = 1.0) -> Tensor:
        """The parameter of this name; the first pass makes it, from the spec's seed and its name."""
        if self.building and name not in self._parameters:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self.spec.seed} {name}".encode()))
            value = torch.randn(*shape, generator=generator, dtype=torch.float64) * gain
            self.register_parameter(name, nn.Parameter(value.to(self.dtype), requires_grad=False))
        found = getattr(self, name)
        if self.building and tuple(found.shape) != shape:
            raise ValueError(f"two ingredients have a weight {name}: {tuple(found.shape)} and {shape}")
        return found

    def constant(self, name: str, value: Tensor) -> Tensor:
        """The buffer of this name."""
        name = name.replace(".", "_").replace("-", "minus_")
        if self.building and name not in self._buffers:
            self.register_buffer(name, value)
        return getattr(self, name)

    def run(self, ids: Tensor, position_ids: Tensor | None = None) -> Any:
        spec = self.spec
        given = position_ids if position_ids is None else position_ids.expand(ids.shape[0], -1)
        c = Context(self, 0, ids, ids, given=given)
        x = make(EMBEDDINGS, spec.embedding, c, ids)
        x = make(HABITS, spec.habit, c, x)
        places: Places = make(POSITIONS, spec.position, c, position_ids)
        x = x if places.added is None else x + places.added.to(x.dtype)
        context = torch.autocast("cpu", torch.bfloat16) if spec.habit.name == "autocast" else nullcontext()
        with context:
            c.x = x
            x = make(MIXERS, spec.mixer, c, x).to(x.dtype)
            for number, layer in enumerate(spec.layers):
                c.layer = number
                x = self.block(c, layer, x, places)
            c.layer = 0
            return make(OUTPUTS, spec.output, c, self.norm(x))

    def norm(self, x: Tensor) -> Tensor:
        if self.spec.rms:
            return F.rms_norm(x, x.shape[-1:])
        return F.layer_norm(x, x.shape[-1:])

    def block(self, c: Context, layer: Layer, x: Tensor, places: Places) -> Tensor:
        y = c.x = self.norm(x)
        y = c.x = make(MIXERS, layer.mixer, c, y).to(y.dtype)
        attended = self.attention(c, layer, y, places)
        if layer.shape.name == "parallel":
            return x + attended + self.mlp(c, y)
        if layer.shape.name == "gated":
            attended = attended * c.linear("out_gate", x.shape[-1]).sigmoid()
        if layer.shape.name == "normed after":
            attended = self.norm(attended)
        if layer.shape.name == "no mlp":
            return x + attended
        x = x + attended
        return x + self.mlp(c, self.norm(x))

    def mlp(self, c: Context, x: Tensor) -> Tensor:
        return F.silu(c.linear("up", 24, x)) @ c.weight("down", 24, x.shape[-1], gain=24**-0.5)

    def attention(self, c: Context, layer: Layer, x: Tensor, places: Places) -> Tensor:
        spec = self.spec
        sizes = [heads * spec.dim for heads in (spec.heads, spec.kv_heads, spec.kv_heads)]
        if spec.fused:
            heads = c.linear("qkv", sum(sizes)).split(sizes, -1)
        else:
            heads = tuple(c.linear(name, size) for name, size in zip("qkv", sizes, strict=True))
        q, k, v = (t.unflatten(-1, (-1, spec.dim)).transpose(1, 2) for t in heads)
        if spec.qk_norm:
            q, k = F.rms_norm(q, (spec.dim,)), F.rms_norm(k, (spec.dim,))
        if places.rotate is not None:
            q, k = places.rotate(q), places.rotate(k)
        q, k, v = make(KEYS, layer.keys, c, q, k, v)
        c.places = c.given if layer.places == "positions" else None
        shown = make(SELECTS, layer.select, c, make(MASKS, layer.mask, c))
        bias = make(BIASES, layer.bias, c)
        scale = make(SCALES, layer.scale, c)
        if scale is not None:
            scale, where = scale
            if where == "query":
                q, scale = (q * scale).to(k.dtype), 1.0
        y = make(SPELLINGS, layer.spelling, c, layer, q, k, v, (shown, bias, scale))
        return c.linear("o", x.shape[-1], y.transpose(1, 2).flatten(2))

    def forward(self, input_ids: Tensor) -> Any:
        return self.run(input_ids)


class ByIdx(Fuzzed):
    """The ids have another name."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        return self.run(idx)


class ByPlaces(Fuzzed):
    """Positions may be given."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
        return self.run(input_ids, position_ids)


class ByPlacesRow(Fuzzed):
    """Positions are made where none are given, [1, S]."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        return self.run(input_ids, position_ids)


class ByKept(Fuzzed):
    """Logits of some last tokens only, where asked."""

    def forward(self, input_ids: Tensor, logits_to_keep: int | Tensor = 0) -> Any:
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        out = self.run(input_ids)
        return out[:, keep] if isinstance(out, Tensor) and out.dim() == 3 else out


class ByMask(Fuzzed):
    """Positions are counted from a mask of padding, all ones where none is given."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        return self.run(input_ids, attention_mask.long().cumsum(-1) - 1)


FORWARDS = {
    "input_ids": Fuzzed,
    "idx": ByIdx,
    "position_ids": ByPlaces,
    "position_ids, made": ByPlacesRow,
    "logits_to_keep": ByKept,
    "attention_mask": ByMask,
}


def build(spec: DecoderSpec) -> Fuzzed:
    """The decoder, in evaluation; the same weights whenever it is built."""
    model = FORWARDS[spec.forward](spec)
    with torch.no_grad():
        model.run(torch.randint(0, spec.vocab, (2, 9), generator=torch.Generator().manual_seed(0)))
    model.building = False
    model.calls.zero_()
    model.mean.zero_()
    model.__dict__.pop("last", None)
    return model.eval()
