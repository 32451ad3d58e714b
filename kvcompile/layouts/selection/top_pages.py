"""TopPages: a decode step reads the pages of tokens that may matter most to its query (Quest, Tang et al. 2024).

Of each page of `page_size` consecutive tokens the cache keeps, channel by channel, the smallest and the largest of its
keys, as attention gets them (after RoPE, before they are quantized). Whatever key k is in the page,

    sm_scale q . k  <=  sum_c max(sm_scale q_c min_c, sm_scale q_c max_c)        (section 3.2, figure 5)

so the page with the highest bound is that whose tokens may have the highest scores. A step reads the `pages` pages
with the highest bounds; the page of its own token is always among them. Query heads that share a KV head read the same
pages: a page's bound is the highest of any of them, so that what is read once serves the whole group.

A pass over many tokens (a prompt) reads everything, as in the paper. So a result depends on how a text is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import sympy
import torch

from kvcompile.layouts import symbols as sy
from kvcompile.layouts.buffer import BufferSpec
from kvcompile.layouts.selection.hooks import Hooks


@dataclass(frozen=True)
class TopPages(Hooks):
    """page_size: tokens of a page; pages: how many a query reads, its own among them."""

    page_size: int = 16
    pages: int = 64
    kind: Literal["top_pages"] = "top_pages"

    num_notes = 3
    followed = "pages.read"

    @property
    def tokens(self) -> int:
        """Tokens that a query reads at most."""
        return self.page_size * self.pages

    def small(self, size: int, count: int) -> TopPages:
        return TopPages(min(self.page_size, size), min(self.pages, count))

    def notes(
        self, num_kv_heads: int, head_dim: int, slots: int, dtype: torch.dtype
    ) -> tuple[BufferSpec, ...]:
        rows = -(-slots // self.page_size)
        return (
            BufferSpec("pages.smallest", (num_kv_heads, rows, head_dim), dtype),
            BufferSpec("pages.largest", (num_kv_heads, rows, head_dim), dtype),
            BufferSpec("pages.read", (num_kv_heads, self.pages), torch.int32, fixed=True),
        )

    def bytes(self, slots: sympy.Expr) -> sympy.Expr:
        """Bytes of one KV head's summaries of `slots` slots, and of the pages that were read last."""
        rows = sympy.ceiling(slots / sympy.Integer(self.page_size))
        return rows * 2 * sy.D * sy.P + 4 * self.pages

    def bytes_per_slot(self) -> sympy.Expr:
        """Bytes that one more token takes in one KV head's summaries, on average."""
        return 2 * sy.D * sy.P / sympy.Integer(self.page_size)

    def __str__(self) -> str:
        return f"top {self.pages} pages of {self.page_size}"
