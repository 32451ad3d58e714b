"""The role combine: partial results of a decode step's splits to its output.

    top = max top_i    total = sum total_i 2^(top_i - top)    out = sum acc_i 2^(top_i - top) / total

Shares without tiles are not read: of a graph for long sequences, a short one has few others. A sink logit joins the
total. Values that are kept turned (Hadamard) are turned back here, once per query.

Many channels are the work of several programs, so that more shares can be read at once; of one sequence, whose heads
are few, of more, so that more multiprocessors read. Of a result that is turned back, one program has all channels.

Options
    listed       decode ran over a list of tiles (`work_list.py`): `spans` says where a head's parts are
    cascade      tiles that sequences have in common were read once for these (`cascade.py`), of spec.block_n slots
    lse          the log-sum-exp in base 2 is stored, [B, Hq] float32, for `score`
    interpreted  bfloat16 is rounded by its bits
"""

from __future__ import annotations

import torch

from kvcompile.kernels.triton import helpers
from kvcompile.kernels.triton.attend import cascade, work_list
from kvcompile.kernels.triton.params import KernelSource, Param, ScalarParam, TensorParam
from kvcompile.kernels.triton.render import rendered
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.kernels.triton.tile.scores import LOG2E

# Shares that are read at once: all of most steps.
FEW, MOST = 16, 128
_NUMBERS = 8192  # of shares that are read at once: 64 registers of a thread
# Channels of a program, at most: of a list, where a step has heads enough for all multiprocessors, and of one sequence.
_CHANNELS, _ALONE = 128, 32


def turns(spec: KernelSpec) -> bool:
    """Whether the result comes out in a turned basis."""
    return (spec.layout.keys if spec.layout.in_keys else spec.layout.values).hadamard


def weighed(spec: KernelSpec) -> int:
    """Channels of the partial results: those of turned keys are all weighed before any can be read."""
    return spec.head_dim if spec.layout.in_keys and turns(spec) else spec.v_head_dim


def pieces(spec: KernelSpec) -> int:
    """Over how many programs the channels of a result are split."""
    return 1 if turns(spec) else -(-weighed(spec) // _most(spec))


def _most(spec: KernelSpec) -> int:
    """Channels of a program, at most."""
    return _CHANNELS if work_list.LISTED in spec.options else _ALONE


def generate(spec: KernelSpec) -> KernelSource:
    """Grid: (query heads, batch, pieces)."""
    dim = weighed(spec)
    listed = work_list.LISTED in spec.options
    block = _most(spec) if pieces(spec) > 1 else max(16, 1 << (dim - 1).bit_length())
    params: list[Param] = [TensorParam("partial", torch.float32), TensorParam("sums", torch.float32)]
    params += [TensorParam("spans", torch.int32), TensorParam("positions", torch.int64, 2)] if listed else []
    params += [cascade.PREFIXES] if cascade.CASCADE in spec.options else []
    params += [TensorParam("sinks", torch.float32)] if spec.site.score.sinks else []
    params += [TensorParam("out", spec.torch_dtype)]
    params += [TensorParam("lse", torch.float32)] if "lse" in spec.options else []
    params += [] if listed else [ScalarParam("splits")]
    interpreted = "interpreted" in spec.options
    text = rendered(
        "combine.py.jinja",
        params=params,
        spec=spec,
        dim=dim,
        block=block,
        pieces=pieces(spec),
        listed=listed,
        cascade=cascade.CASCADE in spec.options,
        row_tiles=work_list.row_tiles(spec),
        members=work_list.members(spec),
        few=FEW,
        most=max(FEW, min(MOST, _NUMBERS // block)),
        sinks=spec.site.score.sinks,
        lse="lse" in spec.options,
        log2e=LOG2E,
        turned=helpers.hadamard("out[None, :]", 1, block, dim) if turns(spec) else "",
        stored=helpers.stored("out", spec.dtype, interpreted),
    )
    return KernelSource("combine", tuple(params), helpers.module(text))
