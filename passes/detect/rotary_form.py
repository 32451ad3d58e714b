"""Which rotary embedding a map is: its style, and the channels that it turns."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.specs import RotaryForm

# Of the size of the values: what is left where a map is not linear, or its table not orthogonal.
EXACT = 1e-6


class NotRotary(Exception):
    """What is not as a rotary embedding has it; the text is the exact reason."""


def partner(form: RotaryForm, channels: int) -> Tensor:
    """For every channel the one it is mixed with (itself where none), int64 [channels]."""
    index = torch.arange(channels)
    turned = torch.arange(form.rotary_dim)
    half = form.rotary_dim // 2
    turned = (turned + half) % form.rotary_dim if form.style == "half" else turned ^ 1
    index[form.start : form.start + form.rotary_dim] = turned + form.start
    return index


def sign(form: RotaryForm) -> Tensor:
    """-1 where rotate() negates, float64 [rotary_dim]."""
    index = torch.arange(form.rotary_dim)
    first = index < form.rotary_dim // 2 if form.style == "half" else index % 2 == 0
    return torch.where(first, -1.0, 1.0).double()


def form_of(maps: Tensor) -> RotaryForm:
    """The pairing of channels in maps [P, D, D]; raises NotRotary."""
    channels = maps.shape[-1]
    off = (maps - torch.diag_embed(maps.diagonal(dim1=-2, dim2=-1))).abs().amax(0) > EXACT
    if not off.any():
        raise NotRotary("positions scale queries or keys and do not rotate them")
    if (off.sum(-1) > 1).any() or not torch.equal(off, off.T):
        raise NotRotary("channels do not rotate in pairs")
    pairs = [(int(i), int(j)) for i, j in off.nonzero() if i < j]
    distances = {j - i for i, j in pairs}
    if len(distances) > 1:
        raise NotRotary(f"the channels of a pair stand at different distances: {sorted(distances)}")
    distance, first, last = distances.pop(), pairs[0][0], pairs[-1][0]
    if distance == 1 and len(pairs) > 1 and len({i % 2 for i, _ in pairs}) == 1:
        return RotaryForm("interleaved", first, last + 2 - first)
    if last >= first + distance or first + 2 * distance > channels:
        raise NotRotary(f"channels rotate in pairs {pairs[:3]}, .., neither halves nor neighbours")
    return RotaryForm("half", first, 2 * distance)
