"""Ops that stand for linear layers in a graph until it is traced: each takes the form that fits its tensors.

| op | what it gives |
|---|---|
| linear, linear_group | layers, of one vector |
| linear_gated | act(x G^T + b) * (x U^T + b') |
| linear_activated | act(x W^T + b) |
| linear_added | r + f (x W^T + b), and a second r |
| linear_normed, linear_gated_normed, linear_activated_normed | the same behind a norm of x (`norm_forms.py`) |
| linear_loop | a product and a sum, which Inductor turns into a loop |

A kernel takes the place of what it takes (`kernels/cpp/host/linear.py`, `kernels/triton/host/linear.py`); all else is
spelled out, as the graph had it. None of these ops is left in what is compiled.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile.compile.norm_forms import OWN, normed

_LIB = torch.library.Library("kvcompile", "FRAGMENT")
_LIB.define("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor")
_LIB.define("linear_loop(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor")
_LIB.define("linear_group(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor[]")
_LIB.define(
    "linear_gated(Tensor x, Tensor[] weights, Tensor?[] biases, str activation, bool second) -> Tensor"
)
_LIB.define("linear_activated(Tensor x, Tensor weight, Tensor? bias, str activation) -> Tensor")
_LIB.define("linear_added(Tensor x, Tensor weight, Tensor? bias, Tensor[] residuals, float factor) -> Tensor")
_LIB.define(
    "linear_normed(Tensor x, Tensor[] norm, float eps, str how, str dtype, Tensor[] weights, "
    "Tensor?[] biases, bool kept) -> Tensor[]"
)
_LIB.define(
    "linear_activated_normed(Tensor x, Tensor[] norm, float eps, str how, str dtype, Tensor weight, "
    "Tensor? bias, str activation) -> Tensor"
)
_LIB.define(
    "linear_gated_normed(Tensor x, Tensor[] norm, float eps, str how, str dtype, Tensor[] weights, "
    "Tensor?[] biases, str activation, bool second) -> Tensor"
)
_KERNELS = (torch.float32, torch.float16, torch.bfloat16)
# Keys are those of `kernels/triton/linear/linear.py`.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K], weight [N, K] -> [..., N]; sums in fp32."""
    one = _one_token(x)
    if one and (kernels := _triton(x, [weight], [bias])) is not None:
        return kernels.linears(x, [weight], [] if bias is None else [bias])[0]  # type: ignore[no-any-return]
    if (one or _several(x)) and (kernel := _kernel(x, weight, bias)) is not None:
        run = kernel.linear if one else kernel.linear_many
        return run(x.contiguous(), weight, bias)  # type: ignore[no-any-return]
    return _loop(x, weight, bias)


def _group(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    """Several layers of the same x, in one call of the kernel where it is one token's."""
    layers = list(zip(weights, biases, strict=True))
    given = [bias for bias in biases if bias is not None]
    made: list[Tensor]
    if _one_token(x) and (own := _triton(x, weights, biases)) is not None:
        made = own.linears(x, weights, given)
        return made
    kernels = [_kernel(x, weight, bias) for weight, bias in layers]
    if not _one_token(x) or None in kernels or len(given) not in (0, len(weights)):
        return [_linear(x, weight, bias) for weight, bias in layers]
    made = kernels[0].linears(x.contiguous(), weights, given)
    return made


def _gated(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], activation: str, second: bool
) -> Tensor:
    """act(x G^T + b) * (x U^T + b'); the kernel takes weights of equally many rows, and none that is broadcast.

    weights, biases: of the gate and of what it opens; or one that holds both, the gate first or second
    """
    layers = _sides(weights, biases, second)
    if _alike(layers[0]) and _one_token(x) and (own := _triton(x, *layers)) is not None:
        given = [bias for bias in layers[1] if bias is not None]
        made: Tensor = own.gated(x, layers[0], given, activation)
        return made
    if len(weights) == 1:  # one product, as the graph had it
        gate, up = _linear(x, weights[0], biases[0]).chunk(2, -1)
        gate, up = (up, gate) if second else (gate, up)
    else:
        gate, up = _group(x, weights, biases)
    return ACTIVATIONS[activation](gate) * up


def _activated(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """act(x W^T + b)."""
    if _one_token(x) and (own := _triton(x, [weight], [bias])) is not None:
        return own.activated(x, weight, bias, activation)  # type: ignore[no-any-return]
    return ACTIVATIONS[activation](_linear(x, weight, bias))


def _added(x: Tensor, weight: Tensor, bias: Tensor | None, residuals: list[Tensor], factor: float) -> Tensor:
    """r + factor * (x W^T + b) of the first r, and the sum with the second, if there is one."""
    own = _triton(x, [weight], [bias]) if _one_token(x) else None
    if own is not None and all(own.takes_residual(x, weight, residual) for residual in residuals):
        return own.added(x, weight, bias, residuals, factor)  # type: ignore[no-any-return]
    made = _linear(x, weight, bias)
    made = made if factor == 1.0 else made * factor
    for residual in residuals:
        made = residual + made
    return made


def _normed(
    x: Tensor,
    norm: list[Tensor],
    eps: float,
    how: str,
    dtype: str,
    weights: list[Tensor],
    biases: list[Tensor | None],
    kept: bool,
) -> list[Tensor]:
    """Several layers of x behind its norm, as `norm_forms.NormNodes` says it; kept: and what the norm gives."""
    if _rounds(x, how, dtype) and (kernels := _triton(x, weights, biases)) is not None:
        own = kernels.norm_in(how, eps, norm, kept)
        if kernels.takes_norm(x, own):
            given = [bias for bias in biases if bias is not None]
            return kernels.linears(x, weights, given, own)  # type: ignore[no-any-return]
    y = normed(x, norm, eps, how, dtype)
    return [*_group(y, weights, biases), *([y] if kept else [])]


def _activated_normed(
    x: Tensor,
    norm: list[Tensor],
    eps: float,
    how: str,
    dtype: str,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
) -> Tensor:
    """As `_activated`, of x behind its norm."""
    if _rounds(x, how, dtype) and (kernels := _triton(x, [weight], [bias])) is not None:
        own = kernels.norm_in(how, eps, norm)
        if kernels.takes_norm(x, own):
            return kernels.activated(x, weight, bias, activation, own)  # type: ignore[no-any-return]
    return _activated(normed(x, norm, eps, how, dtype), weight, bias, activation)


def _gated_normed(
    x: Tensor,
    norm: list[Tensor],
    eps: float,
    how: str,
    dtype: str,
    weights: list[Tensor],
    biases: list[Tensor | None],
    activation: str,
    second: bool,
) -> Tensor:
    """As `_gated`, of x behind its norm."""
    layers = _sides(weights, biases, second)
    if _alike(layers[0]) and _rounds(x, how, dtype) and (kernels := _triton(x, *layers)) is not None:
        own = kernels.norm_in(how, eps, norm)
        if kernels.takes_norm(x, own, 2):
            given = [bias for bias in layers[1] if bias is not None]
            return kernels.gated(x, layers[0], given, activation, own)  # type: ignore[no-any-return]
    return _gated(normed(x, norm, eps, how, dtype), weights, biases, activation, second)


def _rounds(x: Tensor, how: str, dtype: str) -> bool:
    """Whether a norm of one token computes as the kernel does: in float32, rounded to the token's dtype.

    Without casts that is a norm of float32, or a layer_norm, which rounds its results alone in any dtype.
    """
    own = str(x.dtype).removeprefix("torch.")
    rounded = dtype or ("" if "layer" in how.split() else "float32")
    return _one_token(x) and rounded in ("", OWN, own)


def _sides(
    weights: list[Tensor], biases: list[Tensor | None], second: bool
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Weights and biases of a gate and of what it opens, of two layers or of one that holds both."""
    if len(weights) == 1:
        return _both(weights[0], second), _both(biases[0], second)
    return weights, biases


def _both(of: Tensor | None, second: bool) -> list[Any]:
    """The halves of a weight or bias, the gate's first."""
    if of is None:
        return [None, None]
    first, last = of.chunk(2)
    return [last, first] if second else [first, last]


def _alike(weights: list[Tensor]) -> bool:
    """Whether a gate has as many rows as what it opens; a product may broadcast one."""
    return weights[0].shape == weights[1].shape


def _one_token(x: Tensor) -> bool:
    return x.dtype.is_floating_point and all(isinstance(size, int) and size == 1 for size in x.shape[:-1])


def _several(x: Tensor) -> bool:
    if on_gpu(x.device):
        return False
    return importlib.import_module("kvcompile.kernels.cpp.isa").multiplies_rows(x.dtype)  # type: ignore[no-any-return]


def _loop(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same without a kernel."""
    rows = x.shape[:-1]
    if weight.dim() > 2:  # of a product (`turned.py`): no linear layer has it
        made = torch.matmul(x, weight.permute(*reversed(range(weight.dim()))))
        return made if bias is None else made + bias
    if on_gpu(x.device) or not _one_token(x) or weight.dim() != 2:
        return F.linear(x, weight, bias)
    out = (x.reshape(1, -1).float() * weight.float()).sum(-1)
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype).reshape(*rows, weight.shape[0])


def _kernel(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """What launches the kernel, or None where it has none for these."""
    # A vector is a weight as well, and one number a bias of all rows.
    own = bias is None or (bias.dtype == x.dtype and bias.is_contiguous() and bias.shape == weight.shape[:1])
    same = x.dtype == weight.dtype and weight.dim() == 2 and own
    elsewhere = on_gpu(x.device) or x.device.type != "cpu"
    if elsewhere or x.dtype not in _KERNELS or not same or weight.stride(-1) != 1:
        return None
    available = importlib.import_module("kvcompile.kernels.cpp.available")
    if available.problem(x.device) is not None:
        return None
    return importlib.import_module("kvcompile.kernels.cpp.host.linear")


def on_gpu(device: torch.device) -> bool:
    """Whether kernels for GPUs are what linear layers on `device` may run."""
    return device.type == "cuda"


def _triton(x: Tensor, weights: list[Tensor], biases: Sequence[Tensor | None]) -> Any:
    """What launches the kernel of a GPU, or None where it has none for these."""
    if not on_gpu(x.device):
        return None
    available = importlib.import_module("kvcompile.kernels.triton.available")
    if available.problem(x.device) is not None:
        return None
    kernels = importlib.import_module("kvcompile.kernels.triton.host.linear")
    given = [bias for bias in biases if bias is not None]
    return kernels if kernels.takes(x, weights, given) else None


_LIB.impl("linear", _linear, "CompositeImplicitAutograd")
_LIB.impl("linear_loop", _loop, "CompositeImplicitAutograd")
_LIB.impl("linear_group", _group, "CompositeImplicitAutograd")
_LIB.impl("linear_gated", _gated, "CompositeImplicitAutograd")
_LIB.impl("linear_activated", _activated, "CompositeImplicitAutograd")
_LIB.impl("linear_activated_normed", _activated_normed, "CompositeImplicitAutograd")
_LIB.impl("linear_added", _added, "CompositeImplicitAutograd")
_LIB.impl("linear_normed", _normed, "CompositeImplicitAutograd")
_LIB.impl("linear_gated_normed", _gated_normed, "CompositeImplicitAutograd")
