"""Computes what a policy gives: full-sequence attention that forgets and rounds as a layout does, with no cache.

A step is the same for every layout:  place -> write -> select -> attend -> note.

| step | what it does | who says how |
|---|---|---|
| place | rotates queries and keys, each at its position | the retention, whose positions count |
| write | each new vector as its storage gives it back, by then | the storage (`kernels/oracle/quantize.py`) |
| select | which keys a query reads | the selection (`kernels/oracle/selection.py`) |
| attend | scores, softmax, and the values that they weigh | the model (`kernels/oracle/scores.py`) |
| note | which tokens stay | the retention (`kernels/oracle/retention/`) |

Everything is computed from the whole sequence. There are no slots here, so nothing of the address arithmetic under test
is shared with it; and no steps, but where it depends on them what is kept: by scores, and where pages are selected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcompile.kernels.oracle import quantize
from kvcompile.kernels.oracle.choice import Choice
from kvcompile.kernels.oracle.retention import retained
from kvcompile.kernels.oracle.retention.hooks import Pass, View
from kvcompile.kernels.oracle.scores import final_scores, leaves_of, modified, shown
from kvcompile.kernels.oracle.selection import READ
from kvcompile.kernels.shared.rope import rotate
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import InKeys, Storage

Scales = tuple[Tensor | None, Tensor | None]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: SiteSpec,
    rope: list[Tensor],
    padding: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    leaves: Sequence[Tensor] | None = None,
    scales: Scales = (None, None),
    chunks: Sequence[int] = (),
    held: Sequence[Tensor] | None = None,
) -> tuple[Tensor, list[Choice]]:
    """q [B, Hq, T, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv] of whole sequences -> [B, Hq, T, Dv] in q's dtype, choices.

    A choice between two tokens whose scores are equal but for rounding, or two pages, may fall either way, and what
    comes after differs with it. So a caller that has run something else may give what was kept or read there (`held`):
    the oracle then attends to that, and tells of each choice what it would have chosen by.

    Args:
        rope: [cos, sin] tables where the layout keeps keys before RoPE (q and k are then before it), else [].
        padding: int64 [B], padded columns on the left of each sequence; their rows mean nothing.
        sinks: logits [Hq]; bias: as `spec.score.bias` says; None where the site has none.
        leaves: what `spec.score.mod` reads, of the whole sequences: [B, T, ..] of tokens, [B or 1, T, T, ..] of pairs.
        scales: the calibrated scales of K and V, fp32 [Hkv] each; None where their storage has none.
        chunks: how many columns came together, pass by pass, T in all; none: all at once.
        held: after each pass, the tokens that were kept, [B, Hs, N], or the pages that were read, [B, Hkv, K], -1 for
            none; None: as the oracle chooses.

    Raises:
        ValueError: `held` has what was not there, lacks what always is, or another number than it must have.
    """
    chunks = chunks or [q.shape[2]]
    read: Tensor | None = None
    choices: list[Choice] = []
    selection = spec.layout.selection
    if selection.selects:
        read, choices = READ[selection.kind](selection, q, k, spec.sm_scale, chunks, padding, held)
        held = None
    rows = []
    for row in range(q.shape[0]):
        first = 0 if padding is None else int(padding[row])
        sequence = _sequence(
            q[row, :, first:],
            k[row, :, first:],
            v[row, :, first:],
            spec,
            rope,
            sinks,
            bias,
            leaves_of(spec.score.mod, leaves or (), row, first),
            scales,
            None if read is None else read[row, :, first:, first:],
        )
        own = None if held is None else [tokens[row] for tokens in held]
        out, made = sequence.run(_passes(chunks, first), own)
        choices = [*choices, *made]
        rows.append(torch.cat([out.new_zeros(out.shape[0], first, out.shape[2]), out], dim=1))
    return torch.stack(rows).to(q.dtype), choices


def _passes(chunks: Sequence[int], padding: int) -> list[Pass]:
    """The passes of a sequence behind `padding` columns."""
    passes, column, token = [], 0, 0
    for number, size in enumerate(chunks):
        tokens = size - min(max(padding - column, 0), size)
        passes.append(Pass(number, size, token, tokens))
        column, token = column + size, token + tokens
    return [one for one in passes if one.tokens]


@dataclass(frozen=True)
class _Sequence:
    """One sequence without padding: q [Hq, T, D]; of K and V, [Hkv, T, D] and [Hkv, T, Dv], as old tokens come back and
    as the newest do."""

    q: Tensor
    k: tuple[Tensor, Tensor]
    v: tuple[Tensor, Tensor]
    spec: SiteSpec
    rope: list[Tensor]
    sinks: Tensor | None
    bias: Tensor | None
    leaves: Sequence[Tensor]
    read: Tensor | None

    def run(self, passes: Sequence[Pass], held: Sequence[Tensor] | None) -> tuple[Tensor, list[Choice]]:
        """The results [Hq, T, Dv], and the choices of what stays."""
        kv_heads, group = self.k[0].shape[0], self.q.shape[0] // self.k[0].shape[0]
        index = torch.arange(self.q.shape[1], device=self.q.device)
        out = self.v[0].new_zeros(*self.q.shape[:2], self.v[0].shape[-1], dtype=torch.float32)
        retention, choices = self.spec.layout.retention, []
        for number, heads in enumerate(retained(retention).together(kv_heads)):
            hooks = retained(retention)
            own = slice(heads.start * group, heads.stop * group)
            for one in hooks.passes(passes):
                forced = None if held is None else held[one.number][number]
                queries = index[one.start : one.start + one.tokens]
                seen = shown(self.spec.mask, queries, index)
                seen = seen if self.read is None else seen & self.read[own, queries]
                view = hooks.view(one, queries, seen, forced)
                out[own, queries], p = self._attend(heads, queries, view)
                hooks.note(one, p, forced)
            choices += hooks.choices
        return out, choices

    def _attend(self, heads: slice, queries: Tensor, view: View) -> tuple[Tensor, Tensor]:
        """Queries at positions `queries` over what they see of KV heads `heads`: [H, Q, Dv], and weights [H, Q, K]."""
        spec, group = self.spec, self.q.shape[0] // self.k[0].shape[0]
        own = slice(heads.start * group, heads.stop * group)
        q = self.q[own, queries]
        ks = _once(self.k, heads, view.tokens, group)
        if self.rope:
            ks = [rotate(x[None], view.places[None], *self.rope, form=spec.rotary)[0] for x in ks]
            q = rotate(q[None], view.query_places[None], *self.rope, form=spec.rotary)[0]
        scores, *newest = (q.float() @ x.float().transpose(-1, -2) * spec.sm_scale for x in ks)
        if newest:
            scores = torch.where(_in_full(spec.layout.keys, queries, view.tokens), newest[0], scores)
        bias = self.bias if self.bias is None or len(self.bias) == 1 else self.bias[own]
        at = (view.query_places, view.places)
        scores = final_scores(scores, spec.score, bias, *at)
        sinks = None if self.sinks is None else self.sinks[own]
        p = modified(spec.score.mod, scores[None], view.seen, sinks, self.leaves, at, own.start)[0]
        vs = [x.float() for x in _once(self.v, heads, view.tokens, group)]
        if len(vs) == 1:
            return p @ vs[0], p
        owner = spec.layout.keys if isinstance(spec.layout.values, InKeys) else spec.layout.values
        v_full = _in_full(owner, queries, view.tokens)
        out = p.masked_fill(v_full, 0) @ vs[0] + p.masked_fill(~v_full, 0) @ vs[1]
        return out, p


def _sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: SiteSpec,
    rope: list[Tensor],
    sinks: Tensor | None,
    bias: Tensor | None,
    leaves: Sequence[Tensor],
    scales: Scales,
    read: Tensor | None,
) -> _Sequence:
    """The sequence with its vectors as the storage gives them back."""
    layout = spec.layout
    ks = quantize.older_and_newest(layout.keys, k, scales[0])
    if isinstance(layout.values, InKeys):
        older, newest = (x[..., : layout.values.channels] for x in ks)
        vs = (older, older if ks[0] is ks[1] else newest)
    else:
        vs = quantize.older_and_newest(layout.values, v, scales[1])
    return _Sequence(q, ks, vs, spec, rope, sinks, bias, leaves, read)


def _once(pair: tuple[Tensor, Tensor], heads: slice, tokens: Tensor, group: int) -> list[Tensor]:
    """`tokens` of KV heads `heads` [Hkv, T, D] for each query head, [H, K, D], as old ones come back and as the newest
    do; once, where they come back alike."""
    distinct = pair[:1] if pair[0] is pair[1] else pair
    return [x[heads, tokens].repeat_interleave(group, 0) for x in distinct]


def _in_full(storage: Storage, queries: Tensor, tokens: Tensor) -> Tensor:
    """Which tokens each query sees as the newest ones come back, bool [Q, K]."""
    first = [quantize.newest_from(storage, query + 1) for query in queries.tolist()]
    return tokens[None] >= torch.tensor(first, device=tokens.device)[:, None]
