"""Pages: where in a pool a slot stands, after PagedAttention (Kwon et al. 2023, section 4.1; vLLM).

    page = table[row // rows_per_page]      offset = row mod rows_per_page

A layer has one pool per part of its storage, [pages, num_kv_heads, rows_per_page, ...]; rows_per_page is page_size,
or page_size / group where tokens share a row. Layers with equally many slots and pages of one size are a `PageGroup`:
they have one table [sequences, pages of a sequence], int32, and a page number means the same in all their pools.

Page 0 belongs to nobody: an entry of the table that has no page yet is 0, so what is written where no page is
(padding) does no harm, and what is read there is never seen. Neither is what is behind a window: where slots stand in
the order of tokens, pages that lie there may be given back, and their entries are 0 again (`Released`).
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from kvcompile.layouts import symbols as sy

SPARE_PAGES = 1  # page 0
TABLE_BYTES = 4  # of an entry: int32
SMALLEST, LARGEST = 8, 256


def page_index(rows_per_page: int) -> sympy.Expr:
    """Which of its sequence's pages the row `slot` is in: the place in the table."""
    return sympy.floor(sy.slot / sympy.Integer(rows_per_page))


def offset(rows_per_page: int) -> sympy.Expr:
    """The row of that page which the row `slot` is."""
    return sympy.Mod(sy.slot, rows_per_page)


def check_page_size(page_size: int) -> str | None:
    """Why pages cannot have that size, or None."""
    if SMALLEST <= page_size <= LARGEST:
        return None
    return f"a page has {SMALLEST} to {LARGEST} tokens, got page_size {page_size}"


@dataclass(frozen=True)
class Released:
    """What stays of a sequence whose slots stand in the order of tokens: the first `sinks`, and a window."""

    sinks: int
    window: int

    def behind(self, tokens: int, page_size: int) -> range:
        """The places in its table of pages that nothing which comes after so many tokens sees: wholly out of the
        window, and without any of the sinks."""
        first = -(-self.sinks // page_size)
        return range(first, max(first, (tokens - self.window + 1) // page_size))

    def most(self, tokens: int, page_size: int) -> int:
        """Pages of a sequence at any time, at most, if at most `tokens` come at once.

        These are those of the sinks, and what all between the first token that is seen and the last new one can lie on.
        """
        reached = self.window - 1 + tokens
        return -(-self.sinks // page_size) + (reached - 2) // page_size + 2


@dataclass(frozen=True)
class PageGroup:
    """Layers whose sequences have the same pages.

    name:   the page table's placeholder in the graph
    layers: those that own their cache, in order
    slots:  of one sequence, at the limit of tokens
    pages:  of each pool; None: it grows
    released: what of a sequence stays, where pages behind a window may be given back; None: all of it
    """

    name: str
    layers: tuple[int, ...]
    page_size: int
    slots: int
    pages: int | None
    released: Released | None = None

    @property
    def pages_per_sequence(self) -> int:
        return self.pages_for(self.slots)

    def pages_for(self, tokens: int) -> int:
        """Pages of a sequence that has seen that many tokens."""
        return -(-min(tokens, self.slots) // self.page_size)
