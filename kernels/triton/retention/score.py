"""Role score: what one query's logits add to the slots' scores (`layouts/retention/scored.py`), K not read again.

    share[slot] = pool over the heads of a group of 2^(logit[head, slot] + level[head, tile of slot] - lse[head])
    "last": score = share      "sum", "mean_age": score += share      ("vote": a step changes no score)

Decode leaves the logits, final (scaled, capped, with their bias) and in base 2, and who joins its parts the
log-sum-exp, in base 2 as well. They are differences from the level of their tile, which is the largest logit of
the first tile that its program has read, in 16 bits (in a model of float32, in 32): what all logits have in common is
none of these bits. Half as many bytes are written, and read again.

Granularity `layer` pools over KV heads too. Slots that hold no token are left alone, and sequences whose token is
padding.

Where decode joins the parts of a head itself (`attend/work_list.py`), the program that does so knows the log-sum-exp,
and all logits of the head are there: it adds the shares as well (`adds`, `function`), and `score` is not launched. Of
many slots it is, since one program would read for long; and of granularity `layer`, as no program knows that all heads
are there.

Options: interpreted. spec.block_n: slots of a tile; spec.block_m: slots that share a level (a tile of decode).
Launch: grid(spec, batch). logits [B, Hkv, G, slots] of `logits_dtype`; levels float32 [B, Hkv, G, tiles]; lse float32
[B, Hq]; positions int64 [B, 1]; score float32 [B, Hkv or 1, slots].
"""

from __future__ import annotations

import torch

from kvcompile.kernels.triton.append.encode.tile import power_of_two
from kvcompile.kernels.triton.helpers import module
from kvcompile.kernels.triton.params import KernelSource, Param, TensorParam
from kvcompile.kernels.triton.render import rendered
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.layouts import Scored

OPTIONS = {"interpreted"}
# Slots, of each head of a group: of 4,096 the registers of one program fill a multiprocessor.
_LARGEST_TILE = 1024
# The option of decode whose last program of a head adds the shares: of so many slots at most, some two microseconds.
SCORED = "scored"
_ONE_PROGRAM = 16384
# Slots that it adds to at once, and how many times as many are asked for ahead. Of 1,024, int8 takes 229 registers of a
# thread instead of 161, and two programs fit a multiprocessor instead of three.
_JOINED_TILE, _AHEAD = 512, 4


def logits_dtype(spec: KernelSpec) -> torch.dtype:
    """In which decode leaves logits."""
    return torch.float32 if spec.torch_dtype == torch.float32 else torch.float16


def _params(spec: KernelSpec) -> tuple[Param, ...]:
    return (
        TensorParam("logits", logits_dtype(spec), 4),
        TensorParam("levels", torch.float32, 4),
        TensorParam("lse", torch.float32, 2),
        TensorParam("positions", torch.int64, 2),
        TensorParam("score", torch.float32, 3),
    )


def generate(spec: KernelSpec) -> KernelSource:
    """The kernel of a spec of role score.

    Raises:
        ValueError: the layout's retention does not go by scores, or its scores do not change in a step.
    """
    if unknown := set(spec.options) - OPTIONS:
        raise ValueError(f"score knows no options {sorted(unknown)}")
    retention = spec.layout.retention
    if not isinstance(retention, Scored):
        raise ValueError(f"score is for retention by scores, not for {spec.layout}")
    if retention.score == "vote":
        raise ValueError(f"{retention}: tokens vote in a prompt alone, no step changes a score")
    heads = spec.num_kv_heads if retention.granularity == "layer" else 1
    params = _params(spec)
    tile = min(spec.block_m, spec.block_n)
    text = rendered(
        "score.py.jinja",
        params=params,
        retention=retention,
        block=spec.block_n,
        tile=tile,
        tiles_of_level=spec.block_m // tile,
        levels=-(-retention.tokens // spec.block_m),
        group=spec.group,
        heads=heads,
        pool="tl.max" if retention.pooling == "max" else "tl.sum",
        count=spec.group * heads,
    )
    return KernelSource("score", params, module(text))


def adds(spec: KernelSpec) -> bool:
    """Whether decode, which joins the parts of a head, adds the shares of its slots as well."""
    retention = spec.layout.retention
    assert isinstance(retention, Scored)
    return (
        retention.granularity != "layer" and spec.group <= spec.block_m and retention.tokens <= _ONE_PROGRAM
    )


def function(spec: KernelSpec, rows: int) -> str:
    """The function of decode's file that adds the shares of a head, of `rows` log-sum-exps, a power of two."""
    retention = spec.layout.retention
    assert isinstance(retention, Scored)
    block = max(min(power_of_two(retention.tokens), _JOINED_TILE), spec.block_n)
    return rendered(
        "scored.jinja",
        retention=retention,
        block=block,
        tile=spec.block_n,
        levels=-(-retention.tokens // spec.block_n),
        stages=min(-(-retention.tokens // block), _AHEAD) + 1,
        group=spec.group,
        rows=rows,
        pool="tl.max" if retention.pooling == "max" else "tl.sum",
        count=spec.group,
    ).rstrip()


def block_n(slots: int) -> int:
    """Slots of a tile."""
    return min(power_of_two(slots), _LARGEST_TILE)


def grid(spec: KernelSpec, batch: int) -> tuple[int, int, int]:
    return -(-spec.layout.slots(None) // spec.block_n), spec.score_heads, batch
