"""Computes attention of one new query per sequence against what was read of the cache, in PyTorch."""

from __future__ import annotations

from torch import Tensor

from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.reference import codec, residual
from kvcompile.kernels.reference.kv_sides import weighed
from kvcompile.kernels.reference.score_mod import applied, modified
from kvcompile.kernels.reference.scores import bias_at, bias_by_heads, grouped, probabilities, soft_capped
from kvcompile.kernels.shared.rope import rotate
from kvcompile.layouts import CacheLayout


def attend_one(
    x: AttendInputs,
    read: CacheLayout,
    keys: list[Tensor],
    values: list[Tensor],
    tokens: Tensor,
    seen: Tensor,
    places: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The result fp32 [B, Hq, 1, Dv], and the probabilities fp32 [B, Hkv, G, T].

    Args:
        x: q is [B, Hq, 1, D] in the basis of `read`.
        read: the layout in the basis that is read (`sides.as_read`).
        keys, values: its parts, [B, Hkv, T, ...] each.
        tokens: positions of the tokens in them, -1 where there is none: [B, T], or [B, Hkv or 1, T] where KV heads read
            tokens of their own.
        seen: which of them the query sees, bool [B, Hkv or 1, T].
        places: the positions of query [B, 1] and keys (as `tokens`) by which they are rotated and biased; None: their
            own.
    """
    spec, q = x.spec, x.q
    query, key = places or (x.positions, tokens)
    heads = (keys[0].shape[1], q.shape[1] // keys[0].shape[1])
    if x.rope:
        q = rotate(q, query, *x.rope, form=spec.rotary)
        found = residual.decode(read.keys, keys, tokens, x.new_lens, q.dtype)
        rotated = rotate(found, key, *x.rope, form=spec.rotary)
        scores = codec.dot_keys(codec.MODEL, q.squeeze(2).unflatten(1, heads), [rotated])
    else:
        scores = residual.dot_keys(read.keys, q.squeeze(2).unflatten(1, heads), keys, tokens, x.new_lens)
    scores = soft_capped(scores * spec.sm_scale, spec.score.softcap)
    if spec.score.bias is not None:
        assert x.bias is not None
        if key.dim() == 3:
            scores = scores + bias_by_heads(spec.score.bias, x.bias, query, key, heads[1]).squeeze(3)
        else:
            scores = scores + grouped(bias_at(spec.score.bias, x.bias, query, key).squeeze(2), heads[0])
    mod = applied(spec.score.mod, query, key, heads, x.leaves)
    if mod is None:
        p = probabilities(scores.masked_fill(~seen[:, :, None], float("-inf")), x.sinks)
    else:
        p = modified(mod, scores.unsqueeze(3), seen[:, :, None, None], x.sinks).squeeze(3)
    ordered = read.in_order and tokens.dim() == 2
    out = weighed(read, p, keys, values, tokens, x.new_lens, ordered)
    return out.flatten(1, 2).unsqueeze(2), p
