"""Prompts over codes: new tokens are decoded once, those before are read as they stand in the cache.

Each tile of queries makes numbers of all codes that it reads, so that most are made once for each tile behind them. An
append that encodes new tokens knows what is read of them, and writes that as well, in the model's dtype (option
decoded of `append/append.py`): the numbers of the reference. Then attention is two launches,

    older        over the slots of the tokens before, as everywhere; of a text that begins with these tokens, nothing
    continued    over the new tokens, plain numbers, beginning with what the first found

which are one softmax: sums over disjoint sets of keys are joined by their log-sum-exp (Milakov and Gimelshein 2018).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.host.call import Call, append, as_kept, prefill, turned_back
from kvcompile.kernels.triton.host.site_kernels import kernels_of
from kvcompile.layouts import CacheLayout, Full, InKeys


def is_for(call: Call) -> bool:
    """Whether a call's new tokens are attended to as numbers that were decoded once.

    Not in the packed dialect, nor in float32, whose products take longer than to make numbers of codes.
    """
    site = call.site
    written = site.share in ("none", "first") and not call.one and call.starts is None
    return written and call.q.dtype != torch.float32 and _splits(site.layout)


def _splits(layout: CacheLayout) -> bool:
    """Whether slots hold codes of single tokens, as they come, of all tokens, before and after the new ones."""
    keys, values = layout.keys, layout.values
    if isinstance(values, InKeys) or not isinstance(layout.retention, Full) or layout.selection.selects:
        return False
    if layout.in_full or layout.rotates_on_read:
        return False
    if keys.channelwise or values.channelwise:
        return False
    return any(side.element.kind != "float" for side in (keys, values))


def attend(call: Call) -> Tensor:
    """Writes the new tokens, and gives [B, Hq, S, Dv]. What was turned is read in the basis that it is in."""
    site, wanted = call.site, [*call.kernels.transforms(one=False), "k_out", "v_out", "decoded"]
    new = as_kept(call, wanted, append(call, wanted))
    # Sink logits count once, with the new tokens.
    before = _as(call, replace(site, score=replace(site.score, sinks=False)))
    older = prefill(replace(before, sinks=None), new, ("older", "lse"))
    behind = replace(_as(call, replace(site, layout=CacheLayout())), buffers=[], page_table=None)
    (out,) = prefill(behind, new._replace(parts=[new.k, new.v]), ("continued",), older=older)
    return turned_back(call, out)


def _as(call: Call, site: SiteSpec) -> Call:
    """The call by the kernels of another site of the same heads."""
    made = call.kernels
    heads, dims = (made.num_qo_heads, made.num_kv_heads), (made.head_dim, made.v_head_dim)
    return replace(call, kernels=kernels_of(site, heads, dims, made.dtype, made.device, made.one_bias))
