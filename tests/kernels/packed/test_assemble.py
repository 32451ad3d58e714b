"""The packed dialect, ahead of time, with no GPU: it assembles without spills. Its loops
take no more instructions than those of kernels for a batch."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvcompile.kernels.triton.host.launches import Launch, packed_launches
from kvcompile.kernels.triton.tools.assemble import ARCHES, Assembled, assemble
from kvcompile.layouts import CacheLayout, Paged, SinkWindow, fp8, int8, uint
from tests.kernels.triton.attend.test_assemble import MANY, SPILLS, TOLERANCE, asked
from tests.support.kernel_specs import DEVICES, SHAPES

LAYOUTS = {
    "pages": CacheLayout(placement=Paged(16)),
    "int8 in pages of 64": CacheLayout(int8(), int8(), Paged(64)),
    "int4 in pages of 64": CacheLayout(uint(4, 32), uint(4, 32), Paged(64)),
    "ring in pages, fp8": CacheLayout(fp8(), fp8(), Paged(16), SinkWindow(4, 508)),
    "ring in pages, in cache": CacheLayout(placement=Paged(16), retention=SinkWindow(4, 508, "in_cache")),
}
QUICK = (
    ("pages", "llama", 80),
    ("ring in pages, fp8", "gemma", 90),
    ("int8 in pages of 64", "llama", 100),
)


def launches(layout: str, shape: str, arch: int) -> tuple[Launch, ...]:
    own = SHAPES[shape]
    site, dtype = own.site(LAYOUTS[layout]), getattr(torch, own.dtype)
    return packed_launches(site, own.heads, own.dims, dtype, DEVICES[arch], MANY)


def wrong(*cases: tuple[str, str, int]) -> list[str]:
    """What is wrong with the kernels of sites; all are assembled in one process."""
    wanted = []
    for layout, shape, arch in cases:
        # Of codes the one over slots: a packed call reads these as they stand.
        plain = next(
            launch
            for launch in SHAPES[shape].kernels(LAYOUTS[layout], DEVICES[arch], MANY)
            if launch.spec.role == "prefill"
        )
        wanted.append([asked(launch, arch) for launch in (*launches(layout, shape, arch), plain)])
    made = iter(assemble(itertools.chain(*wanted)))
    found = []
    for case, own in zip(cases, wanted, strict=True):
        *packed, plain_one = itertools.islice(made, len(own))
        problems = [problem for one in packed for problem in _problems(one, plain_one)]
        found += [f"{case}: {problem}" for problem in problems]
    return found


def _problems(made: Assembled, plain: Assembled) -> list[str]:
    found = []
    if made.loop_spills or made.spills > SPILLS:
        found.append(f"{made.role}: {made.spills} spills, {made.loop_spills} of them in the main loop")
    if made.shared > DEVICES[made.arch].shared:
        found.append(f"{made.role}: {made.shared:,} bytes of shared memory")
    if made.role == "prefill":
        assert made.per_element is not None and plain.per_element is not None
        if made.per_element > plain.per_element * TOLERANCE:
            found.append(f"{made.per_element} instructions per element, {plain.per_element} without packing")
    return found


def test_kernels_assemble() -> None:
    problems = wrong(*QUICK)
    assert not problems, "\n".join(problems)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_of_every_site_assemble(layout: str, shape: str, arch: int) -> None:
    problems = wrong((layout, shape, arch))
    assert not problems, "\n".join(problems)


def test_what_is_launched_of_many_is_packed() -> None:
    """One launch of each role for all sequences; a ring is written once they have attended."""
    found = [(one.spec.role, "packed" in one.spec.options) for one in launches("pages", "llama", 90)]
    assert found == [("append", True), ("prefill", True)]
    ring = [one.spec.role for one in launches("ring in pages, fp8", "gemma", 90)]
    assert ring == ["append", "prefill", "append"]
