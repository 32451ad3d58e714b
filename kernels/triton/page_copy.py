"""Role page_copy: pages of a pool onto others, where a sequence becomes a copy of another (`runtime/pages.py`).

    pool[targets[i]] = pool[sources[i]]

Every copy is a program of its own, in no order: no target may be a source. It is never one: targets are pages of
nobody (`PagePool.moves`), and sources are somebody's.

| option | means |
|---|---|
| int32, uint8 | a page is seen as such words: what its bytes are a multiple of |
| interpreted | for Triton's interpreter |

spec.block_n: words of a tile. The rest of the spec has no meaning here.
Launch: grid(spec, copies, words). pool [pages, words]; sources, targets int32 [copies].
"""

from __future__ import annotations

import torch

from kvcompile.kernels.triton.helpers import module
from kvcompile.kernels.triton.params import KernelSource, Param, ScalarParam, TensorParam
from kvcompile.kernels.triton.render import rendered
from kvcompile.kernels.triton.spec import KernelSpec

WORDS = {"int32": torch.int32, "uint8": torch.uint8}


def word_of(spec: KernelSpec) -> torch.dtype:
    """What a page is seen as.

    Raises:
        ValueError: an option is unknown, or there is not one word.
    """
    words = [WORDS[option] for option in spec.options if option in WORDS]
    if len(words) != 1 or set(spec.options) - {*WORDS, "interpreted"}:
        raise ValueError(f"page_copy takes one of the options {sorted(WORDS)}, got {spec.options}")
    return words[0]


def generate(spec: KernelSpec) -> KernelSource:
    """The kernel of a spec of role page_copy; raises as `word_of`."""
    params: tuple[Param, ...] = (
        TensorParam("pool", word_of(spec), 2),
        TensorParam("sources", torch.int32, 1),
        TensorParam("targets", torch.int32, 1),
        ScalarParam("words"),
    )
    text = rendered("page_copy.py.jinja", params=params, block=spec.block_n)
    return KernelSource("page_copy", params, module(text))


def grid(spec: KernelSpec, copies: int, words: int) -> tuple[int, int]:
    return -(-words // spec.block_n), copies
