"""A kernel role of a test: the role's file and its op, as `selection/page_bounds.py` and `host/ops_pages.py` are.

Role head_means: means[b, h, d] = scale mean_t(k[b, h, t, d]), over the tokens of a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels.triton import helpers
from kvcompile.kernels.triton.host.launch import launch
from kvcompile.kernels.triton.host.source import kernel_of
from kvcompile.kernels.triton.params import KernelSource, Param, ScalarParam, TensorParam
from kvcompile.kernels.triton.render import rendered
from kvcompile.kernels.triton.spec import KernelSpec

# templates/head_means.py.jinja
TEMPLATE = """\
{{ jit(params) }}
def head_means(
{% for param in params %}
    {{ param.names | join(", ") }},
{% endfor %}
):
    \"\"\"The mean of a head's keys. One program: a head of a sequence.\"\"\"
    head = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, {{ dim }})
    total = tl.zeros([{{ dim }}], tl.float32)
    for start in range(0, tokens, {{ block }}):
        t = start + tl.arange(0, {{ block }})
        rows = k_ptr + batch * k_s0 + head * k_s1 + t[:, None].to(tl.int64) * k_s2
        tile = tl.load(rows + c[None, :], mask=t[:, None] < tokens, other=0.0)
        total += tl.sum(tile.to(tl.float32), axis=0)
    tl.store(means_ptr + batch * means_s0 + head * means_s1 + c, total * {{ scale }} / tokens)
"""


def generate(spec: KernelSpec) -> KernelSource:
    params: tuple[Param, ...] = (
        TensorParam("k", spec.torch_dtype, 4),
        TensorParam("means", torch.float32, 3),
        ScalarParam("tokens"),
    )
    text = rendered(
        "head_means.py.jinja",
        params=params,
        dim=spec.head_dim,
        block=spec.block_n,
        scale=spec.site.sm_scale,
    )
    return KernelSource("head_means", params, helpers.module(text))


def grid(spec: KernelSpec, batch: int) -> tuple[int, int]:
    return spec.num_kv_heads, batch


@torch.library.triton_op("kvtest_role::head_means", mutates_args={})
def head_means(k: Tensor, spec: str) -> Tensor:
    """float32 [B, H, D] of k [B, H, T, D], dense in its last dimension."""
    kernel = kernel_of(spec)
    means = k.new_empty((k.shape[0], k.shape[1], k.shape[3]), dtype=torch.float32)
    launch(kernel, grid(kernel.spec, k.shape[0]), {"k": k, "means": means}, {"tokens": k.shape[2]})
    return means
