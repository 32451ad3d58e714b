"""Role page_copy: pages of a pool onto others, where a sequence becomes a copy of another (`runtime/pages.py`).

    pool[targets[i]] = pool[sources[i]]

Every copy is a program of its own, in no order: no target may be a source. It is never one: targets are pages of
nobody (`PagePool.moves`), and sources are somebody's.

| option | means |
|---|---|
| int32[n], uint8[n] | a page is n such words: the wider, if its bytes are a multiple of it (`words`) |
| interpreted | for Triton's interpreter |

spec.block_n: words of a tile. The rest of the spec has no meaning here.
Launch: grid(spec, copies). pool [pages, n], dense; sources, targets int32 [copies].
"""

from __future__ import annotations

import re

import torch

from kvcompile.kernels.triton.helpers import module
from kvcompile.kernels.triton.params import KernelSource, Param, TensorParam
from kvcompile.kernels.triton.render import rendered
from kvcompile.kernels.triton.spec import KernelSpec

_WORDS = {"int32": torch.int32, "uint8": torch.uint8}
_OPTION = re.compile(r"(int32|uint8)\[(\d+)\]")


def words(page_bytes: int) -> str:
    """The option for pages of so many bytes. The size is a constant of the kernel: of a size that it does not know,
    a kernel copies word by word."""
    return f"int32[{page_bytes // 4}]" if page_bytes % 4 == 0 else f"uint8[{page_bytes}]"


def page_of(spec: KernelSpec) -> tuple[torch.dtype, int]:
    """What a page is seen as: its words, and how many.

    Raises:
        ValueError: an option is unknown, or there is not one of words.
    """
    found = [match for match in map(_OPTION.fullmatch, spec.options) if match]
    if len(found) != 1 or len(found) + ("interpreted" in spec.options) != len(spec.options):
        raise ValueError(f"page_copy takes one option int32[n] or uint8[n], got {list(spec.options)}")
    return _WORDS[found[0][1]], int(found[0][2])


def generate(spec: KernelSpec) -> KernelSource:
    """The kernel of a spec of role page_copy; raises as `page_of`."""
    dtype, size = page_of(spec)
    params: tuple[Param, ...] = (
        TensorParam("pool", dtype),
        TensorParam("sources", torch.int32),
        TensorParam("targets", torch.int32),
    )
    text = rendered("page_copy.py.jinja", params=params, block=spec.block_n, words=size)
    return KernelSource("page_copy", params, module(text))


def grid(spec: KernelSpec, copies: int) -> tuple[int, int]:
    """Copies on the axis that takes 2^31 - 1 programs: of 64 beams that change places there are more than 65,535."""
    return copies, -(-page_of(spec)[1] // spec.block_n)
