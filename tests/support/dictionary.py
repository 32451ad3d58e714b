"""An oracle so slow that it is obvious: each head has a dictionary from kept token to (key, value), in float64.

Tokens come one after another. A token goes in, what the retention forgets is deleted, and the query attends to what is
left. It knows no slots, pages, masks, chunks or packed bits. Which of its forms a stored vector is read in (rounded, or
in full) is asked of `kernels/oracle/quantize.py`, the definition of the storages. Retention by scores has a dictionary
of its own in `kernels/oracle/retention/by_score.py`, because what it forgets depends on how tokens come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from kvcompile.kernels.oracle import quantize
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import Full, InKeys, SinkWindow, TopPages, Window

Rotate = Callable[[Tensor, int], Tensor]  # one vector, at a position


def attend(
    spec: SiteSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotate: Rotate | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
    carried: Callable[[float, int, int, int], float | None] | None = None,
    read: Callable[[int, int], set[int] | None] | None = None,
) -> Tensor:
    """One sequence: q [Hq, T, D], k [Hkv, T, D], v [Hkv, T, Dv] -> float64 [Hq, T, Dv].

    rotate: where keys (and queries) come before RoPE.
    read: the pages that a KV head's step at a place reads; None: all.
    carried: of a score, the query's place, the key's, and the head: what it becomes, None where the key is not seen.
    """
    layout, group = spec.layout, q.shape[0] // k.shape[0]
    stored = [x.double() for x in quantize.older_and_newest(layout.keys, k, scales[0])]
    keys = [_rows(x) for x in stored]
    owner = layout.keys if isinstance(layout.values, InKeys) else layout.values
    if isinstance(layout.values, InKeys):
        stored = [x[..., : layout.values.channels] for x in stored]
    else:
        stored = [x.double() for x in quantize.older_and_newest(layout.values, v, scales[1])]
    values = [_rows(x) for x in stored]

    @cache
    def key_at(new: bool, head: int, token: int, position: int) -> Tensor:
        key = keys[new][head][token]
        return key if rotate is None else rotate(key, position)

    out = torch.zeros(*q.shape[:2], stored[0].shape[-1], dtype=torch.float64)
    for head in range(q.shape[0]):
        kept: dict[int, int] = {}
        for now in range(q.shape[1]):
            kept[now] = head // group
            for token in [t for t in kept if forgotten(spec, t, now)]:
                del kept[token]
            tokens = [t for t in sorted(kept) if not hidden(spec, t, now)]
            pages = None if read is None else read(head // group, now)
            if pages is not None:
                assert isinstance(layout.selection, TopPages)
                tokens = [t for t in tokens if t // layout.selection.page_size in pages]
            k_new, v_new = (quantize.newest_from(s, now + 1) for s in (layout.keys, owner))
            # Positions in the cache are counted over what is kept.
            place = dict(zip(sorted(kept), range(len(kept)), strict=True))
            place = place if layout.retention.in_cache else {t: t for t in kept}
            query = q[head, now].double()
            query = query if rotate is None else rotate(query, place[now])
            found: dict[int, float | None] = {}
            rows = [key_at(t >= k_new, kept[t], t, place[t]) for t in tokens]
            for t, raw in zip(tokens, (torch.stack(rows) @ query).tolist() if rows else (), strict=True):
                score = finished(spec, raw, bias, head, place[now], place[t])
                found[t] = score if carried is None else carried(score, place[now], place[t], head)
            tokens = [t for t in tokens if found[t] is not None]
            scores = [score for score in found.values() if score is not None]
            if not scores:
                continue  # a query that sees nothing gives 0
            most = max([*scores, *([] if sinks is None else [float(sinks[head])])])
            weights = [math.exp(s - most) for s in scores]
            total = sum(weights) + (0.0 if sinks is None else math.exp(float(sinks[head]) - most))
            shares = torch.tensor([weight / total for weight in weights], dtype=torch.float64)
            out[head, now] = shares @ torch.stack([values[t >= v_new][kept[t]][t] for t in tokens])
    return out


def _rows(x: Tensor) -> list[list[Tensor]]:
    """x [H, T, D]: of each head, the vectors of its tokens."""
    return [list(of_head.unbind(0)) for of_head in x.unbind(0)]


def bounds(spec: SiteSpec, q: Tensor, k: Tensor, head: int, now: int) -> list[float]:
    """The most that a key of each page could score with any query of a KV head's group at `now`, in float64."""
    assert isinstance(spec.layout.selection, TopPages)
    size, group = spec.layout.selection.page_size, q.shape[0] // k.shape[0]
    found = []
    for first in range(0, now + 1, size):
        page = k[head, first : min(first + size, now + 1)].double().tolist()
        of_heads = []
        for query in q[head * group : (head + 1) * group, now].double().tolist():
            terms = zip(query, zip(*page, strict=True), strict=True)
            of_heads.append(sum(max(x * spec.sm_scale * c for c in column) for x, column in terms))
        found.append(max(of_heads))
    return found


def pages_read(
    spec: SiteSpec, q: Tensor, k: Tensor, chunks: Sequence[int], first: int, held: Sequence[Tensor]
) -> Callable[[int, int], set[int] | None]:
    """The pages that each step of one sequence read, after a look at whether they are the right ones."""
    selection, steps, end = spec.layout.selection, {}, 0
    assert isinstance(selection, TopPages)
    for count, pages in zip(chunks, held, strict=True):
        end += count
        if count == 1 and end - 1 >= first:
            steps[end - 1 - first] = pages

    def read(head: int, now: int) -> set[int] | None:
        if now not in steps:
            return None
        found = [page for page in steps[now][head].tolist() if page >= 0]
        highest = bounds(spec, q, k, head, now)
        if not found:  # all were read, as all were few
            assert len(highest) <= selection.pages
            return None
        assert len(set(found)) == len(found) == min(selection.pages, len(highest)) and found == sorted(found)
        assert len(highest) - 1 in found, "the page of the step's own token"
        others = [highest[page] for page in found[:-1]]
        left = [bound for page, bound in enumerate(highest) if page not in found]
        if others and left:
            assert max(left) <= min(others) + 1e-4 * max(map(abs, highest))
        return set(found)

    return read


def forgotten(spec: SiteSpec, token: int, now: int) -> bool:
    match spec.layout.retention:
        case Full():
            return False
        case Window(size=size):
            return token <= now - size
        case SinkWindow(sinks=sinks, window=window):
            return sinks <= token <= now - window
    raise AssertionError(spec.layout.retention)


def hidden(spec: SiteSpec, token: int, now: int) -> bool:
    """By the model's own mask."""
    window = spec.mask.window
    if window is None:
        return False
    return token // window != now // window if spec.mask.kind == "chunked" else token <= now - window


def finished(spec: SiteSpec, score: float, bias: Tensor | None, head: int, query: int, key: int) -> float:
    """A raw score with scale, softcap and bias."""
    score *= spec.sm_scale
    if spec.score.softcap is not None:
        score = spec.score.softcap * math.tanh(score / spec.score.softcap)
    if spec.score.bias is None:
        return score
    assert bias is not None
    match spec.score.bias.kind:
        case "alibi":
            return score - float(bias[head]) * (query - key)
        case "relative":
            return score + float(bias[head, query - key])
        case "columns":
            return score + float(bias[head, key]) - float(bias[head, query])
        case "table":
            return score + float(bias[head, query, key])
