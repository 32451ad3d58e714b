"""Attention of many new queries by a generated C++ kernel (`templates/prefill.cpp.jinja`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kvcompile.kernels.cpp.attend.prefill import COLUMNS, forms_of, places_matter, site_of
from kvcompile.kernels.cpp.host import ops
from kvcompile.kernels.cpp.host.leaves import leaves_of
from kvcompile.kernels.cpp.isa import Isa, isa, widens
from kvcompile.kernels.cpp.spec import WIDE, CppSpec
from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.spec import SiteSpec


def attend_many(
    x: AttendInputs,
    k: Tensor,
    v: Tensor,
    key_positions: Tensor,
    allowed: Tensor | None = None,
    near: Tensor | None = None,
) -> Tensor:
    """As the reference's `attend_many`, of queries and keys that have been turned.

    Queries that are padding give zeros.

    Args:
        near: queries as the first tokens meet them, where positions are counted in the cache; None: as all others.

    Raises:
        KernelError: the kernel cannot be compiled; a plan says before where there is no compiler (`available.py`).
    """
    ops.ready()
    q, k, v = (_dense(own.to(x.q.dtype)) for own in (x.q, k, v))
    near = None if near is None else _dense(near.to(q.dtype))
    out: Tensor = ops.cpp_attend_many(
        q,
        k,
        v,
        key_positions[:, None],
        x.positions,
        None if x.sinks is None else x.sinks.float().contiguous(),
        None if x.bias is None else x.bias.float().contiguous(),
        allowed,
        near,
        leaves_of(x.spec, x.leaves),
        _spec(x.spec, q, k, v)[1],
    )
    return out


def attend_columns(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tokens: Tensor,
    positions: Tensor,
    query_places: Tensor,
    key_places: Tensor,
    site: SiteSpec,
    forms: Sequence[int],
    *,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    leaves: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """As the reference's `attend_columns`, of queries and keys that have been turned.

    Args:
        tokens: positions of the keys, int64 [B, Hkv or 1, T], once for each of `forms`.
        query_places, key_places: int64 [B, S] and as `tokens`: where a bias takes queries and keys to be.

    Raises:
        KernelError: the kernel cannot be compiled.
    """
    ops.ready()
    assert tuple(forms) == forms_of(site.layout), (forms, site.layout)
    q, k, v = (_dense(own.to(q.dtype)) for own in (q, k, v))
    spec, text = _spec(site, q, k, v, True)
    columns = torch.empty(k.shape[0], spec.units, k.shape[2], device=q.device)
    by_places = places_matter(site)
    out: Tensor = ops.cpp_attend_columns(
        q,
        k,
        v,
        tokens,
        positions,
        None if sinks is None else sinks.float().contiguous(),
        None if bias is None else bias.float().contiguous(),
        query_places if by_places else None,
        key_places if by_places else None,
        columns,
        leaves_of(site, leaves),
        text,
    )
    return out, columns


def spec_of(
    site: SiteSpec, sizes: tuple[int, int, int, int], dtype: torch.dtype, columns: bool, own: Isa
) -> CppSpec:
    """The kernel of a site.

    Args:
        sizes: query heads, KV heads, channels of a key and of a value.
        columns: whether what retention by scores needs is summed up.
    """
    options = (*((COLUMNS,) if columns else ()), *((WIDE,) if widens(dtype, own) else ()))
    return CppSpec("prefill", site_of(site), *sizes, str(dtype).removeprefix("torch."), options)


def _spec(site: SiteSpec, q: Tensor, k: Tensor, v: Tensor, columns: bool = False) -> tuple[CppSpec, str]:
    """The kernel's spec and its text."""
    return _with_text(site, (q.shape[1], k.shape[1], q.shape[3], v.shape[3]), q.dtype, columns, isa())


@lru_cache(maxsize=1024)
def _with_text(
    site: SiteSpec, sizes: tuple[int, int, int, int], dtype: torch.dtype, columns: bool, own: Isa
) -> tuple[CppSpec, str]:
    spec = spec_of(site, sizes, dtype, columns, own)
    return spec, spec.to_json()


def _dense(x: Tensor) -> Tensor:
    """x with a dense last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()
