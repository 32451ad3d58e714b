"""What stands between raw products and the softmax, as Triton text: kernels/reference/scores.py tells what it means.

Scores are kept in base 2, s * log2(e), so that exp2 is all that is needed. Factors that do not depend on the key are
one number: sm_scale * log2(e), or with a softcap c, where s = c * tanh(sm_scale * x / c), tanh by exp2. What else a
site does to its scores and to what is seen comes last (`expression.py`): what it hides has a score of -inf.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from kvcompile.expression import ScoreMod
from kvcompile.kernels.triton.params import Param, ScalarParam, TensorParam
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.kernels.triton.tile import expression

LOG2E = math.log2(math.e)


def params(spec: KernelSpec) -> tuple[Param, ...]:
    """The tensors of the site's bias and of its expression, dense, and their sizes that vary."""
    bias, mod = spec.site.score.bias, spec.site.score.mod
    leaves = () if mod is None else expression.tensors(mod).params
    if bias is None:
        return leaves
    sizes = () if bias.kind == "alibi" else (ScalarParam("reach"),)
    return (TensorParam("bias", torch.float32), *sizes, *leaves)


def places_matter(spec: KernelSpec) -> bool:
    """Whether scores, or what is seen of what the cache holds, depend on where queries and keys are."""
    mod = spec.site.score.mod
    return spec.site.score.bias is not None or (mod is not None and bool(expression.wanted(mod)))


def factor(spec: KernelSpec) -> float:
    """What raw products are multiplied by first."""
    cap = spec.site.score.softcap
    return spec.site.sm_scale * LOG2E if cap is None else spec.site.sm_scale / cap * 2 * LOG2E


def prologue(spec: KernelSpec, names: Mapping[str, str]) -> list[str]:
    """Lines before the loops; names as for `after`."""
    mod = spec.site.score.mod
    own = [] if mod is None else _printed(spec, mod, names).rows
    return [*_of_bias(spec, names), *own]


def _of_bias(spec: KernelSpec, names: Mapping[str, str]) -> list[str]:
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
    cap, mod = spec.site.score.softcap, spec.site.score.mod
    if cap is not None:
        lines.append(f"s = {cap * LOG2E} - {2 * cap * LOG2E} / (tl.exp2(s) + 1.0)")
    lines += _biased(spec, names, masked)
    return lines if mod is None else [*lines, *_modified(spec, mod, names)]


def _printed(spec: KernelSpec, mod: ScoreMod, names: Mapping[str, str]) -> expression.Printer:
    return expression.Printer(mod, names, "interpreted" in spec.options)


def _modified(spec: KernelSpec, mod: ScoreMod, names: Mapping[str, str]) -> list[str]:
    """Lines that make scores what the site's expression says, and hide what it hides."""
    made = _printed(spec, mod, names)
    lines = list(made.tile)
    if mod.score is not None:
        found = made.values[mod.score]
        text = found.typed if found.is_float else f"{found.typed}.to(tl.float32)"
        whole = "" if "score" in found.on else f" + tl.zeros([{spec.block_m}, {spec.block_n}], tl.float32)"
        lines.append(f"s = {text} * {LOG2E}{whole}")
    if mod.mask is not None:
        lines.append(f's = tl.where({made.values[mod.mask].typed}, s, float("-inf"))')
    return lines


def _biased(spec: KernelSpec, names: Mapping[str, str], masked: bool) -> list[str]:
    """Lines that add the bias."""
    bias = spec.site.score.bias
    if bias is None:
        return []
    lines = []
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
