"""The role combine: partial results of a decode step's splits to its output.

    top = max top_i    total = sum total_i 2^(top_i - top)    out = sum acc_i 2^(top_i - top) / total

Shares without tiles are not read: of a graph for long sequences, a short one has few others. A sink logit joins the
total. Values that are kept turned (Hadamard) are turned back here, once per query.

Options
    lse          the log-sum-exp in base 2 is stored, [B, Hq] float32, for `score`
    interpreted  bfloat16 is rounded by its bits
"""

from __future__ import annotations

import torch

from kvcompile.kernels.triton import helpers
from kvcompile.kernels.triton.params import KernelSource, Param, ScalarParam, TensorParam
from kvcompile.kernels.triton.render import rendered
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.kernels.triton.tile.scores import LOG2E

# Shares that are read at once: all of most steps.
FEW, MOST = 16, 64
_NUMBERS = 8192  # of shares that are read at once: 64 registers of a thread


def turns(spec: KernelSpec) -> bool:
    """Whether the result comes out in a turned basis."""
    return (spec.layout.keys if spec.layout.in_keys else spec.layout.values).hadamard


def weighed(spec: KernelSpec) -> int:
    """Channels of the partial results: those of turned keys are all weighed before any can be read."""
    return spec.head_dim if spec.layout.in_keys and turns(spec) else spec.v_head_dim


def generate(spec: KernelSpec) -> KernelSource:
    """Grid: (query heads, batch)."""
    dim = weighed(spec)
    block = max(16, 1 << (dim - 1).bit_length())
    params: list[Param] = [TensorParam("partial", torch.float32), TensorParam("sums", torch.float32)]
    params += [TensorParam("sinks", torch.float32)] if spec.site.score.sinks else []
    params += [TensorParam("out", spec.torch_dtype)]
    params += [TensorParam("lse", torch.float32)] if "lse" in spec.options else []
    params += [ScalarParam("splits")]
    interpreted = "interpreted" in spec.options
    text = rendered(
        "combine.py.jinja",
        params=params,
        spec=spec,
        dim=dim,
        block=block,
        few=FEW,
        most=max(FEW, min(MOST, _NUMBERS // block)),
        sinks=spec.site.score.sinks,
        lse="lse" in spec.options,
        log2e=LOG2E,
        turned=helpers.hadamard("out[None, :]", 1, block, dim) if turns(spec) else "",
        stored=helpers.stored("out", spec.dtype, interpreted),
    )
    return KernelSource("combine", tuple(params), helpers.module(text))
