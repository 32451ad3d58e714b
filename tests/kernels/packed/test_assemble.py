"""The packed dialect, ahead of time, with no GPU: it assembles without spills. Its loops
take no more instructions than those of kernels for a batch."""

from __future__ import annotations

import pytest
import torch

from kvcompile.kernels.triton.host.launches import Launch, packed_launches
from kvcompile.kernels.triton.tools.assemble import ARCHES, Assembled, assemble
from kvcompile.layouts import CacheLayout, Paged, SinkWindow, fp8, int8, uint
from tests.kernels.triton.attend.test_assemble import LONG, MANY, SPILLS, TOLERANCE, asked
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


def launches(layout: str, shape: str, arch: int, tokens: int = MANY) -> tuple[Launch, ...]:
    own = SHAPES[shape]
    site, dtype = own.site(LAYOUTS[layout]), getattr(torch, own.dtype)
    return packed_launches(site, own.heads, own.dims, dtype, DEVICES[arch], tokens)


def wrong(*cases: tuple[str, str, int], tokens: int = MANY) -> list[str]:
    """What is wrong with the kernels of sites; all are assembled in one process."""
    pairs = []
    for case in cases:
        layout, shape, arch = case
        plain = SHAPES[shape].kernels(LAYOUTS[layout], DEVICES[arch], tokens)
        alike = iter([asked(one, arch) for one in plain if one.spec.role == "prefill"])
        for one in launches(layout, shape, arch, tokens):
            pairs.append((case, asked(one, arch), next(alike) if one.spec.role == "prefill" else None))
        assert next(alike, None) is None, "a launch without packing that is none with it"
    made = iter(assemble(one for _, *both in pairs for one in both if one is not None))
    found = []
    for case, _, plain in pairs:
        problems = _problems(next(made), None if plain is None else next(made))
        found += [f"{case}: {problem}" for problem in problems]
    return found


def _problems(made: Assembled, plain: Assembled | None) -> list[str]:
    found = []
    if made.loop_spills or made.spills > SPILLS:
        found.append(f"{made.role}: {made.spills} spills, {made.loop_spills} of them in the main loop")
    if made.shared > DEVICES[made.arch].shared:
        found.append(f"{made.role}: {made.shared:,} bytes of shared memory")
    if plain is not None:
        assert made.per_element is not None and plain.per_element is not None
        if made.per_element > plain.per_element * TOLERANCE:
            found.append(f"{made.per_element} instructions per element, {plain.per_element} without packing")
        if made.pipeline != plain.pipeline:
            found.append(f"the main loop has {made.pipeline}, without packing {plain.pipeline}")
    return found


def test_kernels_assemble() -> None:
    problems = wrong(*QUICK)
    assert not problems, "\n".join(problems)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [MANY, LONG])
def test_kernels_of_every_site_assemble(layout: str, shape: str, arch: int, tokens: int) -> None:
    problems = wrong((layout, shape, arch), tokens=tokens)
    assert not problems, "\n".join(problems)


def test_what_is_launched_of_many_is_packed() -> None:
    """One launch of each role for all sequences; a ring is written once they have attended."""
    found = [(one.spec.role, "packed" in one.spec.options) for one in launches("pages", "llama", 90)]
    assert found == [("append", True), ("prefill", True)]
    codes = [one.spec.role for one in launches("int8 in pages of 64", "llama", 90)]
    assert codes == ["append", "prefill", "prefill"]
    long = launches("int8 in pages of 64", "llama", 90, LONG)
    assert [one.spec.role for one in long] == ["append", "decoded_rows", "prefill", "prefill"]
    assert all("packed" in one.spec.options for one in long)
    ring = [one.spec.role for one in launches("ring in pages, fp8", "gemma", 90)]
    assert ring == ["append", "prefill", "append"]
