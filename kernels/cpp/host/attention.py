"""Append and attend by a generated C++ kernel, one new token a sequence (`templates/decode.cpp.jinja`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from kvcompile.kernels.cpp.host import ops
from kvcompile.kernels.cpp.host.leaves import leaves_of
from kvcompile.kernels.cpp.isa import widens
from kvcompile.kernels.cpp.spec import WIDE, CppSpec
from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import InKeys


def cached_attention_one(x: AttendInputs, chosen: Tensor | None = None) -> Tensor:
    """Append k, v to the buffers (in place) and attend; returns [B, Hq, 1, Dv] in q's dtype.

    Shapes and meaning are those of `reference.cached_attention`, the oracle of all of this.

    Args:
        chosen: the slots that a selection reads, int64 [B, Hkv, N], those that are no token's -1 or not below the
            length; None: all.

    Raises:
        KernelError: the kernel cannot be compiled; a plan says before where there is no compiler (`available.py`).
    """
    ops.ready()
    site, layout = x.spec, x.spec.layout
    v_dim = layout.values.channels if isinstance(layout.values, InKeys) else x.v.shape[3]
    # What is noted of pages is the selection's, which has noted it.
    buffers = x.buffers[: len(x.buffers) - layout.selection.num_notes]
    heads, dims = (x.q.shape[1], x.k.shape[1]), (x.q.shape[3], v_dim)
    text = _text(site, heads, dims, str(x.q.dtype), chosen is not None, widens(x.q.dtype))
    q, k, v = (_dense(vectors).to(x.q.dtype) for vectors in (x.q, x.k, x.v))
    out: Tensor = ops.cpp_attend(
        q,
        k,
        v,
        buffers,
        x.positions,
        [table.float().contiguous() for table in x.rope],
        None if x.sinks is None else x.sinks.float().contiguous(),
        None if x.bias is None else x.bias.float().contiguous(),
        x.page_table,
        chosen,
        leaves_of(x.spec, x.leaves),
        v_dim,
        text,
    )
    return out


@lru_cache(maxsize=1024)
def _text(
    site: SiteSpec, heads: tuple[int, int], dims: tuple[int, int], dtype: str, chosen: bool, wide: bool
) -> str:
    """The text of the kernel's spec: it takes longer to write than a short text's attention does."""
    return spec_of(replace(site, kernels="cpp"), heads, dims, dtype, chosen, wide).to_json()


def spec_of(
    site: SiteSpec,
    heads: Sequence[int],
    dims: Sequence[int],
    dtype: str,
    chosen: bool = False,
    wide: bool = False,
) -> CppSpec:
    """The kernel of a site; heads of queries and keys, dims of keys and values.

    Args:
        wide: rows of bfloat16 are multiplied as floats.
    """
    options = (*(("chosen",) if chosen else ()), *((WIDE,) if wide else ()))
    return CppSpec(
        "decode", site, heads[0], heads[1], dims[0], dims[1], dtype.removeprefix("torch."), options
    )


def _dense(x: Tensor) -> Tensor:
    """x with a dense last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()
