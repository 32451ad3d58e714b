"""Pages that sequences have in common, on hardware: read once they give what each gives by itself, and in a graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvcompile.kernels.reference import attention as reference
from kvcompile.kernels.triton.attend import cascade
from kvcompile.kernels.triton.host.attention import cached_attention
from kvcompile.kernels.triton.tools.synthetic_cache import Sample, sample
from kvcompile.layouts import Paged
from tests.gpu.sites import SITES
from tests.support.budget import within

pytestmark = pytest.mark.gpu
LENGTHS = (700, 650, 900, 1, 701, 1024, 1000, 720, 333)
# Tokens of which each has the pages of the one before it.
TALKS = (0, 640, 512, 0, 0, 640, 960, 700, 128)
OTHERS = (0, 320, 320, 0, 0, 0, 700, 128, 300)
NAMES = tuple(name for name, site in SITES.items() if cascade.refusal(site.site()) is None)


def started(name: str, device: torch.device) -> Sample:
    sized = SITES[name]
    return sample(sized.site(), sized.heads, sized.dims, LENGTHS, torch.bfloat16, device)


def alike(of: Sample, tokens: tuple[int, ...]) -> Tensor:
    """The table of a sample whose sequences begin alike; the page of a newest token is its own."""
    assert of.table is not None and isinstance(of.site.layout.placement, Paged)
    size, table = of.site.layout.placement.page_size, of.table.clone()
    for row, common in enumerate(tokens):
        full = min(common, LENGTHS[row] - 1, LENGTHS[row - 1] - 1) // size
        table[row, :full] = table[row - 1, :full]
    return table


def asked(of: Sample, table: Tensor, kernels: str, dtype: torch.dtype) -> Tensor:
    """A step of a copy of the caches, by kernels, or by the reference in any dtype."""
    caches = [part.clone() for part in of.caches[0]]
    if dtype == torch.float32:
        caches = [part.float() if part.dtype == torch.bfloat16 else part for part in caches]
    given = replace(of.inputs(0, replace(of.site, kernels=kernels)), buffers=caches, page_table=table)
    given = replace(given, **{name: getattr(given, name).to(dtype) for name in ("q", "k", "v")})
    return cached_attention(given) if kernels == "triton" else reference.cached_attention(given)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_once_is_what_each_reads(name: str, device: torch.device) -> None:
    of = started(name, device)
    for tokens in (TALKS, OTHERS, (0,) * len(LENGTHS)):
        table = alike(of, tokens)
        together = asked(of, table, "triton", torch.bfloat16)
        with cascade.alone():
            apart = asked(of, table, "triton", torch.bfloat16)
        same, truth = (asked(of, table, "reference", dtype) for dtype in (torch.bfloat16, torch.float32))
        for found in (together, apart):
            within(found, same, truth, torch.bfloat16, name)
        if not any(tokens):
            assert torch.equal(together, apart)


@pytest.mark.parametrize("name", NAMES)
def test_a_captured_step_follows_the_tables(name: str, device: torch.device) -> None:
    """Captured when nothing is in common, and replayed when much is, and nothing again."""
    of = started(name, device)
    tables = [alike(of, tokens) for tokens in ((0,) * len(LENGTHS), TALKS, OTHERS, (0,) * len(LENGTHS))]
    given = replace(of.inputs(0), page_table=tables[0].clone())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        cached_attention(given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cached_attention(given)
    for table in tables:
        assert given.page_table is not None
        given.page_table.copy_(table)
        graph.replay()
        assert torch.equal(out, cached_attention(given))
