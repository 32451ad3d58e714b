"""The instruction sets that kernels are compiled for: the best that this machine has, found at run time.

| name | vectors of | flags of the compiler |
|---|---|---|
| amx_bf16 | 16 floats, and tiles of bfloat16 | those of avx512_bf16; see `include/tiles.h` |
| avx512_bf16 | 16 floats, and products of bfloat16 | AVX-512 F, BW, DQ, VL, VNNI, BF16 |
| avx512 | 16 floats | AVX-512 F, BW, DQ, VL |
| avx2 | 8 floats | AVX2, FMA, F16C |
| portable | 4 floats in plain C++ | none: SSE2 on x86-64, NEON on ARM, or nothing |

KVCOMPILE_CPU_ISA names another that the machine has: for tests, and to bisect.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from kvcompile.kernels.cpp import products


@dataclass(frozen=True)
class Isa:
    """One instruction set.

    needs:   what the processor must have, as /proc/cpuinfo calls it
    vectors: the header of its vectors
    """

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]
    vectors: str


_AVX2 = {"avx2", "fma", "f16c"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
_AVX512_FLAGS = (
    *_AVX2_FLAGS,
    *(f"-mavx512{name}" for name in ("f", "bw", "dq", "vl")),
    "-mprefer-vector-width=512",
)
_BF16 = _AVX512 | {"avx512_bf16", "avx512_vnni"}
_BF16_FLAGS = (*_AVX512_FLAGS, "-mavx512bf16", "-mavx512vnni", "-DKV_PAIRS")
ISAS = (
    Isa(
        "amx_bf16", frozenset(_BF16 | {"amx_tile", "amx_bf16"}), (*_BF16_FLAGS, "-DKV_TILES"), "vec_avx512.h"
    ),
    Isa("avx512_bf16", frozenset(_BF16), _BF16_FLAGS, "vec_avx512.h"),
    Isa("avx512", frozenset(_AVX512), _AVX512_FLAGS, "vec_avx512.h"),
    Isa("avx2", frozenset(_AVX2), _AVX2_FLAGS, "vec_avx2.h"),
    Isa("portable", frozenset(), (), "vec_portable.h"),
)
VARIABLE = "KVCOMPILE_CPU_ISA"
_ARCH_PRCTL = 158  # of Linux's calls on x86-64
ASKED = (0x1023, 18)  # ARCH_REQ_XCOMP_PERM, of the data of tiles


def isa() -> Isa:
    """The best instruction set of this machine, or the one that KVCOMPILE_CPU_ISA names.

    Raises:
        ValueError: it names one that is unknown, or that this machine has not.
    """
    there = available()
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return there[0]
    found = next((own for own in there if own.name == wanted), None)
    if found is None:
        raise ValueError(
            f"{VARIABLE}={wanted}: this machine has {', '.join(own.name for own in there)}; set one of these, or "
            "unset it"
        )
    return found


@cache
def available() -> tuple[Isa, ...]:
    """Those that this machine has, the best first."""
    features = _features()
    return tuple(own for own in ISAS if own.needs <= features)


def multiplies_rows(dtype: torch.dtype, own: Isa | None = None) -> bool:
    """Whether linear layers of more than one row have a kernel: of any number where the BLAS is slow at the dtype; in
    float32, and in bfloat16 where its products are the kernel's, of as many as `most_rows` of `include/launch.h` says.

    Args:
        own: as in `lacks_products_of`.
    """
    pairs = dtype == torch.bfloat16 and multiplies_pairs(own)
    few = (dtype == torch.float32 and _wide(own)) or pairs
    return lacks_products_of(dtype, own) or few


def multiplies_pairs(own: Isa | None = None) -> bool:
    """Whether the processor has products of bfloat16; own: as in `lacks_products_of`."""
    return "avx512_bf16" in (own or isa()).needs


def multiplies_tiles(dtype: torch.dtype, own: Isa | None = None) -> bool:
    """Whether the kernel of linear layers of many rows multiplies tiles; own: as in `lacks_products_of`."""
    return dtype == torch.bfloat16 and "amx_bf16" in (own or isa()).needs


def widens(dtype: torch.dtype, own: Isa | None = None) -> bool:
    """Whether many rows are multiplied as floats though the processor has products of their dtype: floats are faster.

    Args:
        own: as in `lacks_products_of`. Of one that this machine has not, nothing is known: False.
    """
    pairs = multiplies_pairs(own) and (own is None or own in available())
    return pairs and dtype == torch.bfloat16 and products.floats_are_faster()


def lacks_products_of(dtype: torch.dtype, own: Isa | None = None) -> bool:
    """Whether the processor multiplies no numbers of a dtype of half the bits, so that its BLAS is slow at them.

    False where nothing is known: not x86-64, or no vectors that a kernel would be faster with.

    Args:
        own: an instruction set, of whose processor this is asked; None: of this machine.
    """
    if not _wide(own):
        return False
    products = {torch.bfloat16: {"avx512_bf16", "amx_bf16"}, torch.float16: {"avx512_fp16", "amx_fp16"}}
    return dtype in products and not products[dtype] & (own.needs if own else _features())


def _wide(own: Isa | None) -> bool:
    return "avx2" in (own or isa()).needs


def _features() -> frozenset[str]:
    """What the processor has; where nothing says so, nothing."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", errors="replace")
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    found = frozenset(line.partition(":")[2].split())
    return found if _may_use_tiles() else found - {"amx_tile", "amx_bf16"}


def _may_use_tiles() -> bool:
    """Whether this process may use AMX's tiles: Linux has to be asked, and not every container lets it be."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, *ASKED) == 0)
