"""`kvcompile::attend_columns`: many queries attend, and each key's share of their probabilities is summed up.

    out     = softmax(f(q k)) v                                 as `reference` has it
    columns = sum over the queries that count of pool over the heads of a group of the probabilities

Retention by scores needs both (`layouts/retention/scored.py`). The probabilities of all queries at once would take
S * T numbers a head, so queries come in blocks, each of which is dropped when it has been summed: an op of its own,
which compilers call and do not look into. A graph that runs without kvcompile (`kernels/shared/dialect.py`) has them
all at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvcompile.kernels.reference.residual_views import PAIRS, may_see
from kvcompile.kernels.reference.score_mod import applied, modified
from kvcompile.kernels.reference.scores import bias_by_heads, soft_capped
from kvcompile.kernels.shared.dialect import current
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import Scored

_LIB = torch.library.Library("kvcompile", "FRAGMENT")
_LIB.define(
    "attend_columns(Tensor q, Tensor k, Tensor v, Tensor tokens, Tensor positions, Tensor query_place, "
    "Tensor key_place, str spec, int[] forms, *, Tensor? sinks=None, Tensor? bias=None, "
    "Tensor[]? leaves=None) -> (Tensor, Tensor)",
    # Tensors of any strides will do: a compiler that kept those it traced with would fix the sizes in them.
    tags=(torch.Tag.flexible_layout,),
)
_ELEMENTS = 1 << 22  # probabilities in memory at a time: 16 MiB


def pooled(p: Tensor, retention: Scored) -> Tensor:
    """Probabilities [B, Hkv, G, ..., T] pooled over what shares a score: [B, Hkv or 1, ..., T]."""
    dims = (1, 2) if retention.granularity == "layer" else (2,)
    match retention.pooling:
        case "sum":
            p = p.sum(dims)
        case "mean":
            p = p.mean(dims)
        case "max":
            p = p.amax(dims)
    return p[:, None] if retention.granularity == "layer" else p


def counted_from(retention: Scored, queries: int) -> int:
    """The first of `queries` queries of a pass whose probabilities count."""
    if retention.score == "last":
        return queries - 1
    return torch.sym_max(queries - retention.rows, 0) if retention.rows else 0


def attend_columns(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tokens: Tensor,
    positions: Tensor,
    query_place: Tensor,
    key_place: Tensor,
    spec: str,
    forms: Sequence[int],
    *,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    leaves: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """q [B, Hq, S, D] against k [B, Hkv, T, D], v [B, Hkv, T, Dv], of which the last S (of each form) are the
    queries' own.

    Args:
        tokens: positions of the keys, int64 [B, Hkv or 1, T]; -1: no key.
        positions: of the queries, int64 [B, S]; negative: padding, which counts nowhere and gives anything.
        query_place, key_place: [B, S] and [B, Hkv or 1, T], where a bias takes queries and keys to be.
        forms: the keys are the same tokens once for each of these, in the form that stands at this number in
            `residual_views.PAIRS`; a query sees a token in one of them.
        sinks, bias, leaves: as `reference.cached_attention` has them; leaves are tables alone.

    Returns:
        out [B, Hq, S, Dv] in q's dtype; columns fp32 [B, Hkv, T], or [B, 1, T] where the layer has one score.
    """
    site = SiteSpec.from_json(spec)
    retention = site.layout.retention
    assert isinstance(retention, Scored)
    batch, heads, count = q.shape[0], q.shape[1], q.shape[2]
    kv_heads, total = k.shape[1], k.shape[2]
    group, old = heads // kv_heads, total - count
    counted = counted_from(retention, count)
    out = q.new_empty(batch, heads, count, v.shape[3])
    columns = torch.zeros(tokens.shape[0], _score_heads(retention, kv_heads), total, device=q.device)
    rows, keys, values = q.unflatten(1, (kv_heads, group)), k.float(), v.float()
    blocks: Iterable[tuple[int, int]] = [(0, count)]  # of a graph for any count, which has no loops
    if current().in_blocks:
        block = max(1, _ELEMENTS // (batch * heads * total))
        blocks = ((start, min(start + block, count)) for start in range(0, count, block))
    for start, end in blocks:
        # Later keys are later tokens.
        seen_to = old + end if len(forms) == 1 else total
        part = rows[:, :, :, start:end].float()
        scores = part.flatten(2, 3) @ keys[:, :, :seen_to].transpose(-1, -2)
        scores = scores.unflatten(2, (group, end - start))
        scores = soft_capped(scores * site.sm_scale, site.score.softcap)
        if site.score.bias is not None:
            assert bias is not None
            scores = scores + bias_by_heads(
                site.score.bias, bias, query_place[:, start:end], key_place[:, :, :seen_to], group
            )
        at, held = positions[:, None, start:end, None], tokens[:, :, None, :seen_to]
        seen = (held >= 0) & (held <= at)
        if len(forms) > 1:
            own = zip(forms, held.chunk(len(forms), -1), strict=True)
            seen = seen & torch.cat([may_see(site.layout, PAIRS[form], x, at + 1) for form, x in own], -1)
        # A padding query sees everything, so that its softmax has something to sum to.
        seen = seen | (at < 0)
        place = (query_place[:, start:end], key_place[:, :, :seen_to])
        mod = applied(site.score.mod, *place, (kv_heads, group), leaves)
        p = modified(mod, scores, seen[:, :, None], sinks)
        weighed = p.flatten(2, 3) @ values[:, :, :seen_to]
        out[:, :, start:end] = weighed.unflatten(2, (group, end - start)).flatten(1, 2).to(q.dtype)
        if not current().in_blocks or end > counted:
            counts = (positions[:, start:end] >= 0) & (torch.arange(start, end, device=q.device) >= counted)
            shares = pooled(p, retention).masked_fill(~counts[:, None, :, None], 0.0)
            columns[:, :, :seen_to] += shares.sum(2)
    return out, columns


def _score_heads(retention: Scored, kv_heads: int) -> int:
    return 1 if retention.granularity == "layer" else kv_heads


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tokens: Tensor,
    positions: Tensor,
    query_place: Tensor,
    key_place: Tensor,
    spec: str,
    forms: Sequence[int],
    *,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    leaves: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    retention = SiteSpec.from_json(spec).layout.retention
    assert isinstance(retention, Scored)
    columns = q.new_empty(
        k.shape[0], _score_heads(retention, int(k.shape[1])), k.shape[2], dtype=torch.float32
    )
    return q.new_empty(*q.shape[:3], v.shape[3]), columns


_LIB.impl("attend_columns", attend_columns, "CompositeExplicitAutograd")
torch.library.register_fake("kvcompile::attend_columns", _fake, lib=_LIB)
OP = torch.ops.kvcompile.attend_columns.default
