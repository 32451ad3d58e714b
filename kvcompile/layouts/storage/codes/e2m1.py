"""E2M1, the float of four bits: a sign, two bits of exponent, one of mantissa (OCP Microscaling Formats 1.0, 5.3.3).

With a scale e8m0 for each 32 elements it is MXFP4: scale = 2^(floor(log2 absmax) - 2), elements to nearest even, and
what is beyond 6 becomes 6 (section 6.3). Zero that came from below has the sign bit, zero itself has not.
"""

from __future__ import annotations

import torch

from kvcompile.layouts.storage.code import Code

CODES = (
    Code(
        "e2m1",
        "codebook",
        4,
        torch.uint8,
        6.0,
        (("group", False),),
        "mxfp4",
        scale_dtypes=("e8m0",),
        groups=(32,),
        levels=(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
        signed=True,
        to_even=True,
    ),
)
