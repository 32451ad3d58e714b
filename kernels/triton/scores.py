"""What stands between raw products and the softmax, as Triton text: kernels/scores.py tells what it means.

Scores are kept in base 2, s * log2(e), so that exp2 is all that is needed. Factors that do not depend on the key are
one number: sm_scale * log2(e), or with a softcap c, where s = c * tanh(sm_scale * x / c), tanh by exp2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from kvcompile.kernels.triton.params import Param, ScalarParam, TensorParam
from kvcompile.kernels.triton.spec import KernelSpec

LOG2E = math.log2(math.e)


def params(spec: KernelSpec) -> tuple[Param, ...]:
    """The tensor of the site's bias, dense, and its sizes that vary."""
    bias = spec.site.score.bias
    if bias is None:
        return ()
    sizes = () if bias.kind == "alibi" else (ScalarParam("reach"),)
    return (TensorParam("bias", torch.float32), *sizes)


def factor(spec: KernelSpec) -> float:
    """What raw products are multiplied by first."""
    cap = spec.site.score.softcap
    return spec.site.sm_scale * LOG2E if cap is None else spec.site.sm_scale / cap * 2 * LOG2E


def prologue(spec: KernelSpec, names: Mapping[str, str]) -> list[str]:
    """Lines before the loops; names as for `after`."""
    bias = spec.site.score.bias
    if bias is None:
        return []
    row = "0" if "one_bias" in spec.options else names["heads"]
    match bias.kind:
        case "alibi":
            shape = f" + tl.zeros([{spec.block_m}], tl.int32)" if row == "0" else ""
            guard = f", mask={names['real']}, other=0.0" if row != "0" else ""
            return [f"slope = tl.load(bias_ptr + {row}{shape}{guard}) * {LOG2E}"]
        case "columns" if not spec.layout.retention.in_cache:
            at = f"({row}) * reach + tl.maximum(position, 0) + tl.zeros([{spec.block_m}], tl.int32)"
            return [f"own_bias = tl.load(bias_ptr + {at}, mask={names['real']}, other=0.0)"]
        case _:
            return []


def after(spec: KernelSpec, names: Mapping[str, str], masked: bool) -> list[str]:
    """Lines that make scores `s` [BLOCK_M, BLOCK_N] of products, already times `factor`.

    names: "query" (broadcasts against [BLOCK_M, BLOCK_N]) and "key" [BLOCK_N]: where queries and keys are taken to be;
        "heads" and "real" [BLOCK_M]
    """
    lines = []
    cap, bias = spec.site.score.softcap, spec.site.score.bias
    if cap is not None:
        lines.append(f"s = {cap * LOG2E} - {2 * cap * LOG2E} / (tl.exp2(s) + 1.0)")
    if bias is None:
        return lines
    query, key, heads = names["query"], f"{names['key']}[None, :]", f"{names['heads']}[:, None]"
    row = "0" if "one_bias" in spec.options else heads
    real = f"{names['real']}[:, None]"
    guard = f"{real} & inside[None, :]" if masked else f"{real} & ({key} >= 0)"
    match bias.kind:
        case "alibi":
            lines.append(f"s = s - slope[:, None] * ({query} - {key}).to(tl.float32)")
        case "relative":
            at = f"{row} * reach + tl.minimum(tl.maximum({query} - {key}, 0), reach - 1)"
            lines.append(f"s = s + tl.load(bias_ptr + {at}, mask={guard}, other=0.0) * {LOG2E}")
        case "columns":
            at = f"{row} * reach + tl.maximum({key}, 0)"
            own = "own_bias[:, None]"
            if spec.layout.retention.in_cache:
                own = f"tl.load(bias_ptr + {row} * reach + tl.maximum({query}, 0), mask={guard}, other=0.0)"
            lines.append(f"s = s + (tl.load(bias_ptr + {at}, mask={guard}, other=0.0) - {own}) * {LOG2E}")
        case "table":
            at = f"({row} * reach + tl.maximum({query}, 0)).to(tl.int64) * reach + tl.maximum({key}, 0)"
            lines.append(f"s = s + tl.load(bias_ptr + {at}, mask={guard}, other=0.0) * {LOG2E}")
    return lines
