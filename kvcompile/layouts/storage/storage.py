"""Storage: code x scale x residual x sinks x Hadamard.

Residual (KIVI, Liu et al. 2024, section 3). The newest tokens may stay unquantized, in the model's dtype:

| scale per | quantized | newest tokens |
|---|---|---|
| channel | groups of `scale.size` tokens, together when they are `residual` | the last, incomplete `residual` |
| anything else | each token by itself; the oldest when a token comes | the last `residual` |

The first `sinks` tokens of a sequence may stay unquantized as well, for ever, since they get much of the attention
(StreamingLLM, Xiao et al. 2023; KVQuant, Hooper et al. 2024, keeps the first token so). Whether a token is a sink
depends on its position alone. A group of tokens is quantized as if it had no sinks in it.

`quantized_tokens` says how many tokens of a sequence are read in their quantized form, as an expression of its length.
A query at position i reads what a sequence of length i + 1 keeps. So what a token reads does not depend on how a
prompt is cut, and a prompt reads quantized tokens as a decode step does (the paper's prompt attends to everything
unquantized).

Unquantized tokens have `sinks` + `residual` rows of their own: that of the token at p is p for a sink, and else
sinks + p mod residual, a ring. A quantized form is a function of the token, or of the tokens of its group, alone: it
may be written any time before it is read, and single tokens may be quantized at any slot.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy
import torch

from kvcompile.layouts import symbols as sy
from kvcompile.layouts.storage.code import Code
from kvcompile.layouts.storage.codes import CODES
from kvcompile.layouts.storage.hadamard import check as check_hadamard
from kvcompile.layouts.storage.part import Part
from kvcompile.layouts.storage.scale import Calibration, Scale
from kvcompile.layouts.storage.supported import unsupported


@dataclass(frozen=True)
class Storage:
    """How vectors are kept; see the module. code: a name of `codes.CODES`.

    Raises:
        ValueError: the code does not go with the scale.
    """

    code: str = "model"
    scale: Scale = Scale()
    residual: int = 0
    sinks: int = 0
    hadamard: bool = False

    def __post_init__(self) -> None:
        if problem := unsupported(self.element, self.scale):
            raise ValueError(problem)

    @property
    def element(self) -> Code:
        """What an element becomes."""
        return CODES[self.code]

    @property
    def calibration(self) -> Calibration | None:
        """What has a scale that was measured beforehand, which its part "scale" holds from the start."""
        return self.scale.calibration

    @property
    def channelwise(self) -> bool:
        """Whether scales belong to channels, and groups of tokens share them."""
        return self.scale.per == "channel"

    @property
    def group(self) -> int:
        """Tokens that share a row of data."""
        return self.scale.size if self.channelwise else 1

    @property
    def unquantized(self) -> int:
        """Rows of tokens in the model's dtype, beside the slots."""
        return self.sinks + self.residual

    @property
    def plain(self) -> bool:
        """Whether vectors are kept as the model computes them, in its dtype."""
        return self.element.name == "model" and not self.hadamard

    @property
    def quantized_tokens(self) -> sympy.Expr:
        """Tokens of a sequence of `length` that are read in their quantized form, sinks aside; none where negative."""
        if self.channelwise:
            return sy.length - sympy.Mod(sy.length, self.residual)
        return sy.length - self.residual

    @property
    def without_hadamard(self) -> Storage:
        """The storage of transformed vectors: what its parts hold."""
        return replace(self, hadamard=False)

    @property
    def of_slots(self) -> Storage:
        """What the slots hold: without the transform before it and the unquantized rows beside."""
        return replace(self, residual=0, sinks=0, hadamard=False)

    @property
    def largest(self) -> float:
        """What the magnitude of an element is at most, after the scale."""
        element = self.element
        if self.scale.per != "none" or element.dtype is None:
            return element.largest
        return torch.finfo(element.dtype).max

    def groups(self, dim: int) -> int:
        """How many groups of a vector's `dim` channels have a scale each."""
        return dim // self.scale.size if self.scale.per == "group" and self.scale.size else 1

    def parts(self, dim: int, model_dtype: torch.dtype) -> tuple[Part, ...]:
        """The tensors of vectors of `dim` channels: data, then what of scale, minimum, unquantized rows there is."""
        element, scale = self.element, self.scale
        width = dim * element.bits // 8 if element.packed else dim
        every = self.group
        data = (every, width) if self.channelwise else (width,)
        shape: tuple[int, ...] = ()
        if scale.per == "group":
            shape = (self.groups(dim),)
        elif scale.per == "channel":
            shape = (dim,)
        fixed = 1 if scale.calibration else 0
        found = [Part("data", data, element.dtype or model_dtype, every)]
        found += [Part(name, shape, scale.torch_dtype, every, fixed) for name in scale.numbers]
        if self.unquantized:
            found.append(Part("full", (dim,), model_dtype, fixed=self.unquantized))
        return tuple(found)

    def bytes_per_vector(self, dim: sympy.Expr) -> sympy.Expr:
        """Bytes that one more vector of `dim` channels takes; on average, where tokens share some."""
        element, scale = self.element, self.scale
        data = dim * sy.P if element.dtype is None else dim * sympy.Rational(element.bits, 8)
        number = len(scale.numbers) * scale.torch_dtype.itemsize
        match scale.per:
            case "vector":
                return data + number
            case "group":
                return data + number * (dim / sympy.Integer(scale.size) if scale.size else 1)
            case "channel":
                return data + number * dim / sympy.Integer(scale.size)
            case _:
                return data

    def bytes(self, dim: sympy.Expr, slots: sympy.Expr) -> sympy.Expr:
        """Bytes of `slots` slots of one KV head, with what it keeps beside them."""
        if self.channelwise:  # whole groups
            slots = sympy.ceiling(slots / sympy.Integer(self.group)) * self.group
        calibrated = self.scale.torch_dtype.itemsize if self.calibration else 0
        return slots * self.bytes_per_vector(dim) + calibrated + self.unquantized * dim * sy.P

    def check(self, dim: int) -> str | None:
        """Why vectors of `dim` channels cannot be kept like this, or None."""
        problem = (check_hadamard(dim) if self.hadamard else None) or self.element.check(dim)
        size = self.scale.size if self.scale.per == "group" else 0
        if problem is None and size and dim % size:
            return f"{self.element.title} group {size} does not divide head_dim {dim}"
        return problem

    def exact(self, model_dtype: torch.dtype) -> bool:
        """Whether vectors in `model_dtype` come back as they were."""
        if self.hadamard or self.element.kind != "float":
            return False
        return self.element.dtype in (None, model_dtype, torch.float32)

    def __str__(self) -> str:
        element, scale = self.element, self.scale
        name = element.title
        if self.channelwise:
            name += f" per channel/{scale.size} tokens"
        elif scale.minimum and element.bits == 8:
            name += " asymmetric"
        name += {"tensor": " calibrated", "head": " calibrated per head"}.get(scale.per, "")
        if element.kind == "fp8" and scale.per == "none":
            name += " without scale"
        if scale.per == "group" and scale.size and len(element.groups) > 1:
            name += f"/g{scale.size}"
        kept = [(f"first {self.sinks}", self.sinks), (f"last {self.residual}", self.residual)]
        if found := [text for text, count in kept if count]:
            name += f", {' and '.join(found)} in full"
        return f"hadamard {name}" if self.hadamard else name
