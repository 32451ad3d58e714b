"""K's part of a kernel, or V's: how a vector is written to its slot, met by queries, weighed; `side.cpp.jinja`."""

from __future__ import annotations

import math
from typing import Literal

import torch

from kvcompile.kernels.cpp.attend.values import DATA, SCALES
from kvcompile.kernels.cpp.render import real, rendered
from kvcompile.kernels.cpp.spec import CppSpec
from kvcompile.kernels.cpp.symbolic import printed
from kvcompile.layouts import Paged, Storage
from kvcompile.layouts import symbols as sy
from kvcompile.layouts.storage.hadamard import block


def side_text(spec: CppSpec, side: Literal["keys", "values"], on_read: bool) -> str:
    """The functions of one side. on_read: keys turn when they are read."""
    layout = spec.layout
    storage = layout.keys if side == "keys" else layout.values
    assert isinstance(storage, Storage)
    dim = spec.head_dim if side == "keys" else spec.v_head_dim
    code, scale = storage.element, storage.scale
    data = storage.parts(dim, spec.torch_dtype)[0]
    paged = layout.placement.page_size if isinstance(layout.placement, Paged) else 0
    channelwise = scale.per == "channel"
    return rendered(
        "side.cpp.jinja",
        side=side,
        title="K" if side == "keys" else "V",
        name=side.upper(),
        storage=storage,
        dim=dim,
        data=DATA[data.dtype],
        scale=SCALES[scale.dtype] if scale.per not in ("none", "head", "tensor") else "",
        per=scale.per,
        kind=code.kind,
        minimum=scale.minimum,
        bits=code.bits,
        width=data.shape[-1],
        every=data.every,
        group=dim // storage.groups(dim) if not channelwise else 0,
        largest=real(storage.largest),
        clamps=_clamps(storage, spec.torch_dtype),
        codebook=code.kind == "codebook",
        levels=[real(level) for level in code.numbers],
        thresholds=[real(at) for at, _ in code.thresholds],
        uppers=["true" if upper else "false" for _, upper in code.thresholds],
        signed="true" if code.signed else "false",
        hadamard=block(dim) if storage.hadamard else 0,
        unquantized=storage.unquantized,
        newest_from=printed(storage.quantized_tokens, {sy.length: "length"}) if storage.residual else "",
        direct=not code.packed,
        quads=_quads(spec, storage, dim),
        pairs=_pairs(spec, storage, dim, side == "keys" and (on_read or storage.hadamard)),
        together_in_memory=f"block.straight && {paged} % W == 0 && block.slot[0] % W == 0"
        if paged
        else "block.straight",
        paged=paged,
        run=math.gcd(paged, 64) if paged else 64,
        on_read=on_read and side == "keys",
        in_keys=layout.in_keys,
        bounded=layout.bounded,
        together=spec.together,
        scored=layout.retention.by_score,
    )


def _clamps(storage: Storage, model: torch.dtype) -> bool:
    """Whether a float of another dtype cannot hold all numbers of the model's."""
    dtype = storage.element.dtype
    if storage.element.kind != "float" or dtype is None:
        return False
    return torch.finfo(model).max > torch.finfo(dtype).max


def _quads(spec: CppSpec, storage: Storage, dim: int) -> dict[str, object] | None:
    """How codes are multiplied as whole numbers (`include/quads.h`), or None where they are no such.

    takes, takes_sums: for the preprocessor, whether K's rows suit, and what is weighed
    span:              channels that share a scale; splits: whether there is a power of two of them
    """
    code, scale = storage.element, storage.scale
    weighed_dim = _weighed(spec) if spec.layout.in_keys else dim
    if code.kind == "int" and not code.packed and scale.per == "vector":
        takes = f"KV_TAKES({dim})"
        sums = f"KV_TAKES({weighed_dim})" if weighed_dim != dim else takes
        return {"kind": "bytes", "takes": takes, "takes_sums": sums, "span": dim, "splits": True}
    if code.packed and code.kind == "uint" and code.bits == 4 and scale.per == "group" and scale.minimum:
        span = dim // storage.groups(dim)
        if dim % 2 or span % 2 or (dim // 2 % span and span % (dim // 2)):
            return None
        takes = f"(KV_TAKES({dim // 2}) && KV_TAKES({span}))"
        sums = takes if weighed_dim == dim else "0"
        spans = dim // span
        return {
            "kind": "nibbles",
            "takes": takes,
            "takes_sums": sums,
            "span": span,
            "splits": spans & (spans - 1) == 0,
        }
    return None


def _pairs(spec: CppSpec, storage: Storage, dim: int, turned: bool) -> dict[str, str] | None:
    """Whether rows of bfloat16 are multiplied in pairs (`include/pairs.h`). turned: what they meet is in float."""
    bf16 = torch.bfloat16
    data = storage.parts(dim, spec.torch_dtype)[0]
    if spec.torch_dtype is not bf16 or data.dtype is not bf16 or storage.unquantized or turned:
        return None
    return {
        "takes": _takes_pairs(dim),
        "takes_sums": _takes_pairs(_weighed(spec) if spec.layout.in_keys else dim),
    }


def paired_sums(spec: CppSpec, on_read: bool) -> str:
    """Where sums of weighed rows stand as pairs are multiplied, as a condition of the compiler's; empty: nowhere."""
    layout = spec.layout
    storage, dim = (layout.keys, spec.head_dim) if layout.in_keys else (layout.values, spec.v_head_dim)
    assert isinstance(storage, Storage)
    pairs = _pairs(spec, storage, dim, layout.in_keys and (on_read or storage.hadamard))
    return pairs["takes_sums"] if pairs else ""


def _takes_pairs(dim: int) -> str:
    return f"(defined(KV_PAIRS) && KV_TAKES({dim}))"


def _weighed(spec: CppSpec) -> int:
    """Channels of what is weighed: those of a key, where values are the first channels of keys that are turned."""
    layout = spec.layout
    return spec.head_dim if layout.in_keys and layout.keys.hadamard else spec.v_head_dim
