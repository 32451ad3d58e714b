"""Storages that keep the newest tokens, or the first, in the model's dtype: KIVI (Liu et al. 2024, section 3), sinks.

| storage | settled tokens | the newest tokens, in full |
|---|---|---|
| Recent | each by itself, as `inner` says | the last `residual`; the oldest settles when a token comes |
| PerChannel | in groups of `group`, a scale and a minimum per channel | settle together when they are `residual` |

Both may keep the first `sinks` tokens of a sequence in full as well, for ever, since they get much of the attention
(StreamingLLM, Xiao et al. 2023; KVQuant, Hooper et al. 2024, keeps the first token so). Whether a token is a sink
depends on its position alone. A group of tokens is rounded as if it had no sinks in it.

`settled` says how many tokens of a sequence are read in their settled form, as an expression of its length. A query
at position i reads what a sequence of length i + 1 keeps. So what a token reads does not depend on how a prompt is
cut, and a prompt reads settled tokens as a decode step does (the paper's prompt attends to everything unrounded).

Tokens in full have `sinks` + `residual` rows of their own: that of the token at p is p for a sink, and else
sinks + p mod residual, a ring. A settled form is a function of the token, or of the tokens of its group, alone: it may
be written any time before it is read, and single tokens may settle at any slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import sympy
import torch

from kvcompile.layouts import symbols as sy
from kvcompile.layouts.storages.floats import Fp8
from kvcompile.layouts.storages.integers import Affine, Bits, Int8, check_packing
from kvcompile.layouts.storages.part import SCALE_BYTES, Calibration, Part, ScaleDtype, scale_dtype

Settled = Fp8 | Int8 | Affine


@dataclass(frozen=True)
class Recent:
    """`inner` for all but the last `residual` tokens and the first `sinks`; one of the two is more than 0."""

    inner: Settled
    residual: int
    sinks: int = 0
    kind: Literal["recent"] = "recent"

    @property
    def calibration(self) -> Calibration | None:
        return self.inner.calibration

    @property
    def settled(self) -> sympy.Expr:
        """Tokens of a sequence of `length` that are read as `inner` gives them back; none where negative."""
        return sy.length - self.residual

    def parts(self, dim: int, model_dtype: torch.dtype) -> tuple[Part, ...]:
        full = Part("full", (dim,), model_dtype, fixed=self.sinks + self.residual)
        return (*self.inner.parts(dim, model_dtype), full)

    def bytes_per_vector(self, dim: sympy.Expr) -> sympy.Expr:
        return self.inner.bytes_per_vector(dim)

    def bytes(self, dim: sympy.Expr, slots: sympy.Expr) -> sympy.Expr:
        """Bytes of `slots` slots of one KV head."""
        return self.inner.bytes(dim, slots) + (self.sinks + self.residual) * dim * sy.P

    def check(self, dim: int) -> str | None:
        return self.inner.check(dim)

    def exact(self, model_dtype: torch.dtype) -> bool:
        return False

    def __str__(self) -> str:
        return f"{self.inner}, {in_full(self)}"


@dataclass(frozen=True)
class PerChannel:
    """Unsigned integers with a scale and a minimum per channel and group of `group` consecutive tokens; the tokens of
    the last, incomplete `residual`, and the first `sinks`, in full."""

    bits: Bits
    group: int
    residual: int
    scale_dtype: ScaleDtype = "float16"
    sinks: int = 0
    kind: Literal["per_channel"] = "per_channel"

    @property
    def calibration(self) -> Calibration | None:
        return None

    @property
    def settled(self) -> sympy.Expr:
        """Tokens of a sequence of `length` that are read in groups."""
        return sy.length - sympy.Mod(sy.length, self.residual)

    def parts(self, dim: int, model_dtype: torch.dtype) -> tuple[Part, ...]:
        dtype = scale_dtype(self.scale_dtype)
        return (
            Part("data", (self.group, dim * self.bits // 8), torch.uint8, every=self.group),
            Part("scale", (dim,), dtype, every=self.group),
            Part("minimum", (dim,), dtype, every=self.group),
            Part("full", (dim,), model_dtype, fixed=self.sinks + self.residual),
        )

    def bytes_per_vector(self, dim: sympy.Expr) -> sympy.Expr:
        return dim * self.bits / 8 + dim * 2 * SCALE_BYTES[self.scale_dtype] / sympy.Integer(self.group)

    def bytes(self, dim: sympy.Expr, slots: sympy.Expr) -> sympy.Expr:
        """Bytes of `slots` slots of one KV head: whole groups."""
        groups = sympy.ceiling(slots / sympy.Integer(self.group))
        return groups * self.group * self.bytes_per_vector(dim) + (self.sinks + self.residual) * dim * sy.P

    def check(self, dim: int) -> str | None:
        return check_packing(self.bits, dim)

    def exact(self, model_dtype: torch.dtype) -> bool:
        return False

    def __str__(self) -> str:
        return f"int{self.bits} per channel/{self.group} tokens, {in_full(self)}"


def in_full(storage: Recent | PerChannel) -> str:
    first, last = f"first {storage.sinks}", f"last {storage.residual}"
    kept = [text for text, count in ((first, storage.sinks), (last, storage.residual)) if count]
    return f"{' and '.join(kept)} in full"
