"""Caches full of numbers, for measuring: what a kernel reads, without the tokens that would have made it.

Codes are random over their range, scales are those of vectors of about unit size, and pages stand in no order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import BufferSpec, CacheLayout, Paged, Scored
from kvcompile.layouts import symbols as sy

_SEED = 7
_BETWEEN = {"scale": (0.005, 0.02), "minimum": (-0.2, -0.1), "score": (0.0, 1.0)}


@dataclass(frozen=True)
class Sample:
    """The newest tokens of each of `lengths` sequences (which count them) at a site, and caches to ask.

    heads, dims: of queries and keys; of keys and values
    q [B, Hq, S, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv], positions int64 [B, S], table int32 [B, pages] or None
    """

    site: SiteSpec
    heads: tuple[int, int]
    dims: tuple[int, int]
    lengths: tuple[int, ...]
    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    table: Tensor | None
    caches: tuple[list[Tensor], ...]
    sinks: Tensor | None = None
    bias: Tensor | None = None

    @property
    def bytes(self) -> int:
        """Bytes that attention must read or write: the slots that are seen, the queries, the results."""
        slots = seen_bytes(self.site, self.heads[1], self.dims, self.lengths, self.q.dtype)
        return slots + self.q.nbytes + self.q.nbytes // self.dims[0] * self.dims[1]

    def inputs(self, cache: int, site: SiteSpec | None = None) -> AttendInputs:
        """What `cached_attention` takes, for one of the caches."""
        return AttendInputs(
            self.q,
            self.k,
            self.v,
            self.caches[cache],
            self.positions,
            self.positions[:, 0],
            [],
            max(self.lengths),
            site or self.site,
            self.sinks,
            self.bias,
            page_table=self.table,
        )


def sample(
    site: SiteSpec,
    heads: tuple[int, int],
    dims: tuple[int, int],
    lengths: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    room: int = 0,
    tokens: int = 1,
) -> Sample:
    """A sample with as many caches as read `room` bytes together, so that an L2 cache does not hold what comes next.

    Raises:
        ValueError: the site has a bias that is not ALiBi, or an expression of its scores.
        torch.cuda.OutOfMemoryError: the caches do not fit.
    """
    if site.score.bias is not None and site.score.bias.kind != "alibi":
        raise ValueError(f"no sample of a site with {site.score.bias}")
    if site.score.mod is not None:
        raise ValueError(f"no sample of a site with {site.score.mod}")
    random = torch.Generator(device).manual_seed(_SEED)
    batch, (queries, kv_heads) = len(lengths), heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device).to(dtype)

    table, pages = _table(site.layout, lengths, device, random)
    specs = site.layout.buffers(kv_heads, *dims, dtype, max(lengths))
    one = max(1, seen_bytes(site, kv_heads, dims, lengths, dtype))
    caches = tuple(
        [_filled(spec, pages if spec.paged else batch, site.layout, lengths, dtype, random) for spec in specs]
        for _ in range(max(1, -(-room // one)))
    )
    return Sample(
        site,
        heads,
        dims,
        tuple(lengths),
        normal(batch, queries, tokens, dims[0]),
        normal(batch, kv_heads, tokens, dims[0]),
        normal(batch, kv_heads, tokens, dims[1]),
        torch.tensor(lengths, device=device)[:, None] + torch.arange(-tokens, 0, device=device),
        table,
        caches,
        normal(queries).float() if site.score.sinks else None,
        2.0 ** -torch.linspace(1, 8, queries, device=device) if site.score.bias is not None else None,
    )


def seen_bytes(
    site: SiteSpec, heads: int, dims: tuple[int, int], lengths: Sequence[int], dtype: torch.dtype
) -> int:
    """Bytes of the slots that one query of each sequence sees, scales and tokens' scores included."""
    sizes = {sy.H: heads, sy.D: dims[0], sy.Dv: dims[1], sy.P: dtype.itemsize}
    slot = float(site.layout.bytes_per_slot.subs(sizes))
    most = site.layout.slots(None) if site.layout.bounded else None
    return int(sum(min(n, most or n, site.mask.window or n) for n in lengths) * slot)


def _table(
    layout: CacheLayout, lengths: Sequence[int], device: torch.device, random: torch.Generator
) -> tuple[Tensor | None, int]:
    """The pages of the sequences, and how many a pool has."""
    if not isinstance(layout.placement, Paged):
        return None, 0
    most, size = layout.slots(max(lengths)), layout.placement.page_size
    each = [-(-min(n, most) // size) for n in lengths]
    order = 1 + torch.randperm(sum(each), generator=random, device=device)
    table = torch.zeros(len(lengths), max(each), dtype=torch.int32, device=device)
    for row, own in enumerate(order.split(each)):
        table[row, : len(own)] = own
    return table, 1 + sum(each)


def _filled(
    spec: BufferSpec,
    rows: int,
    layout: CacheLayout,
    lengths: Sequence[int],
    dtype: torch.dtype,
    random: torch.Generator,
) -> Tensor:
    shape, device = (rows, *spec.shape), random.device
    if spec.name == "slots.token":
        return _tokens(layout, shape, lengths, device)
    drawn_between = _BETWEEN.get(spec.name.partition(".")[2])
    if drawn_between is not None:
        low, high = drawn_between
        return (low + (high - low) * torch.rand(shape, generator=random, device=device)).to(spec.dtype)
    if spec.dtype in (torch.int8, torch.uint8):
        low = -127 if spec.dtype == torch.int8 else 0
        return torch.randint(low, low + 255, shape, generator=random, device=device, dtype=spec.dtype)
    # In half precision and by the sequence, so that a large cache is not there in float32 as well.
    made = torch.empty(shape, device=device, dtype=spec.dtype)
    for row in made:
        drawn = torch.empty(
            row.shape, device=device, dtype=torch.float32 if row.dtype.itemsize == 4 else dtype
        )
        row.copy_(drawn.normal_(generator=random))
    return made


def _tokens(
    layout: CacheLayout, shape: tuple[int, ...], lengths: Sequence[int], device: torch.device
) -> Tensor:
    """Distinct tokens that each sequence has seen before the new one; those that always stay are among them."""
    retention = layout.retention
    assert isinstance(retention, Scored)
    found = torch.zeros(shape, dtype=torch.int32)
    for row, length in enumerate(lengths):
        seen = length - 1
        if seen <= shape[-1]:  # slots fill in order
            found[row, :, :seen] = torch.arange(seen)
            continue
        always = torch.cat([torch.arange(retention.sinks), torch.arange(seen - retention.recent, seen)])
        others = torch.randperm(seen - len(always))[: shape[-1] - len(always)] + retention.sinks
        found[row] = torch.cat([always, others])
    return found.to(device)
