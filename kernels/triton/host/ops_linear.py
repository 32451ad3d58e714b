"""Defines the op of the role linear; it carries its KernelSpec as a text (`ops_attend.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels.triton.host.launch import launch
from kvcompile.kernels.triton.host.source import kernel_of
from kvcompile.kernels.triton.linear import linear as role
from kvcompile.kernels.triton.linear.norm import norm_form


@torch.library.triton_op("kvcompile::triton_linear", mutates_args={})
def linear(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    norm: list[Tensor],
    residuals: list[Tensor],
    num_warps: int,
    spec: str,
) -> Tensor:
    """One token by the weights of linear layers; see `linear/linear.py`.

    Args:
        x: [K], dense. weights: [N, K], dense in their last dimension; of a gated spec a gate's and what it opens.
        biases: [N] of each, dense, where the spec has them; else [].
        norm: [K] each, dense: what its norm reads (`NormForm.tensors`). residuals: [N] each, dense, as many as
            the spec has.

    Returns:
        [places[-1]]: the results of layer i from places(rows)[i] on, of which those between two layers are anything;
        where the token is kept, it is the last as if it were one more layer's.
    """
    kernel = kernel_of(spec)
    rows = [weight.shape[0] for weight in (weights[:1] if role.gated(kernel.spec) else weights)]
    kept = [x.shape[0]] if "kept" in kernel.spec.options else []
    out = x.new_empty((role.places([*rows, *kept])[-1],))
    tensors = {"x": x, "out": out} | {f"w_{layer}": weight for layer, weight in enumerate(weights)}
    tensors |= {f"b_{layer}": bias for layer, bias in enumerate(biases)}
    form = norm_form(kernel.spec.options)
    tensors |= dict(zip(form.tensors, norm, strict=True)) if form else {}
    tensors |= dict(zip(role.residuals(kernel.spec), residuals, strict=True))
    sizes = {f"n_{layer}": count for layer, count in enumerate(rows)}
    launch(kernel, role.grid(kernel.spec, rows), tensors, sizes, num_warps=num_warps)
    return out
