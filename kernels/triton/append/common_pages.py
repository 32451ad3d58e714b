"""Which pages neighbouring sequences have in common: the numbers `prefixes` of `attend/cascade.py`.

A program of the step's append (`templates/common_pages.jinja`) compares the tables of as many sequences as a bundle may
have, each with the one before it, and makes bundles of those in which all have enough in common:

    same[i]    = tokens of whole pages that sequences i - 1 and i begin with alike, before the newest token of either
    begins[i]  = i is the first of the program's, or same[i] < LEAST, or same[i] is less than half of a neighbour's
    common     = the least same[i] of a bundle, but that of its first

What is half of a neighbour's is a longer prefix's end: sequences of two talks that share no more than what all talks
begin with are in two bundles, each with the pages of its own talk.
"""

from __future__ import annotations

from kvcompile.kernels.triton.attend.cascade import NUMBERS
from kvcompile.kernels.triton.render import rendered
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.layouts import Paged

LEAST = 128  # tokens; of fewer, another part that is written and joined is more work than reading them twice
_AT_ONCE = 512  # page numbers that are compared in a turn


def compare(spec: KernelSpec) -> str:
    """The function of a kernel's file that writes the numbers of spec.block_m sequences, from a multiple of that on."""
    assert isinstance(spec.layout.placement, Paged)
    return rendered(
        "common_pages.jinja",
        most=spec.block_m,
        page_size=spec.layout.placement.page_size,
        width=max(1, _AT_ONCE // spec.block_m),
        least=LEAST,
        never=2**31 - 1,
        numbers=NUMBERS,
    ).rstrip()


def call() -> str:
    """The line that calls it, for the sequences from `batch` on."""
    given = "positions_ptr, positions_s0, page_table_ptr, page_table_s0"
    return f"common_pages(prefixes_ptr, {given}, batch)"
