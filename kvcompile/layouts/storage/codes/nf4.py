"""NF4: 16 levels at the quantiles of a normal distribution, 0 among them (Dettmers et al. 2023, QLoRA, appendix E).

x ~ level * scale, scale = absmax of the group. A number on the middle of two levels becomes the lower one.
"""

from __future__ import annotations

import torch

from kvcompile.layouts.storage.code import Code

_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

CODES = (Code("nf4", "codebook", 4, torch.uint8, 1.0, (("group", False),), levels=_LEVELS),)
