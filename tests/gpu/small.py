"""Every role once, small: what compute-sanitizer runs (`test_sanitizer.py`), and a first look at a new GPU.

python -m tests.gpu.small
"""

from __future__ import annotations

import sys

import torch

from tests.gpu.sites import SITES, vectors
from tests.support.runner import run

NAMES = (
    "model",
    "model, 80 channels",
    "model, ring in pages",
    "int8, pages of 64",
    "fp8",
    "int4, 64 channels, pages of 32",
    "kivi, pages of 32",
    "int4 turned",
    "latent int8",
    "h2o int8",
)


def main(
    device: torch.device, names: tuple[str, ...] = NAMES, chunks: tuple[int, ...] = (70, 9, 1, 1, 1)
) -> None:
    pads = torch.tensor([0, 33], device=device)
    for name in names:
        sized = SITES[name]
        qkv = vectors(sized, 2, sum(chunks), torch.bfloat16, device)
        out = run(sized.site(), qkv, chunks, pads, **sized.extra(device)).out
        print(f"{name}: {'finite' if torch.isfinite(out).all() else 'NOT FINITE'}")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("needs an NVIDIA GPU")
    main(torch.device("cuda"))
